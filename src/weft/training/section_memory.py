"""What holding a section takes of memory, before a stage is joined.

    section_memory(Holding(...), section, num_members=3, num_taken=8)     # bytes, by component, as of a whole model
    needed_nbytes(holding, section, device, num_taken=8)                  # by place, as `device.needed_nbytes`
    most_taken(holding, section, device, free)                            # micro-batches that fit; 0: it cannot join
    fitting(run, peer, device)                                            # the same of this machine

Parameters, moments, outer state and what rounds need are those of any run, of the section alone (`sync.costs`); in
place of one micro-batch's activations stand those of all that are under way (`weft.cost.pipeline`), and of one more
where members look at what others compute, with what these were made of. Nothing is counted
of what later attempts bring, which is held within `pipeline.worker.Bounds.held_nbytes` where members die.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from weft.cost import pipeline as cost_pipeline
from weft.cost import training as cost
from weft.cost.pipeline import MicroBatch, Shape
from weft.errors import TooLarge
from weft.model.config import ModelConfig
from weft.model.flat import layout
from weft.model.held import Numbers
from weft.model.sections import Section, num_section_base, num_section_parameters
from weft.pipeline.codec import boundary
from weft.pipeline.codec.activations import AqSgdConfig, SubspaceConfig
from weft.pipeline.codec.build import Boundaries
from weft.pipeline.config import PipelineConfig
from weft.pipeline.sender import PER_STAGE
from weft.pipeline.witness import AT_ONCE, KEPT_NBYTES
from weft.pipeline.worker import Bounds
from weft.run.config import TrainConfig
from weft.run.machine import PeerConfig
from weft.run.staged import StagedConfig
from weft.run.trust import AuditedTrust
from weft.sync.costs import peer_memory
from weft.sync.method.choices import Choices
from weft.training.device import (
    Device,
    base_numbers,
    by_place,
    decoder,
    figures,
    fits,
    free_nbytes,
    with_base,
    with_texts,
)

ASSUMED_MEMBERS = 4  # of a stage, before it is known: memory falls slowly with their number
# Of activations, what the allocator of a CPU process holds beside: tensors come and go between those that stay. Each
# further micro-batch took 1.26 times its tensors (Linux, 6 and 12 under way, 200 MB each).
HEAP = 0.25


@dataclass(frozen=True, kw_only=True)
class Holding:
    """What a run with stages says of those who hold its sections."""

    model: ModelConfig
    train: TrainConfig
    choices: Choices
    pipeline: PipelineConfig
    has_rows: bool = False  # of whole texts
    is_audited: bool = False  # members look at what others of their stage compute

    @property
    def micro(self) -> MicroBatch:
        """Return what the closed forms need to know of a micro-batch: at most what a member begins in a step."""
        num_samples, seq_len = min(self.pipeline.micro_batch, self.train.batch_size), self.train.seq_len
        # Bytes do not follow from the vocabulary, of which one codec draws a table.
        shape = boundary.Shape(seq_len, self.model.width, vocab_size=1)
        found = Boundaries(self.pipeline.activations, self.pipeline.gradients).boundary(shape)
        return MicroBatch(
            num_samples=num_samples,
            seq_len=seq_len,
            activations_nbytes=found.activations.nbytes(num_samples),
            gradients_nbytes=found.gradients.nbytes(num_samples),
            has_rows=self.has_rows,
        )


def of_run(run: StagedConfig) -> Holding:
    return Holding(
        model=run.model,
        train=run.train,
        choices=run.method,
        pipeline=run.pipeline,
        has_rows=run.data.has_rows,
        is_audited=isinstance(run.trust, AuditedTrust),
    )


def section_memory(
    holding: Holding,
    section: Section,
    *,
    num_members: int,
    num_taken: int,
    is_half: bool = False,
    has_recompute: bool = False,
) -> cost.Memory:
    """Return the memory of a peer that holds a section.

    Args:
        num_members: of its stage.
        num_taken: micro-batches that it keeps at a time, at most; `usual_taken`.
    """
    train, choices = holding.train, holding.choices
    shape = shape_of(holding.model, section)
    memory = peer_memory(
        choices,
        train.optimizer,
        tuple(span.shape for span in layout(holding.model, section)),
        shape.num_parameters,
        num_members,
        num_rounds=-(-train.tokens // (choices.every * train.batch_size * train.seq_len)),  # one begins all
        activations=cost_pipeline.activation_nbytes(
            shape, holding.micro, num_taken + holding.is_audited, is_half=is_half, has_recompute=has_recompute
        )
        + team_nbytes(holding.pipeline, shape.num_parameters),
    )
    held = memory.copies + codec_nbytes(holding.model, holding.pipeline, section) + passages_nbytes(holding)
    return replace(memory, copies=held, heap=int(HEAP * memory.activations))


def passages_nbytes(holding: Holding) -> int:
    """Return the bytes that a member keeps of what it has computed in a step, for others to look at, and fetches of
    theirs; nothing where nobody looks."""
    if not holding.is_audited:
        return 0
    micro = holding.micro
    each = 2 * (micro.activations_nbytes + micro.gradients_nbytes)
    num = -(-holding.train.batch_size // micro.num_samples)
    return min(KEPT_NBYTES, num * each) + AT_ONCE * each


def team_nbytes(pipeline: PipelineConfig, num_parameters: int) -> int:
    """Return the bytes that a member of a team holds beside: copies of its part of the weights, what it found of two
    micro-batches at a time, their sum, and that once more, encoded."""
    if pipeline.split is None:
        return 0
    num_parts = pipeline.split.members if pipeline.split.by == "heads" else 1
    return 4 * num_parameters * 3 // num_parts + 2 * 4 * num_parameters


def codec_nbytes(model: ModelConfig, pipeline: PipelineConfig, section: Section) -> int:
    """Return the bytes of memory that the codecs of a section's boundaries hold beside messages."""
    match pipeline.activations:
        case SubspaceConfig(rank=rank):
            return 4 * model.width * (rank + model.vocab_size)
        case AqSgdConfig(held_nbytes=nbytes):
            return nbytes * (2 - section.is_first - section.is_last)
        case _:
            return 0


def needed_nbytes(
    holding: Holding,
    section: Section,
    device: Device,
    *,
    num_taken: int,
    has_recompute: bool = False,
    serve_nbytes: int = 0,
    numbers: Numbers = "fp32",
) -> dict[str, int]:
    """Return the bytes that a member of a stage needs at its peak beside its process, by place: "cpu", the device.

    Args:
        has_recompute, serve_nbytes: as of its settings.
        numbers: of what its adapter goes beside.
    """
    memory = section_memory(
        holding,
        section,
        num_members=ASSUMED_MEMBERS,
        num_taken=num_taken,
        is_half=device.precision != "fp32",
        has_recompute=has_recompute,
    )
    needed = with_base(by_place(memory, device), holding.model, section, numbers, device)
    return with_texts(needed, holding.model, section, holding.pipeline.activations, device, serve_nbytes)


def most_taken(
    holding: Holding,
    section: Section,
    device: Device,
    free: Mapping[str, int],
    *,
    has_recompute: bool = False,
    serve_nbytes: int = 0,
    numbers: Numbers = "fp32",
) -> int:
    """Return how many micro-batches a member can keep at a time (pipeline.worker.Bounds); 0: not one.

    Where they fit, more than a member has usually: micro-batches come in bursts, and whoever is full makes senders
    wait. Else half as many, and so on.

    Args:
        free: bytes, by place.
    """
    num_taken = Bounds().num_taken
    while num_taken:
        needed = needed_nbytes(
            holding,
            section,
            device,
            num_taken=num_taken,
            has_recompute=has_recompute,
            serve_nbytes=serve_nbytes,
            numbers=numbers,
        )
        if fits(needed, free):
            break
        num_taken //= 2
    return num_taken


def usual_taken(num_stages: int, num_first: int = 1, num_members: int = 1) -> int:
    """Return how many micro-batches a member keeps at a time where as many are under way as may be.

    Args:
        num_first: members of the first stage; `num_members`: of this one, which share what those begin.
    """
    return min(Bounds().num_taken, -(-PER_STAGE * num_stages * num_first // num_members))


def shape_of(model: ModelConfig, section: Section) -> Shape:
    """Return what the closed forms need to know of a section."""
    return Shape(
        decoder=decoder(model),
        num_parameters=num_section_parameters(model, section),
        num_layers=len(section.layers),
        is_first=section.is_first,
        is_last=section.is_last,
    )


def relative_costs(run: StagedConfig) -> list[float]:
    """Return what computing a sample takes in each section, 1 where it takes as much as in the mean one."""
    flops = [cost_pipeline.section_flops(shape_of(run.model, cut), run.train.seq_len).total for cut in run.cuts]
    return [each * len(flops) / sum(flops) for each in flops]


def fitting(run: StagedConfig, peer: PeerConfig, device: Device) -> int:
    """Return how many micro-batches this machine can keep at a time as a member of a stage, a tied matrix held already.

    Args:
        run: of the stage.

    Raises:
        TooLarge: not one; says the figures.
    """
    section, holding = run.section, of_run(run)
    assert section is not None, "a section of which stage?"
    free, texts = free_nbytes(peer.caps, device), peer.serve_nbytes
    given: dict[str, Any] = {
        "has_recompute": peer.has_recompute,
        "serve_nbytes": texts,
        "numbers": base_numbers(run, peer, device),
    }
    if num_taken := most_taken(holding, section, device, free, **given):
        return num_taken
    needed = needed_nbytes(holding, section, device, num_taken=1, **given)
    num, lower = num_section_parameters(run.model, section), "lower serve_nbytes, " if texts else ""
    raise TooLarge(
        f"section {section.number + 1} of {section.num_sections} has {num:,} parameters and does not fit, even with "
        f"one micro-batch at a time. {figures(needed, free)}. Close other programs, {lower}or "
        "take part with a larger machine; the run's maker can cut the model into more stages, or lower "
        "pipeline.micro_batch."
    )


def least_nbytes(holding: Holding, cuts: Iterable[Section]) -> int:
    """Return the least memory with which a machine without a GPU can hold any of the sections.

    The largest section decides who can join wherever somebody is missing.
    """
    needed = max(
        section_memory(holding, cut, num_members=1, num_taken=1).on_cpu
        + cost.vector_nbytes(num_section_base(holding.model, cut))
        for cut in cuts
    )
    return cost_pipeline.BASE_NBYTES + needed
