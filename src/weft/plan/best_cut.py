"""How many stages suit some machines: as many as are fastest, or one, where whole models fit and are faster.

    best = best_stages(question, PipelineConfig(micro_batch=1))
    best.num_stages, best.why

Whole models are timed with the run's own method, and with ddp and sparseloco beside (`plan.forecast`), among those
machines that have the memory; stages with the run's method. All by tokens a second: what rare outer steps cost in loss
is the same for a stage as for a whole model of as many members, as far as anybody has published.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from weft.errors import ConfigError
from weft.pipeline.config import PipelineConfig
from weft.plan.cut import Cut, planned
from weft.plan.forecast import forecast, pace_of
from weft.plan.methods import name_of
from weft.plan.question import Question
from weft.run.staged import TIED
from weft.sync.method.presets import DdpConfig, SparseLoCoConfig, spell_out

MOST_TRIED = 16  # numbers of stages that are all tried; above, each doubling, and the most there can be


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
    if question.model.is_tied and question.choices.send != "gradient":
        refusal = TIED
    fastest = max((each for each in whole if each.tokens_per_s), key=lambda each: each.tokens_per_s, default=None)
    if not cuts and fastest is None:
        raise ConfigError(f"no machine has the memory for the whole model, and stages do not help. {refusal}")
    if not cuts:
        why = f"whole models: it cannot be cut for these machines ({refusal})" if refusal else "whole models: one peer"
        return Best(num_stages=1, why=why, whole=whole, cuts=cuts)
    num, cut = max(cuts.items(), key=lambda found: (found[1].tokens_per_s, -found[0]))
    if fastest is None:
        why = f"{num} stages: no machine has the memory for the whole model; {_faster(num, cut, cuts)}"
    elif fastest.tokens_per_s >= cut.tokens_per_s:
        some = f" on the {fastest.num_peers} machines that hold them" if fastest.objection else " fit all machines and"
        why = (
            f"whole models{some} train {fastest.tokens_per_s:,.0f} tokens/s with {fastest.name}, the fastest cut, into "
            f"{num} stages, {cut.tokens_per_s:,.0f}: {_held_up(cut)}"
        )
        return Best(num_stages=1, why=why, whole=whole, cuts=cuts)
    else:
        why = (
            f"{num} stages train {cut.tokens_per_s:,.0f} tokens/s, whole models {fastest.tokens_per_s:,.0f} at most, "
            f"with {fastest.name}; {_faster(num, cut, cuts)}"
        )
    return Best(num_stages=num, why=why, whole=whole, cuts=cuts)


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
        return "no other number can be"
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
        asked = question.with_choices(choices)
        names = {hold.machines for hold in forecast(asked).memory if hold.has_room is not False}
        some = tuple(each for each in question.machines if each.name in names)
        if not some:
            yield Whole(name=name, num_peers=0, tokens_per_s=0.0, objection="does not fit any machine")
            continue
        num_peers = sum(each.count for each in some)
        missing = "" if len(some) == len(question.machines) else f"fits {num_peers} of {question.num_peers} machines"
        pace = pace_of(replace(asked, machines=some))
        yield Whole(name=name, num_peers=num_peers, tokens_per_s=pace.tokens_per_s, objection=missing)
