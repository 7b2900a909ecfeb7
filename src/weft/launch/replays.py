"""Makes training steps of an archived run again, drawn by chance: what `weft ledger check RUN` does.

    listed       the rounds of the archive, each once its certificate and the works that it counts are checked
    drawn        so many of the leases that rounds have counted, by this machine's own chance; or all
    replayed     round by round: parameters follow from the results of rounds, and are those that most members named;
                 each drawn lease is made again from how it began (`weft.peer.audit.leases.replays`)

In exact numbers what a lease began with, if nobody has shown it, follows from the work before it, which is made again
for that.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from msgspec import UNSET
from torch import Tensor

from weft import rng
from weft.anchor.archive import (
    Blobs,
    KeptRound,
    KeptWork,
    Stretch,
    Wanted,
    counted_works,
    followed,
    is_sound,
    opened_work,
    stretches,
)
from weft.clock import Clock
from weft.data.tokenizer import from_bytes
from weft.errors import ConfigError, DataError, PayloadError, WireError
from weft.events import Emit
from weft.ids import Digest, PeerId, Round, RunId, short
from weft.keys import verify
from weft.launch.code import recall
from weft.launch.fetch import read_came_with
from weft.peer.audit.heads import Head
from weft.peer.audit.leases.replays import Before, Case, Ended, NotHere, Replayed, Replays, Shown
from weft.peer.chain import Chain
from weft.peer.context import Data
from weft.peer.state.replica import Replica
from weft.run.config import RunConfig
from weft.run.frozen import frozen_of
from weft.run.genesis import MAX_RUN_NBYTES, MAX_TOKENIZER_NBYTES, initial, on_corpus, read_run
from weft.run.host import limit_cores
from weft.run.machine import PeerConfig
from weft.run.staged import StagedConfig
from weft.run.trust import AuditedTrust
from weft.store.chunks import raw, state_index
from weft.store.home import Home
from weft.sync.governance import votes_of
from weft.sync.merge.method import OUTER
from weft.sync.records import rewinds
from weft.sync.records.index import MAX_INDEX_NBYTES, StateIndex
from weft.sync.records.messages import Certificate, Manifest
from weft.sync.records.work import Work
from weft.training.rewarded import trainer_of
from weft.wire import Buffer, decode, digest_of

NOTHING_HERE = "its work is not in the archive"
NOT_ANY_MORE = "its round, or one that it began at, is not in the archive"


@dataclass(frozen=True)
class Found:
    """What came of one lease."""

    round: Round  # that has counted it
    peer: PeerId
    of: Replayed


@dataclass
class Report:
    """
    Args:
        founder: who began the run, where the archive begins there; None: it rests on a state that members gave.
        num_segments: that the archive's rounds have counted.
        num_drawn: of those.
        faults: what is altered in the archive.
    """

    founder: PeerId | None = None
    num_rounds: int = 0
    num_segments: int = 0
    num_drawn: int = 0
    found: list[Found] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    @property
    def outcomes(self) -> Counter[str]:
        return Counter(each.of.outcome for each in self.found)

    @property
    def differing(self) -> list[Found]:
        return [each for each in self.found if each.of.outcome == "differs"]


@dataclass
class _Item:
    """A work that a round of the archive has counted."""

    stretch: int
    round: Round
    peer: PeerId
    name: Digest
    work: Work
    kept: KeptWork
    wanted: set[int] = field(default_factory=set)  # segments to make again
    is_derived: bool = False  # from the work before it, which is made again for that
    num_users: int = 0  # later works that go on from what it ended with, and have shown nothing themselves

    @property
    def shown(self) -> Shown | None:
        return Shown(self.kept.begins, self.kept.ends) if self.kept.begins else None


@dataclass
class _Rounds:
    """A stretch that was read.

    Args:
        last: its last round that is whole and proven.
        targets: rounds that later ones go back to.
    """

    stretch: Stretch
    last: int
    targets: set[Round] = field(default_factory=set)


OnFound = Callable[[Found], None]


def replay(
    home: Home, run: RunId, folder: Path, num: int | None, settings: PeerConfig, clock: Clock, emit: Emit,
    on_found: OnFound = lambda _found: None,
) -> Report:  # fmt: skip
    """Return what came of leases of an archive that were made again on this machine.

    Args:
        home: has the run's config and data.
        folder: the archive.
        num: leases that are drawn; None: all.
        on_found: told of each.

    Raises:
        ConfigError: the run is not audited, or this machine cannot train it.
        DataError: its config or data are not here, or the archive is empty.
    """
    config, data = _run_of(home, run)
    limit_cores(settings.caps.cores)
    outer = initial(config, home)
    if outer is None:
        raise DataError(f"the weights that run {short(run)} begins with are not in {home.root}.")
    assert isinstance(config.trust, AuditedTrust)
    frozen = partial(frozen_of, config, home, data.tokenizer, data.came_with)
    trainer = trainer_of(config, settings, data.batches(config, "train"), emit, clock, frozen)
    trainer.start(outer.clone())
    replays = Replays(trainer, config, config.trust.numerics, _reader(Blobs(folder / "blobs")))
    return _Check(config, outer, folder, replays, is_exact=config.trust.is_exact, on_found=on_found).run(num)


def _run_of(home: Home, run: RunId) -> tuple[RunConfig, Data]:
    """
    Raises:
        ConfigError: nobody's steps of it can be done again.
        DataError: its config or data are not here.
    """
    data = home.blobs.read(Digest(run), MAX_RUN_NBYTES)
    if data is None:
        raise DataError(f"the config of run {short(run)} is not in {home.root}: take the whole home of the anchor.")
    config = on_corpus(read_run(data, PeerConfig().max_parameters))
    recall(config, home)
    if not isinstance(config.trust, AuditedTrust) or isinstance(config, StagedConfig):
        raise ConfigError(f"members of run {short(run)} do not name their training steps, so nobody can do them again.")
    blob = home.blobs.read(config.data.tokenizer, MAX_TOKENIZER_NBYTES)
    if blob is None or (missing := home.shards.missing(config.data)):
        what = "its tokenizer is" if blob is None else f"{len(missing)} pieces of its text are"
        raise DataError(f"run {short(run)}: {what} not in {home.root}. Take the whole home of the anchor.")
    return config, Data(from_bytes(blob), home.shards, config.data, read_came_with(config, home))


def _reader(blobs: Blobs) -> Callable[[Digest], Buffer]:
    def read(name: Digest) -> Buffer:
        if not blobs.has(name):
            raise NotHere(f"blob {short(name)} is not in the archive")
        return blobs.read(name)

    return read


class _Check:
    def __init__(
        self, config: RunConfig, first: Tensor, folder: Path, replays: Replays, *, is_exact: bool, on_found: OnFound
    ) -> None:
        self._config = config
        self._first = first
        self._folder = folder
        self._replays = replays
        self._is_exact = is_exact
        self._on_found = on_found
        self._blob = _reader(Blobs(folder / "blobs"))
        self._report = Report()
        self._items: dict[Digest, _Item] = {}
        self._missing: list[Wanted] = []  # works of which nothing is here
        self._ended: dict[Digest, Ended] = {}  # of works that others go on from

    def run(self, num: int | None) -> Report:
        read = list(self._listed())
        if not self._items and not self._missing:
            what = "; ".join(self._report.faults) or "no work is in it yet"
            raise DataError(f"nothing of {self._folder} can be checked: {what}.")
        self._draw(num)
        for number, rounds in enumerate(read):
            self._replay(number, rounds)
        return self._report

    # --- what there is ---

    def _listed(self) -> Iterator[_Rounds]:
        for number, stretch in enumerate(stretches(self._folder)):
            try:
                begin = stretch.begin()
            except DataError as error:
                self._report.faults.append(str(error))
                continue
            if begin.head.run != self._config.run or not is_sound(begin, self._config.run):
                self._report.faults.append(
                    f"{stretch.folder / 'begin.bin'} is altered: it does not begin with this run"
                )
                continue
            if begin.opening is not None:
                self._report.founder = PeerId(begin.opening.signer)
            rounds = _Rounds(stretch, begin.head.round)
            try:
                for kept in followed(Chain(begin.head, begin.charter), stretch):
                    self._list(number, kept)
                    rounds.last = kept.manifest.round
                    if (back := rewinds.decided(kept.manifest)) is not None:
                        rounds.targets.add(back.round)
            except DataError as error:
                self._report.faults.append(str(error))
            self._report.num_rounds += rounds.last - begin.head.round
            yield rounds

    def _list(self, stretch: int, kept: KeptRound) -> None:
        for wanted in counted_works(kept.manifest):
            work = kept.work(wanted.name)
            if work is None:
                self._report.num_segments += 1
                if any(each.signed.signer == wanted.peer for each in kept.works):
                    text = f"the work of {wanted.peer} that round {wanted.round} counts is altered: it is another"
                    self._report.faults.append(text)
                else:
                    self._missing.append(wanted)
                continue
            try:
                opened = opened_work(work.signed, wanted)
            except WireError as error:
                text = f"the work of {wanted.peer} that round {wanted.round} counts is altered: {error}"
                self._report.faults.append(text)
                continue
            item = _Item(stretch, wanted.round, wanted.peer, wanted.name, opened, work)
            self._items[wanted.name] = item
            self._report.num_segments += len(opened.segments)

    def _draw(self, num: int | None) -> None:
        every: list[tuple[_Item | Wanted, int]] = [(each, 0) for each in self._missing]
        for item in self._items.values():
            every += [(item, number) for number in range(len(item.work.segments))]
        chosen = every
        if num is not None and num < len(every):
            luck = rng.stream(int.from_bytes(rng.fresh_secret(8), "little"), "segments")
            chosen = [every[at] for at in sorted(luck.choice(len(every), num, replace=False))]
        self._report.num_drawn = len(chosen)
        for each, number in chosen:
            if isinstance(each, Wanted):
                self._found(each.round, each.peer, Replayed(0, 0, "unknown", NOTHING_HERE))
            else:
                each.wanted.add(number)
                self._want_before(each)

    def _want_before(self, item: _Item) -> None:
        """Make the works again that one goes on from, as far back as nobody has shown what they began with."""
        while item.shown is None and self._is_exact and item.work.follows is not None:
            before = self._items.get(Digest(item.work.follows))
            if before is None or item.is_derived:
                return
            item.is_derived = True
            before.num_users += 1
            before.wanted |= set(range(len(before.work.segments)))
            item = before

    # --- again ---

    def _replay(self, number: int, rounds: _Rounds) -> None:
        """Go through the rounds of a stretch, and make again what is drawn of it."""
        due = [item for item in self._items.values() if item.stretch == number and item.wanted]
        if not due:
            return
        last_use: dict[Digest, Round] = {}
        for item in due:
            for segment in item.work.segments:
                last_use[Digest(segment.head)] = max(item.round, last_use.get(Digest(segment.head), Round(0)))
        heads, outers, earlier = dict[Digest, Head](), dict[Digest, Tensor](), dict[Round, Tensor]()
        left = {item.name: item for item in due}
        try:
            replica = self._begun(rounds.stretch)
            for at in range(replica.head.round if replica.head else 0, rounds.last):
                kept = rounds.stretch.round(at + 1)
                assert replica.head is not None
                if replica.head.round in rounds.targets:
                    earlier[replica.head.round] = replica.outer.clone()
                if (name := digest_of(replica.head)) in last_use:
                    heads[name] = self._head(replica, kept.certificate)
                    outers[name] = replica.outer.clone()
                for item in [each for each in due if each.round == kept.manifest.round]:
                    del left[item.name]
                    self._make(item, heads, outers)
                results, back = self._results(kept.manifest), rewinds.decided(kept.manifest)
                if back is not None and back.round not in earlier:
                    break  # the archive begins later
                replica.apply(kept.manifest, results, None if back is None else earlier[back.round])
                for gone in [each for each in outers if last_use[each] <= kept.manifest.round]:
                    del outers[gone]
        except (DataError, PayloadError) as error:
            self._report.faults.append(str(error))
        for item in left.values():
            self._tell(item, [Replayed(each, 0, "unknown", NOT_ANY_MORE) for each in item.wanted])

    def _results(self, manifest: Manifest) -> tuple[Buffer, ...]:
        return tuple(self._blob(Digest(part.result)) for part in manifest.parts)

    def _begun(self, stretch: Stretch) -> Replica:
        begin, replica = stretch.begin(), Replica(self._config, self._first.clone())
        if begin.index is None:
            replica.begin(begin.head)
            return replica
        index: StateIndex = decode(self._blob(Digest(begin.index)), StateIndex, max_nbytes=MAX_INDEX_NBYTES)
        vectors = replica.vectors()
        if index.shape != {name: vector.numel() for name, vector in vectors.items()}:
            raise DataError(f"{stretch.folder / 'begin.bin'} names no state of this run's model")
        for vector in index.vectors:
            here, start = raw(vectors[vector.name]), 0
            for chunk in vector.chunks:
                data = self._blob(Digest(chunk))
                here[start : start + len(data)] = memoryview(data)
                start += len(data)
        replica.load(begin.head, begin.charter, vectors)
        return replica

    def _head(self, replica: Replica, after: Certificate) -> Head:
        """Return what leases begin at here, which is what most members had, if they named it.

        Raises:
            DataError: it is not.
        """
        assert replica.head is not None
        index = state_index(replica.vectors())
        members, named = replica.head.members, Counter[Digest]()
        for vote in votes_of(after, members, verify).values():
            if vote.state is not UNSET:
                named[Digest(vote.state)] += 1
        most = next((name for name, count in named.items() if 2 * count > len(members)), None)
        if most is not None and most != digest_of(index):
            raise DataError(
                f"what the archive leads to after round {replica.head.round} is not what most members had: the state "
                "that it begins with was not the run's, or this version of weft computes rounds otherwise"
            )
        outer = index.vector(OUTER)
        return Head(manifest=replica.head, charter=replica.charter, outer=outer)

    def _make(self, item: _Item, heads: dict[Digest, Head], outers: dict[Digest, Tensor]) -> None:
        names = [Digest(segment.head) for segment in item.work.segments]
        if any(name not in outers for name in names):
            self._tell(item, [Replayed(each, 0, "unknown", NOT_ANY_MORE) for each in item.wanted])
            return
        begun = tuple(heads[name] for name in names)
        try:
            case = Case(item.work, begun, [outers[name] for name in names], item.shown, self._before(item))
            found, ended = self._replays.check(case, item.wanted)
        except DataError as error:
            text = f"what is kept of the work of {item.peer} that round {item.round} counts is altered: {error}"
            self._report.faults.append(text)
            return
        if item.num_users and ended is not None:
            self._ended[item.name] = ended
        if item.is_derived and (before := self._items.get(Digest(item.work.follows or ""))) is not None:
            before.num_users -= 1
            if not before.num_users:
                self._ended.pop(before.name, None)
        self._tell(item, found)

    def _before(self, item: _Item) -> Before | None:
        before = self._items.get(Digest(item.work.follows or ""))
        if before is None:
            return None
        last = None
        if before.kept.ends:
            data = self._blob(Digest(before.kept.ends[-1].state))
            last = decode(data, StateIndex, max_nbytes=MAX_INDEX_NBYTES)
        return Before(before.work, last, self._ended.get(before.name))

    def _tell(self, item: _Item, found: list[Replayed]) -> None:
        for each in found:
            self._found(item.round, item.peer, each)

    def _found(self, round: Round, peer: PeerId, of: Replayed) -> None:
        line = Found(round, peer, of)
        self._report.found.append(line)
        self._on_found(line)
