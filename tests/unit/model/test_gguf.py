"""A GGUF file read back: by the package `gguf`, and by `transformers`, whose logits must be those of weft."""

import contextlib
import io
import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import tokenizers
import torch
from tokenizers import models, pre_tokenizers

from weft.data.tokenizer import ByteTokenizer, CharTokenizer, train_bpe
from weft.errors import ConfigError
from weft.model.config import Llama3Scaling, ModelConfig
from weft.model.flat import assemble, layout
from weft.model.gguf import _CUTS, _LLAMA3, _QWEN2, Words, _cut_of, write_gguf
from weft.model.initial import initial_vector
from weft.model.wavelengths import inverse_wavelengths

gguf = pytest.importorskip("gguf", reason="the extra gguf is not installed")
pytestmark = pytest.mark.full

TEXT = "def f(x):\n    return x * 1234 + öß  # äüÜ 日本\n" * 9
PLAIN = {"vocab_size": 261, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "width": 32, "ffn_width": 48}
CASES: dict[str, dict[str, Any]] = {
    "llama": {},
    "tied": {"is_tied": True},
    "all heads": {"num_kv_heads": 4, "rope_theta": 5e5},
    "wide heads": {"head_width": 12},
    "qwen2": {"has_qkv_bias": True},
    "qwen3": {"has_qk_norm": True, "head_width": 128, "num_heads": 2, "num_kv_heads": 1},  # transformers reads no other
}


def small(**fields: Any) -> ModelConfig:
    return msgspec.convert({**PLAIN, "max_seq_len": 64, **fields}, ModelConfig)


def random_vector(config: ModelConfig) -> torch.Tensor:
    """Return parameters of which none is neutral: norms and biases, too."""
    vector = initial_vector(config, 0)
    for span in layout(config):
        if len(span.shape) == 1:
            vector[span.offset : span.stop] += torch.rand(span.stop - span.offset) - 0.3
    return vector


def written(path: Path, config: ModelConfig, vector: torch.Tensor, **options: Any) -> Path:
    words = Words("tiny", ByteTokenizer().to_json(), "{{ messages }}", {"eos_token_id": 256})
    write_gguf(path / "tiny.gguf", config, vector, words, **options)
    return path / "tiny.gguf"


def contents(file: Path) -> dict[str, Any]:
    return {name: field.contents() for name, field in gguf.GGUFReader(file).fields.items()}


@pytest.fixture
def _quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with contextlib.redirect_stderr(io.StringIO()):
        yield


@pytest.mark.usefixtures("_quiet")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_transformers_has_the_logits_of_weft(case: str, dtype: Any, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformers

        config = small(**CASES[case])
        vector = random_vector(config)
        if dtype == "bfloat16":  # what the file holds
            for span in layout(config):
                if len(span.shape) > 1:
                    part = vector[span.offset : span.stop]
                    part.copy_(part.bfloat16().float())
        file = written(tmp_path, config, vector, dtype=dtype)
        theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file.name, dtype=torch.float32)
    tokens = torch.arange(40).reshape(2, 20) * 6 % 257
    with torch.no_grad():
        torch.testing.assert_close(theirs(tokens).logits, assemble(config, vector)(tokens), rtol=1e-4, atol=1e-5)


def test_the_file_says_what_the_model_is(tmp_path: Path) -> None:
    config = small()
    told = list[int]()
    file = written(tmp_path, config, random_vector(config), on_written=told.append)
    found = contents(file)
    for name, value in (
        ("general.architecture", "llama"),
        ("general.name", "tiny"),
        ("llama.context_length", 64),
        ("llama.vocab_size", 261),
        ("tokenizer.ggml.model", "gpt2"),
        ("tokenizer.ggml.pre", "gpt-2"),
        ("tokenizer.ggml.eos_token_id", 256),
        ("tokenizer.ggml.merges", ["ÿ ÿ"]),  # llama.cpp loads no file without any
        ("tokenizer.ggml.add_bos_token", False),
        ("tokenizer.chat_template", "{{ messages }}"),
    ):
        assert found[name] == value
    pieces, kinds = found["tokenizer.ggml.tokens"], found["tokenizer.ggml.token_type"]
    assert len(pieces) == len(kinds) == 261
    assert pieces[ord("a")] == "a"
    assert pieces[256:] == ["<|endoftext|>", "[PAD257]", "[PAD258]", "[PAD259]", "[PAD260]"]
    assert kinds[255:] == [1, 3, 5, 5, 5, 5]
    assert sum(told) == sum(tensor.n_bytes for tensor in gguf.GGUFReader(file).tensors)
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.gguf"]


def test_stretched_wavelengths_are_factors(tmp_path: Path) -> None:
    """llama.cpp turns by theta^(-2i/D) / factor."""
    config = small(rope_scaling=msgspec.to_builtins(Llama3Scaling(factor=8.0, original_seq_len=16)))
    file = written(tmp_path, config, random_vector(config))
    (factors,) = [each.data for each in gguf.GGUFReader(file).tensors if each.name == "rope_freqs.weight"]
    width = config.channels_per_head
    angles = config.rope_theta ** (-np.arange(0, width, 2) / width) / factors
    np.testing.assert_allclose(angles, inverse_wavelengths(config), rtol=1e-6)
    assert len(set(factors.round(3).tolist())) > 1


def test_merges_of_a_trained_tokenizer_are_there_in_order(tmp_path: Path) -> None:
    tokenizer = train_bpe([TEXT], 280)
    config = small(vocab_size=280)
    words = Words("tiny", tokenizer.to_json(), None, {"eos_token_id": tokenizer.end_of_text or 0})
    write_gguf(tmp_path / "m.gguf", config, random_vector(config), words)
    found = contents(tmp_path / "m.gguf")
    merges = json.loads(tokenizer.to_json())["model"]["merges"]
    assert found["tokenizer.ggml.merges"] == [" ".join(each) for each in merges]
    vocab = {piece: id for id, piece in enumerate(found["tokenizer.ggml.tokens"])}
    again = tokenizers.Tokenizer(models.BPE(vocab, [tuple(each.split(" ")) for each in found["tokenizer.ggml.merges"]]))
    again.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)  # gpt-2's cut
    assert again.encode(TEXT).ids == tokenizer.encode(TEXT).tolist()
    assert "tokenizer.chat_template" not in found


# --- what llama.cpp would take for something else ---


def tree(*steps: dict[str, Any], norm: str | None = None, **model: Any) -> dict[str, Any]:
    step: dict[str, Any] = {"type": "Sequence", "pretokenizers": list(steps)} if len(steps) > 1 else steps[0]
    return {"pre_tokenizer": step, "normalizer": norm and {"type": norm}, "model": {"type": "BPE", **model}}


def split(regex: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}


BYTES = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
CUT = BYTES | {"use_regex": False}
DIGITS = {"type": "Digits", "individual_digits": True}
KNOWN = [
    (tree(BYTES), "gpt-2"),
    (tree({"type": "ByteLevel", "add_prefix_space": False}), "gpt-2"),
    (tree(DIGITS, BYTES), "smollm"),
    (tree(split(_LLAMA3), CUT, ignore_merges=True), "llama-bpe"),
    (tree(split(_QWEN2), CUT, norm="NFC"), "qwen2"),
    (tree(split(_QWEN2), CUT), "qwen2"),
]
UNKNOWN = [
    tree(CUT),  # merges across words
    tree({"type": "ByteLevel", "use_regex": True}),  # a space before the first word
    tree(DIGITS | {"individual_digits": False}, BYTES),
    tree(split(_LLAMA3), CUT),
    tree(split("x"), CUT),
    tree(split(_QWEN2), BYTES),
    tree(BYTES, norm="NFKC"),
    tree(BYTES, byte_fallback=True),
    tree({"type": "Metaspace"}, byte_fallback=True),
    tree(BYTES, type="Unigram"),
    {"model": {"type": "BPE"}},
]


@pytest.mark.parametrize(("given", "name"), KNOWN)
def test_ways_of_cutting_text_that_llama_cpp_has_a_name_for(given: dict[str, Any], name: str) -> None:
    assert name in _CUTS.values()
    assert _cut_of(given, has_merges=True) == name


@pytest.mark.parametrize("given", UNKNOWN)
def test_other_ways_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="would read text as other tokens"):
        _cut_of(given, has_merges=True)


def test_what_cannot_be_written_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    config = small()
    vector, words = random_vector(config), Words("tiny", CharTokenizer("ab").to_json())
    with pytest.raises(ConfigError, match="would read text as other tokens"):
        write_gguf(tmp_path / "m", config, vector, words)
    for fields, said in (
        ({"window": 8}, "windows"),
        ({"yarn": {"factor": 2.0, "score_factor": 1.0, "original_seq_len": 8}}, "YaRN"),
        ({"has_qkv_bias": True, "has_out_bias": True}, "biases on the output"),
    ):
        other = small(**fields)
        with pytest.raises(ConfigError, match=said):
            written(tmp_path, other, random_vector(other))
    with pytest.raises(ConfigError, match="belong to different configs"):
        written(tmp_path, config, vector[1:])
    written(tmp_path, config, vector)
    with pytest.raises(ConfigError, match="overwrites no export"):
        written(tmp_path, config, vector)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be written"):
        written(tmp_path / "file", config, vector)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "tiny.gguf"]
