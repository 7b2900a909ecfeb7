import pickle

import msgspec
import pytest
import torch

from weft.codec.config import Bf16Config, Fp32Config, Int8Config
from weft.config import Config, from_tree
from weft.errors import ConfigError
from weft.sync.merge.mean import merge
from weft.sync.merge.method import Method
from weft.sync.merge.outer import StepContext, build
from weft.sync.merge.reduce import coding_in
from weft.sync.method.choices import (
    AdamWConfig,
    Choices,
    InnerConfig,
    InnerSgdConfig,
    MixConfig,
    MuonConfig,
    NesterovConfig,
    SgdConfig,
)
from weft.sync.method.presets import DdpConfig, DiLoCoConfig, FedAvgConfig, MethodConfig, diloco_defaults, spell_out

DELTA = {"type": "custom", "every": 5, "send": "delta", "apply": {"type": "sgd"}}
WHOLE = {**DELTA, "merged_by": "all"}


class Holder(Config, frozen=True, kw_only=True):
    method: MethodConfig


def read(tree: dict[str, object], num_peers: int = 4) -> Choices:
    return spell_out(from_tree({"method": tree}, Holder, where="run.toml").method, num_peers)


def randn(seed: int, num: int = 1000) -> torch.Tensor:
    return torch.randn(num, generator=torch.Generator().manual_seed(seed))


def test_rows_spell_out_the_table() -> None:
    assert read({"type": "ddp"}) == Choices(every=1, send="gradient", apply=InnerConfig(), codec=Bf16Config())
    assert read({"type": "fedavg", "every": 7}) == Choices(every=7, send="delta", apply=SgdConfig(lr=1.0))
    assert read({"type": "diloco", "every": 50, "lr": 0.4}) == Choices(
        every=50, send="delta", apply=NesterovConfig(lr=0.4, momentum=0.9), codec=Int8Config()
    )


@pytest.mark.parametrize(("num_peers", "lr"), [(0, 0.4), (1, 0.4), (2, 0.6), (4, 0.6), (8, 0.8), (64, 0.8)])
def test_diloco_rates_follow_the_scaling_law_table(num_peers: int, lr: float) -> None:
    assert diloco_defaults(num_peers) == (lr, 0.9)
    assert spell_out(DiLoCoConfig(), num_peers).apply == NesterovConfig(lr=lr, momentum=0.9)


@pytest.mark.parametrize(
    ("codec", "step"),
    [
        ({"type": "top_k"}, 0.0625),
        ({"type": "top_k", "kept": 256}, 0.125),
        ({"type": "random_k", "kept": 410, "largest": 64}, 0.0312),
        ({"type": "sign"}, 0.4),
        ({"type": "bf16"}, 1.0),
    ],
)
def test_the_step_of_choco_follows_from_its_codec(codec: dict[str, object], step: float) -> None:
    assert read({"type": "choco", "codec": codec}).apply == MixConfig(step=step)
    assert read({"type": "choco", "codec": codec, "step": 0.3}).apply == MixConfig(step=0.3)


def test_a_custom_mix_is_taken_as_it_is() -> None:
    choices = read(
        {
            "type": "custom",
            "every": 3,
            "send": "delta",
            "apply": {"type": "sgd", "lr": 0.5},
            "codec": {"type": "int8", "block": 64},
            "reply_codec": {"type": "fp32"},
        }
    )
    assert choices.codec == Int8Config(block=64)
    assert choices.reply_codec == Fp32Config()
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(choices), type=Choices) == choices


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"type": "custom", "every": 5, "send": "gradient", "apply": {"type": "sgd"}}, "set every = 1"),
        ({"type": "custom", "every": 5, "send": "delta", "apply": {"type": "inner"}}, "already holds training steps"),
        ({"type": "custom", "every": 0, "send": "delta", "apply": {"type": "sgd"}}, "every"),
        ({"type": "custom", "every": 1, "send": "weights", "apply": {"type": "sgd"}}, "send"),
        ({"type": "diloco", "momentum": 1.0}, "momentum"),
        ({"type": "diloco", "lr": 0.0}, "lr"),
        ({"type": "fedavg", "lr": 1.0}, "has no field"),
        ({"type": "dilocoo"}, "dilocoo"),
        ({"type": "ddp", "codec": {"type": "int5"}}, "int5"),
        ({"type": "diloco", "codec": {"type": "top_k"}}, "set feedback = 0.95"),
        ({"type": "sparseloco", "reply_feedback": None}, "reply_feedback"),
        ({**WHOLE, "codec": {"type": "int8"}, "reply_feedback": 1.0}, "reply_feedback needs one owner"),
        ({**WHOLE, "codec": {"type": "int8"}, "reply_codec": {"type": "sign"}}, "none keeps that for later"),
        ({**WHOLE, "tune": 0.05}, "tune"),
        ({**DELTA, "wait": "ready", "fragments": 4}, "fragments: 4 follow the round's number"),
        ({**DELTA, "error": "local", "feedback": 1.0, "mix": 0.5}, "mix: 0.5 replaces a share"),
    ],
)
def test_a_mix_that_cannot_work_is_refused(tree: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(tree)


def test_choices_of_another_process_are_written_alike() -> None:
    choices = read({"type": "fedavg", "every": 5})
    told = pickle.loads(pickle.dumps(choices))
    assert msgspec.msgpack.encode(told) == msgspec.msgpack.encode(choices)


def test_state_is_named_by_row() -> None:
    def names(config: MethodConfig) -> tuple[str, ...]:
        return ("outer", *Method(spell_out(config, 4), AdamWConfig()).init(0))

    assert names(DdpConfig()) == ("outer", "moment1", "moment2")
    assert names(FedAvgConfig()) == ("outer",)
    assert names(DiLoCoConfig()) == ("outer", "momentum")


def test_reply_codec_is_the_codec_unless_named() -> None:
    coding = coding_in(spell_out(DiLoCoConfig(), 2), 1)
    assert coding.reply.nbytes(1000) == coding.codec.nbytes(1000)


def test_where_no_results_travel_they_are_whole_unless_a_codec_is_named() -> None:
    choices = Choices(every=5, send="delta", apply=SgdConfig(), codec=Int8Config(), merged_by="all")
    assert coding_in(choices, 1).reply.nbytes(1000) == 4000
    named = msgspec.structs.replace(choices, reply_codec=Bf16Config())
    assert coding_in(named, 1).reply.nbytes(1000) == 2000


def test_delta_is_outer_minus_local_and_gradient_is_itself() -> None:
    outer, local = randn(0), randn(1)
    assert torch.equal(Method(spell_out(FedAvgConfig(), 2), AdamWConfig()).contribution(outer, local), outer - local)
    assert Method(spell_out(DdpConfig(), 2), AdamWConfig()).contribution(outer, local) is local


def test_one_fedavg_peer_ends_where_its_inner_steps_ended() -> None:
    outer = randn(0)
    local = outer + 2**-8 * torch.sign(randn(1))  # small enough that outer - local is exact
    method = Method(spell_out(FedAvgConfig(), 1), AdamWConfig())
    delta = method.contribution(outer, local)
    method.apply(outer, method.init(1000), merge([(64, delta)]), StepContext(number=1))
    torch.testing.assert_close(outer, local, rtol=0, atol=1e-7)


def test_one_ddp_peer_is_plain_training() -> None:
    outer, method = randn(0), Method(spell_out(DdpConfig(), 1), AdamWConfig(weight_decay=0.2))
    plain, optimizer = outer.clone(), build(AdamWConfig(weight_decay=0.2))
    state, plain_state = method.init(1000), optimizer.init(1000)
    for t in range(1, 6):
        context = StepContext(number=t, lr=1e-3, num_decayed=600, max_norm=1.0)
        method.apply(outer, state, merge([(512, method.contribution(outer, randn(t)))]), context)
        optimizer.apply(plain, plain_state, randn(t), context)
    assert torch.equal(outer, plain)


def test_fedavg_of_one_step_is_ddp_with_sgd() -> None:
    """Four peers, one SGD step each, rates a power of two so that outer - (outer - lr g) is lr g without rounding."""
    lr, tokens = 2.0**-6, [100, 200, 50, 150]
    ddp = Method(Choices(every=1, send="gradient", apply=SgdConfig(lr=lr), codec=Fp32Config()), AdamWConfig())
    fedavg = Method(spell_out(FedAvgConfig(every=1, codec=Fp32Config()), 4), AdamWConfig())
    start = (randn(0) * 256).round() / 256
    by_ddp, by_fedavg = start.clone(), start.clone()
    for t in range(1, 4):
        gradients = [(randn(10 * t + peer) * 64).round() / 64 for peer in range(4)]
        merged = merge((w, ddp.contribution(by_ddp, g)) for w, g in zip(tokens, gradients, strict=True))
        deltas = [fedavg.contribution(by_fedavg, by_fedavg - lr * g) for g in gradients]
        ddp.apply(by_ddp, ddp.init(1000), merged, StepContext(number=t))
        fedavg.apply(by_fedavg, fedavg.init(1000), merge(zip(tokens, deltas, strict=True)), StepContext(number=t))
        if t == 1:
            assert torch.equal(by_ddp, by_fedavg)  # still on the dyadic grid: nothing was rounded
    torch.testing.assert_close(by_ddp, by_fedavg, rtol=0, atol=1e-6)
    assert not torch.equal(by_ddp, start)


def test_an_optimizer_that_machines_compute_differently_is_no_step_of_all() -> None:
    with pytest.raises(ConfigError, match="muon"):
        Method(spell_out(DdpConfig(), 2), MuonConfig())
    assert not Method(spell_out(FedAvgConfig(), 2), MuonConfig()).init(0)
    assert list(Method(spell_out(DdpConfig(), 2), InnerSgdConfig(momentum=0.9)).init(0)) == ["momentum"]


def test_a_gradient_has_no_proximal_term() -> None:
    with pytest.raises(ConfigError, match="proximal"):
        Choices(every=1, send="gradient", apply=SgdConfig(), proximal=0.1)
