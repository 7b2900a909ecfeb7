"""A run whose model is cut into sections, and the runs of its stages.

    StagedConfig ──of_stage(2)──► StagedConfig with stage = 2 ──digest──► RunId of that stage

Those who hold one section, its stage, have a run of their own: its members, manifests, state and checkpoints are of
this section alone, and its rounds are those of any run (docs/adr/0053-a-stage-is-a-run.md). The whole run is what
tickets and handshakes name.

It does not know how micro-batches pass from one stage to the next.
"""

from typing import Annotated, Any

import msgspec

from weft.errors import ConfigError
from weft.ids import Digest
from weft.model.config import num_parameters
from weft.model.flat import layout
from weft.model.sections import Section, num_section_parameters, sections
from weft.net.messages import HexDigest
from weft.peer.config import RunConfig, VectorShape
from weft.pipeline.config import PipelineConfig
from weft.pipeline.messages import MAX_STAGES
from weft.sync.acts import MAX_TOKENS
from weft.sync.staged import check_staged
from weft.wire import digest

TIED = (
    "stages: the model's embedding is tied to its head, and they lie in two stages that synchronise apart. "
    "Set is_tied = false in [model], or stages = 1."
)


class StagedConfig(RunConfig, frozen=True, kw_only=True, tag_field="type", tag="staged"):
    """What all peers of a run with stages share; or, where it says `stage`, what the members of that stage share."""

    stages: Annotated[int, msgspec.Meta(ge=2, le=MAX_STAGES)]
    initials: Annotated[tuple[HexDigest, ...], msgspec.Meta(min_length=2, max_length=MAX_STAGES)]
    """Of the vectors that the sections start from; of the whole run, `initial` is `initial_of` these."""
    pipeline: PipelineConfig
    stage: Annotated[int, msgspec.Meta(ge=0, lt=MAX_STAGES)] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_staged(self.method)
        if len(self.initials) != self.stages or (self.stage is not None and self.stage >= self.stages):
            raise ConfigError(f"this run names {len(self.initials)} sections' weights, and has {self.stages} stages.")
        if self.model.is_tied:
            raise ConfigError(TIED)
        sections(self.model, self.stages)

    def of_stage(self, stage: int) -> "StagedConfig":
        """Return the run of those who hold one section. When all is trained, the first stage's says."""
        train = self.train if stage == 0 else msgspec.structs.replace(self.train, tokens=MAX_TOKENS)
        initial = self.initials[stage]
        return msgspec.structs.replace(self, stage=stage, initial=initial, train=train, has_even_leases=True)

    @property
    def cuts(self) -> tuple[Section, ...]:
        """Return the sections."""
        return sections(self.model, self.stages)

    def of_largest(self) -> "StagedConfig":
        """Return the run of the stage whose section is the largest: who can hold that can hold any."""
        return max((self.of_stage(stage) for stage in range(self.stages)), key=lambda each: each.num_parameters)

    @property
    def section(self) -> Section | None:
        """Return the section that the run of a stage trains; None: this is the whole run."""
        return None if self.stage is None else self.cuts[self.stage]

    @property
    def num_parameters(self) -> int:
        section = self.section
        return num_parameters(self.model) if section is None else num_section_parameters(self.model, section)

    @property
    def vector(self) -> VectorShape:
        """Return what the vector of the parameters holds: of a stage, its section's."""
        spans = layout(self.model, self.section)
        return VectorShape(spans.num_parameters, spans.num_decayed, tuple(span.shape for span in spans))


def channel_of(stage: int) -> str:
    """Return the name of the channel on which the members of a stage speak to each other."""
    return f"stage{stage}"


def held_of(run: RunConfig) -> RunConfig:
    """Return what a member of `run` holds at most: of a model that is cut, the largest section."""
    return run.of_largest() if isinstance(run, StagedConfig) and run.stage is None else run


def staged(run: RunConfig, initials: tuple[Digest, ...], pipeline: PipelineConfig) -> StagedConfig:
    """Return `run`, its model cut into as many sections as there are first weights."""
    fields: dict[str, Any] = {name: getattr(run, name) for name in run.__struct_fields__}
    fields |= {"initial": initial_of(initials), "initials": initials, "stages": len(initials), "pipeline": pipeline}
    return StagedConfig(**fields)


def initial_of(initials: tuple[Digest, ...]) -> Digest:
    """Return what names the first weights of all sections."""
    return digest("".join(initials).encode())
