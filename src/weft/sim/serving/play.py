"""Plays texts that are asked for: production entries ask production members, and each answer is checked.

    served = play(scenario, write)

Members come before the first text does. Texts go to the entries in turn. A play ends once all texts have, or at the
scenario's limit. Each event goes to `write` as it happens, one JSON line: equal scenarios give equal lines.
"""

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from weft.clock import VirtualClock
from weft.engine.draw import Drawing
from weft.engine.text import Full, Wanted
from weft.errors import WeftError
from weft.events import VERSION, Event, TextMoved
from weft.events import Entry as Line
from weft.ids import PeerId
from weft.net.transport.memory import MemoryNetwork
from weft.rng import stream
from weft.sim.scenario import Kill, Stop
from weft.sim.serving.machines import STOP, VOCAB_SIZE, Agreed, AskerLink, Machine, identity_of
from weft.sim.serving.node import PlayedNode
from weft.sim.serving.scenario import LONGEST, Churn, ServingFault, ServingScenario
from weft.sim.world import set_line
from weft.texts.asking.entry import Entry
from weft.texts.asking.path import Paths
from weft.texts.member import listen

SETTLE_S = 15.0  # until all have told of themselves, and how far others are
MILLISECONDS = 1000.0


class Spans(msgspec.Struct, frozen=True, kw_only=True):
    """Of many spans of time, in milliseconds: those that 50, 95 and 99 of a hundred do not exceed, and the mean."""

    p50: float
    p95: float
    p99: float
    mean: float


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """How one machine fared.

    Args:
        stage: that it holds, from 1.
        num_tokens: that it computed.
        busy: the share of the time in which it was there that it computed.
        step_ms: of a step with one row, as it is without faults.
    """

    name: str
    stage: int
    num_tokens: int
    busy: float
    step_ms: float
    num_lives: int
    is_there: bool


class Served(msgspec.Struct, frozen=True, kw_only=True):
    """How a play went.

    Args:
        num_done: texts that came whole and right; num_wrong: others that ended; num_failed: with an error;
            num_unended: at the limit.
        num_mended: of all, those that were asked for again once tokens of theirs had come.
        num_moved: members that took another's place in a path.
        failures: what was said of those that failed, and how often.
        gap: between two tokens of a text; None: there were none.
        first: from when a text is asked for to its first token.
        tokens_per_s: of all texts, from the first that is asked for to the last end.
        took_s: virtual seconds from the first that is asked for.
        broken: errors that nobody handled: faults of weft.
    """

    num_done: int
    num_wrong: int
    num_failed: int
    num_unended: int
    num_mended: int
    num_moved: int
    failures: dict[str, int]
    gap: Spans | None
    first: Spans | None
    tokens_per_s: float
    took_s: float
    machines: tuple[Load, ...]
    unplayed: tuple[ServingFault, ...]
    broken: tuple[str, ...]


@dataclass(eq=False)
class _Asked:
    """One text: what is asked for, and when its tokens came."""

    number: int
    at_s: float
    num_prompt: int
    num_answer: int
    came: list[float] = field(default_factory=list)
    end: str = ""


def play(
    scenario: ServingScenario,
    write: Callable[[bytes], object] = lambda _line: None,
    make_paths: "Callable[[Stage], Paths] | None" = None,
) -> Served:
    """Play `scenario`.

    Args:
        write: takes each line of the log.
        make_paths: makes what an entry chooses paths with; None: as in production.
    """
    stage = Stage(scenario, write, make_paths)
    return stage.clock.run(stage.play())


class Stage:
    """Where a play takes place: all machines, those who ask, and the network between."""

    def __init__(
        self, scenario: ServingScenario, write: Callable[[bytes], object], make_paths: "Callable[[Stage], Paths] | None"
    ) -> None:
        self.scenario = scenario
        self.clock = VirtualClock()
        self.network = MemoryNetwork(seed=scenario.seed)
        self.machines: dict[str, Machine] = {}
        self.entries: list[Entry] = []
        self._write, self._make_paths = write, make_paths
        self._nodes: list[PlayedNode] = []
        self._links: list[AskerLink] = []
        self._askers = [identity_of(scenario.seed, name) for name in scenario.askers()]
        self._coming: dict[asyncio.Task[None], ServingFault | None] = {}
        self._num_moved = 0
        self._broken: list[str] = []
        for name, kind, number in scenario.servers():
            identity = identity_of(scenario.seed, name)
            self.machines[name] = Machine(name, kind, number, self.network, identity, self.clock)

    async def play(self) -> Served:
        asyncio.get_running_loop().set_exception_handler(self._note_broken)
        await self._begin()
        began_s = self.clock.now()
        asked = list(_asked(self.scenario))
        for fault in self.scenario.fault:
            for machine in self._called(fault.peer):
                self._expect(self._befall(fault, machine), fault)
        for machine in self.machines.values():
            if machine.usual.joins_at_s:
                self._expect(self._join(machine), None)
        if self.scenario.churn is not None:
            self._expect(self._churn(self.scenario.churn), None)
        asking = [asyncio.ensure_future(self._ask(each)) for each in asked]
        with suppress(TimeoutError):
            async with asyncio.timeout(self.scenario.limit_s):
                await asyncio.gather(*asking)
        took_s = self.clock.now() - began_s
        unplayed = {fault: None for task, fault in self._coming.items() if fault is not None and not task.done()}
        for task in (*self._coming, *asking):
            task.cancel()
        served = self._summary(asked, took_s, tuple(unplayed))
        await self._end()
        return served

    # --- machines ---

    async def _begin(self) -> None:
        scenario = self.scenario
        lines = [kind for kind in scenario.entry for _ in kind.names()]
        for identity, name, line in zip(self._askers, scenario.askers(), lines, strict=True):
            emit = self._emit(identity.peer)
            node = PlayedNode(self.network, identity.peer)
            set_line(self.network, identity.peer, line)
            link = AskerLink(node)
            listen(link)
            self._links.append(link)
            most = LONGEST * (scenario.texts.prompt_tokens + scenario.texts.answer_tokens)
            luck = stream(scenario.seed, "names", name)
            entry = Entry(
                link,
                num_stages=scenario.stages,
                vocab_size=VOCAB_SIZE,
                context=most,
                row_nbytes=scenario.texts.row_nbytes,
                clock=self.clock,
                emit=emit,
                new_secret=luck.bytes,
                paths=None if self._make_paths is None else self._make_paths(self),
            )
            self._nodes.append(node)
            self.entries.append(entry)
        for machine in self.machines.values():
            if not machine.usual.joins_at_s:
                self._start(machine)
        await asyncio.sleep(SETTLE_S)

    def _start(self, machine: Machine) -> None:
        """Let a machine come. Who sends to another is linked to it, as all members of a run are to all."""
        num = self.scenario.stages
        near = {(machine.stage - 1) % num, (machine.stage + 1) % num} - {machine.stage}
        there = [each.node for each in self.machines.values() if each.node is not None and each.stage in near]
        askers = [identity.peer for identity in self._askers]
        machine.start(num, self.scenario.texts.row_nbytes, [*there, *self._nodes], askers)

    async def _join(self, machine: Machine) -> None:
        await asyncio.sleep(machine.usual.joins_at_s)
        self._start(machine)

    def _called(self, name: str) -> list[Machine]:
        found = [kind.names() for kind in self.scenario.kind if kind.name == name]
        return [self.machines[each] for each in (found[0] if found else [name])]

    async def _end(self) -> None:
        for entry in self.entries:
            await entry.aclose()
        for machine in self.machines.values():
            await machine.stop()
        for node in self._nodes:
            await node.aclose()

    # --- what befalls them ---

    def _expect(self, coming: Coroutine[Any, Any, None], fault: ServingFault | None) -> None:
        self._coming[asyncio.ensure_future(coming)] = fault

    async def _befall(self, fault: ServingFault, machine: Machine) -> None:
        await asyncio.sleep(fault.at_s or 0.0)
        match fault:
            case Kill() | Stop():
                await (machine.kill() if isinstance(fault, Kill) else machine.stop())
                if fault.returns_after_s is not None:
                    await self._return(machine, fault.returns_after_s)
            case _:
                machine.in_force = (*machine.in_force, fault)
                machine.arrange()
                await asyncio.sleep(fault.lasts_s)
                machine.in_force = tuple(each for each in machine.in_force if each is not fault)
                machine.arrange()

    async def _return(self, machine: Machine, after_s: float) -> None:
        await asyncio.sleep(after_s)
        if machine.node is None:
            self._start(machine)

    async def _churn(self, churn: Churn) -> None:
        luck = stream(self.scenario.seed, "churn")
        while True:
            await asyncio.sleep(-churn.every_s * math.log(1.0 - luck.random()))
            there = [machine for machine in self.machines.values() if machine.node is not None]
            is_killed = luck.random() < churn.killed
            if there:
                machine = there[int(luck.integers(len(there)))]
                await (machine.kill() if is_killed else machine.stop())
                self._expect(self._return(machine, churn.returns_after_s), None)

    # --- texts ---

    async def _ask(self, asked: _Asked) -> None:
        await asyncio.sleep(asked.at_s)
        entry = self.entries[asked.number % len(self.entries)]
        words = stream(self.scenario.seed, "prompt", asked.number).integers(1, VOCAB_SIZE, asked.num_prompt)
        stop = asked.num_prompt + asked.num_answer
        seed = Agreed.seed(asked.number, stop)
        wanted = Wanted(
            key="play",
            prompt=tuple(map(int, words)),
            max_new_tokens=LONGEST * self.scenario.texts.answer_tokens,
            drawing=Drawing(seed=seed),
            stop_ids=(STOP,),
        )
        began_s = self.clock.now()
        try:
            text = entry.begin(wanted)
            place = asked.num_prompt
            async for drawn in text:
                asked.came.append(self.clock.now() - began_s)
                if drawn.token != Agreed.token(seed, place):
                    asked.end = "wrong"
                    text.cancel()
                    return
                place += 1
            asked.end = "done" if place == stop and text.ended in ("stop", "length") else "wrong"
        except (WeftError, Full) as error:
            asked.end = str(error)

    # --- what is told ---

    def _emit(self, peer: PeerId) -> Callable[[Event], None]:
        def emit(event: Event) -> None:
            if isinstance(event, TextMoved):
                self._num_moved += 1
            line = Line(v=VERSION, at=self.clock.wall(), peer=peer, event=event)
            self._write(msgspec.json.encode(line) + b"\n")

        return emit

    def _note_broken(self, _loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
        self._broken.append(f"{context['message']}: {context.get('exception')!r}")

    def _summary(self, asked: Sequence[_Asked], took_s: float, unplayed: tuple[ServingFault, ...]) -> Served:
        ends = Counter(each.end for each in asked)
        gaps = np.concatenate([np.diff(each.came) for each in asked])
        firsts = np.array([each.came[0] for each in asked if each.came])
        now = self.clock.now()
        return Served(
            num_done=ends.pop("done", 0),
            num_wrong=ends.pop("wrong", 0),
            num_unended=ends.pop("", 0),
            num_failed=sum(ends.values()),
            failures=dict(sorted(ends.items())),
            num_mended=sum(len(link.mended) for link in self._links),
            num_moved=self._num_moved,
            gap=_spans(gaps),
            first=_spans(firsts),
            tokens_per_s=sum(len(each.came) for each in asked) / took_s,
            took_s=took_s,
            machines=tuple(self._load(machine, now) for machine in self.machines.values()),
            unplayed=unplayed,
            broken=tuple(self._broken),
        )

    def _load(self, machine: Machine, now: float) -> Load:
        there_s = machine.there_for(now)
        return Load(
            name=machine.name,
            stage=machine.stage + 1,
            num_tokens=machine.computing.num_tokens,
            busy=machine.computing.busy_s / there_s if there_s else 0.0,
            step_ms=machine.usual.step_ms + machine.usual.row_ms,
            num_lives=machine.num_lives,
            is_there=machine.node is not None,
        )


def _asked(scenario: ServingScenario) -> "list[_Asked]":
    """Return the texts, by when they are asked for."""
    texts, luck = scenario.texts, stream(scenario.seed, "texts")
    at_s = 0.0
    found = []
    for number in range(texts.count):
        at_s -= math.log(1.0 - luck.random()) / texts.per_s
        num_prompt, num_drawn = (_length(luck.random(), mean) for mean in (texts.prompt_tokens, texts.answer_tokens))
        found.append(_Asked(number, at_s, num_prompt, num_drawn))
    return found


def _length(drawn: float, mean: int) -> int:
    return min(1 + int(-mean * math.log(1.0 - drawn)), LONGEST * mean)


def _spans(seconds: "np.ndarray[Any, np.dtype[np.float64]]") -> Spans | None:
    if not len(seconds):
        return None
    p50, p95, p99 = np.quantile(seconds, (0.5, 0.95, 0.99)) * MILLISECONDS
    return Spans(p50=float(p50), p95=float(p95), p99=float(p99), mean=float(seconds.mean()) * MILLISECONDS)
