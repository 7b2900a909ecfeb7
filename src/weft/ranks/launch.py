"""How the processes of a site begin and end: the peer on rank 0, and on the others what serves it.

ranks = Ranks(rank, settings)   all of them; on rank 0 it is what `launch.found` and `join` take as trainers
ranks.serve()                   on all but rank 0: until that ends
ranks.close()                   on rank 0
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import torch
from msgspec import structs
from torch import Tensor

from weft import __version__
from weft.clock import Clock
from weft.data.batch import Batches
from weft.errors import ConfigError
from weft.events import Emit
from weft.ranks.learner import SiteLearner, check
from weft.ranks.line import Line
from weft.ranks.site import Site, serve
from weft.ranks.vector import spread
from weft.run.config import RunConfig
from weft.run.frozen import LoadFrozen
from weft.run.host import limit_cores, take_singly
from weft.run.machine import PeerConfig
from weft.store.home import PeerFolder
from weft.store.pool import Pool
from weft.training.device import Share, check_fits, choose
from weft.training.learner import Learner

_LARGE_NBYTES = 1 << 20  # that go back to the system: with all that glibc keeps rank 0 held 1.4 times as much


@dataclass(frozen=True, kw_only=True)
class Rank:
    """Which process of a site this is, as torchrun says in its environment."""

    rank: int
    local_rank: int  # among those of this machine
    num_ranks: int
    num_local: int


class Ranks:
    """
    Args:
        settings: what this machine gives.

    Raises:
        ConfigError: no such device.
        SiteBroken: the processes do not find each other.
    """

    def __init__(self, rank: Rank, settings: PeerConfig) -> None:
        self.rank = rank
        self._settings = settings = own_device(settings, rank)
        if settings.caps.cores is not None:
            limit_cores(settings.caps.cores)
        take_singly(_LARGE_NBYTES)
        backend = "gloo" if choose(settings).is_cpu else "cpu:gloo,cuda:nccl"
        self._line = Line(backend, rank.rank, rank.num_ranks)
        require_alike(self._line, settings)
        self._site = None if rank.rank else Site(self._line, settings)
        self._micro_batch = 1

    def serve(self) -> None:
        """Do what rank 0 tells, until it ends."""
        serve(self._line, self._settings)

    def close(self) -> None:
        """Let the others end."""
        self._first.close()

    @property
    def _first(self) -> Site:
        assert self._site is not None
        return self._site

    # --- of rank 0's peer ---

    has_model = False

    def check_fits(self, run: RunConfig, settings: PeerConfig) -> None:
        check(run, settings)
        rank = self.rank
        share = Share(host=rank.num_local / rank.num_ranks, device=1 / rank.num_ranks)
        settings = msgspec.structs.replace(self._settings, serve_nbytes=0)  # a site draws no texts
        self._micro_batch = check_fits(run, settings, choose(settings), share)

    def memory(self, folder: PeerFolder) -> Pool:
        return Pool(0, folder.scratch)

    def held(self, vector: Tensor, folder: PeerFolder) -> Tensor:
        self._first.open(vector.numel(), folder.scratch)
        return spread(self._first, vector)

    def learner(
        self,
        run: RunConfig,
        settings: PeerConfig,  # noqa: ARG002  # each rank has its own
        batches: Batches,
        emit: Emit,
        clock: Clock,
        frozen: LoadFrozen,  # noqa: ARG002  # runs that have any are refused by `check_fits`
    ) -> Learner:
        return SiteLearner(self._first, run, self._micro_batch, batches, emit, clock)


def own_device(settings: PeerConfig, rank: Rank) -> PeerConfig:
    """Return the settings of this rank: of several GPUs of a machine each has one.

    Raises:
        ConfigError: a device that ranks cannot share, or fewer GPUs than ranks.
    """
    device = choose(settings).torch
    if device.type == "mps" or ":" in settings.device:
        raise ConfigError(
            f'peer.device: "{settings.device}" is one device, and this is one of {rank.num_ranks} processes. Set '
            'device = "auto" or "cuda", if each has a GPU of its own, or "cpu".'
        )
    if device.type != "cuda":
        return settings
    own = structs.replace(settings, device=f"cuda:{rank.local_rank}")
    torch.cuda.set_device(choose(own).torch)
    return own


def require_alike(line: Line, settings: PeerConfig) -> None:
    """Make sure that all ranks would compute alike.

    Raises:
        ConfigError: on each of them, where they would not: says who differs in what.
    """
    chosen = choose(settings)
    mine = {
        "weft": __version__,
        "torch": str(torch.__version__),
        "device": chosen.torch.type,
        "precision": chosen.precision,
        "has_recompute": str(settings.has_recompute),
    }
    told = [msgspec.json.decode(each, type=dict[str, str]) for each in line.answer(msgspec.json.encode(mine))]
    if line.rank:
        found = msgspec.json.decode(line.hear(), type=list[str])
    else:
        found = differences(told)
        line.tell(msgspec.json.encode(found))
    if found:
        line.close()  # what is open as a process ends ends it with an abort
        raise ConfigError(
            f"the processes of this site are not alike: {'; '.join(found)}. Install the same on all of its machines, "
            "and start them with the same settings."
        )


def differences(told: Sequence[Mapping[str, str]]) -> list[str]:
    """Return in what ranks differ from the first.

    Args:
        told: what each says of itself.
    """
    return [
        f"{name} is {each.get(name)} on rank {rank} and {value} on rank 0"
        for rank, each in enumerate(told)
        for name, value in told[0].items()
        if each.get(name) != value
    ]
