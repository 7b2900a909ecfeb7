"""weft against `transformers`: the same folder must give the same logits, whichever side wrote it."""

import contextlib
import io
import logging
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from unit.model.folder_forms import SHAPE
from weft.inference.sample import Sampling, generate
from weft.model.config import ModelConfig
from weft.model.flat import assemble, layout
from weft.model.initial import initial_vector
from weft.model.weights import read_config, read_folder, write_folder
from weft.rng import stream

Make = Callable[..., ModelConfig]

with warnings.catch_warnings():
    # Importing transformers sets off deprecations inside its own dependencies.
    warnings.simplefilter("ignore", DeprecationWarning)
    import transformers

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
THEIRS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama tied": ("Llama", {"tie_word_embeddings": True}),
    "llama scaled": ("Llama", {"rope_parameters": LLAMA3}),
    "llama without groups": ("Llama", {"num_key_value_heads": 4}),
    "llama wide heads": ("Llama", {"head_dim": 12}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral uneven": ("Mistral", {"sliding_window": 64, "hidden_size": 30, "head_dim": 8, "num_key_value_heads": 1}),
    "mistral windowed": ("Mistral", {"sliding_window": 7}),
    "llama biased": ("Llama", {"attention_bias": True}),
    "llama yarn": ("Llama", {"rope_parameters": {**YARN, "rope_theta": 10_000.0}}),
    "qwen2": ("Qwen2", {}),
    "qwen2 tied": ("Qwen2", {"tie_word_embeddings": True, "rope_parameters": {**LLAMA3, "rope_theta": 1e6}}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3 tied": ("Qwen3", {"head_dim": 8, "tie_word_embeddings": True}),
}


@pytest.fixture(autouse=True)
def _offline_and_quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    transformers.utils.logging.disable_progress_bar()
    with contextlib.redirect_stderr(io.StringIO()):
        yield


def random_model(case: str) -> Any:
    """Return their model with every tensor, norms and biases too, far from its neutral value."""
    kind, fields = THEIRS[case]
    config = getattr(transformers, f"{kind}Config")(**{**SHAPE, **fields})
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale = 0.15 if parameter.dim() == 2 else 0.5
            parameter.copy_(torch.randn_like(parameter) * scale + (1.0 if "norm" in name else 0.0))
    return model


def logits_of(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(tokens).logits
    return logits


def tokens_of(vocab_size: int) -> torch.Tensor:
    return torch.randint(0, vocab_size, (2, 48))


@pytest.mark.parametrize("name", THEIRS)
@pytest.mark.parametrize("max_shard_size", ["5GB", "40KB"])
def test_a_folder_they_wrote_gives_their_logits(name: str, max_shard_size: str, tmp_path: Path) -> None:
    theirs = random_model(name)
    theirs.save_pretrained(tmp_path, max_shard_size=max_shard_size)
    assert (tmp_path / "model.safetensors.index.json").exists() == (max_shard_size == "40KB")
    config, vector = read_folder(tmp_path)
    tokens = tokens_of(config.vocab_size)
    expected = logits_of(theirs, tokens)
    assert expected.abs().max() > 1
    torch.testing.assert_close(assemble(config, vector)(tokens), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", THEIRS)
def test_a_folder_we_wrote_gives_our_logits_in_transformers(name: str, tmp_path: Path) -> None:
    random_model(name).save_pretrained(tmp_path / "theirs")
    config, vector = read_folder(tmp_path / "theirs")
    write_folder(tmp_path / "ours", config, vector)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval()
    assert again.dtype == torch.float32
    tokens = tokens_of(config.vocab_size)
    torch.testing.assert_close(assemble(config, vector)(tokens), logits_of(again, tokens), atol=1e-4, rtol=1e-4)
    assert read_config(tmp_path / "ours") == config


def test_every_variant_of_ours_runs_in_transformers(variant: ModelConfig, tmp_path: Path) -> None:
    vector = initial_vector(variant, 1)
    spans = layout(variant)
    vector[: spans.num_decayed] *= 10
    vector[spans.num_decayed :] += torch.randn(spans.num_parameters - spans.num_decayed) * 0.3
    write_folder(tmp_path / "ours", variant, vector)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval()
    assert theirs.num_parameters() == spans.num_parameters
    tokens = torch.randint(0, variant.vocab_size, (2, 24))
    torch.testing.assert_close(assemble(variant, vector)(tokens), logits_of(theirs, tokens), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["llama scaled", "llama yarn", "mistral", "mistral windowed", "qwen2", "qwen3 tied"])
def test_cached_greedy_text_equals_uncached_and_their_generate(name: str, tmp_path: Path) -> None:
    random_model(name).save_pretrained(tmp_path / "theirs")
    config, vector = read_folder(tmp_path / "theirs")
    write_folder(tmp_path / "ours", config, vector)
    model = assemble(config, vector)
    prompt = [5, 17, 3, 60, 2]
    cached = list(generate(model, prompt, Sampling(max_new_tokens=40, temperature=0.0), stream(0, "unused")))

    uncached = list(prompt)
    for _ in range(40):
        uncached.append(int(model(torch.tensor([uncached]))[0, -1].argmax()))
    assert cached == uncached[5:]

    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval()
    inputs = torch.tensor([prompt])
    settings = transformers.GenerationConfig(max_new_tokens=40, do_sample=False, pad_token_id=0)
    found = theirs.generate(inputs, attention_mask=torch.ones_like(inputs), generation_config=settings)
    assert cached == found[0, 5:].tolist()
    assert len(set(cached)) > 3


def test_half_precision_folders_are_read_as_the_numbers_they_hold(tmp_path: Path) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        random_model("qwen2").to(dtype).save_pretrained(tmp_path / str(dtype))
        theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / str(dtype), dtype=torch.float32)
        config, vector = read_folder(tmp_path / str(dtype))
        tokens = tokens_of(config.vocab_size)
        expected = logits_of(theirs, tokens)
        torch.testing.assert_close(assemble(config, vector)(tokens), expected, atol=1e-4, rtol=1e-4)


def test_a_bf16_export_loads_as_bf16_and_reads_back_rounded(small: Make, tmp_path: Path) -> None:
    vector = initial_vector(small(), 1)
    write_folder(tmp_path / "ours", small(), vector, dtype="bfloat16")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert theirs.dtype == torch.bfloat16
    _, again = read_folder(tmp_path / "ours")
    assert torch.equal(again, vector.bfloat16().float())


def test_the_tokenizer_and_its_stop_token_reach_transformers(small: Make, tmp_path: Path) -> None:
    from tokenizers import AddedToken, Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    tokenizer = Tokenizer(WordLevel({"warp": 0, "and": 1, "weft": 2}, unk_token="weft"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.add_special_tokens([AddedToken("<end>", special=True)])
    blob = tokenizer.to_str().encode()
    write_folder(tmp_path / "ours", small(), initial_vector(small(), 1), blob, stop_id=3)
    assert (tmp_path / "ours" / "tokenizer.json").read_bytes() == blob
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "ours")
    assert theirs("warp and weft")["input_ids"] == [0, 1, 2]
    assert theirs.eos_token == "<end>"
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert model.config.eos_token_id == model.generation_config.eos_token_id == 3


logging.getLogger("transformers").setLevel(logging.ERROR)
