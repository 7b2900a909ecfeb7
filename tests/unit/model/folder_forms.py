"""Model folders as public models ship them, one of each form: transformers' loss, or a refusal.

A form is a model of transformers, saved, and what is then done to the folder.
"""

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

SHAPE: dict[str, Any] = {
    "vocab_size": 67,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "bos_token_id": None,
    "eos_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
DEEP = "[" * 3000 + "]" * 3000

Edit = Callable[[Path], None]


@dataclass(frozen=True)
class Form:
    """`refused` is a pattern of the refusal; where it is None the folder gives transformers' loss.

    `ours` are edits that transformers does not take: the loss is that before them.
    """

    name: str
    kind: str = "Llama"
    fields: dict[str, Any] = field(default_factory=dict)
    edits: tuple[Edit, ...] = ()
    ours: tuple[Edit, ...] = ()
    refused: str | None = None


def config(**fields: Any) -> Edit:
    """Return what sets fields of config.json; `...` removes one."""

    def edit(folder: Path) -> None:
        path = folder / "config.json"
        tree = json.loads(path.read_text())
        for name, value in fields.items():
            tree.pop(name, None) if value is ... else tree.update({name: value})
        path.write_text(json.dumps(tree))

    return edit


def text(name: str, change: Callable[[str], str | bytes]) -> Edit:
    def edit(folder: Path) -> None:
        changed = change((folder / name).read_text() if (folder / name).exists() else "")
        (folder / name).write_bytes(changed if isinstance(changed, bytes) else changed.encode())

    return edit


def tensors(change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Edit:
    def edit(folder: Path) -> None:
        path = folder / "model.safetensors"
        save_file(change(load_file(path)), path, metadata={"format": "pt"})

    return edit


def _with_field(more: str) -> Edit:
    return text("config.json", lambda whole: f"{whole.rstrip()[:-1]}, {more}}}")


def _cut(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def _renamed(old: str, new: str) -> Edit:
    return lambda folder: shutil.move(folder / old, folder / new) and None


def forms() -> Iterator[Form]:
    rope = {"rope_theta": 10_000.0}
    yield Form("llama")
    yield Form("llama, tied", fields={"tie_word_embeddings": True})
    yield Form("llama, without groups", fields={"num_key_value_heads": 4})
    yield Form("llama, wide heads", fields={"head_dim": 12})
    yield Form("llama, other base", fields={"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}})
    yield Form("llama, biases of attention", fields={"attention_bias": True})
    yield Form("llama, biases of attention, tied", fields={"attention_bias": True, "tie_word_embeddings": True})
    scalings: dict[str, dict[str, Any]] = {
        "llama3": LLAMA3,
        "linear": {"rope_type": "linear", "factor": 2.5},
        "dynamic": {"rope_type": "dynamic", "factor": 4.0},
        "yarn": YARN,
        "yarn with its own attention factor": {**YARN, "attention_factor": 1.25},
        "yarn with mscale": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5},
        "yarn with other turns": {**YARN, "beta_fast": 16.0, "beta_slow": 2.0},
        "yarn, not rounded": {**YARN, "truncate": False},
    }
    for name, scaling in scalings.items():
        yield Form(f"llama, {name}", fields={"rope_parameters": {**rope, **scaling}})
        old = {("type" if key == "rope_type" else key): value for key, value in scaling.items()}
        spelled = config(rope_parameters=..., rope_theta=10_000.0, rope_scaling=old)
        yield Form(f"llama, {name}, old spelling", edits=(spelled,))
    yield Form("qwen3, yarn", "Qwen3", {"head_dim": 16, "rope_parameters": {**rope, **YARN}})
    yield Form("mistral", "Mistral", {"sliding_window": None})
    yield Form("mistral, a window that hides nothing", "Mistral", {"sliding_window": 64})
    yield Form("mistral, a window that bites", "Mistral", {"sliding_window": 7})
    yield Form("mistral, a window of one", "Mistral", {"sliding_window": 1})
    yield Form("mistral, an uneven width", "Mistral", {"hidden_size": 30, "head_dim": 8, "num_key_value_heads": 1})
    yield Form("qwen2", "Qwen2")
    yield Form("qwen2, tied", "Qwen2", {"tie_word_embeddings": True})
    yield Form("qwen2, a window that is switched off", "Qwen2", {"sliding_window": 7, "use_sliding_window": False})
    windowed = {"sliding_window": 7, "use_sliding_window": True}
    yield Form("qwen2, windows in the last layers", "Qwen2", {**windowed, "max_window_layers": 1})
    yield Form("qwen2, windows in all layers", "Qwen2", {**windowed, "max_window_layers": 0})
    yield Form("qwen2, windows in no layer", "Qwen2", {**windowed, "max_window_layers": 3})
    yield Form("qwen3", "Qwen3", {"head_dim": 16})
    yield Form("qwen3, tied", "Qwen3", {"head_dim": 8, "tie_word_embeddings": True})
    yield Form("qwen3, windows in the last layers", "Qwen3", {**windowed, "head_dim": 16, "max_window_layers": 2})
    mixed = ["sliding_attention", "full_attention", "sliding_attention"]
    yield Form(
        "qwen2, windows in between",
        "Qwen2",
        {**windowed, "layer_types": mixed},
        refused="layer_types: Found windows in other layers",
    )
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        yield Form(f"llama in {dtype}", edits=(tensors(lambda t, d=dtype: {n: x.to(d) for n, x in t.items()}),))
    mark = "\ufeff"
    yield Form("a byte order mark before config.json", ours=(text("config.json", lambda whole: mark + whole),))
    yield Form("config.json in UTF-16", ours=(text("config.json", lambda whole: whole.encode("utf-16")),))
    yield Form("NaN and Infinity in config.json", edits=(_with_field('"a": NaN, "b": [Infinity, -Infinity]'),))
    yield Form("whole numbers with a point", ours=(config(vocab_size=67.0, max_position_embeddings=64.0),))
    yield Form("null where transformers has a default", ours=(config(attention_bias=None, rope_scaling=None),))
    yield Form("a number of 40 digits in config.json", edits=(_with_field('"a": ' + "9" * 40),))
    yield Form("no max_position_embeddings, as llama 1", edits=(config(max_position_embeddings=...),))
    yield Form(
        "no num_key_value_heads, as llama 1",
        fields={"num_key_value_heads": 4},
        edits=(config(num_key_value_heads=...),),
    )
    yield Form("rotary angles among the tensors", edits=(tensors(_with_angles),))
    yield Form("a head that is the embedding", fields={"tie_word_embeddings": True}, edits=(tensors(_with_head(1.0)),))
    yield Form("an index that is stale beside the whole file", edits=(text("model.safetensors.index.json", _stale),))
    yield Form(
        "files nobody reads",
        edits=(text("README.md", str), text("pytorch_model.bin", lambda _: "x"), text("a.gguf", str)),
    )
    refused: dict[str, tuple[tuple[Edit, ...], str]] = {
        "another head": ((config(tie_word_embeddings=True),), "lm_head.weight is not model.embed_tokens.weight"),
        "deep brackets in config.json": ((_with_field(f'"x": {DEEP}'),), "nested too deep"),
        "config.json cut short": ((text("config.json", lambda whole: whole[:40]),), "config.json: not JSON"),
        "config.json is empty": ((text("config.json", lambda _: ""),), "config.json: not JSON"),
        "config.json is a list": ((text("config.json", lambda _: "[]"),), "config.json: Expected `object`"),
        "config.json is a page": ((text("config.json", lambda _: "<!doctype html>"),), "config.json is an HTML page"),
        "config.json is a pointer": (
            (text("config.json", lambda _: "version https://git-lfs.github.com/spec/v1\n"),),
            "config.json is a Git LFS pointer",
        ),
        "weights are a pointer": (
            (text_of_weights("version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 9\n"),),
            "model.safetensors: .*Git LFS pointer",
        ),
        "weights are a page": ((text_of_weights("<html>gone</html>"),), "model.safetensors: .*HTML page"),
        "weights are empty": ((text_of_weights(""),), "model.safetensors: cannot be read as safetensors"),
        "weights cut short": ((_cut,), "model.safetensors: cannot be read as safetensors"),
        "no weights": ((lambda folder: (folder / "model.safetensors").unlink(),), "holds neither"),
        "pickled weights": ((_renamed("model.safetensors", "pytorch_model.bin"),), "reads no pickled weights"),
        "no config.json": ((lambda folder: (folder / "config.json").unlink(),), "config.json: no such file"),
        "a missing tensor": (
            (tensors(_without("model.norm.weight")),),
            "1 of 30 tensors are missing, first model.norm",
        ),
        "a tensor too many": ((tensors(lambda t: {**t, "score.weight": torch.ones(2)}),), "score.weight has no place"),
        "another width": ((config(intermediate_size=50),), r"has shape \[48, 32\]|has shape \[32, 48\]"),
        "another family": ((config(model_type="gpt2"),), "weft reads the families llama, mistral, qwen2, qwen3"),
        "no family": ((config(model_type=...),), "weft reads the families"),
        "heads that do not divide": (
            (config(num_key_value_heads=3),),
            r"must divide num_heads = 4\. Found 3\. *$|Found 3[^.]*\.[^.]*$",
        ),
        "quantised": ((config(quantization_config={"quant_method": "gptq"}),), "quantization_config: Found 'gptq'"),
        "integers": ((tensors(lambda t: {n: x.to(torch.int8) for n, x in t.items()}),), "has dtype I8"),
        "another activation": ((config(hidden_act="gelu"),), "hidden_act: Found 'gelu'"),
        "biases of the ffn": ((config(mlp_bias=True),), "mlp_bias: Found True"),
        "a part of the head turns": ((config(partial_rotary_factor=0.5),), "partial_rotary_factor: Found 0.5"),
        "longrope": ((config(rope_parameters={"rope_type": "longrope", "factor": 2.0}),), "Found type 'longrope'"),
        "a width that is text": ((config(hidden_size="wide"),), "Expected `int"),
        "an index that leads out": (
            (
                _renamed("model.safetensors", "x"),
                text("model.safetensors.index.json", lambda _: '{"weight_map": {"a": "../x"}}'),
            ),
            "no index of safetensors files",
        ),
    }
    for name, (edits, message) in refused.items():
        yield Form(name, edits=edits, refused=message)


def text_of_weights(whole: str) -> Edit:
    return lambda folder: (folder / "model.safetensors").write_text(whole) and None


def _with_angles(held: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {**held, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}


def _with_head(factor: float) -> Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
    return lambda held: {**held, "lm_head.weight": factor * held["model.embed_tokens.weight"]}


def _without(name: str) -> Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
    return lambda held: {key: value for key, value in held.items() if key != name}


def _stale(_whole: str) -> str:
    return json.dumps({"metadata": {}, "weight_map": {"model.embed_tokens.weight": "model-00001-of-00002.safetensors"}})
