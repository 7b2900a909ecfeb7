"""The table `[trust]`: how much of a run can be looked up and checked by others than those who did it."""

from typing import Annotated, Literal

from msgspec import UNSET, Meta, UnsetType

from weft.codec.config import RandomKConfig
from weft.config import Config
from weft.errors import ConfigError
from weft.pipeline.config import PipelineConfig
from weft.sync.method.choices import Choices, LowRankConfig, MuonConfig, OptimizerConfig
from weft.sync.records.charter import MAX_QUARANTINE
from weft.verify.passages import NUMBERS

FEWEST = 3  # peers: of fewer nobody is a majority against one of them


class MembersTrust(Config, frozen=True, kw_only=True, tag_field="type", tag="members"):
    """Members believe each other, and newcomers those that give them the state."""


class RecordedTrust(Config, frozen=True, kw_only=True, tag_field="type", tag="recorded"):
    """Each round names all rounds before, and each vote the state: newcomers check the state that they are given, and
    anybody can be shown who was counted, and for what (`weft ledger`)."""


class AuditedTrust(Config, frozen=True, kw_only=True, tag_field="type", tag="audited"):
    """As `recorded`, and members do some of each other's training steps again, and merge some parts again, drawn so
    that nobody can foresee which. A majority that comes to something else strikes out who claimed it. In a run with
    stages: members of one compute some of each other's micro-batches again."""

    numerics: Literal["fp32", "bf16", "exact"] = "fp32"
    """Of matrix products in training steps, on all members alike: their last bits differ from machine to machine, and
    those of another precision far more. "exact": of all numbers in them, the same bits on every CPU."""
    micro_batch: Annotated[int, Meta(ge=0, description="samples at a time, on all members; 0: a whole batch")] = 0
    audit_rate: Annotated[
        float,
        Meta(
            gt=0,
            le=1,
            description="chance that a contribution is audited, and each part of a result; in stages each micro-batch",
        ),
    ] = 0.1
    trace_every: Annotated[
        int, Meta(ge=1, le=100_000, description="training steps from one state that is named to the next")
    ] = 1
    quarantine: Annotated[
        int, Meta(ge=0, le=MAX_QUARANTINE, description="a newcomer's first works, which count once others have looked")
    ] = 3

    @property
    def is_exact(self) -> bool:
        return self.numerics == "exact"

    @property
    def signs_gradients(self) -> bool:
        """Whether a worker signs the gradient of what it shows: its bits prove something, and it is of one step."""
        return self.is_exact and self.trace_every == 1


TrustConfig = MembersTrust | RecordedTrust | AuditedTrust
Recorded = RecordedTrust | AuditedTrust


def is_exact(trust: TrustConfig | UnsetType) -> bool:
    """Return whether training steps are computed in exact numbers."""
    return isinstance(trust, AuditedTrust) and trust.is_exact


def of_run(trust: TrustConfig) -> Recorded | UnsetType:
    """Return what a run's config has of it: one that says nothing is as they were before."""
    return UNSET if isinstance(trust, MembersTrust) else trust


def check(trust: TrustConfig | UnsetType, method: Choices) -> None:
    """
    Raises:
        ConfigError: a run that trains so cannot be recorded or audited.
    """
    if isinstance(trust, Recorded):
        _check_recorded(method)
    if isinstance(trust, AuditedTrust):
        _check_audited(method)
        _check_quarantine(trust, method)


def check_staged(trust: TrustConfig | UnsetType, method: Choices, pipeline: PipelineConfig) -> None:
    """As `check`, of a run with stages.

    Raises:
        ConfigError: it cannot be recorded, or what its members compute cannot be computed again.
    """
    if isinstance(trust, Recorded):
        _check_recorded(method)
    if not isinstance(trust, AuditedTrust):
        return
    sent = {"activations": pipeline.activations, "gradients": pipeline.gradients or pipeline.activations}
    unlike = [name for name, config in sent.items() if config.__struct_config__.tag not in NUMBERS]
    found = {
        "members of a stage have other parameters each between two rounds of this method. Choose one that sends "
        "gradients (ddp, powersgd, demo)": not method.sends_gradient,
        'trust.numerics: sections are computed in fp32. Set numerics = "fp32"': trust.numerics != "fp32",
        "trust.micro_batch: stages have pipeline.micro_batch. Leave it out": bool(trust.micro_batch),
        "trust.trace_every: micro-batches are looked at one by one. Leave it out": trust.trace_every != 1,
        "trust.quarantine: what a newcomer to a stage computes, others have to go on with at once. Set trust.quarantine"
        " = 0": bool(trust.quarantine),
        "pipeline.split: a team's members have parts of what goes on. Leave it out": pipeline.split is not None,
        f"pipeline.{'.'.join(unlike[:1])}: two machines that round otherwise would send unlike bytes, or what is sent "
        f"depends on what was sent before. Choose one of {', '.join(NUMBERS)}": bool(unlike),
    }
    for why, is_so in found.items():
        if is_so:
            raise ConfigError(f'trust: {why}, or set trust.type = "recorded".')


def _check_recorded(method: Choices) -> None:
    if method.graph is not None:
        raise ConfigError(
            "trust: members that exchange with neighbours have a state each, and a round can name one. Choose another "
            'method, or type = "members".'
        )
    if method.wait == "ready":
        raise ConfigError(
            "trust: where rounds wait for nobody, members vote before they have made the outer step, and cannot say "
            'what the state is. Set wait = "all", or type = "members".'
        )


def _check_audited(method: Choices) -> None:
    if method.sends_gradient:
        why = "what is audited is training steps between two rounds, and this method sends gradients"
    elif method.is_streaming:
        why = "training steps go on while a round is decided, and a state would belong to no one round"
    elif isinstance(method.basis, LowRankConfig):
        why = "a payload of low rank is made of more than the parameters that training steps come to"
    elif method.reply_feedback is not None:
        why = "owners of parts keep errors to themselves (reply_feedback), so nobody else can merge again"
    else:
        return
    raise ConfigError(f'trust: {why}. Choose a method such as diloco, fedavg or pulse, or type = "recorded".')


def _check_quarantine(trust: AuditedTrust, method: Choices) -> None:
    if trust.quarantine and isinstance(method.codec, RandomKConfig):
        raise ConfigError(
            "trust.quarantine: what waits has to be the same bytes in the next round, and the codec random_k makes "
            "others in each. Set trust.quarantine = 0, or choose another codec."
        )


def check_loop(trust: TrustConfig | UnsetType) -> None:
    """
    Raises:
        ConfigError: who trains in a loop of their own cannot be audited.
    """
    if isinstance(trust, AuditedTrust):
        raise ConfigError(
            'trust: what your own loop does is known to nobody else, so nobody can do it again. Set type = "recorded".'
        )


def check_of_model(
    trust: TrustConfig | UnsetType,
    *,
    is_private: bool,
    has_reward: bool,
    is_crowded: bool = False,
    is_lonely: bool = False,
) -> None:
    """
    Args:
        is_crowded: more peers are expected than have a vote.
        is_lonely: fewer are than `FEWEST`.

    Raises:
        ConfigError: what its peers train on, or who does, cannot be audited.
    """
    if not isinstance(trust, AuditedTrust):
        return
    found = {
        "is_private: nobody can do a training step again on text that stays where it is": is_private,
        "reward: answers are drawn beside training, and nobody names those": has_reward,
        "peers: those without a vote bring their work through others, who are counted for it": is_crowded,
        f"peers: of fewer than {FEWEST} nobody is a majority against one of them": is_lonely,
    }
    for why, is_so in found.items():
        if is_so:
            raise ConfigError(f'{why}, so this run cannot be audited. Change that, or set trust.type = "recorded".')


def check_exact(trust: TrustConfig | UnsetType, *, optimizer: OptimizerConfig, has_base: bool, has_loss: bool) -> None:
    """
    Args:
        has_loss: beside cross entropy.

    Raises:
        ConfigError: exact numbers are not there for what it trains.
    """
    if not isinstance(trust, AuditedTrust) or not trust.is_exact:
        return
    found = {
        'train.optimizer: muon has no exact numbers, as adamw and sgd have. Choose type = "adamw"': isinstance(
            optimizer, MuonConfig
        ),
        "adapter, model: exact numbers are of models of which all is trained. Choose such a model": has_base,
        "train.loss: exact numbers are of cross entropy, and not of pairs of answers. Leave it out": has_loss,
    }
    for why, is_so in found.items():
        if is_so:
            raise ConfigError(f'{why}, or set trust.numerics = "fp32".')
