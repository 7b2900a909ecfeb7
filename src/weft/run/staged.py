"""A run whose model is cut into sections, and the runs of its stages.

    StagedConfig ──of_stage(2)──► StagedConfig with stage = 2 ──digest──► RunId of that stage

Those who hold one section, its stage, have a run of their own: its members, manifests, state and checkpoints are of
this section alone, and its rounds are those of any run (docs/adr/0053-a-stage-is-a-run.md). The whole run is what
tickets and handshakes name.

Where embedding and head are one matrix that is trained, that has a run of its own, too, with the number after the last
stage's: its members are those of both end stages. Of a model with an adapter, each stage trains the part of the adapter
that goes beside its section. Where activations are sent in a subspace, the weights are held to it (`confined`).
"""

import math
from typing import Annotated

import msgspec
from jaxtyping import Float32
from torch import Tensor

from weft.config import alike
from weft.errors import ConfigError
from weft.ids import Digest
from weft.model.config import ModelConfig, has_base, num_parameters, plain
from weft.model.flat import layout
from weft.model.initial import initial_vector
from weft.model.sections import Section, has_table_apart, num_section_base, num_section_parameters, pieces, sections
from weft.net.messages import HexDigest
from weft.pipeline.codec.activations import SubspaceConfig
from weft.pipeline.codec.subspace import Confined, confined
from weft.pipeline.config import PipelineConfig
from weft.pipeline.messages import MAX_STAGES
from weft.pipeline.split.section import check_split
from weft.run import trust as trusts
from weft.run.config import Genesis, RunConfig, VectorShape, check_adapter_in_stages, check_space_in_stages
from weft.sync.method.choices import Choices, check_staged
from weft.sync.records.acts import MAX_TOKENS
from weft.wire import digest

TIED = (
    "stages: the model's embedding is tied to its head, which lies in another stage: both have to add up its gradient "
    "at each step. Choose a method that sends gradients (ddp, powersgd, demo), or set is_tied = false in [model]."
)

AUDITED_TIED = (
    "trust: the model's embedding is tied to its head, and that matrix changes in rounds of its own: nobody else has "
    'the one that a micro-batch was computed with. Set is_tied = false in [model], or trust.type = "recorded".'
)

SPLIT = (
    "pipeline.split: members of a team have the same weights at every step. Choose a method that sends gradients (ddp, "
    "powersgd, demo), or leave split out."
)


class StagedConfig(RunConfig, frozen=True, kw_only=True, tag_field="type", tag="staged"):
    """What all peers of a run with stages share; or, where it says `stage`, what the members of that stage share."""

    stages: Annotated[int, msgspec.Meta(ge=2, le=MAX_STAGES)]
    initials: Annotated[tuple[HexDigest, ...], msgspec.Meta(min_length=2, max_length=MAX_STAGES + 1)]
    """Of the vectors that the pieces start from; of the whole run, `initial` is `initial_of` these."""
    pipeline: PipelineConfig
    bases: Annotated[tuple[HexDigest, ...], msgspec.Meta(max_length=MAX_STAGES)] | msgspec.UnsetType = msgspec.UNSET
    """Of the vectors of what is frozen of the sections; of the whole run, `base` is `initial_of` these."""
    stage: Annotated[int, msgspec.Meta(ge=0, le=MAX_STAGES)] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        adapter = self.model.adapter
        if adapter is not msgspec.UNSET:
            check_adapter_in_stages(self.pipeline, has_dropout=bool(adapter.dropout))
        elif has_base(self.model):
            check_space_in_stages(self.pipeline)
        if (0 if self.bases is msgspec.UNSET else len(self.bases)) != self.stages * has_base(self.model):
            raise ConfigError(
                "bases: a run with stages has one of each where a part of its model is frozen, and only there."
            )
        if self.stage is None and (
            self.initial != initial_of(self.initials) or (self.bases and self.base != initial_of(self.bases))
        ):
            raise ConfigError("initial, base: of a run with stages they name those of its parts. Do not join it.")
        if self.train.loss is not msgspec.UNSET:
            raise ConfigError("train.loss: stages know no pairs of answers. Leave stages out.")
        check_staged(self.method)
        check_tied(self.model, self.stages, self.method)
        if isinstance(self.trust, trusts.AuditedTrust) and has_table_apart(self.model, self.stages):
            raise ConfigError(AUDITED_TIED)
        if (split := self.pipeline.split) is not None:
            check_split(split, self.model, self.train.seq_len)
            if not self.method.sends_gradient:
                raise ConfigError(SPLIT)
        if len(self.initials) != self.num_pieces or (self.stage is not None and self.stage >= self.num_pieces):
            raise ConfigError(
                f"this run names {len(self.initials)} parts' weights and has {self.num_pieces} parts; its own is "
                f"{self.stage}."
            )

    def _check_trust(self) -> None:
        trusts.check_staged(self.trust, self.method, self.pipeline)

    def of_stage(self, stage: int) -> "StagedConfig":
        """Return the run of those who hold one piece. When all is trained, the first stage's says.

        Its gradient is as long at most as its share of the model's parameters allows: together those of all pieces are
        no longer than the whole run says.
        """
        assert self.stage is None, "only the whole run has stages"
        share = num_section_parameters(self.model, self.pieces[stage]) / num_parameters(self.model)
        tokens = self.train.tokens if stage == 0 else MAX_TOKENS
        train = msgspec.structs.replace(self.train, tokens=tokens, clip=self.train.clip * math.sqrt(share))
        own = {"initial": self.initials[stage]} | ({"base": self.bases[stage]} if self.bases else {})
        return msgspec.structs.replace(self, stage=stage, train=train, has_even_leases=True, **own)

    @property
    def cuts(self) -> tuple[Section, ...]:
        """Return the sections, with all that their members hold."""
        return sections(self.model, self.stages)

    @property
    def pieces(self) -> tuple[Section, ...]:
        """Return what has a run of its own: the sections, and a tied matrix apart from them."""
        return pieces(self.model, self.stages)

    @property
    def num_pieces(self) -> int:
        return self.stages + has_table_apart(self.model, self.stages)

    @property
    def tied(self) -> int | None:
        """Return the number of the tied matrix's run; None: there is none."""
        return self.stages if has_table_apart(self.model, self.stages) else None

    def has_tied(self, stage: int) -> bool:
        """Whether who holds a stage is a member of the tied matrix's run, too."""
        return self.tied is not None and stage in {0, self.stages - 1}

    def called(self, stage: int) -> str:
        return "the tied matrix" if stage == self.tied else f"stage {stage + 1}"

    def of_largest(self) -> "StagedConfig":
        """Return the run of the stage whose members hold most: who can hold that can hold any."""
        return self.of_stage(max(self.cuts, key=lambda cut: num_section_parameters(plain(self.model), cut)).number)

    @property
    def section(self) -> Section | None:
        """Return the piece that the run of a stage trains; None: this is the whole run."""
        return None if self.stage is None else self.pieces[self.stage]

    @property
    def num_parameters(self) -> int:
        section = self.section
        return num_parameters(self.model) if section is None else num_section_parameters(self.model, section)

    @property
    def num_base(self) -> int:
        section = self.section
        return super().num_base if section is None else num_section_base(self.model, section)

    @property
    def vector(self) -> VectorShape:
        """Return what the vector of the parameters holds: of a stage, its section's."""
        spans = layout(self.model, self.section)
        return VectorShape(spans.num_parameters, spans.num_decayed, tuple(span.shape for span in spans))


def check_tied(model: ModelConfig, stages: int, method: Choices) -> None:
    """
    Raises:
        ConfigError: members would train copies of a tied matrix apart; or there are more stages than layers.
    """
    sections(model, stages)
    if has_table_apart(model, stages) and not method.sends_gradient:
        raise ConfigError(TIED)


def channel_of(stage: int) -> str:
    """Return the name of the channel on which the members of a stage speak to each other."""
    return f"stage{stage}"


def by_section(run: RunConfig) -> list[RunConfig]:
    """Return the runs of a model's pieces; of a model that is not cut, and of a piece, this one."""
    if not isinstance(run, StagedConfig) or run.stage is not None:
        return [run]
    return [run.of_stage(piece) for piece in range(run.num_pieces)]


def held_of(run: RunConfig) -> RunConfig:
    """Return what a member of `run` holds at most: of a model that is cut, the largest section."""
    return run.of_largest() if isinstance(run, StagedConfig) and run.stage is None else run


def staged(
    run: RunConfig,
    initials: tuple[Digest, ...],
    pipeline: PipelineConfig,
    bases: tuple[Digest, ...] = (),
    trust: trusts.Recorded | msgspec.UnsetType = msgspec.UNSET,
) -> StagedConfig:
    """Return `run`, its model cut into as many pieces as there are first weights.

    Args:
        bases: of sections of which a part is frozen, that.
        trust: in place of the run's own, which is that of whole models; unset: that one.
    """
    stages = len(initials) - (run.model.is_tied and not bases)
    cut = {"initial": initial_of(initials), "initials": initials, "stages": stages, "pipeline": pipeline}
    if trust is not msgspec.UNSET:
        cut |= {"trust": trust}
    if bases:
        cut |= {"bases": bases, "base": initial_of(bases)}
    return StagedConfig(**alike(RunConfig, run) | cut)


def initial_of(initials: tuple[Digest, ...]) -> Digest:
    """Return what names the first weights of all pieces, or the bases of all sections."""
    return digest("".join(initials).encode())


def confinement(run: Genesis) -> Confined | None:
    """Return what holds the weights of a stage's run to its space; None: they may be any.

    Raises:
        ConfigError: the space has more dimensions than the model.
    """
    if not isinstance(run, StagedConfig) or run.section is None:
        return None
    return _confined(run.model, run.section, run.pipeline)


def seeded(model: ModelConfig, seed: int, section: Section, pipeline: PipelineConfig) -> Float32[Tensor, " num"]:
    """Return the weights that a piece of a model starts from, in a run that makes them of its seed."""
    vector, held = initial_vector(model, seed, section), _confined(model, section, pipeline)
    if held is not None:
        held.begin(vector)
    return vector


def _confined(model: ModelConfig, section: Section, pipeline: PipelineConfig) -> Confined | None:
    config = pipeline.activations
    return confined(config, model, section) if isinstance(config, SubspaceConfig) and section.num_sections > 1 else None
