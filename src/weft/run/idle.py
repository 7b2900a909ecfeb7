"""Fields of a run file, or of a loop's config, that change nothing beside the others, each with the reason.

    without_effect(run_file)        dotted field -> why
    of_loop(config)                 the same of a `SyncConfig`

Which of them somebody has set is for whoever read the file to say: these are named, and those set by an option refused
(`weft.config.idle`). What contradicts the other fields does not come here: it is refused where the file is read.
"""

from weft.codec.config import Fp32Config, RandomKConfig
from weft.data.corpus import BinSource
from weft.run.config import RunFile, SyncConfig
from weft.sync.method.choices import (
    Choices,
    DelayedNesterovConfig,
    InnerConfig,
    NesterovConfig,
    SgdConfig,
    SignSgdConfig,
)
from weft.sync.method.presets import spell_out
from weft.sync.method.schedule import ScheduleConfig, WsdConfig


def without_effect(run_file: RunFile) -> dict[str, str]:
    """Return the fields and sections that change nothing beside the others, dotted, each with the reason."""
    method, source = spell_out(run_file.method, run_file.peers), run_file.data.source
    found = _of_method(method) | _of_training(method) | _of_schedule(run_file.train.schedule, run_file.train.tokens)
    if isinstance(source, BinSource) and source.heldout_path is not None:
        found["data.heldout_fraction"] = "data.source.heldout_path has all held-out text"
    if method.graph is not None:
        reason = "neighbours do it after each mean over all members (mean_every), whatever this says"
        names = ("evaluate_every", "sample_every")
        found |= {f"train.{name}": reason for name in names if getattr(run_file.train, name) > 1}
    if run_file.stages > 1:
        whole = "in a run with stages nobody holds the whole model, and a part cannot write"
        found |= dict.fromkeys(("train.sample_every", "train.sample_prompt"), whole)
        found["has_even_leases"] = "members of a stage train on what other stages pass to them"
    return found


def of_loop(config: SyncConfig) -> dict[str, str]:
    """Return the same of a run whose members train in loops of their own."""
    return _of_method(spell_out(config.method, config.peers))


def _of_method(method: Choices) -> dict[str, str]:
    found: dict[str, str] = {}
    if method.graph is not None and method.graph.graph != "random":
        why = f"graph is {method.graph.graph}, and only a random one has a degree"
        found |= dict.fromkeys(("method.degree", "method.among.degree"), why)
    if isinstance(method.apply, DelayedNesterovConfig) and not method.apply.momentum:
        fields = ("method.delay", "method.apply.delay", "method.apply.activation")
        found |= dict.fromkeys(fields, "momentum is 0, so there is none to delay")
    for name, codec in (("codec", method.codec), ("reply_codec", method.reply_codec)):
        if isinstance(codec, RandomKConfig) and codec.largest == codec.kept:
            found[f"method.{name}.largest"] = "largest equals kept"
    is_whole = method.send == "delta" and not method.is_streaming and not method.is_projected
    if isinstance(method.codec, Fp32Config) and is_whole:
        found["method.feedback"] = "method.codec is fp32, which has no error to add later"
    if isinstance(method.reply, Fp32Config):
        found["method.reply_feedback"] = "merged parts are fp32, which has no error to add later"
    return found


def _of_training(method: Choices) -> dict[str, str]:
    if not method.sends_gradient or isinstance(method.apply, InnerConfig):
        return {}
    found = {"train.optimizer": "gradients are sent, and method.apply steps along their mean"}
    if isinstance(method.apply, SgdConfig | NesterovConfig | DelayedNesterovConfig):
        found["train.schedule"] = "gradients are sent, and method.apply has a learning rate of its own (lr)"
    if isinstance(method.apply, SignSgdConfig) and method.feedback is None:
        found["train.clip"] = "method.apply steps by signs, which have no length"
    return found


def _of_schedule(schedule: ScheduleConfig, tokens: int) -> dict[str, str]:
    if isinstance(schedule, WsdConfig) and not schedule.decay_tokens and tokens <= schedule.total_tokens:
        return {"train.schedule.floor": "decay_tokens is 0, so the rate never comes down"}
    return {}
