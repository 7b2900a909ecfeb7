"""Plays a scenario: lets machines come, befalls them with faults, and tells how it went.

    played = play(scenario, run_file, base, folder, write)

The maker and all that are there from the start begin together, or as many of them as its electorate takes; others join
later. A play ends when nobody runs any more and nobody is still to come, or at the scenario's limit. Each event goes to
`write` as it happens, one JSON line as in a peer's own log: equal scenarios give equal lines, byte for byte.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch

from weft.clock import SkewedClock
from weft.errors import ConfigError, NotFinite, WeftError
from weft.events import VERSION, ActEnacted, Entry, Evaluated, Event, RoundCommitted, RoundMissed, StageHeld
from weft.ids import Digest, PeerId, Round, Tokens
from weft.net.membership.full_mesh import MAX_MEMBERS
from weft.net.membership.gossip import ClaimReader
from weft.net.transport.memory import MemoryNetwork
from weft.peer.context import MakeTrainer
from weft.peer.round.acts import STRIKE_OUT
from weft.run.config import RunFile
from weft.run.genesis import seal
from weft.run.trust import AuditedTrust
from weft.sim.cheats import accuse, arrange_cheats
from weft.sim.cost import CostTrainer, StepwiseCostTrainer
from weft.sim.memo import shared
from weft.sim.scenario import Fault, Freeze, Kill, Kind, Partition, Scenario, Stop, at_present, audits_how, parted
from weft.sim.world import Life, Member, Paced, World, set_line
from weft.store.home import Home
from weft.sync.records.messages import GroupRecord, Manifest, claims_in
from weft.training.rewarded import trainer_of
from weft.wire import digest_of


@dataclass(frozen=True)
class Machine:
    """How one machine fared.

    Args:
        trained: tokens of inner steps of all its processes.
        counted: of them, in the manifests that the furthest one follows on, so not in a branch that was left, nor what
            it brought of one, nor of others in its group; of a leaf, through its aggregator.
        carried: of them, what it would bring to the next round; None where it has no such end.
        num_lives: processes that it had.
        end: why its last process ended.
        replica: the digest of its replicated state at the end; None where it had none to tell.
        struck_out: in which round the others have struck it out.
        has_diverged: that was a loss, a gradient or a delta that is not finite.
        stages: that its processes have held, one after the other; none, where the model is whole.
        sections: the digests of what its last process held at its end, by stage.
    """

    name: str
    peer: PeerId
    trained: Tokens
    counted: Tokens
    carried: Tokens | None
    num_missed: int
    num_lives: int
    end: str
    replica: Digest | None
    has_diverged: bool
    struck_out: Round | None = None
    stages: tuple[int, ...] = ()
    sections: Mapping[int, Digest] = field(default_factory=dict)


@dataclass(frozen=True)
class Played:
    """How a scenario went.

    Args:
        took_s: virtual seconds.
        unplayed: faults whose moment never came.
        broken: errors that nobody handled: faults of weft.
        manifests: all that any machine made an outer step of, as they were made; where there are stages, the first's.
    """

    machines: tuple[Machine, ...]
    took_s: float
    num_rounds: Round
    committed_tokens: Tokens
    evaluated: Evaluated | None  # of the latest round that was
    unplayed: tuple[Fault, ...]
    broken: tuple[str, ...]
    manifests: tuple[Manifest, ...]

    @property
    def nats_per_byte(self) -> float | None:
        """The held-out loss; None: there is none."""
        return None if self.evaluated is None else self.evaluated.nats_per_byte


def play(
    scenario: Scenario,
    run_file: RunFile,
    base: Path,
    folder: Path,
    write: Callable[[bytes], object],
    make_trainer: MakeTrainer = trainer_of,
) -> Played:
    """Play `scenario` with `run_file`, whose paths are relative to `base`; machines keep what they keep in `folder`.

    Args:
        write: takes each line of the log.
        make_trainer: of machines that compute.

    Raises:
        WeftError: the run cannot be made: its file, its data or its model; or it is none that is simulated.
    """
    if run_file.pipeline.split is not None:
        raise ConfigError("pipeline.split: members that compute together are not simulated. Leave it out.")
    torch.set_num_threads(1)  # sums in another order are other bits
    home = Home(folder)
    sealed = seal(run_file, base, home, lambda _event: None)
    world = World(sealed, home, MemoryNetwork(seed=scenario.seed), scenario.seed)
    is_audited = isinstance(run_file.trust, AuditedTrust)
    cost = StepwiseCostTrainer if is_audited else CostTrainer  # a call's only step could not be done again one by one
    world.make_trainer = cost if scenario.compute == "cost" else make_trainer
    arrange_cheats(scenario, world, has_model=scenario.compute == "real")
    if len(list(scenario.machines())) > MAX_MEMBERS:
        world.reader = ClaimReader(sealed.config.run)
    with shared():
        return world.clock.run(_Stage(scenario, world, write).play())


class _Stage:
    def __init__(self, scenario: Scenario, world: World, write: Callable[[bytes], object]) -> None:
        self.world = world
        self._scenario = scenario
        self._write = write
        self._kinds: dict[str, Kind] = dict(scenario.machines())  # as they are without faults
        self._clocks = {name: SkewedClock(world.clock, kind.clock_skew_s) for name, kind in self._kinds.items()}
        self._partitions: list[Partition] = []  # in force
        self._cut: set[tuple[str, str]] = set()  # pairs of machines between which nothing passes
        self._coming: dict[asyncio.Task[None], Fault | None] = {}
        self._manifests: dict[int, dict[tuple[str, Round], Manifest]] = {0: {}}  # by stage; of a whole model, one
        self._records: dict[Digest, GroupRecord] = {}  # of the groups that they count
        self._broken: list[str] = []
        self._struck_out: dict[PeerId, Round] = {}
        world.on_event = self._hear

    async def play(self) -> Played:
        asyncio.get_running_loop().set_exception_handler(self._note_broken)
        members = [self.world.member(name) for name in self._kinds]
        members[0].is_founder = True
        for member in members:
            self._arrange(member)
        present = [member for member in members if not self._kinds[member.name].joins_at_s]
        wait_for = min(
            len(present), self.world.sealed.config.electors
        )  # the others find an aggregator, and need no more
        for member in present:
            self._launch(member, wait_for)
        for member in members:
            if member not in present:
                self._expect(self._join(member), None)
        for fault in self._scenario.fault:
            if isinstance(fault, Partition):
                self._expect(self._part(fault), fault)
                continue
            for name in self._scenario.called(fault.peer):
                self._expect(self._befall(fault, self.world.member(name)), fault)
        with suppress(TimeoutError):
            async with asyncio.timeout(self._scenario.limit_s):
                await self._until_all_ended()
        unplayed = {fault: None for task, fault in self._coming.items() if fault is not None and not task.done()}
        for task in self._coming:
            task.cancel()
        took_s = self.world.clock.now()
        chains = [history(tuple(each.values())) for each in self._manifests.values()]
        num_counted = counted((manifest for chain in chains for manifest in chain), self._records)
        machines = tuple(self._fate(member, num_counted) for member in members)
        await self.world.end()
        return self._summary(machines, took_s, tuple(unplayed))

    async def _until_all_ended(self) -> None:
        while True:
            running = [life for life in self.world.lives if life.is_running]
            coming = [task for task in self._coming if not task.done()]
            if running:
                await running[0].has_ended.wait()
            elif coming and not self._is_complete():
                await asyncio.wait(coming, return_when=asyncio.FIRST_COMPLETED)
            else:
                return

    def _is_complete(self) -> bool:
        tokens = self.world.sealed.config.train.tokens
        heads = [life.head() for life in self.world.lives]
        return any(head is not None and head.committed_tokens >= tokens for head in heads)

    # --- machines ---

    def _launch(self, member: Member, wait_for: int = 1) -> None:
        self.world.launch(member, wait_for=wait_for, compute=Paced(member), clock=self._clocks[member.name])

    async def _join(self, member: Member) -> None:
        await asyncio.sleep(self._kinds[member.name].joins_at_s)
        self._launch(member)

    def _arrange(self, member: Member) -> None:
        """Give a machine what it has at the moment: its line to the network, its speed, its clock on the wall."""
        now = at_present(self._kinds[member.name], member.in_force)
        member.tokens_per_s = now.tokens_per_s
        self._clocks[member.name].ahead_s = now.clock_skew_s
        set_line(self.world.network, member.id, now)

    # --- faults ---

    def _expect(self, coming: Coroutine[Any, Any, None], fault: Fault | None) -> None:
        self._coming[asyncio.ensure_future(coming)] = fault

    async def _befall(self, fault: Fault, member: Member) -> None:
        await self._moment(fault, member)
        match fault:
            case Kill():
                if member.lives:
                    member.life.kill()
                await self._return(member, fault.returns_after_s)
            case Stop():
                if member.lives and member.life.is_running:
                    member.life.stop("its person stopped it")
                    await member.life.has_ended.wait()
                await self._return(member, fault.returns_after_s)
            case Freeze():
                if member.lives:
                    await member.life.freeze(fault.lasts_s)
            case Partition():
                raise AssertionError("a partition befalls no single machine")
            case _:
                member.in_force = (*member.in_force, fault)
                self._arrange(member)
                if fault.lasts_s is not None:
                    await asyncio.sleep(fault.lasts_s)
                    member.in_force = tuple(each for each in member.in_force if each is not fault)
                    self._arrange(member)

    async def _part(self, fault: Partition) -> None:
        await self._moment(fault, self.world.member(self._scenario.called(fault.sides[0][0])[0]))
        self._partitions.append(fault)
        self._arrange_links()
        await asyncio.sleep(fault.lasts_s)
        self._partitions.remove(fault)
        self._arrange_links()

    async def _moment(self, fault: Fault, member: Member) -> None:
        if fault.at_s is not None:
            await asyncio.sleep(fault.at_s)
        else:
            await self.world.round(member, fault.at_round or 0)

    def _arrange_links(self) -> None:
        """Cut the links that a partition in force goes through, and no others."""
        before, self._cut = self._cut, set()
        for fault in self._partitions:
            sides = [[name for each in side for name in self._scenario.called(each)] for side in fault.sides]
            self._cut |= parted(sides, self._kinds)
        member, network = self.world.member, self.world.network
        for one, other in sorted(before - self._cut):
            network.heal(member(one).id, member(other).id)
        for one, other in sorted(self._cut - before):
            network.partition(member(one).id, member(other).id)

    async def _return(self, member: Member, after_s: float | None) -> None:
        if after_s is not None:
            await asyncio.sleep(after_s)
            if not (member.lives and member.life.is_running):
                self._launch(member)

    # --- what is told ---

    def _hear(self, life: Life, event: Event) -> None:
        entry = Entry(v=VERSION, at=self.world.clock.wall(), peer=life.member.id, event=event)
        root = str(self.world.home.root).encode()
        self._write(msgspec.json.encode(entry).replace(root, b"") + b"\n")
        stage = event.stage or 0
        if isinstance(event, ActEnacted) and event.kind == STRIKE_OUT:
            self._struck_out.setdefault(PeerId(event.subject), event.round)
        if isinstance(event, RoundCommitted) and "accuse" in audits_how(life.member.in_force):
            accuse(life, event.round)
        if isinstance(event, RoundCommitted) and (head := life.head(stage)) is not None:
            self._manifests.setdefault(stage, {})[head.branch, head.round] = head
            for claim in claims_in(head).values() if life.staged is None else ():
                if (record := life.peer.record(claim.record)) is not None:
                    self._records[claim.record] = record

    def _note_broken(self, _loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
        self._broken.append(f"{context['message']}: {context.get('exception')!r}")

    def _fate(self, member: Member, num_counted: Counter[PeerId]) -> Machine:
        lives = member.lives
        last = lives[-1] if lives else None
        replica, has_diverged = None, False
        if last is None:
            end = "it never came"
        elif last.is_dead:
            end = "killed"
        elif not last.task.done():
            end = "still running"
        elif (error := last.task.exception()) is not None:
            end = str(error) if isinstance(error, WeftError) else repr(error)
            has_diverged = isinstance(error, NotFinite)
        else:
            end, replica = last.outcome.reason, last.outcome.replica
        return Machine(
            name=member.name,
            peer=member.id,
            trained=Tokens(sum(life.trained_tokens for life in lives)),
            counted=Tokens(num_counted[member.id]),
            carried=last.carried_tokens if last is not None and not last.is_dead else None,
            num_missed=sum(len(life.seen(RoundMissed)) for life in lives),
            num_lives=len(lives),
            end=end,
            replica=replica,
            has_diverged=has_diverged,
            struck_out=self._struck_out.get(member.id),
            stages=tuple(event.stage for life in lives for event in life.seen(StageHeld)),
            sections={} if last is None or last.staged is None else last.staged.replicas,
        )

    def _summary(self, machines: tuple[Machine, ...], took_s: float, unplayed: tuple[Fault, ...]) -> Played:
        manifests = tuple(self._manifests[0].values())
        furthest = max(manifests, key=_progress, default=None)
        evaluated = [event for life in self.world.lives for event in life.seen(Evaluated)]
        latest = max(evaluated, key=lambda event: event.committed_tokens, default=None)
        return Played(
            machines=machines,
            took_s=took_s,
            num_rounds=Round(0) if furthest is None else furthest.round,
            committed_tokens=Tokens(0) if furthest is None else furthest.committed_tokens,
            evaluated=latest,
            unplayed=unplayed,
            broken=tuple(self._broken),
            manifests=manifests,
        )


def history(manifests: Sequence[Manifest]) -> list[Manifest]:
    """Return the furthest of `manifests`, and those that it follows on, back to the first."""
    by_digest = {digest_of(manifest): manifest for manifest in manifests}
    head = max(manifests, key=_progress, default=None)
    found = []
    while head is not None:
        found.append(head)
        head = by_digest.get(head.previous)
    return found


def counted(manifests: Iterable[Manifest], records: Mapping[Digest, GroupRecord]) -> Counter[PeerId]:
    """Return the tokens of each peer's own work that `manifests` count, by itself or through an aggregator.

    Args:
        records: of all groups in `manifests`, by digest.
    """
    tokens = Counter[PeerId]()
    for each in (each for manifest in manifests for each in manifest.contributions):
        if each.group is not None:
            tokens.update({stake.peer: stake.tokens for stake in records[each.group.record].stakes})
        elif each.legacy is None:
            tokens[each.peer] += each.tokens
    return tokens


def _progress(manifest: Manifest) -> tuple[Tokens, Round]:
    return manifest.committed_tokens, manifest.round
