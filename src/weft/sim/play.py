"""Plays a scenario: lets machines come, befalls them with faults, and tells how it went.

    played = play(scenario, run_file, base, folder, write)

The maker and all that are there from the start begin together; others join later. A play ends when nobody runs any more
and nobody is still to come, or at the scenario's limit. Each event goes to `write` as it happens, one JSON line as in a
peer's own log: equal scenarios give equal lines, byte for byte.

It does not know what a run computes, nor who reads the log.
"""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, assert_never

import msgspec
import torch

from weft.clock import SkewedClock
from weft.errors import WeftError
from weft.events import VERSION, Entry, Evaluated, Event, RoundCommitted, RoundMissed
from weft.ids import Digest, PeerId, Round, Tokens
from weft.net.memory import MemoryNetwork
from weft.peer.config import RunFile
from weft.peer.home import Home
from weft.peer.seal import seal
from weft.sim.scenario import Cut, Fault, Group, Kill, Line, Scenario, Slow, Stop, changed
from weft.sim.world import Life, Member, Paced, World
from weft.sync.messages import Manifest

MBIT = 1e6


@dataclass(frozen=True)
class Machine:
    """How one machine fared.

    Args:
        trained: tokens of inner steps of all its processes.
        counted: of them, in manifests.
        end: why its last process ended.
        replica: the digest of its replicated state at the end; None where it had none to tell.
    """

    name: str
    peer: PeerId
    trained: Tokens
    counted: Tokens
    num_missed: int
    end: str
    replica: Digest | None


@dataclass(frozen=True)
class Played:
    """How a scenario went.

    Args:
        took_s: virtual seconds.
        unplayed: faults whose moment never came.
        broken: errors that nobody handled: faults of weft.
    """

    machines: tuple[Machine, ...]
    took_s: float
    num_rounds: Round
    committed_tokens: Tokens
    nats_per_byte: float | None
    unplayed: tuple[Fault, ...]
    broken: tuple[str, ...]


def play(scenario: Scenario, run_file: RunFile, base: Path, folder: Path, write: Callable[[bytes], object]) -> Played:
    """Play `scenario` with `run_file`, whose paths are relative to `base`; machines keep what they keep in `folder`.

    Args:
        write: takes each line of the log.

    Raises:
        WeftError: the run cannot be made: its file, its data or its model.
    """
    torch.set_num_threads(1)  # sums in another order are other bits
    home = Home(folder)
    sealed = seal(run_file, base, home, lambda _event: None)
    stage = _Stage(scenario, World(sealed, home, MemoryNetwork(seed=scenario.seed), scenario.seed), write)
    return stage.world.clock.run(stage.play())


class _Stage:
    def __init__(self, scenario: Scenario, world: World, write: Callable[[bytes], object]) -> None:
        self.world = world
        self._scenario = scenario
        self._write = write
        self._groups: dict[str, Group] = dict(scenario.machines())  # as they are now
        self._paces = {name: Paced(group.tokens_per_s) for name, group in self._groups.items()}
        self._coming: dict[asyncio.Task[None], Fault | None] = {}
        self._manifests: dict[tuple[str, Round], Manifest] = {}
        self._broken: list[str] = []
        world.on_event = self._hear

    async def play(self) -> Played:
        asyncio.get_running_loop().set_exception_handler(self._note_broken)
        members = [self.world.member(name) for name in self._groups]
        members[0].is_founder = True
        for member in members:
            self._lay(member)
        present = [member for member in members if not self._groups[member.name].joins_at_s]
        for member in present:
            self._launch(member, len(present))
        for member in members:
            if member not in present:
                self._expect(self._join(member), None)
        for fault in self._scenario.fault:
            self._expect(self._befall(fault), fault)
        with suppress(TimeoutError):
            async with asyncio.timeout(self._scenario.limit_s):
                await self._until_all_ended()
        unplayed = [fault for task, fault in self._coming.items() if fault is not None and not task.done()]
        for task in self._coming:
            task.cancel()
        took_s = self.world.clock.now()
        machines = tuple(self._fate(member) for member in members)
        await self.world.end()
        return self._summary(machines, took_s, tuple(unplayed))

    async def _until_all_ended(self) -> None:
        while True:
            running = [life.task for life in self.world.lives if life.is_running]
            coming = [task for task in self._coming if not task.done()]
            if running:
                await asyncio.wait(running)
            elif coming and not self._is_complete():
                await asyncio.wait(coming, return_when=asyncio.FIRST_COMPLETED)
            else:
                return

    def _is_complete(self) -> bool:
        tokens = self.world.sealed.config.train.tokens
        heads = [life.peer.head for life in self.world.lives if life.peer is not None]
        return any(head is not None and head.committed_tokens >= tokens for head in heads)

    # --- machines ---

    def _launch(self, member: Member, wait_for: int = 1) -> None:
        skew_s = self._groups[member.name].clock_skew_s
        clock = SkewedClock(self.world.clock, skew_s) if skew_s else self.world.clock
        self.world.launch(member, wait_for=wait_for, compute=self._paces[member.name], clock=clock)

    async def _join(self, member: Member) -> None:
        await asyncio.sleep(self._groups[member.name].joins_at_s)
        self._launch(member)

    def _lay(self, member: Member) -> None:
        """Give a machine its line to the network, as its group says now."""
        mine, network = self._groups[member.name], self.world.network
        network.set_line(member.id, up_bps=_bps(mine.up_mbit), down_bps=_bps(mine.down_mbit))
        for name, group in self._groups.items():
            if name != member.name:
                network.set_link(
                    member.id,
                    self.world.member(name).id,
                    delay_s=(mine.delay_ms + group.delay_ms) / 1000,
                    jitter_s=(mine.jitter_ms + group.jitter_ms) / 1000,
                    loss=1 - (1 - mine.loss) * (1 - group.loss),
                )

    # --- faults ---

    def _expect(self, coming: Coroutine[Any, Any, None], fault: Fault | None) -> None:
        self._coming[asyncio.ensure_future(coming)] = fault

    async def _befall(self, fault: Fault) -> None:
        member = self.world.member(fault.peer)
        if fault.at_s is not None:
            await asyncio.sleep(fault.at_s)
        else:
            await self.world.round(member, fault.at_round or 0)
        match fault:
            case Kill():
                self.world.kill(member)
                await self._return(member, fault.returns_after_s)
            case Stop():
                if member.lives and member.life.is_running:
                    member.peer.stop("its person stopped it")
                    await asyncio.wait([member.life.task])
                await self._return(member, fault.returns_after_s)
            case Cut():
                inside = [member, *(self.world.member(name) for name in fault.companions)]
                outside = [other for other in self.world.members.values() if other not in inside]
                self.world.cut(inside, outside)
                await asyncio.sleep(fault.lasts_s)
                self.world.heal(inside, outside)
            case Slow():
                pace = self._paces[fault.peer]
                pace.tokens_per_s *= fault.factor
                await asyncio.sleep(fault.lasts_s)
                pace.tokens_per_s /= fault.factor
            case Line():
                before = self._groups[fault.peer]
                self._groups[fault.peer] = changed(before, fault)
                self._lay(member)
                await asyncio.sleep(fault.lasts_s)
                self._groups[fault.peer] = before
                self._lay(member)
            case _:
                assert_never(fault)

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
        if isinstance(event, RoundCommitted) and (head := life.peer.head) is not None:
            self._manifests[head.branch, head.round] = head

    def _note_broken(self, _loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
        self._broken.append(f"{context['message']}: {context.get('exception')!r}")

    def _fate(self, member: Member) -> Machine:
        lives = member.lives
        last = lives[-1] if lives else None
        replica = None
        if last is None:
            end = "it never came"
        elif last.is_dead:
            end = "killed"
        elif not last.task.done():
            end = "still running"
        elif (error := last.task.exception()) is not None:
            end = str(error) if isinstance(error, WeftError) else repr(error)
        else:
            end, replica = last.outcome.reason, last.outcome.replica
        return Machine(
            name=member.name,
            peer=member.id,
            trained=Tokens(sum(life.trained_tokens for life in lives)),
            counted=Tokens(
                sum(
                    each.tokens
                    for manifest in self._manifests.values()
                    for each in manifest.contributions
                    if each.peer == member.id
                )
            ),
            num_missed=sum(len(life.seen(RoundMissed)) for life in lives),
            end=end,
            replica=replica,
        )

    def _summary(self, machines: tuple[Machine, ...], took_s: float, unplayed: tuple[Fault, ...]) -> Played:
        furthest = max(self._manifests.values(), key=lambda each: (each.committed_tokens, each.round), default=None)
        evaluated = [event for life in self.world.lives for event in life.seen(Evaluated)]
        latest = max(evaluated, key=lambda event: event.committed_tokens, default=None)
        return Played(
            machines=machines,
            took_s=took_s,
            num_rounds=Round(0) if furthest is None else furthest.round,
            committed_tokens=Tokens(0) if furthest is None else furthest.committed_tokens,
            nats_per_byte=None if latest is None else latest.nats_per_byte,
            unplayed=unplayed,
            broken=tuple(self._broken),
        )


def _bps(mbit: float | None) -> float | None:
    return None if mbit is None else mbit * MBIT
