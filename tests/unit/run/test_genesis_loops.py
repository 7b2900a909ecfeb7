"""Runs whose members train in loops of their own, as a genesis: what is refused, and what is read of one."""

from typing import Any

import msgspec
import pytest

from weft import wire
from weft.errors import ConfigError, TooLarge
from weft.ids import Digest, RunId
from weft.run.amend import amended, amendment, first_charter
from weft.run.config import FrozenConfig, LoopConfig, SyncConfig, TensorConfig
from weft.run.genesis import on_corpus, read_run
from weft.run.outline import TicketAdmission, read_outline
from weft.sync.amendments import amended_settings
from weft.sync.method.presets import DdpConfig, DeMoConfig, FedAvgConfig, MethodConfig, PowerSgdConfig, spell_out


def config(**fields: Any) -> LoopConfig:
    usual: dict[str, Any] = {
        "name": "loops",
        "seed": 0,
        "initial": wire.digest(b"any"),
        "method": spell_out(FedAvgConfig(every=5), 2),
        "admission": TicketAdmission(),
        "orphan_after_s": None,
        "is_strict": False,
        "tensors": (TensorConfig(name="weight", dtype="float32", shape=(2, 3)),),
        "samples": 100,
        "batch_size": 4,
    }
    return LoopConfig(**(usual | fields))


def test_a_run_of_loops_is_read_as_what_it_is() -> None:
    run = config()
    assert read_run(wire.encode(run), 1000) == run
    assert run.vector.num == 6


@pytest.mark.parametrize("method", [DdpConfig(), PowerSgdConfig(), DeMoConfig(), FedAvgConfig(proximal=0.1)])
def test_a_method_that_needs_gradients_is_refused(method: MethodConfig) -> None:
    with pytest.raises(ConfigError, match="your own loop"):
        SyncConfig(samples=10, method=method)


def test_a_strangers_method_that_needs_gradients_is_refused() -> None:
    tree = msgspec.to_builtins(config()) | {"method": msgspec.to_builtins(spell_out(DdpConfig(), 2))}
    with pytest.raises(ConfigError, match="gradients"):
        read_run(wire._encoder.encode(tree), 1000)


def test_a_name_that_is_used_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match="once"):
        config(frozen=(FrozenConfig(name="weight", dtype="int8", shape=(1,), digest=wire.digest(b"")),))


def test_more_numbers_than_this_machine_takes_are_refused() -> None:
    with pytest.raises(TooLarge):
        read_run(wire.encode(config()), 5)


def test_an_anchor_reads_how_long_the_run_is() -> None:
    run = config()
    outline = read_outline(wire.encode(run), RunId(Digest(run.run)))
    assert (outline.data, outline.total_tokens, outline.tokens_per_step) == (None, 100, 4)


def test_what_needs_a_transformer_says_so() -> None:
    with pytest.raises(ConfigError, match=r"weft\.Sync"):
        on_corpus(config())


def test_samples_and_steps_are_amended_and_nothing_gets_longer_samples() -> None:
    run = config()
    charter = first_charter(run)
    more = amendment(charter.settings, {"train.tokens": 200, "method.every": 7}, "longer")
    now = msgspec.structs.replace(charter, settings=amended_settings(charter, more))
    assert amended(run, now) == config(samples=200, method=spell_out(FedAvgConfig(every=7), 2))
    with pytest.raises(ValueError, match="more than the 1"):
        amended_settings(charter, amendment(charter.settings, {"train.seq_len": 2}, "longer"))
