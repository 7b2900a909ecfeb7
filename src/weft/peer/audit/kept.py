"""What others may need of rounds gone by: parts of payloads and results on disk, and which parts each payload has.

    traces/parts/    files by their digests, for as long as a later round may take them out, or auditors ask for them

A manifest names a payload by the digest of its parts' digests, one after the other: so these bytes are a blob, too, and
who knows the manifest alone can fetch them. Owners write down what they take out of a round, so auditors of that round
find those parts with them. Lists are kept until these audits are over, too.

Failure:
- the disk does not take a file: this peer could not answer. `DataError` or `DiskFull` ends it.
- a file is gone, or damaged: it is not shown.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from weft.data.store import write_atomically
from weft.ids import Digest, PeerId, Round
from weft.peer.audit.outcome import ANSWER_ROUNDS, ANSWER_S
from weft.peer.context import Context
from weft.peer.round.driver import RoundDriver
from weft.sync.records.counters import WITHIN
from weft.sync.records.messages import Collect, Manifest, counted, list_of
from weft.wire import Buffer, digest

# Both over: others ask again once one has asked in vain, and until `2 * ANSWER_ROUNDS` after the round.
KEPT_ROUNDS, KEPT_S = max(WITHIN, 4 * ANSWER_ROUNDS), 4 * ANSWER_S
LISTED_ROUNDS = WITHIN + 2 * ANSWER_ROUNDS  # the last round that may take out what this one counts is audited, too


@dataclass
class _Since:
    """Since when a file is of use."""

    round: Round
    at: float


class Kept:
    """Of one peer."""

    def __init__(self, context: Context, rounds: RoundDriver) -> None:
        self._context = context
        self._rounds = rounds
        self._folder = context.folder.traces / "parts"
        now, round = context.clock.now(), rounds.chain.head.round
        self._files = {Digest(path.name): _Since(round, now) for path in self._folder.glob("*")}
        self._lists = dict[Digest, tuple[Round, bytes]]()
        self._listed = dict[Round, float]()  # until when a later round could take out what these count
        rounds.merger.on_brought(self.keep)
        context.node.serve_blobs(self._lookup, is_patient=True)

    def _lookup(self, _peer: PeerId, wanted: Digest) -> Buffer | None:
        return self.part(wanted) or self.listed(wanted)

    def beside(self, manifest: Manifest) -> dict[Digest, Buffer]:
        """Return the results of parts that this peer is to keep, beside those who merged them: of each before its own.

        In memory they are kept for some rounds only, and whoever merged one may hold it back.
        """
        me, num = self._context.node.peer, len(manifest.parts)
        before = (manifest.parts[number - 1] for number in range(num) if manifest.parts[number].owner == me)
        results = {Digest(part.result) for part in before if part.owner != me}
        return {each: data for each in sorted(results) if (data := self._rounds.chain.result(each)) is not None}

    async def keep(self, parts: Mapping[Digest, Buffer]) -> None:
        """Write down parts of payloads, or of results.

        Raises:
            DiskFull, DataError: they cannot be written.
        """
        round = Round(self._rounds.chain.head.round + 1)
        if not self.is_audited(round):
            return
        new = {name: data for name, data in parts.items() if name not in self._files}
        await self._context.compute.serve(lambda: self._write(new))
        self._files.update(dict.fromkeys(parts, _Since(round, self._context.clock.now())))

    def is_audited(self, round: Round) -> bool:
        """Return whether somebody may merge a round again; where all do, they do so before they vote."""
        charter = self._rounds.chain.charter_in(round)
        return bool(charter.audits) and not charter.settings.method.is_merged_by_all

    def _write(self, parts: Mapping[Digest, Buffer]) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        for name, data in parts.items():
            write_atomically(self._folder / name, [data], is_synced=False)

    def part(self, wanted: Digest) -> Buffer | None:
        """Return a part of a payload; None: it is not here."""
        if wanted in self._files:
            with suppress(OSError):
                data = (self._folder / wanted).read_bytes()
                return data if digest(data) == wanted else None
        return None

    def listed(self, payload: Digest) -> bytes | None:
        """Return which parts a payload has, as `messages.list_of`; None: it is not known here."""
        known = self._lists.get(payload)
        return None if known is None else known[1]

    def note(self, round: Round, plan: Collect) -> None:
        """Note which parts the payloads have that a round has counted."""
        lists = map(list_of, (each.parts for each in plan.contributions))
        self._lists |= {digest(each): (round, each) for each in lists}
        self._listed[round] = self._context.clock.now()

    def is_listed(self, round: Round) -> bool:
        """Return whether others may still ask for what is noted of a round."""
        return round in self._listed

    def sweep(self, manifest: Manifest) -> None:
        """Let go of what nobody can ask for any more, after a round."""
        now, oldest = self._context.clock.now(), manifest.round - KEPT_ROUNDS
        for name, since in list(self._files.items()):
            if since.round < oldest and now - since.at > KEPT_S:
                with suppress(OSError):
                    (self._folder / name).unlink(missing_ok=True)
                del self._files[name]
        self._listed |= {each: now for each in self._listed if manifest.round - each <= WITHIN}
        self._listed = {
            each: at
            for each, at in self._listed.items()
            if manifest.round - each <= LISTED_ROUNDS or now - at <= KEPT_S
        }
        self._lists = {name: known for name, known in self._lists.items() if self.is_listed(known[0])}


def is_plan_of(plan: Collect, manifest: Manifest) -> bool:
    """Return whether a plan is one that a manifest may come of."""
    return (
        tuple(map(counted, plan.contributions)) == manifest.contributions
        and plan.awaited == manifest.awaited
        and plan.counters == manifest.counters
    )


def room(nbytes: int) -> memoryview:
    """Return memory for what is fetched."""
    return memoryview(bytearray(nbytes))
