"""What checking what a run has recorded takes, of who has neither been in it nor torch: pieces of blobs, and rounds.

    python -m benchmarks.ledger         # some seconds

An opening shows 1 KiB of a blob of 1 MiB, a slice more of it (`weft.ledger.opening`). A run has 10,000 rounds of 32
members, of whom one goes and another comes each hundred rounds; in each round five are counted. What others tell of it
is checked whole (`RoundsFile.fill`), and so is what shows that it has counted a work, and what lease that was for
(`weft ledger check`). Aims: 5 ms, and 5 s. Figures are seconds of one thread's CPU, in the middle of several times.
"""

import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import TypeVar

import numpy as np
from msgspec import UNSET
from msgspec.structs import replace

from benchmarks import report
from weft.data.assign import Lease
from weft.ids import Attempt, BranchId, PeerId, Round, RunId, Tokens
from weft.keys import Identity
from weft.ledger.opening import Opening, Slice, is_chunk, is_slice, open_chunk, open_slice
from weft.store.proving import prove
from weft.store.rounds import RoundsFile
from weft.sync.proof import Shown, shown
from weft.sync.records.messages import (
    Accept,
    Certificate,
    Counted,
    Entry,
    Manifest,
    PartResult,
    RoundNote,
    header_of,
    past_after,
    work_of,
)
from weft.sync.records.proof import MAX_PROOF_NBYTES, Milestone, WorkProof
from weft.wire import Signed, decode, digest, digest_of, encode, seal

BLOB_NBYTES, TIMES = 1 << 20, 20
NUM_ROUNDS, NUM_MEMBERS, NUM_COUNTED, EVERY = 10_000, 32, 5, 100
EARLY = 17  # a round of long ago
RUN = RunId("cd" * 32)
KEYS = {each.peer: each for each in (Identity.from_seed(bytes([number]) * 32) for number in range(40))}

T = TypeVar("T")


def timed(check: Callable[[], T], times: int = TIMES) -> tuple[float, T]:
    """Return the seconds that a check takes, in the middle of several times, and what it comes to."""
    took_s = list[float]()
    for _ in range(times):
        began = time.thread_time()
        found = check()
        took_s.append(time.thread_time() - began)
    return median(took_s), found


# --- pieces of blobs ---


def pieces() -> list[tuple[object, ...]]:
    blob = np.arange(BLOB_NBYTES // 4, dtype=np.uint32).tobytes()
    name = digest(blob)
    one = encode(open_chunk(blob, 700))
    some, whole = (encode(open_slice(blob, range(nbytes))) for nbytes in (4096, BLOB_NBYTES))
    rows = list[tuple[object, ...]]()

    def opened() -> bool:
        return is_chunk(name, BLOB_NBYTES, decode(one, Opening))

    def sliced(data: bytes) -> Callable[[], bool]:
        return lambda: is_slice(name, BLOB_NBYTES, decode(data, Slice, max_nbytes=2 * BLOB_NBYTES))

    for what, data, check in (
        ("1 KiB of it", one, opened),
        ("4 KiB of it, side by side", some, sliced(some)),
        ("all of it", whole, sliced(whole)),
    ):
        took_s, is_so = timed(check)
        if not is_so:
            raise RuntimeError(f"what shows {what} does not")
        rows.append((what, len(data), 1e3 * took_s))
    return rows


# --- rounds ---


def first() -> Manifest:
    members = tuple(sorted(KEYS))[:NUM_MEMBERS]
    return Manifest(
        run=RUN,
        branch=BranchId(RUN),
        round=Round(0),
        attempt=Attempt(0),
        leader=members[0],
        previous=digest(b"the run"),
        contributions=(),
        parts=(),
        members=members,
        uplinks=(16,) * NUM_MEMBERS,
        joined=(),
        left=(),
        leases=_leases(members, 0),
        cursor=8 * NUM_MEMBERS,
        committed_tokens=Tokens(0),
        acts=(),
        charter=digest(b"its charter"),
        entry=Entry(work=work_of(()), past=b""),
    )


def following(before: Manifest, joined: tuple[PeerId, ...], left: tuple[PeerId, ...]) -> Manifest:
    assert before.entry is not UNSET
    members = tuple(sorted(set(before.members) - set(left) | set(joined)))
    counted = tuple(
        Counted(peer=peer, tokens=Tokens(512), payload=digest(peer.encode())) for peer in before.members[:NUM_COUNTED]
    )
    return replace(
        before,
        round=Round(before.round + 1),
        previous=digest_of(before),
        contributions=counted,
        parts=tuple(PartResult(owner=peer, result=digest(b"part")) for peer in before.members),
        members=members,
        joined=joined,
        left=left,
        leases=_leases(members, before.cursor),
        cursor=before.cursor + 8 * NUM_MEMBERS,
        committed_tokens=Tokens(before.committed_tokens + 512 * NUM_COUNTED),
        entry=Entry(work=work_of(counted), past=past_after(before, before.entry)),
    )


def _leases(members: tuple[PeerId, ...], start: int) -> tuple[Lease, ...]:
    return tuple(Lease(peer=peer, start=start + 8 * at, stop=start + 8 * at + 8) for at, peer in enumerate(members))


def milestone_of(manifest: Manifest, voters: tuple[PeerId, ...]) -> Milestone:
    accept = Accept(attempt=manifest.attempt, manifest=digest_of(manifest))
    note = RoundNote(branch=manifest.branch, round=manifest.round, message=accept)
    votes = tuple(seal(KEYS[peer], note) for peer in sorted(voters))
    return Milestone(certificate=Certificate(attempt=manifest.attempt, manifest=manifest, votes=votes, farewells=()))


def played(file: RoundsFile) -> tuple[Signed, bytes, list[Milestone], Manifest]:
    """Put some rounds of a long run into a file, as who was there for them has it; return how the run began, and what
    others tell who comes at its end: all headers before, rounds in which members changed, and the head."""
    last = first()
    opening, waiting = (
        seal(KEYS[PeerId(last.leader)], last),
        [each for each in sorted(KEYS) if each not in last.members],
    )
    headers, milestones = [_header(last)], list[Milestone]()
    file.begin(opening)
    for number in range(1, NUM_ROUNDS + 1):
        before, is_change = last, number % EVERY == 0
        goes = (PeerId(last.members[number // EVERY % NUM_MEMBERS]),) if is_change else ()
        last = following(last, tuple(waiting[: len(goes)]), goes)
        waiting = [*waiting[len(goes) :], *goes]
        headers.append(_header(last))
        if is_change:
            milestones.append(milestone_of(last, before.members))
        if number in (EARLY - 1, EARLY, NUM_ROUNDS - 1):
            file.put(last, None)
    file.put(last, milestones[-1])
    return opening, b"".join(headers[:-1]), milestones, last


def _header(manifest: Manifest) -> bytes:
    assert manifest.entry is not UNSET
    return header_of(manifest, manifest.entry).pack()


def rounds(folder: Path) -> list[tuple[object, ...]]:
    file = RoundsFile(folder / "rounds.db")
    opening, headers, milestones, last = played(file)
    told = len(headers) + sum(len(encode(each)) for each in milestones)

    def filled() -> bool:
        return file.fill(RUN, opening, headers, milestones, last)

    took_s, is_so = timed(filled, 3)
    if not is_so:
        raise RuntimeError("what is told of the run is not what led to its head")
    rows: list[tuple[object, ...]] = [("all rounds, and who its members were", told, took_s)]
    for number in (EARLY, NUM_ROUNDS):
        manifest = file.manifest(number)
        assert manifest is not None
        data = encode(prove(file, RUN, Round(number), PeerId(manifest.contributions[0].peer)))
        took_s, found = timed(partial(checked, data), 3)
        if found.round != number or not found.leases:
            raise RuntimeError(f"the proof of round {number} shows something else")
        rows.append((f"one work of round {number:,}, and what was leased for it", len(data), took_s))
    return rows


def checked(proof: bytes) -> Shown:
    return shown(decode(proof, WorkProof, max_nbytes=MAX_PROOF_NBYTES))


def main() -> None:
    load = report.load()
    with tempfile.TemporaryDirectory() as name:
        of_rounds = rounds(Path(name))
    sections = [
        "Of a blob of 1 MiB:",
        report.table(("shown", "bytes", "ms to check"), pieces()),
        f"Of a run of {NUM_ROUNDS:,} rounds of {NUM_MEMBERS} members, one of whom is replaced each {EVERY} rounds:",
        report.table(("shown", "bytes", "s to check"), of_rounds),
        report.load_line(load),
    ]
    report.write("ledger", "What it takes to check what a run has recorded", "python -m benchmarks.ledger", sections)


if __name__ == "__main__":
    main()
