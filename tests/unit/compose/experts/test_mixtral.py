"""Mixtures as folders of mixtral: every number once, and in transformers the same logits."""

import contextlib
import io
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from unit.compose.experts.test_mixture import evaluated, mixture, tokens_of
from weft.compose.experts.mixtral import is_mixture, mixtral_config, mixtral_tensors, read_mixture, write_mixture
from weft.compose.experts.mixture import mixture_layout
from weft.data.tokenizer import ByteTokenizer
from weft.engine.batch import Piece
from weft.engine.numbers import Kind
from weft.engine.step import KeysAndValues, Stepper, Weights
from weft.errors import ConfigError

FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"is_tied": True},
    "wide heads": {"head_width": 10, "num_kv_heads": 1},
    "windowed": {"window": 5},
    "scaled": {"rope_scaling": {"factor": 8.0, "original_seq_len": 16}, "rope_theta": 5e5},
}


def theirs(folder: Path) -> Any:
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore", DeprecationWarning)
        transformers = pytest.importorskip(
            "transformers", reason="transformers is not installed: pip install weft[dev]"
        )
        transformers.utils.logging.disable_progress_bar()
        return transformers.AutoModelForCausalLM.from_pretrained(folder).eval()


@pytest.mark.parametrize("fields", FORMS.values(), ids=FORMS.keys())
def test_their_tensors_cover_the_vector_once(fields: dict[str, Any]) -> None:
    config, _ = mixture(**fields)
    covered = torch.zeros(mixture_layout(config).num_parameters, dtype=torch.int64)
    names = list[str]()
    for tensor in mixtral_tensors(config):
        names.append(tensor.name)
        covered[tensor.offset : tensor.stop] += 1
    assert covered.eq(1).all()
    assert len(set(names)) == len(names)
    assert "model.layers.1.block_sparse_moe.experts.2.w3.weight" in names
    assert "model.layers.0.block_sparse_moe.gate.weight" in names


@pytest.mark.parametrize("fields", FORMS.values(), ids=FORMS.keys())
def test_a_folder_is_read_as_it_was_written(fields: dict[str, Any], tmp_path: Path) -> None:
    config, vector = mixture(num=4, top_k=2, **fields)
    write_mixture(tmp_path / "mixture", config, vector)
    assert is_mixture(tmp_path / "mixture")
    assert not is_mixture(tmp_path)
    found, numbers = read_mixture(tmp_path / "mixture")
    assert found == config
    assert numbers.equal(vector)
    (tmp_path / "mixture" / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="holds neither"):
        read_mixture(tmp_path / "mixture")
    (tmp_path / "mixture" / "config.json").write_text('{"model_type": "mixtral"}')
    with pytest.raises(ConfigError, match="no config of a mixtral"):
        read_mixture(tmp_path / "mixture")


@pytest.mark.parametrize("kind", ["fp32", "int8"])
@pytest.mark.parametrize("top_k", [1, 2])
def test_an_engine_computes_the_same(kind: Kind, top_k: int) -> None:
    config, vector = mixture(num=4, top_k=top_k)
    tokens = tokens_of(config)[0].tolist()
    weights = Weights(config.model, vector, kind, spans=mixture_layout(config), top=config.top_k)
    stepper = Stepper(weights, KeysAndValues(config.model, 2, torch.device("cpu"), kind))
    pieces = Piece(tokens[:5], 0, [1], 5), Piece(tokens[5:], 5, [1], len(tokens) - 5)
    rows = torch.cat([stepper.step([each]) for each in pieces])
    expected = evaluated(config, vector)(torch.tensor([tokens]))[0]
    assert (rows - expected).abs().max() < (1e-4 if kind == "fp32" else 0.1 * expected.abs().max())


def test_a_router_has_no_exact_numbers() -> None:
    config, vector = mixture()
    with pytest.raises(ConfigError, match="no exact numbers"):
        Weights(config.model, vector, "exact", spans=mixture_layout(config), top=2)


@pytest.mark.full
@pytest.mark.parametrize("top_k", [1, 2])
@pytest.mark.parametrize("fields", FORMS.values(), ids=FORMS.keys())
def test_transformers_computes_our_logits(
    fields: dict[str, Any], top_k: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    config, vector = mixture(num=4, top_k=top_k, **fields)
    vector[mixture_layout(config).num_decayed :] += 0.3 * torch.randn(
        vector.numel() - mixture_layout(config).num_decayed, generator=torch.Generator().manual_seed(1)
    )
    write_mixture(tmp_path / "mixture", config, vector)
    model, tokens = theirs(tmp_path / "mixture"), tokens_of(config)
    assert type(model).__name__ == "MixtralForCausalLM"
    assert model.num_parameters() == vector.numel()
    with torch.no_grad():
        expected = model(tokens).logits
    assert expected.abs().max() > 1
    torch.testing.assert_close(evaluated(config, vector)(tokens), expected, atol=1e-4, rtol=1e-4)


def test_a_folder_has_what_was_given(tmp_path: Path) -> None:
    config, vector = mixture()
    write_mixture(tmp_path / "m", config, vector, ByteTokenizer().to_json(), stop_id=256, dtype="bfloat16")
    tree = json.loads((tmp_path / "m" / "config.json").read_bytes())
    assert (tree["model_type"], tree["num_local_experts"], tree["num_experts_per_tok"]) == ("mixtral", 3, 2)
    assert (tree["torch_dtype"], tree["eos_token_id"]) == ("bfloat16", 256)
    assert (tmp_path / "m" / "tokenizer.json").read_bytes() == ByteTokenizer().to_json()
    with pytest.raises(ConfigError, match="overwrites no folder"):
        write_mixture(tmp_path / "m", config, vector)


@pytest.mark.parametrize("fields", [{"has_qk_norm": True}, {"has_qkv_bias": True}, {"window": 4, "first_windowed": 1}])
def test_what_no_mixtral_has_is_not_exported(fields: dict[str, Any], tmp_path: Path) -> None:
    config, vector = mixture(**fields)
    with pytest.raises(ConfigError, match="no mixtral has it"):
        write_mixture(tmp_path / "m", config, vector)
    assert not (tmp_path / "m").exists()


def test_a_vector_of_another_config_is_not_exported(tmp_path: Path) -> None:
    config, vector = mixture()
    with pytest.raises(ConfigError, match="belongs to another config"):
        write_mixture(tmp_path / "m", config, vector[1:])
    assert mixtral_config(config, dtype="float32", stop_id=None)["sliding_window"] is None
