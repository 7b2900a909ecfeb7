"""A run whose model is cut into stages, planned: who holds what, how long steps and rounds take, what they move.

    found = planned(question, PipelineConfig(micro_batch=1), num_stages=4)
    best = best_stages(question, PipelineConfig(micro_batch=1))    # how many stages suit the machines, and why

Machines go to stages as newcomers do (`pipeline.placement`), the fastest first: each to the weakest stage of those that
it has the memory for. A stage is as fast as its members' rates added up. Steps are those of `plan.pipeline`; rounds are
made by each stage among its own members, on their lines, when a step is over, and the slowest one's is waited for.

What encoding and decoding of activations takes is in the seconds of a micro-batch; so is what messages, digests and
encryption take where peers have less than a core each: elsewhere that goes on beside.

The best number of stages is the fastest, or one, where whole models fit and are faster. Whole models are timed with the
run's own method, and with ddp and sparseloco beside, among those machines that have the memory; stages with the run's
method. All by tokens a second: what rare rounds cost in loss is the same for a stage as for a whole model of as many
members, as far as anybody has published.
"""

import heapq
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from weft.codec.build import build as build_codec
from weft.codec.config import Bf16Config, E3m0Config, Fp8Config, Fp32Config, Int4Config, Int8Config
from weft.cost import pipeline as cost_pipeline
from weft.cost import training as cost
from weft.cost.pipeline import Crossing, MicroBatch, Shape
from weft.errors import ConfigError, TooLarge
from weft.ids import several
from weft.model.flat import layout
from weft.model.sections import Section, num_section_base, sections
from weft.pipeline.config import PipelineConfig
from weft.plan.forecast import forecast, pace_of
from weft.plan.groups import grouped_time
from weft.plan.methods import name_of
from weft.plan.pipeline import Holder, Pipe, StepTime, num_members, rate, step_time
from weft.plan.processor import codec_s, processor_time, sent_nbytes
from weft.plan.question import Machines, Question
from weft.plan.timing import Kind, Load, RoundTime
from weft.run.staged import TIED, check_tied
from weft.run.trust import AuditedTrust
from weft.sync.merge.method import most_sent
from weft.sync.method.choices import check_staged
from weft.sync.method.presets import DdpConfig, SparseLoCoConfig, spell_out
from weft.training.device import decoder
from weft.training.section_memory import Holding, least_nbytes, section_memory, shape_of, usual_taken

# passing.md: CPU-seconds of a member for a micro-batch, forward and back together.
SIDE_CPU_S = 4.4e-3  # for each boundary that it has
BEGIN_CPU_S = 2.0e-3  # for who begins it
PASSED_CPU_S = 3.2e-9  # for each byte that is sent or received
_NUMBERS = (Fp32Config, Bf16Config, Fp8Config, Int8Config, Int4Config, E3m0Config)  # whose encoding was timed
MOST_TRIED = 16  # numbers of stages that are all tried; above, each doubling, and the most there can be


@dataclass(frozen=True, kw_only=True)
class Held:
    """A section on machines that are alike.

    Args:
        on_device: bytes on a GPU at its peak; 0: it trains on its CPU. `on_host`: the rest, with the process itself.
        num_taken: micro-batches that it keeps at a time; fewer than may be under way, where memory ends.
    """

    machines: str
    count: int
    on_device: int
    on_host: int
    num_taken: int


@dataclass(frozen=True, kw_only=True)
class StagePlan:
    """One stage.

    Args:
        micro_per_s: as its members' rates add up, if they never wait.
        utilisation: of its members' machines, in a round.
        traffic: of a mean member in a round: micro-batches, the round, messages.
        round: the one that its members make, with a round's steps as training.
    """

    section: Section
    num_parameters: int
    held: tuple[Held, ...]
    micro_per_s: float
    utilisation: float
    traffic: cost.Traffic
    round: RoundTime

    @property
    def num_members(self) -> int:
        return sum(each.count for each in self.held)


@dataclass(frozen=True, kw_only=True)
class Cut:
    """How a run with stages would go.

    Args:
        between: bytes of a micro-batch over each boundary.
        num_steps: of a round. `exchange_s`: what its slowest stage's round adds to them.
        tokens: of a round.
        least_nbytes: with which a machine without a GPU can hold the largest section.
    """

    stages: tuple[StagePlan, ...]
    micro: MicroBatch
    between: Crossing
    step: StepTime
    num_micro: int
    num_steps: int
    exchange_s: float
    tokens: int
    total_s: float
    least_nbytes: int

    @property
    def round_s(self) -> float:
        return self.num_steps * self.step.total_s + self.exchange_s

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.round_s

    @property
    def boundary_nbytes_per_token(self) -> float:
        return self.between.total_nbytes / self.micro.num_tokens

    def link_bps(self, number: int) -> float:
        """Return the bits a second on each link over the boundary behind a stage, both ways, while steps are made."""
        num_links = self.stages[number].num_members * self.stages[number + 1].num_members
        return 8 * self.between.total_nbytes * self.num_micro / self.step.total_s / num_links


def planned(question: Question, pipeline: PipelineConfig, num_stages: int) -> Cut:
    """Return how the run of `question` would go with its model cut into so many stages.

    Raises:
        ConfigError: the model, the method or the number of machines admits no such cut.
        TooLarge: no machine has the memory for a section.
    """
    return _Planner(question, pipeline, num_stages).planned()


def able(question: Question, pipeline: PipelineConfig, num_stages: int, others: Sequence[Machines]) -> list[str]:
    """Return the names of those machines that could hold any section, with one micro-batch at a time at least."""
    planner, usual = _Planner(question, pipeline, num_stages), -(-question.num_peers // num_stages)
    numbers = range(num_stages)
    return [each.name for each in others if all(planner.num_taken(n, each, usual, usual) for n in numbers)]


class _Planner:
    def __init__(self, question: Question, pipeline: PipelineConfig, num_stages: int) -> None:
        check_staged(question.choices)
        check_tied(question.model, num_stages, question.choices)
        self.cuts = sections(question.model, num_stages)
        if question.num_peers < num_stages:
            raise ConfigError(
                f"stages: {num_stages} among {several(question.num_peers, 'peer')}. Each needs a peer; expect more, or "
                "set fewer."
            )
        self.question, self.pipeline = question, pipeline
        trust = question.trust
        self.audit_rate = trust.audit_rate if isinstance(trust, AuditedTrust) else 0.0
        self.holding = Holding(
            model=question.model,
            train=question.train,
            choices=question.choices,
            pipeline=pipeline,
            is_audited=self.audit_rate > 0,
        )
        self.micro = self.holding.micro
        self.shapes = [shape_of(question.model, cut) for cut in self.cuts]
        self.between = cost_pipeline.crossing(self.micro)

    def planned(self) -> Cut:
        question, train = self.question, self.question.train
        placed = self._placed()
        num_first = sum(placed[0].values())
        num_micro = num_first * -(-train.batch_size // self.micro.num_samples)
        pipe = Pipe(
            stages=tuple(tuple(self._stage(number, placed)) for number in range(len(self.cuts))),
            between=self.between,
            entry=cost_pipeline.entry(self.micro),
            num_micro=num_micro,
        )
        step, num_steps = step_time(pipe), question.choices.every
        rounds = [self._round(number, placed[number], num_steps * step.total_s) for number in range(len(self.cuts))]
        exchange_s = max(round.total_s - round.train_s - round.uneven_s for round in rounds)
        tokens = num_steps * num_first * train.batch_size * train.seq_len
        round_s = num_steps * step.total_s + exchange_s
        return Cut(
            stages=tuple(
                StagePlan(
                    section=cut,
                    num_parameters=self.shapes[number].num_parameters,
                    held=tuple(self._held(number, each, count, placed) for each, count in placed[number].items()),
                    micro_per_s=rate(pipe.stages[number]),
                    utilisation=step.utilisation[number] * num_steps * step.total_s / round_s,
                    traffic=self._traffic(pipe, number, num_steps, round_s),
                    round=rounds[number],
                )
                for number, cut in enumerate(self.cuts)
            ),
            micro=self.micro,
            between=self.between,
            step=step,
            num_micro=num_micro,
            num_steps=num_steps,
            exchange_s=exchange_s,
            tokens=tokens,
            total_s=math.ceil(train.tokens / tokens) * round_s,
            least_nbytes=least_nbytes(self.holding, self.cuts),
        )

    # --- places ---

    def _placed(self) -> list[Counter[Machines]]:
        """Return who holds which stage: the fastest first, each where it is needed most of what it has room for."""
        usual = -(-self.question.num_peers // len(self.cuts))
        fits = {
            (each, number): self.num_taken(number, each, usual, usual) > 0
            for each in self.question.machines
            for number in range(len(self.cuts))
        }
        found: list[Counter[Machines]] = [Counter() for _ in self.cuts]
        weakest = [(0.0, number) for number in range(len(self.cuts))]
        for each in sorted(self.question.machines, key=lambda each: -each.tokens_per_s):
            for _ in range(each.count):
                passed = list[tuple[float, int]]()
                while weakest and not fits[each, weakest[0][1]]:
                    passed.append(heapq.heappop(weakest))
                if weakest:
                    rate, number = heapq.heappop(weakest)
                    found[number][each] += 1
                    passed.append((rate + 1 / sum(self._parts_s(number, each)), number))
                for entry in passed:
                    heapq.heappush(weakest, entry)
        for number, members in enumerate(found):
            if not members:
                raise TooLarge(self._too_large(number))
        return found

    def _too_large(self, number: int) -> str:
        cut, shape = self.cuts[number], self.shapes[number]
        needs = []
        for each in self.question.machines:
            device, host = self._needed(number, each, 1, 1)
            needs.append(f"{each.name}: {(device or host) / 1e9:.1f} GB needed, {(each.memory_nbytes or 0) / 1e9:.1f}")
        return (
            f"stages: no machine is left that can hold section {cut.number + 1} of {len(self.cuts)}, of "
            f"{shape.num_parameters:,} parameters, even with one micro-batch at a time ({'; '.join(needs)} there). Set "
            "more stages or a smaller micro_batch, or expect more peers."
        )

    def num_taken(self, number: int, machines: Machines, num_here: int, num_first: int) -> int:
        """Return how many micro-batches a machine can keep, of as many as may be under way; 0: it cannot hold this."""
        num_taken = usual_taken(len(self.cuts), num_first, num_here)
        while num_taken and machines.memory_nbytes is not None:
            device, host = self._needed(number, machines, num_here, num_taken)
            if (device or host) <= cost.SPARE * machines.memory_nbytes:
                break
            num_taken //= 2
        return num_taken

    def _needed(self, number: int, machines: Machines, num_here: int, num_taken: int) -> tuple[int, int]:
        memory = section_memory(
            self.holding, self.cuts[number], num_members=num_here, num_taken=num_taken, is_half=machines.is_half
        )
        base = cost.vector_nbytes(num_section_base(self.holding.model, self.cuts[number]))
        device, host = memory.on_gpu if machines.is_gpu else (0, memory.on_cpu)
        return device and device + base, host + base + cost_pipeline.BASE_NBYTES  # a GPU's host reads it first

    def _held(self, number: int, machines: Machines, count: int, placed: Sequence[Counter[Machines]]) -> Held:
        num_here, num_first = sum(placed[number].values()), sum(placed[0].values())
        num_taken = max(1, self.num_taken(number, machines, num_here, num_first))
        device, host = self._needed(number, machines, num_here, num_taken)
        return Held(machines=machines.name, count=count, on_device=device, on_host=host, num_taken=num_taken)

    # --- seconds ---

    def _stage(self, number: int, placed: Sequence[Counter[Machines]]) -> Iterator[Holder]:
        num_here, num_first = sum(placed[number].values()), sum(placed[0].values())
        for each, count in placed[number].items():
            forward_s, input_s, weights_s = self._parts_s(number, each)
            yield Holder(
                name=each.name,
                count=count,
                line=each.line,
                forward_s=forward_s,
                input_s=input_s,
                weights_s=weights_s,
                num_taken=max(1, self.num_taken(number, each, num_here, num_first)),
            )

    def _parts_s(self, number: int, machines: Machines) -> tuple[float, float, float]:
        """Return the seconds of a micro-batch: forward, the input's gradient, the weights'.

        By operations; a machine's rate is that of the whole model's inner steps.
        """
        shape, seq_len = self.shapes[number], self.question.train.seq_len
        flops = cost_pipeline.section_flops(shape, seq_len)
        whole = cost.flops_per_token(decoder(self.question.model), seq_len)
        token_s = self.micro.num_tokens / (machines.tokens_per_s * whole)
        forward_s, input_s = flops.forward * token_s, flops.input * token_s
        if not machines.is_processor_free:
            more = self._codecs_s(shape)
            forward_s, input_s = forward_s + machines.crowding * more[0], input_s + machines.crowding * more[1]
        if not machines.is_processor_free and machines.crowding > 1:  # else what is sent has a core of its own
            passed_s = machines.crowding * self._passing_cpu_s(shape) / 2
            forward_s, input_s = forward_s + passed_s, input_s + passed_s
        looks_s = self.audit_rate * (forward_s + input_s)  # at what others compute: these fill free time, too
        return forward_s, input_s, flops.weights * token_s + looks_s

    def _passing_cpu_s(self, shape: Shape) -> float:
        """Return what a micro-batch takes of a member's processor on its way in and out, both ways together."""
        num_sides = 2 - shape.is_first - shape.is_last
        nbytes = num_sides * (self.between.down_nbytes + self.between.up_nbytes)
        return num_sides * SIDE_CPU_S + shape.is_first * BEGIN_CPU_S + PASSED_CPU_S * nbytes

    def _codecs_s(self, shape: Shape) -> tuple[float, float]:
        """Return what a section's codecs take forward and back; nothing is known of those that are not of numbers."""
        pipeline, num = self.pipeline, self.micro.num_tokens * self.question.model.width
        (there, here), (back, again) = (
            codec_s(config, num) if isinstance(config, _NUMBERS) else (0.0, 0.0)
            for config in (pipeline.activations, pipeline.gradients or pipeline.activations)
        )
        has_before, has_after = not shape.is_first, not shape.is_last
        return has_before * here + has_after * there, has_after * again + has_before * back

    def _load(self, number: int, num_here: int) -> Load:
        choices = self.question.choices
        shapes = tuple(span.shape for span in layout(self.question.model, self.cuts[number]))
        num_sent = most_sent(choices, shapes, self.shapes[number].num_parameters)
        num_electors = min(num_here, self.question.electors)
        return Load.of(num_sent, num_electors, build_codec(choices.codec), build_codec(choices.reply))

    def _round(self, number: int, members: Counter[Machines], steps_s: float) -> RoundTime:
        num_here = sum(members.values())
        load = self._load(number, num_here)
        kinds = [
            Kind(
                name=each.name,
                count=count,
                line=each.line,
                train_s=steps_s,
                serve_s=0.0 if each.is_processor_free else self._serve_s(number, each, members, load),
            )
            for each, count in members.items()
        ]
        return grouped_time(kinds, min(num_here, self.question.electors), load)

    def _serve_s(self, number: int, machines: Machines, members: Counter[Machines], load: Load) -> float:
        """Return what a round takes of a member's processor; `forecast` counts a whole model's so."""
        here = replace(self.question, machines=tuple(replace(each, count=count) for each, count in members.items()))
        found, crowding = processor_time(here, load), machines.crowding
        share = self.shapes[number].num_parameters / self.question.num_parameters
        line_s = 8 * sent_nbytes(load, here.num_electors - 1, 0) / min(machines.line.up_bps, machines.line.down_bps)
        return crowding * (found.round_s + share * found.values_s) + max(0.0, crowding * found.bytes_s - line_s)

    def _traffic(self, pipe: Pipe, number: int, num_steps: int, round_s: float) -> cost.Traffic:
        num_here = num_members(pipe.stages[number])
        each = pipe.traffic(number)
        share = num_steps * pipe.num_micro / num_here
        load = self._load(number, num_here)
        exchanged = int((num_here - 1) * (load.payload_nbytes + load.result_nbytes) / num_here)
        total = cost.Traffic(round(share * each.sent_nbytes), round(share * each.received_nbytes))
        total += cost.Traffic(exchanged, exchanged)
        return total if num_here == 1 else total + cost.control_traffic(num_here, round_s)


@dataclass(frozen=True, kw_only=True)
class Whole:
    """Whole models, by one method; `objection`: why that cannot be, or not on all machines."""

    name: str
    num_peers: int
    tokens_per_s: float
    objection: str = ""


@dataclass(frozen=True, kw_only=True)
class Best:
    """What suits the machines.

    Args:
        num_stages: 1: whole models. `why`: a sentence.
        cuts: that were tried, by their number of stages, and can be.
    """

    num_stages: int
    why: str
    whole: tuple[Whole, ...]
    cuts: dict[int, Cut]


def best_stages(question: Question, pipeline: PipelineConfig) -> Best:
    """Return how many stages are fastest.

    Raises:
        ConfigError: neither whole models fit any machine, nor can the model be cut for these.
    """
    whole = tuple(_whole(question))
    cuts, refusal = dict[int, Cut](), ""
    for num_stages in _tried(question):
        try:
            cuts[num_stages] = planned(question, pipeline, num_stages)
        except ConfigError as error:
            refusal = str(error)
    if question.model.is_tied and not question.choices.sends_gradient:
        refusal = TIED
    fastest = max((each for each in whole if each.tokens_per_s), key=lambda each: each.tokens_per_s, default=None)
    if not cuts and fastest is None:
        raise ConfigError(f"no machine has the memory for the whole model, and stages do not help. {refusal}")
    if not cuts:
        why = f"whole models: no cut fits these machines ({refusal})" if refusal else "whole models: one peer"
        return Best(num_stages=1, why=why, whole=whole, cuts=cuts)
    num, cut = max(cuts.items(), key=lambda found: (found[1].tokens_per_s, -found[0]))
    best = num
    if fastest is None:
        why = f"{num} stages: no machine has the memory for the whole model; {_faster(num, cut, cuts)}"
    elif fastest.tokens_per_s >= cut.tokens_per_s:
        some = f" on the {fastest.num_peers} machines that hold them" if fastest.objection else " fit all machines and"
        why = (
            f"whole models{some} train {fastest.tokens_per_s:,.0f} tokens/s with {fastest.name}. The fastest cut, into "
            f"{num} stages, trains {cut.tokens_per_s:,.0f}: {_held_up(cut)}"
        )
        best = 1
    else:
        why = (
            f"{num} stages train {cut.tokens_per_s:,.0f} tokens/s, whole models at most {fastest.tokens_per_s:,.0f}, "
            f"with {fastest.name}; {_faster(num, cut, cuts)}"
        )
    return Best(num_stages=best, why=why, whole=whole, cuts=cuts)


def _held_up(cut: Cut) -> str:
    match cut.step.limit:
        case "lines":
            return "activations keep lines busy for longer than machines"
        case "under way":
            return "micro-batches take long to pass, and no more may be under way"
        case "machines":
            return f"of a step {cut.step.compute_s / cut.step.total_s:.0%} is computing, the rest waits for neighbours"


def _faster(num: int, cut: Cut, cuts: dict[int, Cut]) -> str:
    others = [(found.tokens_per_s, number) for number, found in cuts.items() if number != num]
    if not others:
        return "no other number is possible"
    tokens_per_s, other = max(others)
    return f"{other} would train {tokens_per_s / cut.tokens_per_s:.0%} as fast"


def _tried(question: Question) -> Iterator[int]:
    most = min(question.model.num_layers, question.num_peers)
    num_stages = 2
    while num_stages < most:
        yield num_stages
        num_stages = num_stages + 1 if num_stages < MOST_TRIED else 2 * num_stages
    if most > 1:
        yield most


def _whole(question: Question) -> Iterator[Whole]:
    """Yield whole models by some methods, among those machines that have the memory."""
    rows = (
        question.choices,
        spell_out(DdpConfig(), question.num_peers),
        spell_out(SparseLoCoConfig(), question.num_peers),
    )
    seen = set[str]()
    for choices in rows:
        name = name_of(choices)
        if name in seen:
            continue
        seen.add(name)
        asked = replace(question, choices=choices)
        names = {hold.machines for hold in forecast(asked).memory if hold.has_room is not False}
        some = tuple(each for each in question.machines if each.name in names)
        if not some:
            yield Whole(name=name, num_peers=0, tokens_per_s=0.0, objection="does not fit any machine")
            continue
        num_peers = sum(each.count for each in some)
        missing = "" if len(some) == len(question.machines) else f"fits {num_peers} of {question.num_peers} machines"
        pace = pace_of(replace(asked, machines=some))
        yield Whole(name=name, num_peers=num_peers, tokens_per_s=pace.tokens_per_s, objection=missing)
