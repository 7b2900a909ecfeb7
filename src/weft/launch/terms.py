"""What joining a run costs this machine: shown to a person who is asked whether to, or told to a program that joins.

Bytes of data, disk and training memory follow from the run in closed form (`weft.cost.training`), in a run with stages
from the stage that this machine would take. How often a round comes around does not, nor what it moves beside payloads:
both are what members have measured (`weft.observe.pace`), or nothing is said of a day. An `Allowance` then holds what
is really moved against what was shown.

    async with MemberWatch(node, clock) as members:
        ...                              # heartbeats come with every link, and every two seconds
        heard = await members.heard()

Whoever takes part sends heartbeats, in a run with stages news of its stages; who only reads the terms sends none, and
is not counted.
"""

import asyncio
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec

from weft.clock import Clock
from weft.cost import training as cost
from weft.cost.pipeline import crossing
from weft.cost.training import HEARTBEAT_S
from weft.dashboard import figures
from weft.errors import TooLarge
from weft.events import Emit, Notice
from weft.ids import PeerId, Round, short
from weft.launch.fetch import lacks_first_weights, missing_base_nbytes
from weft.model.sections import num_section_parameters
from weft.net.messages import Heartbeat
from weft.net.node import Node
from weft.net.ticket import Ticket
from weft.observe.pace import Rounds, measured
from weft.pipeline.placement import stage_for
from weft.run.config import Genesis, LoopConfig
from weft.run.host import process_nbytes
from weft.run.machine import PeerConfig
from weft.run.staged import StagedConfig
from weft.stages.messages import StageNews
from weft.stages.table import StageTable
from weft.store.home import Home
from weft.sync.costs import round_traffic
from weft.sync.merge.method import Method
from weft.training import section_memory as holding
from weft.training.device import (
    Device,
    audits_nbytes,
    base_numbers,
    beside_loop_nbytes,
    check_fits,
    choose,
    needed_nbytes,
    program_nbytes,
)
from weft.wire import printable

CALLED_S = 1.0  # for the other members of a run that has begun to call a newcomer that one of them told them of
HEARD_S = HEARTBEAT_S + 0.5  # for a first heartbeat of who is linked


@dataclass(frozen=True, kw_only=True)
class Heard:
    """What was heard of those who take part.

    Args:
        num_linked: who are here, heard or not.
        speeds: tokens a second of inner steps, of each member that has made any.
        names: what each of them calls itself, as far as it does.
        committed_tokens: of the one that is furthest.
        is_complete: whether one said that nothing is left to train.
        news: of each that holds stages, or waits for one.
        rounds: as members have measured them.
    """

    num_members: int = 0
    num_linked: int = 0
    speeds: tuple[float, ...] = ()
    names: Mapping[PeerId, str] = field(default_factory=dict)
    committed_tokens: int = 0
    is_complete: bool = False  # of a run with stages
    news: Mapping[PeerId, StageNews] = field(default_factory=dict)
    rounds: Rounds | None = None


NOBODY = Heard()


class MemberWatch:
    """Listens from the first link on, until it is left; what members say is then for who takes part."""

    def __init__(self, node: Node, clock: Clock) -> None:
        self._node = node
        self._clock = clock
        self._began = clock.now()
        self._beats: dict[PeerId, Heartbeat] = {}
        self._stages: dict[PeerId, StageNews] = {}
        self._news = asyncio.Event()

    async def __aenter__(self) -> "MemberWatch":
        self._node.on_note(Heartbeat, self._on_heartbeat)
        self._node.on_note(StageNews, self._on_stages)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._node.ignore(Heartbeat)
        self._node.ignore(StageNews)

    async def heard(self) -> Heard:
        """Return what was heard, once everybody who may be heard had the time to speak."""
        while self._clock.now() < self._until():
            self._news.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(self._until() - self._clock.now()):
                    await self._news.wait()
        beats = {peer: beat for peer, beat in self._beats.items() if not beat.is_anchor}
        stages = {peer: news for peer, news in self._stages.items() if news.is_trainer}
        speeds = (beat.tokens_per_s for beat in beats.values())
        members = beats.keys() | stages.keys()
        return Heard(
            num_members=len(members),
            num_linked=len(self._node.peers),
            speeds=tuple(sorted(speed for speed in speeds if 0 < speed < math.inf)),
            names={peer: printable(beat.name) for peer, beat in beats.items() if beat.name},
            committed_tokens=max((beat.committed_tokens for beat in beats.values()), default=0),
            is_complete=any(news.is_complete for news in stages.values()),
            news=stages,
            rounds=await measured(self._node, sorted(members & set(self._node.peers))),
        )

    def _until(self) -> float:
        """Return how long to listen: not at all where a run waits to begin and all that are linked have spoken."""
        if not set(self._node.peers) <= self._beats.keys() | self._stages.keys():
            return self._began + HEARD_S
        has_begun = any(beat.manifest is not None for beat in self._beats.values())
        has_begun = has_begun or any(news.held for news in self._stages.values())
        return self._began + (CALLED_S if has_begun else 0.0)

    async def _on_heartbeat(self, peer: PeerId, heartbeat: Heartbeat) -> None:
        self._beats[peer] = heartbeat
        self._news.set()

    async def _on_stages(self, peer: PeerId, news: StageNews) -> None:
        self._stages[peer] = news
        self._news.set()


CHECKPOINT_VECTORS = 10  # outer, momentum, local and two moments, twice while a new one is written
DAY_S = 86_400.0
HOUR_S = 3600.0  # what was moved in less is held against an hour's share: rounds come in bursts
FIRST_S = 600.0  # until a day's bytes are told of which the terms could not say anything
TOLERANCE = 1.5  # times what was shown: an estimate may be so much too low and nothing is said


@dataclass(frozen=True)
class Kept:
    """Where a run stands that this machine has kept, and of which nobody answers.

    Args:
        round: that its checkpoint is of; rounds that were decided later may lie beside it.
        wait_s: for the others, before it goes on alone; None: it goes on with a majority only.
        committed_tokens: up to that round.
    """

    round: Round
    wait_s: float | None
    committed_tokens: int = 0

    @property
    def then(self) -> str:
        """Return what this machine does then, in words."""
        if self.wait_s is None:
            return "it goes on once a majority of its members is back"
        waits = f"waits {self.wait_s:.0f} s for the others and then " if self.wait_s else ""
        return f"it {waits}goes on alone"


@dataclass(frozen=True, kw_only=True)
class Terms:
    ticket: Ticket
    run: Genesis  # as amended: its own digest names nothing
    stages: tuple[int, ...]  # that this machine would hold; none: the run has no stages
    num_parameters: int  # that this machine would hold
    data_nbytes: int  # of the run's data that are not here
    fetch_nbytes: int  # data, first weights and state, as far as they are not here
    disk_nbytes: int  # data and checkpoint
    process_nbytes: int  # of memory, that the program takes itself; where a loop of one's own trains: that it has taken
    memory_nbytes: int  # that training and texts take beside it; where a loop of one's own trains: that the peer takes
    audits_nbytes: int = 0  # of it, for audits
    micro_batch: int  # samples that are trained on at a time, or pass through a stage, or of a loop's step
    num_peers: int  # who takes part, as far as is known, or else as many as the ticket tells, and this one
    round_nbytes: int  # sent and received in one round of so many: as was measured, else in closed form
    rounds: Rounds | None  # as members have measured them; None: none has
    day_nbytes: float | None  # that such rounds come to; None: nobody has measured them among several
    kept: Kept | None = None  # what this machine has of it, where nobody answers
    names: Mapping[PeerId, str] = field(default_factory=dict)  # of those who take part
    done_tokens: int = 0  # of a loop: samples
    left_s: float | None = None  # until nothing is left to train, by how fast members are now; None: nobody knows
    is_complete: bool = False  # nothing is left to train
    is_here: bool = False  # it is complete, and this machine has all of it
    draws_texts: bool = False
    is_drawing_only: bool = False  # it trains nothing, and judges nothing

    @property
    def total_tokens(self) -> int:
        return self.run.settings.tokens

    @property
    def length(self) -> str:
        """Return how long the run is, and what is left of it: 5M tokens to train, 12 % done; about 3.1 h left."""
        what = "samples" if isinstance(self.run, LoopConfig) else "tokens"
        done = f", {figures.percent(self.done_tokens, self.total_tokens)} done" if self.done_tokens else ""
        left = "" if self.left_s is None or self.is_complete else f"; about {figures.seconds(self.left_s)} left"
        return f"{figures.amount(self.total_tokens)} {what} to train{done}{left}"

    @property
    def to_fetch(self) -> str:
        return figures.nbytes(self.fetch_nbytes) if self.fetch_nbytes else "nothing"

    @property
    def left_nbytes(self) -> float | None:
        """Return what is moved until the run is complete; None: that is more than a day away, or not known."""
        if self.day_nbytes is None or self.left_s is None or self.left_s >= DAY_S:
            return None
        return self.day_nbytes * self.left_s / DAY_S

    @property
    def rest(self) -> tuple[int, int] | None:
        """Return how many rounds of so many peers are left, and what is moved in them; None: of stages, or nothing."""
        left_tokens = self.total_tokens - self.done_tokens
        if isinstance(self.run, StagedConfig) or self.is_complete or left_tokens <= 0:
            return None
        num_rounds = math.ceil(left_tokens / (self.num_peers * self.run.settings.quota_tokens))
        return num_rounds, num_rounds * self.round_nbytes

    @property
    def why_no_day(self) -> str:
        """Return why the bytes of a day are not known; nothing where they are."""
        if self.day_nbytes is not None:
            return ""
        if self.kept is not None:
            return "nobody of the run answers"
        if self.rounds is None:
            return "no member has said yet how long its rounds take"
        return "its only member trains alone, and rounds take longer once there are two"

    def __str__(self) -> str:
        """Return the terms in one line."""
        memory = figures.nbytes(self.process_nbytes + self.memory_nbytes)
        day = f"bytes a day are not known: {self.why_no_day}"
        if self.left_nbytes is not None:
            day = f"about {figures.nbytes(self.left_nbytes)} until the run is complete, as members measured"
        elif self.day_nbytes is not None:
            day = f"about {figures.nbytes(self.day_nbytes)} a day, as members measured"
        stands = "it is complete, and nothing is left to train; " if self.is_complete else ""
        if self.kept is not None and not self.is_complete:
            stands = f"nobody of it answers, and this machine has it at round {self.kept.round} or later: "
            stands += f"{self.kept.then}; "
        return (
            f"joining run {short(self.ticket.run)} ({printable(self.run.name)}): {stands}"
            f"{figures.amount(self.num_parameters)} parameters; {self.length}; "
            f"{self.to_fetch} to fetch, {figures.nbytes(self.disk_nbytes)} of disk, "
            f"about {memory} of memory; {figures.nbytes(self.round_nbytes)} a round among {self.num_peers} peers "
            f"with this one; {day}"
        )


def tell(shown: Terms, emit: Emit, on_terms: Callable[[str], object]) -> None:
    """Say what joining costs where nobody is asked: in an event, and to the program that joins, which may raise."""
    emit(Notice(text=str(shown)))
    on_terms(str(shown))


class Allowance:
    """What a person agreed that this machine may move, held against what it moves.

    Where the terms said nothing of a day, what it comes to is told once that is known, and is what was shown.

    Args:
        terms: those that were agreed to. What is fetched once to join counts for no day.
    """

    def __init__(self, terms: Terms, clock: Clock) -> None:
        self._clock = clock
        self._shown_nbytes = terms.day_nbytes
        self._began, self._moved_nbytes = clock.now(), -terms.fetch_nbytes

    def count(self, nbytes: int) -> float | None:
        """Count what was moved; return the bytes a day that it comes to where that is told: far above what was agreed.

        It is told again once it has grown as far above what was told last. Every day is reckoned anew.
        """
        self._moved_nbytes += nbytes
        passed_s = self._clock.now() - self._began
        if self._shown_nbytes is None:
            if passed_s < FIRST_S or self._moved_nbytes <= 0:
                return None
            self._shown_nbytes = self._moved_nbytes * DAY_S / passed_s
            return self._shown_nbytes
        day_nbytes = self._moved_nbytes * DAY_S / max(passed_s, HOUR_S)
        if passed_s >= DAY_S:
            self._began, self._moved_nbytes = self._clock.now(), 0
        if day_nbytes <= TOLERANCE * self._shown_nbytes:
            return None
        self._shown_nbytes = day_nbytes
        return day_nbytes


def terms(
    run: Genesis,
    ticket: Ticket,
    home: Home,
    settings: PeerConfig,
    heard: Heard = NOBODY,
    me: PeerId | None = None,
    kept: Kept | None = None,
    *,
    is_here: bool = False,
) -> Terms:
    """Return what joining `run` costs.

    Args:
        run: as all of it is; of a model that is cut, not a stage's.
        heard: of those who train already.
        me: who would join; decides between stages that are as weak.
        kept: of the run, where nobody answers.
        is_here: whether this machine has it, and it is complete.

    Raises:
        ConfigError: the settings name a device that is not there.
    """
    num_here = heard.num_members or (heard.num_linked if isinstance(run, StagedConfig) else 0)
    num_measured = 0 if heard.rounds is None or isinstance(run, StagedConfig) else heard.rounds.num_members
    # Members that this machine has no link to yet are in the rounds of those that it heard.
    num_members = max(num_here, num_measured) or (0 if kept is not None else len(ticket.contacts))
    num_peers = max(1, num_members) + 1
    stages = () if not isinstance(run, StagedConfig) else stages_of(run, heard.news, num_peers, me)
    parts = _parts(run, stages, num_peers, settings)
    num = sum(part.num_parameters for part in parts)
    # Of the state, parameters and outer optimizer, which are here where nobody else has them.
    num_vectors = 0 if kept is not None else 1 + len(Method(run.method, run.optimizer).init(0))
    if lacks_first_weights(run, home):
        num_vectors += 1
    held = [run.of_stage(stage) for stage in stages] if isinstance(run, StagedConfig) else [run]
    base_nbytes = sum(missing_base_nbytes(each, home) for each in held)
    data_nbytes = 0 if run.data is None else sum(info.nbytes for info in home.shards.missing(run.data))
    fetch_nbytes = data_nbytes + base_nbytes + num_vectors * cost.vector_nbytes(num)
    rounds, round_nbytes, day_nbytes = heard.rounds, sum(part.round_nbytes for part in parts), None
    if rounds is not None and (rounds.num_members > 1 or (stages and num_here > 1)):
        # One more takes part. In a run with stages it takes over work of others.
        more = 1.0 if stages else _round_nbytes(run, num_peers) / _round_nbytes(run, rounds.num_members)
        round_nbytes = round(rounds.round_nbytes * more)
        day_nbytes = 1e9 * cost.gigabytes_per_day(round_nbytes, rounds.round_s)
    done_tokens = heard.committed_tokens if kept is None else kept.committed_tokens
    left_tokens = max(0, run.settings.tokens - done_tokens)
    return Terms(
        ticket=ticket,
        run=run,
        stages=stages,
        num_parameters=num,
        data_nbytes=data_nbytes,
        fetch_nbytes=fetch_nbytes,
        disk_nbytes=fetch_nbytes + 4 * num * CHECKPOINT_VECTORS,
        process_nbytes=process_nbytes() if isinstance(run, LoopConfig) else program_nbytes(choose(settings)),
        memory_nbytes=sum(part.memory_nbytes for part in parts),
        audits_nbytes=audits_nbytes(run),
        micro_batch=parts[0].micro_batch,
        num_peers=num_peers,
        round_nbytes=round_nbytes,
        rounds=rounds,
        day_nbytes=day_nbytes,
        kept=kept,
        names=heard.names,
        done_tokens=done_tokens,
        left_s=_left_s(run, left_tokens, heard),
        is_complete=is_here or heard.is_complete or left_tokens == 0,
        is_here=is_here,
        is_drawing_only=settings.is_drawing_only,
        draws_texts=bool(settings.serve_nbytes) and not isinstance(run, LoopConfig),
    )


def _left_s(run: Genesis, left_tokens: int, heard: Heard) -> float | None:
    """Return how long members take for the rest of a run without this machine: by their rounds, else by their steps."""
    if heard.rounds is not None and not isinstance(run, StagedConfig):
        of_round = heard.rounds.num_members * run.settings.quota_tokens
        return left_tokens / of_round * heard.rounds.round_s
    if heard.speeds and not isinstance(run, StagedConfig):
        return left_tokens / sum(heard.speeds)
    return None


def stages_of(
    run: StagedConfig, news: Mapping[PeerId, StageNews], num_peers: int, me: PeerId | None = None
) -> tuple[int, ...]:
    """Return which stages a newcomer would hold: the weakest, or as many of the largest as fall to each of few peers.

    Args:
        news: of those who hold stages.
        num_peers: that take part, the newcomer included.
    """
    table = StageTable(run.stages, has_tied=run.tied is not None, costs=holding.relative_costs(run))
    for peer, told in news.items():
        table.told(peer, told)
    if len(table.empty()) < run.stages:
        newcomer = me or PeerId("")
        held = [dict(stage) or {newcomer: math.inf} for stage in table.rates()]  # who has the state of one takes it up
        return (stage_for(newcomer, held, table.costs),)
    largest = sorted(run.cuts, key=lambda cut: -num_section_parameters(run.model, cut))
    return tuple(sorted(cut.number for cut in largest[: -(-run.stages // num_peers)]))


@dataclass(frozen=True, kw_only=True)
class _Part:
    """What a member has of a run, or of one of its stages, among its peers.

    Args:
        round_nbytes: that come and go in a round.
        memory_nbytes: that training takes.
    """

    num_parameters: int
    round_nbytes: int
    memory_nbytes: int
    micro_batch: int


def _parts(run: Genesis, stages: tuple[int, ...], num_peers: int, settings: PeerConfig) -> list[_Part]:
    if isinstance(run, LoopConfig):
        return [
            _Part(
                num_parameters=run.num_parameters,
                round_nbytes=_round_nbytes(run, num_peers),
                memory_nbytes=beside_loop_nbytes(run),
                micro_batch=run.batch_size,
            )
        ]
    device = choose(settings)
    if isinstance(run, StagedConfig):
        return [_stage(run, stage, num_peers, settings, device) for stage in stages]
    try:
        micro_batch = check_fits(run, settings, device)
    except TooLarge:  # here; several processes may hold it together
        micro_batch = 1
    return [
        _Part(
            num_parameters=run.num_parameters,
            round_nbytes=_round_nbytes(run, num_peers),
            memory_nbytes=sum(needed_nbytes(run, settings, device, micro_batch).values()),
            micro_batch=micro_batch,
        )
    ]


def _stage(whole: StagedConfig, stage: int, num_peers: int, settings: PeerConfig, device: Device) -> _Part:
    run, section = whole.of_stage(stage), whole.cuts[stage]
    held = holding.of_run(whole)  # which says how many rounds there will be
    micro = held.micro
    num_members, num_sides = -(-num_peers // run.stages), min(2, run.stages - 1)
    num_micro = run.method.every * -(-run.train.batch_size // micro.num_samples)
    round_nbytes = _round_nbytes(run, num_members) + num_micro * num_sides * crossing(micro).total_nbytes
    if run.has_tied(stage):
        matrix = msgspec.structs.replace(run, stage=run.tied)
        round_nbytes += _round_nbytes(matrix, min(num_peers, 2 * num_members))
    needed = holding.needed_nbytes(
        held,
        section,
        device,
        num_taken=holding.usual_taken(run.stages),
        has_recompute=settings.has_recompute,
        serve_nbytes=settings.serve_nbytes,
        numbers=base_numbers(whole, settings, device),
    )
    return _Part(
        num_parameters=run.num_parameters,
        round_nbytes=round_nbytes,
        memory_nbytes=sum(needed.values()),
        micro_batch=micro.num_samples,
    )


def _round_nbytes(run: Genesis, num_members: int) -> int:
    """Return what a member sends and receives in a round, without what heartbeats and micro-batches take."""
    traffic = round_traffic(run.method, run.vector.tensors, run.num_parameters, num_members)
    traffic += cost.control_traffic(min(num_members, run.electors))
    return traffic.sent_nbytes + traffic.received_nbytes
