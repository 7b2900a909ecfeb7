"""Snapshots to save, and a process to save them in: `python snapshots.py WHAT FOLDER` (see `main`)."""

# ruff: noqa: T201  # that process speaks to the test through its output

import io
import os
import resource
import shutil
import signal
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from weft.data.assign import Lease
from weft.data.store import DataIndex, ShardInfo
from weft.data.tokenizer import ByteTokenizer
from weft.errors import WeftError
from weft.ids import Attempt, BranchId, Digest, PeerId, Round, Tokens
from weft.model.came_with import CameWith
from weft.model.config import named, num_parameters
from weft.peer.state.checkpoint import Snapshot, load, save
from weft.run.amend import first_charter
from weft.run.config import RunConfig, TrainConfig
from weft.run.outline import TicketAdmission
from weft.sync.method.presets import DiLoCoConfig, spell_out
from weft.sync.method.schedule import ConstantConfig
from weft.sync.records.messages import Counted, Manifest, PartResult
from weft.wire import digest_of, encode

PEER = PeerId("cd" * 32)
DIGEST = Digest("ab" * 32)
_SHARD = ShardInfo(digest=DIGEST, num_tokens=1000, nbytes=2000)
CONFIG = RunConfig(
    name="a run",
    seed=1,
    model=msgspec.structs.replace(named("nano", 257, 64), num_layers=3),
    initial=DIGEST,
    is_seeded=True,
    data=DataIndex(
        dtype="uint16",
        train=(_SHARD,),
        heldout=(_SHARD,),
        train_text_nbytes=1000,
        heldout_text_nbytes=1000,
        tokenizer=ByteTokenizer().digest,
        vocab_size=257,
    ),
    is_private=False,
    train=TrainConfig(tokens=Tokens(10_000), seq_len=64, schedule=ConstantConfig()),
    method=spell_out(DiLoCoConfig(), 4),
    admission=TicketAdmission(),
    orphan_after_s=None,
    is_strict=False,
    has_even_leases=True,
)
NUM = num_parameters(CONFIG.model)


def manifest(number: int) -> Manifest:
    return Manifest(
        run=CONFIG.run,
        branch=BranchId(CONFIG.run),
        round=Round(number),
        attempt=Attempt(0),
        leader=PEER,
        previous=DIGEST,
        contributions=(Counted(peer=PEER, tokens=Tokens(7), payload=DIGEST),),
        parts=(PartResult(owner=PEER, result=DIGEST),),
        members=(PEER,),
        uplinks=(16,),
        joined=(),
        left=(),
        leases=(Lease(peer=PEER, start=0, stop=8),),
        cursor=8,
        committed_tokens=Tokens(7 * number),
        acts=(),
        charter=digest_of(first_charter(CONFIG)),
    )


def numbers(seed: int, num: int = NUM) -> torch.Tensor:
    """Return a vector of any bits whatever: NaNs with payloads, infinities and negative zeros included."""
    bits = np.random.Generator(np.random.Philox(seed)).integers(0, 1 << 32, num, dtype=np.uint32)
    return torch.from_numpy(bits.view(np.float32))


@cache
def snapshot(number: int) -> Snapshot:
    """Return one of many states of the same run; equal numbers give equal bits."""
    return Snapshot(
        config=CONFIG,
        tokenizer=ByteTokenizer().to_bytes(),
        came_with=encode(CameWith(files={"LICENSE": b"warp"})),
        head=manifest(number) if number else None,
        replicated={"outer": numbers(4 * number), "momentum": numbers(4 * number + 1)},
        private={"local": numbers(4 * number + 2), "moment1": numbers(4 * number + 3), "empty": torch.zeros(0)},
        counters={"uncounted_tokens": 100 + number},
    )


# --- what a process does ---


def main(what: str, folder: Path, *rest: str) -> None:
    torch.set_num_threads(1)
    {"forever": _save_forever, "limited": _save_limited, "full": _save_full, "killed": _save_killed}[what](
        folder, *rest
    )


def _save_forever(folder: Path) -> None:
    """Save one state after the other, saying so, until somebody kills this process."""
    for number in range(1, 1000):
        print(f"saving {number}", flush=True)
        save(folder, snapshot(number))


def _save_limited(folder: Path) -> None:
    """Save once, then again where no file may grow as large as a checkpoint's."""
    save(folder, snapshot(1))
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 * NUM, resource.RLIM_INFINITY))
    _report(lambda: save(folder, snapshot(2)))


def _save_full(folder: Path) -> None:
    """Save once on a disk of 10 MB, then fill it and save again, then make room and save again."""
    save(folder, snapshot(1))
    filler = folder.parent / "filler"
    space = os.statvfs(folder)
    filler.write_bytes(bytes(space.f_bavail * space.f_frsize - NUM))
    _report(lambda: save(folder, snapshot(2)))
    print(sorted(path.name for path in folder.iterdir()))
    print(load(folder).counters["uncounted_tokens"])
    filler.unlink()
    save(folder, snapshot(3))
    print(load(folder).counters["uncounted_tokens"])


def _save_killed(folder: Path, num_moments: str) -> None:
    """For each moment of a save, die there, in a process and a folder of its own."""
    before, after = snapshot(1), snapshot(2)
    _fork(lambda: save(folder / "before", before))  # this process must not hash: its threads would not be forked
    for moment in range(int(num_moments)):
        here = Path(shutil.copytree(folder / "before", folder / f"{moment:03}"))
        status = _fork(lambda moment=moment, here=here: _die_while_saving(here, after, moment))  # type: ignore[misc]
        print("killed" if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL else f"ended {status}")


def _fork(work: Callable[[], object]) -> int:
    """Do `work` in a child process and return how that ended."""
    child = os.fork()
    if child == 0:
        work()
        os._exit(0)
    return os.waitpid(child, 0)[1]


def _die_while_saving(folder: Path, state: Snapshot, moment: int) -> None:
    """Count what a save asks of the system, and die when `moment` are counted.

    The moment of opening a file is right after it (nothing is written yet), that of every other call right before it.
    """
    left = [moment]

    def count() -> None:
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        left[0] -= 1

    def opened(call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            result = call(*args, **kwargs)
            count()
            return result

        return counted

    def other(call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            count()
            return call(*args, **kwargs)

        return counted

    for name in ("fsync", "replace", "rename", "unlink"):
        setattr(os, name, other(getattr(os, name)))
    os.open, io.open = opened(os.open), opened(io.open)  # the second is pathlib's
    save(folder, state)


def _report(work: Callable[[], object]) -> None:
    try:
        work()
        print("saved")
    except WeftError as error:
        print(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
