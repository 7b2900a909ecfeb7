"""What `weft plan` prints of a run with stages: for people, and as JSON for programs."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from weft.cli.plan.question import Asked
from weft.cli.plan.show import seconds, seconds_of, spelt, titled
from weft.cost import training as cost
from weft.dashboard import figures
from weft.ids import several
from weft.plan.cut import Best, Cut, StagePlan, able, best_stages, planned
from weft.plan.methods import name_of
from weft.plan.pipeline import StepTime
from weft.plan.profiles import known
from weft.plan.question import Machines
from weft.plan.split import Layer, Link, advice
from weft.plan.timing import Line
from weft.training.device import decoder

LITTLE = 0.3  # of a step: a bubble above it is said


@dataclass(frozen=True)
class Answer:
    cut: Cut
    best: Best
    able: tuple[str, ...]  # devices known by name that could hold any section


def cut(asked: Asked) -> Answer:
    """Return the plan of a run with stages.

    Raises:
        ConfigError: the model, the method or the number of peers admits no such cut.
        TooLarge: no machine has the memory for a section.
    """
    question, pipeline = asked.question, asked.pipeline
    devices = [
        Machines(
            name=each.name,
            count=1,
            line=Line(),
            tokens_per_s=1.0,
            memory_nbytes=1e9 * each.memory_gb,
            is_gpu=each.kind == "gpu",
            is_half=each.precision != "fp32",
        )
        for each in known().device
    ]
    return Answer(
        planned(question, pipeline, asked.stages),
        best_stages(question, pipeline),
        tuple(able(question, pipeline, asked.stages, devices)),
    )


def lines(asked: Asked, answer: Answer) -> Iterator[str]:
    """Yield what to tell of a plan, line by line."""
    question, found = asked.question, answer.cut
    peers = " + ".join(f"{each.count} {each.name}" for each in question.machines)
    yield from titled(
        asked.name,
        f"{question.num_parameters:,} parameters in {asked.stages} stages, "
        f"{figures.amount(question.train.tokens)} tokens, {name_of(question.choices)} within each, {peers}",
    )
    yield from _stages(found)
    yield from titled("step", _step(found))
    slowest = max(found.stages, key=lambda stage: stage.round.total_s)
    yield from titled(
        "round",
        f"{seconds(found.round_s)}: {several(found.num_steps, 'step')}, and {seconds(found.exchange_s)} until "
        f"stage {slowest.section.number + 1} has averaged; stages do so at the same time, each among its own members",
    )
    yield from titled("speed", f"{found.tokens_per_s:,.0f} tokens/s; {figures.duration(found.total_s)} in all")
    yield from titled("bytes", _bytes(found))
    yield from titled("memory", _memory(answer))
    if max(stage.num_members for stage in found.stages) > 1:
        yield from titled("teams", _teams(asked, found))
    yield ""
    yield from _against(answer)
    yield ""
    for note in _notes(asked, found):
        yield from titled("note", note)


def _stages(found: Cut) -> Iterator[str]:
    yield (
        f"  {'stage':<7}{'layers':>8}{'parameters':>16}{'peers':>7}{'busy':>7}{'sent/day':>11}{'received/day':>14}"
        f"{'memory':>11}"
    )
    for stage in found.stages:
        section = stage.section
        what = f"{section.layers.start + 1}-{section.layers.stop}"
        sent, received = (
            figures.nbytes(int(nbytes * 86_400 / found.round_s))
            for nbytes in (stage.traffic.sent_nbytes, stage.traffic.received_nbytes)
        )
        memory = figures.nbytes(max(each.on_device or each.on_host for each in stage.held))
        yield (
            f"  {section.number + 1:<7}{what:>8}{stage.num_parameters:>16,}{stage.num_members:>7}"
            f"{stage.utilisation:>7.0%}{sent:>11}{received:>14}{memory:>11}"
        )


def _step(found: Cut) -> str:
    step = found.step
    parts = (
        ("computing", step.compute_s),
        ("bubble", step.bubble_s),
        ("uneven ends", step.uneven_s),
        ("transfers", step.transfer_s),
        ("latency", step.latency_s + step.told_s),
    )
    return (
        f"{seconds(step.total_s)} for {several(found.num_micro, 'micro-batch')} of "
        f"{several(found.micro.num_samples, 'sample')}: "
        f"{seconds_of(parts)}. Bubble {step.bubble:.0%} without a network; {_limit(step)}"
    )


def _limit(step: StepTime) -> str:
    match step.limit:
        case "machines":
            return f"stage {step.bottleneck + 1} is the slowest, by its machines"
        case "lines":
            return f"stage {step.bottleneck + 1} is the slowest, by its lines"
        case "under way":
            return "only more micro-batches would hide the latency, and no more are allowed"


def _bytes(found: Cut) -> str:
    links = [found.link_bps(number) for number in range(len(found.stages) - 1)]
    return (
        f"{figures.nbytes(found.between.down_nbytes)} down and {figures.nbytes(found.between.up_nbytes)} back for each "
        f"micro-batch over each boundary, {found.boundary_nbytes_per_token:,.0f} bytes a token; "
        f"{max(links) / 1e6:.3g} Mbit/s on a link between two members at most"
    )


def _memory(answer: Answer) -> str:
    held = [each for stage in answer.cut.stages for each in stage.held]
    most = max(held, key=lambda each: each.on_device or each.on_host)
    place = "on the device" if most.on_device else "of the machine's own"
    fewest = min(each.num_taken for each in held)
    least = figures.nbytes(answer.cut.least_nbytes)
    return (
        f"{figures.nbytes(most.on_device or most.on_host)} {place} at most; members keep "
        f"{several(fewest, 'micro-batch')} at a "
        f"time or more; a machine without a GPU needs {least} at least. Any section fits "
        f"{', '.join(answer.able) or 'no device that is known by name'}"
    )


def _teams(asked: Asked, found: Cut) -> str:
    """Return whether members of a stage that compute each micro-batch together would be done sooner."""
    question, split = asked.question, asked.pipeline.split
    layer = Layer(question.model, found.micro.num_samples, question.train.seq_len)
    kind, size = question.machines[0], 2 if split is None else split.members
    speed = kind.tokens_per_s * cost.flops_per_token(decoder(question.model), question.train.seq_len)
    link = Link(min(kind.line.up_bps, kind.line.down_bps), 4 * kind.line.delay_s)
    told = "" if split is None else "; step and speed above are of members that compute alone"
    return f"{advice(layer, [speed] * size, link).words}{told}"


def _against(answer: Answer) -> Iterator[str]:
    best = answer.best
    yield f"  {'peers hold':<48}{'tokens/s':>10}"
    for whole in best.whole:
        told = f"{whole.tokens_per_s:>10,.0f}" if whole.tokens_per_s else f"{'-':>10}"
        yield f"  {f'whole models, {whole.name}':<48}{told}" + (f"  {whole.objection}" if whole.objection else "")
    own = len(answer.cut.stages)
    for number, tried in sorted({own: answer.cut, **best.cuts}.items()):
        mark = "-" if number == own else " "
        yield f"{mark} {f'one of {number} stages':<48}{tried.tokens_per_s:>10,.0f}"
    yield ""
    yield from titled("stages", best.why)


def _notes(asked: Asked, found: Cut) -> Iterator[str]:
    if found.step.bubble > LITTLE:
        yield (
            f"with {several(found.num_micro, 'micro-batch')} a step, stages are idle at its start and end: a larger "
            "train.batch_size or a smaller pipeline.micro_batch gives more"
        )
    if found.stages[0].num_members == 1 and asked.question.num_peers > len(found.stages):
        yield "one member alone starts all micro-batches: if it dies, steps wait until another takes its stage"
    split = asked.pipeline.split
    if split is not None and (small := [stage for stage in found.stages if stage.num_members < split.members]):
        yield (
            f"stages {', '.join(str(stage.section.number + 1) for stage in small)} have fewer than {split.members} "
            "members (pipeline.split.members) here, and each of them computes alone: lower it, or expect more peers"
        )
    yield "this plan leaves out evaluation, energy and money, as for all runs with stages"
    yield from asked.notes


def as_json(asked: Asked, answer: Answer) -> str:
    """Return everything of a plan as one JSON object: seconds, bytes, bits a second."""
    found, best = answer.cut, answer.best
    tree: dict[str, Any] = {
        "name": asked.name,
        "num_parameters": asked.question.num_parameters,
        "num_peers": asked.question.num_peers,
        "method": name_of(asked.question.choices),
        "num_stages": len(found.stages),
        "stages": [_stage(found, number, stage) for number, stage in enumerate(found.stages)],
        "step": {"total_s": found.step.total_s, "bubble": found.step.bubble, **asdict(found.step)},
        "num_micro": found.num_micro,
        "num_steps": found.num_steps,
        "exchange_s": found.exchange_s,
        "round_s": found.round_s,
        "round_tokens": found.tokens,
        "tokens_per_s": found.tokens_per_s,
        "total_s": found.total_s,
        "boundary": {"bytes_per_token": found.boundary_nbytes_per_token, **asdict(found.between)},
        "least_nbytes": found.least_nbytes,
        "able": answer.able,
        "best": {
            "num_stages": best.num_stages,
            "why": best.why,
            "whole": best.whole,
            "cuts": {str(number): tried.tokens_per_s for number, tried in best.cuts.items()},
        },
        "notes": list(_notes(asked, found)),
    }
    return spelt(tree)


def _stage(found: Cut, number: int, stage: StagePlan) -> dict[str, Any]:
    sent, received = stage.traffic.sent_nbytes, stage.traffic.received_nbytes
    return {
        "layers": [stage.section.layers.start, stage.section.layers.stop],
        "num_parameters": stage.num_parameters,
        "num_members": stage.num_members,
        "micro_per_s": stage.micro_per_s,
        "utilisation": stage.utilisation,
        "sent_nbytes": sent,
        "received_nbytes": received,
        "gigabytes_per_day": cost.gigabytes_per_day(sent + received, found.round_s),
        "link_bps": found.link_bps(number) if number < len(found.stages) - 1 else None,
        "round_s": stage.round.total_s,
        "held": stage.held,
    }
