"""Every field of a run file, of a loop's config and of a machine's settings, where it would change nothing.

The fields are read from the structs. One without a place here fails: whoever adds a field says beside what it does
nothing, or that it always does something.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import inspect

from weft.config import Config, from_tree, idle, is_in, leaves, load_tree, replace_field, said, told_idle
from weft.errors import ConfigError
from weft.run import machine
from weft.run.config import RunFile, SyncConfig
from weft.run.idle import of_loop, without_effect
from weft.run.machine import PeerConfig

HOUSE = Path(__file__).parents[3]
Settings = dict[str, Any]


@dataclass(frozen=True)
class Idle:
    """Settings, by dotted field, beside which the field does nothing, the field as a file names it, and the reason."""

    beside: Settings
    field: str
    value: Any
    reason: str


@dataclass(frozen=True)
class Refused:
    """Settings with which a file is not read at all, and what is said."""

    beside: Settings
    words: str


STAGED: Settings = {"stages": 2, "method.type": "ddp"}
GOSSIP: Settings = {
    **{"method.type": "custom", "method.every": 1, "method.send": "weights", "method.apply.type": "mix"},
    **{"method.among.type": "graph", "method.among.graph": "ring"},
}
GRADIENT: Settings = {"method.type": "custom", "method.every": 1, "method.send": "gradient"}
SIGNS: Settings = {**GRADIENT, "method.apply.type": "sign_sgd"}
DELTA: Settings = {"method.type": "custom", "method.every": 5, "method.send": "delta", "method.apply.type": "sgd"}
DELAYED: Settings = {**DELTA, "method.apply.type": "delayed_nesterov", "method.apply.momentum": 0.0}
FP32: Settings = {"method.codec.type": "fp32"}
WSD: Settings = {f"train.schedule.{name}": value for name, value in (("type", "wsd"), ("total_tokens", 1000))}
BIN: Settings = {"data.source.type": "bin", "data.source.path": "a.bin", "data.source.heldout_path": "b.bin"}
AS_MANY: Settings = {"method.type": "sparseloco", "method.codec.type": "random_k", "method.codec.kept": 64}
SUBSPACE: Settings = {"pipeline.activations.type": "subspace", "pipeline.gradients.type": "bf16"}
NO_MODEL, ROUTED = "nobody holds the whole model", "other stages pass"
NO_DEGREE, NOTHING_LEFT, NO_MOMENTUM = "only a random one has a degree", "no error to add", "momentum is 0"
NO_STAGES = "no effect in a run without stages"

# By struct: fields that always do something, and those that do not, with where.
FIELDS: dict[str, tuple[str, dict[str, tuple[Idle | Refused, ...]]]] = {
    "RunFile": (
        "name seed peers model adapter data is_private reward tokenizer train method stages admission orphan_after_s "
        "is_strict electors stewards predecessor run trust",
        {
            "pipeline": (Refused({"pipeline.micro_batch": 2}, NO_STAGES),),
            "has_even_leases": (Idle(STAGED, "has_even_leases", True, ROUTED),),
        },
    ),
    "SizedModel": ("size is_tied", {}),
    "FolderModel": ("path", {}),
    "NewAdapter": ("rank alpha targets is_rank_stabilized dropout", {}),
    "FolderAdapter": ("path", {}),
    "ShapedModel": ("num_layers num_heads num_kv_heads width ffn_width has_qk_norm has_qkv_bias is_tied", {}),
    "SpaceModel": ("path member num_layers num_heads num_kv_heads ffn_width has_qk_norm has_qkv_bias", {}),
    "CorpusConfig": (
        "source",
        {"heldout_fraction": (Idle(BIN, "data.heldout_fraction", 0.1, "has all held-out text"),)},
    ),
    "StdlibSource": ("", {}),
    "TextSource": ("paths", {}),
    "JsonlSource": ("paths field", {}),
    "ConversationsSource": ("paths template too_long date", {}),
    "PreferencesSource": ("paths template too_long date", {}),
    "TasksSource": ("paths template too_long date", {}),
    "MatchReward": ("samples max_tokens clip runs_code", {}),
    "ExtensionReward": ("samples max_tokens clip judge", {}),
    "JudgeConfig": ("name source settings", {}),
    "DpoConfig": ("beta", {}),
    "OrpoConfig": ("weight", {}),
    "ParquetSource": ("paths column", {}),
    "DatasetSource": ("name subset split column revision max_documents", {}),
    "BinSource": ("path heldout_path dtype", {}),
    "BytesConfig": ("", {}),
    "CharactersConfig": ("", {}),
    "JsonConfig": ("path", {}),
    "TrainConfig": (
        "seq_len batch_size tokens evaluate_windows loss",
        {
            "evaluate_every": (Idle(GOSSIP, "train.evaluate_every", 3, "neighbours do it"),),
            "schedule": tuple(
                Idle({**GRADIENT, "method.apply.type": kind}, "train.schedule.lr", 0.1, "rate of its own (lr)")
                for kind in ("sgd", "nesterov", "delayed_nesterov")
            ),
            "optimizer": (
                Idle({"method.type": "demo"}, "train.optimizer", {"type": "muon"}, "steps along their mean"),
                Idle(
                    {**SIGNS, "train.optimizer.type": "adamw"}, "train.optimizer.beta1", 0.5, "steps along their mean"
                ),
            ),
            "clip": (Idle(SIGNS, "train.clip", 0.5, "signs, which have no length"),),
            "sample_every": (
                Idle(GOSSIP, "train.sample_every", 3, "neighbours do it"),
                Idle(STAGED, "train.sample_every", 3, NO_MODEL),
            ),
            "sample_prompt": (Idle(STAGED, "train.sample_prompt", "x", NO_MODEL),),
        },
    ),
    "ConstantConfig": ("lr warmup_tokens", {}),
    "CosineConfig": ("lr warmup_tokens total_tokens floor", {}),
    "WsdConfig": (
        "lr warmup_tokens decay_tokens total_tokens",
        {"floor": (Idle({**WSD, "train.schedule.decay_tokens": 0}, "train.schedule.floor", 0.1, "never comes down"),)},
    ),
    "AdamWConfig": ("beta1 beta2 eps weight_decay", {}),
    "MuonConfig": ("momentum beta1 beta2 eps weight_decay", {}),
    "InnerSgdConfig": ("momentum", {}),
    "DdpConfig": ("codec reply_codec merge", {}),
    "PowerSgdConfig": ("rank factors codec reply_codec feedback", {}),
    "FedAvgConfig": ("every codec reply_codec merge among proximal", {}),
    "DiLoCoConfig": ("every lr momentum codec reply_codec merge", {}),
    "PulseConfig": ("every lr momentum codec reply_codec feedback", {}),
    "AutoConfig": ("tune lr momentum", {}),
    "StreamingConfig": ("every fragments overlap mix lr momentum codec reply_codec merge", {}),
    "AsyncDiLoCoConfig": (
        "every lr momentum codec reply_codec",
        {"delay": (Idle({"method.type": "async-diloco", "method.momentum": 0.0}, "method.delay", 3, NO_MOMENTUM),)},
    ),
    "SparseLoCoConfig": (
        "every lr codec reply_codec basis merge",
        {
            "feedback": (Idle({"method.type": "sparseloco", **FP32}, "method.feedback", 0.5, NOTHING_LEFT),),
            "reply_feedback": (
                Idle(
                    {"method.type": "sparseloco", "method.reply_codec.type": "fp32"},
                    *("method.reply_feedback", 0.5, NOTHING_LEFT),
                ),
            ),
        },
    ),
    "DeMoConfig": (
        "codec reply_codec basis momentum merge weight_decay",
        {
            "reply_feedback": (
                Idle(
                    {"method.type": "demo", "method.reply_codec.type": "fp32"},
                    *("method.reply_feedback", 0.5, NOTHING_LEFT),
                ),
            )
        },
    ),
    "CocktailConfig": (
        "every lr codec reply_codec overlap",
        {
            "reply_feedback": (
                Idle(
                    {"method.type": "cocktail", "method.reply_codec.type": "fp32"},
                    *("method.reply_feedback", 0.5, NOTHING_LEFT),
                ),
            )
        },
    ),
    "DPsgdConfig": (
        "every graph mean_every codec reply_codec",
        {"degree": (Idle({"method.type": "dpsgd"}, "method.degree", 3, NO_DEGREE),)},
    ),
    "ChocoConfig": (
        "every graph mean_every step codec reply_codec",
        {"degree": (Idle({"method.type": "choco"}, "method.degree", 3, NO_DEGREE),)},
    ),
    "NoLoCoConfig": ("every mean_every lr momentum pull codec reply_codec", {}),
    "Choices": (
        "every send apply codec reply_codec basis error merge among fragments overlap mix wait merged_by",
        {
            "feedback": (
                Idle({**DELTA, **FP32}, "method.feedback", 0.5, NOTHING_LEFT),
                Refused({**GOSSIP, "method.feedback": 0.5}, "methods with replicas"),
            ),
            "reply_feedback": (Idle({**DELTA, **FP32}, "method.reply_feedback", 0.5, NOTHING_LEFT),),
            "proximal": (Refused({**SIGNS, "method.proximal": 0.5}, "nothing pulls it back"),),
            "tune": (Refused({**SIGNS, "method.tune": 0.1}, "only if no other choice is set"),),
        },
    ),
    "GraphConfig": ("graph mean_every", {"degree": (Idle(GOSSIP, "method.among.degree", 3, NO_DEGREE),)}),
    "SampleConfig": ("share", {}),
    "LowRankConfig": ("rank factors", {}),
    "TrimmedMeanConfig": ("left_out", {}),
    "MultiKrumConfig": ("left_out", {}),
    "SgdConfig": ("lr", {}),
    "NesterovConfig": ("lr momentum", {}),
    "DelayedNesterovConfig": (
        "lr momentum",
        {
            "delay": (Idle(DELAYED, "method.apply.delay", 3, NO_MOMENTUM),),
            "activation": (Idle(DELAYED, "method.apply.activation", 0.1, NO_MOMENTUM),),
        },
    ),
    "SignSgdConfig": ("weight_decay", {}),
    "InnerConfig": ("", {}),
    "MixConfig": ("step", {}),
    "PairNesterovConfig": ("lr momentum pull", {}),
    "ExtensionOuterConfig": ("name source settings", {}),
    "Fp32Config": ("", {}),
    "Bf16Config": ("", {}),
    **{f"{name}Config": ("block", {}) for name in ("Fp8", "Int8", "Int4", "E3m0", "Int2", "Sign")},
    "TopKConfig": ("kept values", {}),
    "NonzeroConfig": ("values", {}),
    "RandomKConfig": ("kept values", {"largest": (Idle(AS_MANY, "method.codec.largest", 64, "largest equals kept"),)}),
    "ExtensionCodecConfig": ("name source settings", {}),
    "PipelineConfig": (
        "micro_batch activations split rebalance_s",
        {"gradients": (Refused({**STAGED, **SUBSPACE}, "have no other codec"),)},
    ),
    "LplrConfig": ("rank", {}),
    "SubspaceConfig": ("rank values seed fixed_std", {}),
    "AqSgdConfig": ("values held_nbytes", {}),
    "SplitConfig": ("by members", {}),
    "TicketAdmission": ("", {}),
    "KeysAdmission": ("keys", {}),
    "OpenAdmission": ("", {}),
    "SyncConfig": (
        "name seed peers samples batch_size method admission orphan_after_s is_strict has_even_leases electors "
        "stewards predecessor trust",
        {},
    ),
    "MembersTrust": ("", {}),
    "RecordedTrust": ("", {}),
    "AuditedTrust": ("numerics micro_batch audit_rate trace_every quarantine", {}),
}


def structs(kind: inspect.Type) -> Iterator[inspect.StructType]:
    if isinstance(kind, inspect.Metadata):
        yield from structs(kind.type)
    elif isinstance(kind, inspect.UnionType):
        for each in kind.types:
            yield from structs(each)
    elif isinstance(kind, inspect.StructType):
        yield kind
        for field in kind.fields:
            yield from structs(field.type)


def described(beside: Settings) -> Settings:
    tree: Settings = {"name": "a", "train": {"tokens": 100, "schedule": {"type": "constant"}}}
    for dotted, value in beside.items():
        replace_field(tree, dotted, value)
    return tree


def idle_in(beside: Settings) -> dict[str, list[str]]:
    tree = described(beside)
    return idle((name for name, _ in leaves(tree)), without_effect(from_tree(tree, RunFile, where="run.toml")))


def test_every_field_of_every_struct_has_a_place() -> None:
    there = {
        struct.cls.__name__: {field.encode_name for field in struct.fields}
        for kind in (RunFile, SyncConfig)
        for struct in structs(inspect.type_info(kind))
    }
    assert {name: {*always.split(), *others} for name, (always, others) in FIELDS.items()} == there


CASES = [(f"{name}.{field}", case) for name, (_, rows) in FIELDS.items() for field, row in rows.items() for case in row]


@pytest.mark.parametrize(("name", "case"), CASES, ids=[name for name, _ in CASES])
def test_a_field_that_does_nothing_is_found_with_the_reason(name: str, case: Idle | Refused) -> None:
    if isinstance(case, Refused):
        with pytest.raises(ConfigError, match=re.escape(case.words)):
            from_tree(described(case.beside), RunFile, where="run.toml")
        return
    assert name.partition(".")[2] in case.field
    (fields,) = [given for why, given in idle_in({**case.beside, case.field: case.value}).items() if case.reason in why]
    assert any(is_in(each, case.field) for each in fields)


TELLING: list[Settings] = [
    {},
    {"method.type": "dpsgd", "method.graph": "random", "method.degree": 3},
    {"method.type": "async-diloco", "method.delay": 3},
    {**GOSSIP, "train.evaluate_every": 0, "train.sample_every": 1},
    {**AS_MANY, "method.codec.largest": 63},
    {"method.type": "sparseloco", "method.feedback": 0.5, "method.reply_feedback": 0.5},
    {"method.type": "powersgd", "method.codec.type": "fp32", "method.feedback": 0.5},
    {"method.type": "ddp", "train.optimizer.type": "adamw", "train.clip": 0.5},
    {**SIGNS, "method.feedback": 0.9, "train.clip": 0.5, "train.schedule.lr": 0.1},
    {**WSD, "train.schedule.decay_tokens": 0, "train.schedule.floor": 0.1, "train.tokens": 2000},
    {name: value for name, value in BIN.items() if "heldout" not in name} | {"data.heldout_fraction": 0.1},
    {"train.sample_every": 3, "train.sample_prompt": "x", "has_even_leases": True},
]


@pytest.mark.parametrize("beside", TELLING)
def test_a_field_that_does_something_is_not_named(beside: Settings) -> None:
    assert idle_in(beside) == {}


@pytest.mark.parametrize("path", [*sorted(HOUSE.glob("recipes/*.toml")), HOUSE / "src/weft/recipes/demo.toml"], ids=str)
def test_no_recipe_has_a_field_that_does_nothing(path: Path) -> None:
    tree = load_tree(path)
    assert idle((name for name, _ in leaves(tree)), without_effect(from_tree(tree, RunFile, where="it"))) == {}


def test_what_a_program_sets_is_what_differs_from_the_defaults() -> None:
    run_file = from_tree(described({"method.type": "dpsgd", "method.degree": 3, "seed": 1}), RunFile, where="it")
    assert set(said(run_file)) == {
        *("name", "seed", "train.tokens", "train.schedule.type", "method.type", "method.degree")
    }
    (line,) = told_idle("config", said(run_file), without_effect(run_file))
    assert (
        line
        == "config: these have no effect here, since graph is ring, and only a random one has a degree: method.degree"
    )
    loop = from_tree({"samples": 5, "method": {"type": "choco", "degree": 3}}, SyncConfig, where="it")
    assert idle(said(loop), of_loop(loop)) == {"graph is ring, and only a random one has a degree": ["method.degree"]}


# --- a machine's settings ---

DEVICE = {
    "device",
    "precision",
    "base_numbers",
    "micro_batch",
    "threads",
    "is_compiled",
    "has_recompute",
    "caps.vram_nbytes",
}
SERVING = {"serve_nbytes", "serve_share"}
STAYING = {"check", "caps.hours", "is_blocking", "max_blocked_s", "checkpoint_every_s", "is_drawing_only", "code"}
STAYING |= SERVING
WAYS = ("transports", "tls.", "iroh.")
MACHINE: dict[machine.Use, set[str]] = {
    "training": set(),
    "whole": {"keep"},
    "site": {"keep", "check", *SERVING},
    "stage": {"keep", "check", "micro_batch", "is_compiled"},
    "loop": {"keep", "check", *DEVICE, "caps.cores", "is_drawing_only", "code", *SERVING},
    "anchor": {*DEVICE, *STAYING},
    "visit": {"keep", *DEVICE, *STAYING, "caps.memory_nbytes", "caps.cores"},
}
# Of all others somebody has looked where they are read.
HEARD = {
    *("name", "max_parameters", "transports", "has_lan", "caps.upload_bps", "caps.download_bps", "caps.day_nbytes"),
    *(f"relay.{name}" for name in ("is_on", "max_streams", "max_streams_per_peer", "max_bps", "idle_s")),
    *(f"tls.{name}" for name in ("host", "port", "advertise", "proxy", "proxy_user", "proxy_password")),
    *(f"iroh.{name}" for name in ("hosts", "port", "relays", "dial_timeout_s")),
    *(f"{way}.handshake_timeout_s" for way in ("tls", "iroh")),
    *(f"{way}.{name}" for way in ("tls", "iroh") for name in ("max_half_open", "max_half_open_per_ip")),
    "tls.bulk_threads",
}
NO_PROXY = {"tls.proxy_user", "tls.proxy_password"}


def fields_of(config: Config, place: str = "") -> Iterator[str]:
    for field in msgspec.structs.fields(config):
        value = getattr(config, field.name)
        if isinstance(value, Config):
            yield from fields_of(value, f"{place}{field.name}.")
        else:
            yield f"{place}{field.name}"


@pytest.mark.parametrize("use", ["training", "whole", "site", "stage", "loop", "anchor", "visit"])
def test_every_setting_of_a_machine_has_a_place(use: machine.Use) -> None:
    fields = set(fields_of(PeerConfig()))
    silent = {name for names in idle(fields, machine.without_effect(PeerConfig(), use)).values() for name in names}
    assert fields == HEARD.union(*MACHINE.values())
    expected = MACHINE.get(use, {name for name in fields if not name.startswith(WAYS)})
    assert silent == expected | NO_PROXY | {"serve_share"}


def test_a_share_for_text_does_something_only_beside_room_for_it() -> None:
    without = from_tree({"serve_share": 0.5}, PeerConfig, where="it")
    found = idle(said(without), machine.without_effect(without, "stage"))
    assert found == {"serve_nbytes is 0: this peer draws no text": ["serve_share"]}
    both = from_tree({"serve_share": 0.5, "serve_nbytes": 10**6}, PeerConfig, where="it")
    assert idle(said(both), machine.without_effect(both, "stage")) == {}


def test_settings_of_what_is_switched_off_do_nothing() -> None:
    settings = from_tree({"relay": {"is_on": False, "max_streams": 5}}, PeerConfig, where="it")
    assert idle(said(settings), machine.without_effect(settings)) == {"relay.is_on is false": ["relay.max_streams"]}
