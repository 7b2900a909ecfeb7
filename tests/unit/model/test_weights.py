import errno
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from weft.errors import ConfigError, DiskFull
from weft.model import weights
from weft.model.config import ModelConfig, num_parameters
from weft.model.families import config_from_hf, config_to_hf, family_of, hf_tensors
from weft.model.initial import initial_vector
from weft.model.weights import read_config, read_folder, write_folder

Make = Callable[..., ModelConfig]


@pytest.fixture
def folder(small: Make, tmp_path: Path) -> Path:
    write_folder(tmp_path / "model", small(), initial_vector(small(), 1))
    return tmp_path / "model"


def edit_config(folder: Path, **fields: Any) -> None:
    file = folder / "config.json"
    tree = {**json.loads(file.read_bytes()), **fields}
    file.write_text(json.dumps({key: value for key, value in tree.items() if value is not ...}))


def edit_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_their_tensors_cover_the_vector_once(variant: ModelConfig) -> None:
    covered = torch.zeros(num_parameters(variant), dtype=torch.int64)
    for tensor in hf_tensors(variant):
        covered[tensor.offset : tensor.stop] += 1
    assert covered.eq(1).all()


def test_a_folder_reads_back_bit_identical(variant: ModelConfig, tmp_path: Path) -> None:
    vector = initial_vector(variant, 1)
    write_folder(tmp_path / "deep" / "model", variant, vector)
    config, again = read_folder(tmp_path / "deep" / "model")
    assert config == variant
    assert torch.equal(again, vector)


def test_many_files_read_back_like_one(small: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "MAX_SHARD_NBYTES", 3000)
    vector = initial_vector(small(), 1)
    write_folder(tmp_path / "model", small(), vector)
    files = sorted((tmp_path / "model").glob("model-*.safetensors"))
    assert len(files) > 2
    assert files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    index = json.loads((tmp_path / "model" / "model.safetensors.index.json").read_bytes())
    assert index["metadata"]["total_size"] == 4 * vector.numel()
    for file in files:
        with safe_open(file, framework="pt") as reader:
            assert all(index["weight_map"][name] == file.name for name in reader.keys())  # noqa: SIM118
    assert torch.equal(read_folder(tmp_path / "model")[1], vector)


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3"])
def test_config_maps_to_their_words_and_back(model_type: str, small: Make) -> None:
    fields: dict[str, Any] = {
        "llama": {"rope_scaling": {"factor": 4.0, "original_seq_len": 8}, "rope_theta": 5e5},
        "mistral": {"width": 18, "head_width": 4},
        "qwen2": {"has_qkv_bias": True},
        "qwen3": {"has_qk_norm": True, "head_width": 6, "norm_eps": 1e-6},
    }[model_type]
    config = small(**fields)
    assert family_of(config) == model_type
    tree = config_to_hf(config, dtype="float32", stop_id=None)
    assert tree["model_type"] == model_type
    assert config_from_hf(json.dumps(tree).encode(), "config.json") == config


def test_old_and_new_spellings_of_rotary_settings_mean_the_same(folder: Path, small: Make) -> None:
    edit_config(
        folder, rope_theta=..., rope_scaling=..., rope_parameters={"rope_type": "default", "rope_theta": 12345.0}
    )
    assert read_config(folder) == small(rope_theta=12345.0)
    edit_config(folder, rope_parameters=..., rope_theta=12345.0)
    assert read_config(folder) == small(rope_theta=12345.0)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"model_type": "gpt2"}, "gpt2.*llama, mistral, qwen2, qwen3"),
        ({"hidden_size": "wide"}, "Expected `int`"),
        ({"hidden_act": "gelu"}, "hidden_act: Found 'gelu'"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"model_type": "mistral", "attention_bias": True, "sliding_window": None}, "attention_bias"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "longrope"),
        ({"rope_scaling": {"type": "linear"}}, "Expected `"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "Expected `"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config: Found 'gptq'"),
        ({"num_key_value_heads": 3}, "num_kv_heads"),
        ({"vocab_size": 1 << 50}, "vocab_size"),
    ],
)
def test_what_weft_would_compute_otherwise_is_refused_by_file_and_field(
    fields: dict[str, Any], words: str, folder: Path
) -> None:
    edit_config(folder, **fields)
    with pytest.raises(ConfigError, match=rf"(?s)config\.json: .*{words}"):
        read_config(folder)


@pytest.mark.parametrize(
    "fields",
    [
        {"model_type": "mistral", "sliding_window": None},
        {"model_type": "mistral", "sliding_window": 32},
        {"model_type": "qwen3", "use_sliding_window": False, "sliding_window": 16, "head_dim": 4},
        {
            "model_type": "qwen2",
            "use_sliding_window": True,
            "sliding_window": 16,
            "layer_types": ["full_attention"] * 2,
        },
    ],
)
def test_a_window_that_hides_nothing_is_none(fields: dict[str, Any], folder: Path) -> None:
    edit_config(folder, **fields)
    config = read_config(folder)
    assert config.max_seq_len == 32
    assert [config.window_of(layer) for layer in range(2)] == [None, None]


@pytest.mark.parametrize(
    ("fields", "windows"),
    [
        ({"model_type": "mistral", "sliding_window": 16}, [16, 16]),
        ({"model_type": "mistral", "sliding_window": ..., "max_position_embeddings": 8192}, [4096, 4096]),
        ({"model_type": "qwen3", "use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}, [None, 16]),
    ],
)
def test_a_window_that_is_shorter_than_the_context_is_kept(
    fields: dict[str, Any], windows: list[int | None], folder: Path
) -> None:
    edit_config(folder, **fields)
    assert [read_config(folder).window_of(layer) for layer in range(2)] == windows


def test_broken_json_names_the_file(folder: Path) -> None:
    (folder / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json: not JSON"):
        read_config(folder)


def test_a_missing_folder_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere.config\.json: no such file"):
        read_folder(tmp_path / "nowhere")


def test_a_missing_tensor_is_named(folder: Path) -> None:
    edit_weights(folder, lambda tensors: tensors.pop("model.norm.weight"))
    with pytest.raises(ConfigError, match=r"1 of 21 tensors are missing, first model\.norm\.weight"):
        read_folder(folder)


def test_an_extra_tensor_is_named(folder: Path) -> None:
    edit_weights(folder, lambda tensors: tensors.update(extra=torch.ones(2)))
    with pytest.raises(ConfigError, match=r"model\.safetensors: tensor extra has no place"):
        read_folder(folder)


def test_a_wrong_shape_is_named_with_both_shapes(folder: Path) -> None:
    edit_weights(folder, lambda tensors: tensors.update({"model.norm.weight": torch.ones(17)}))
    with pytest.raises(ConfigError, match=r"model\.safetensors: tensor model\.norm\.weight has shape \[17\].*\[16\]"):
        read_folder(folder)


def test_a_quantised_tensor_is_named_with_its_dtype(folder: Path) -> None:
    edit_weights(folder, lambda tensors: tensors.update({"model.norm.weight": torch.ones(16, dtype=torch.int8)}))
    with pytest.raises(ConfigError, match=r"tensor model\.norm\.weight has dtype I8"):
        read_folder(folder)


def test_a_cut_off_file_is_named(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(ConfigError, match=r"model\.safetensors: cannot be read as safetensors"):
        read_folder(folder)


def test_derived_angles_and_a_repeated_tied_head_are_no_error(small: Make, tmp_path: Path) -> None:
    config = small(is_tied=True)
    vector = initial_vector(config, 1)
    write_folder(tmp_path / "model", config, vector)

    def add(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(2)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    edit_weights(tmp_path / "model", add)
    assert torch.equal(read_folder(tmp_path / "model")[1], vector)


@pytest.mark.parametrize("name", ["../model.safetensors", "sub/x.safetensors", 7, ""])
def test_an_index_cannot_lead_out_of_the_folder(name: object, folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
    with pytest.raises(ConfigError, match=r"index\.json: no index of safetensors files"):
        read_folder(folder)


def test_an_index_beside_a_whole_file_is_not_asked(folder: Path) -> None:
    expected = read_folder(folder)[1]
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "gone.safetensors"}}))
    assert torch.equal(read_folder(folder)[1], expected)


def test_an_index_that_names_a_missing_file_is_refused_by_that_file(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "gone.safetensors"}}))
    with pytest.raises(ConfigError, match=r"gone\.safetensors: cannot be read"):
        read_folder(folder)


def test_a_tensor_in_two_files_is_refused(folder: Path) -> None:
    (folder / "twin.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    (folder / "model.safetensors").rename(folder / "one.safetensors")
    names = {"a": "one.safetensors", "b": "twin.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    with pytest.raises(ConfigError, match=r"twin\.safetensors: tensor .* is also in one\.safetensors"):
        read_folder(folder)


def test_pickled_weights_are_not_read(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="reads no pickled weights"):
        read_folder(folder)


def test_an_export_overwrites_nothing(folder: Path, small: Make) -> None:
    before = (folder / "model.safetensors").read_bytes()
    with pytest.raises(ConfigError, match="exists; weft overwrites no folder"):
        write_folder(folder, small(), initial_vector(small(), 2))
    assert (folder / "model.safetensors").read_bytes() == before


def test_an_export_fills_an_empty_folder(small: Make, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    write_folder(tmp_path / "empty", small(), initial_vector(small(), 2))
    assert read_config(tmp_path / "empty") == small()
    assert [file.name for file in tmp_path.iterdir()] == ["empty"]


def test_an_export_fills_the_folder_where_somebody_stands_and_one_behind_a_link(
    small: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to("there")
    monkeypatch.chdir(tmp_path / "here")
    for path in (Path(), tmp_path / "link"):
        write_folder(path, small(), initial_vector(small(), 2))
    assert read_config(tmp_path / "here") == read_config(tmp_path / "there") == small()
    assert (tmp_path / "link").is_symlink()


def test_a_vector_of_another_config_is_not_exported(small: Make, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the vector 5 numbers"):
        write_folder(tmp_path / "model", small(), torch.zeros(5))


@pytest.mark.parametrize(("code", "kind"), [(errno.ENOSPC, DiskFull), (errno.EACCES, ConfigError)])
def test_a_failed_export_leaves_nothing_behind(
    code: int, kind: type[Exception], small: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(handle: int) -> None:
        raise OSError(code, "as the test demands")

    monkeypatch.setattr(weights.os, "fsync", fail)
    with pytest.raises(kind, match=str(tmp_path / "model")):
        write_folder(tmp_path / "model", small(), initial_vector(small(), 1))
    assert list(tmp_path.iterdir()) == []


def test_tokenizer_bytes_pass_through(small: Make, tmp_path: Path) -> None:
    blob = b'{"added_tokens": [{"id": 10, "content": "<end>"}],   "model": {}}'
    write_folder(tmp_path / "with", small(), initial_vector(small(), 1), blob, stop_id=10)
    write_folder(tmp_path / "without", small(), initial_vector(small(), 1))
    assert (tmp_path / "with" / "tokenizer.json").read_bytes() == blob
    assert not (tmp_path / "without" / "tokenizer.json").exists()
    assert json.loads((tmp_path / "with" / "tokenizer_config.json").read_bytes())["eos_token"] == "<end>"
    assert json.loads((tmp_path / "with" / "config.json").read_bytes())["eos_token_id"] == 10
