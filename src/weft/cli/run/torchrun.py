"""Whether this process is one of several that make up one peer, as torchrun says, and what it does then.

    torchrun --nproc-per-node 4 --no-python weft train run.toml      one machine, four GPUs: one peer

The first of them is the peer; the others serve it, and neither read nor print anything.
"""

import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from weft.errors import ConfigError

if TYPE_CHECKING:
    from weft.peer.context import Trainers
    from weft.ranks.launch import Rank
    from weft.run.machine import PeerConfig

_NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


def served(settings: "PeerConfig") -> bool:
    """Return whether this process is another than the first of a site; then it has served that, and all is over.

    Raises:
        ConfigError: torchrun's environment is not whole, or there is no such device.
        SiteBroken: the processes have lost each other.
    """
    rank = rank_of(os.environ)
    if rank is None or not rank.rank:
        return False
    from weft.ranks.launch import Ranks

    ranks = Ranks(rank, settings)
    for number in (signal.SIGINT, signal.SIGTERM):  # they reach all ranks; the first tells when it is over
        signal.signal(number, signal.SIG_IGN)
    ranks.serve()
    return True


@contextmanager
def trainers(settings: "PeerConfig") -> "Iterator[Trainers]":
    """Yield who makes this peer's inner steps: this process, or the ranks of a site, of which it is the first.

    Raises:
        as `served`.
    """
    rank = rank_of(os.environ)
    if rank is None:
        from weft.launch.corpus import ONE

        yield ONE
        return
    from weft.ranks.launch import Ranks

    ranks = Ranks(rank, settings)
    try:
        yield ranks
    finally:
        ranks.close()


def rank_of(environment: Mapping[str, str]) -> "Rank | None":
    """Return which process of a site this is; None: it is none, for torchrun has not started it."""
    if "TORCHELASTIC_RUN_ID" not in environment:
        return None
    from weft.ranks.launch import Rank

    try:
        rank, local_rank, num_ranks, num_local = (int(environment[name]) for name in _NAMES)
    except (KeyError, ValueError) as error:
        raise ConfigError(f"torchrun has not said which process this is ({error}). Start it with torchrun.") from None
    return Rank(rank=rank, local_rank=local_rank, num_ranks=num_ranks, num_local=num_local)
