"""A model with an adapter begins as its base, trains nothing else, and is the plain model that both make together."""

import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from weft.errors import ConfigError
from weft.model.adapter import LowRank, Noise, adapted
from weft.model.config import TARGETS, AdapterConfig, ModelConfig, num_parameters, plain
from weft.model.flat import assemble, cut, layout, over
from weft.model.initial import initial_vector
from weft.model.peft import CONFIG, WEIGHTS, merged, read_adapter, write_adapter
from weft.model.sections import num_section_parameters, sections
from weft.model.transformer import SectionModule, Transformer

Make = Callable[..., ModelConfig]
SOME = (TARGETS, ("q_proj", "v_proj"), ("k_proj",), ("o_proj", "up_proj"), ("gate_proj", "down_proj"))


def with_adapter(base: ModelConfig, **fields: object) -> ModelConfig:
    adapter = AdapterConfig(**({"rank": 2, "alpha": 3.0} | fields))  # type: ignore[arg-type]
    return msgspec.structs.replace(base, adapter=adapter)


def tokens_of(config: ModelConfig) -> Tensor:
    return torch.randint(0, config.vocab_size, (2, 12))


def drawn(config: ModelConfig) -> Tensor:
    """Return an adapter that has learnt something: B is not zero."""
    return torch.randn(num_parameters(config), generator=torch.Generator().manual_seed(4)) / 5


def test_it_begins_as_its_base_bit_for_bit(variant: ModelConfig) -> None:
    config, base = with_adapter(variant), initial_vector(variant, 1)
    tokens = tokens_of(variant)
    with torch.no_grad():
        found, expected = assemble(config, initial_vector(config, 2), base)(tokens), assemble(variant, base)(tokens)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("targets", SOME, ids="-".join)
@pytest.mark.parametrize("is_rank_stabilized", [False, True])
def test_merged_it_is_a_plain_model_that_computes_the_same(
    small: Make, targets: tuple[str, ...], is_rank_stabilized: bool
) -> None:
    config = with_adapter(small(), targets=targets, is_rank_stabilized=is_rank_stabilized)
    base, vector, tokens = initial_vector(small(), 1) * 3, drawn(config), tokens_of(small())
    whole = merged(config, base, vector)
    with torch.no_grad():
        found, expected = assemble(config, vector, base)(tokens), assemble(small(), whole)(tokens)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(expected, assemble(small(), base)(tokens), atol=1e-3)


def test_merging_knows_every_variant(variant: ModelConfig) -> None:
    config = with_adapter(variant)
    base, vector, tokens = initial_vector(variant, 1), drawn(config), tokens_of(variant)
    with torch.no_grad():
        found = assemble(config, vector, base)(tokens)
        expected = assemble(plain(config), merged(config, base, vector))(tokens)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("targets", SOME, ids="-".join)
def test_its_gradient_is_that_of_the_whole_matrix_through_both(small: Make, targets: tuple[str, ...]) -> None:
    """dW is known from the plain model: dB = s dW A^T and dA = s B^T dW (2106.09685, equation 3)."""
    config = with_adapter(small(), targets=targets)
    base, vector, tokens = initial_vector(small(), 1) * 3, drawn(config), tokens_of(small())
    model = over(Transformer(config), vector, base)
    model.module.loss(tokens, tokens).backward()  # type: ignore[no-untyped-call]
    whole = over(Transformer(small()), merged(config, base, vector))
    whole.module.loss(tokens, tokens).backward()  # type: ignore[no-untyped-call]
    there = {span.name: whole.layout.view(whole.gradient, span) for span in whole.layout}
    spans = {span.name: span for span in model.layout}
    for matrix in (each for layer in range(config.num_layers) for each in adapted(config, layer)):
        a, b = (model.layout.view(vector, spans[f"{matrix.path}.{side}"]) for side in "ab")
        da, db = (model.layout.view(model.gradient, spans[f"{matrix.path}.{side}"]) for side in "ab")
        dw = there[matrix.base][matrix.rows.start : matrix.rows.stop]
        torch.testing.assert_close(db, 1.5 * dw @ a.T, rtol=1e-3, atol=1e-6)
        torch.testing.assert_close(da, 1.5 * b.T @ dw, rtol=1e-3, atol=1e-6)
    assert model.gradient.abs().max() > 0


def test_the_base_has_no_gradient_and_stays(small: Make) -> None:
    config = with_adapter(small())
    base = initial_vector(small(), 1)
    before = base.clone()
    model = over(Transformer(config), initial_vector(config, 2), base)
    trained = {name for name, parameter in model.module.named_parameters() if parameter.requires_grad}
    assert trained == {span.name for span in layout(config)}
    model.module.loss(tokens_of(config), tokens_of(config)).backward()  # type: ignore[no-untyped-call]
    model.vector.add_(model.gradient)
    assert torch.equal(base, before)


def test_the_vector_holds_the_adapter_alone_of_a_model_and_of_its_sections(small: Make) -> None:
    config = with_adapter(small(num_layers=3))
    assert layout(config).num_parameters == num_parameters(config) < 0.5 * num_parameters(plain(config))
    vector, base, tokens = drawn(config), initial_vector(plain(config), 1), tokens_of(config)
    x = tokens
    with torch.no_grad():
        for section in sections(config, 3):
            part = cut(config, vector, section)
            assert part.numel() == num_section_parameters(config, section)
            model = over(SectionModule(config, section), part, cut(plain(config), base, section))
            x = model.module(x)
        torch.testing.assert_close(x, assemble(config, vector, base)(tokens))


def test_the_first_weights_are_uniform_and_zero_and_the_same_everywhere(small: Make) -> None:
    config = with_adapter(small(width=64, ffn_width=256), rank=8)
    vector, there = initial_vector(config, 7), layout(config)
    assert torch.equal(vector, initial_vector(config, 7))
    assert not torch.equal(vector, initial_vector(config, 8))
    for span in there:
        numbers = there.view(vector, span)
        if span.name.endswith(".b"):
            assert not numbers.any()
        else:
            most = span.shape[1] ** -0.5
            assert 0.95 * most < numbers.abs().max() <= most
            assert float(numbers.std()) == pytest.approx(most / 3**0.5, rel=0.1)
            assert abs(float(numbers.mean())) < 0.1 * most


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"rank": 100}, r"adapter\.rank: q_proj has a side of 16, .* Found 100"),
        ({"rank": 9, "targets": ("k_proj",)}, "side of 8"),
        ({"targets": ("q_proj", "q_proj")}, "each is named once"),
    ],
)
def test_what_no_adapter_can_be_is_refused(small: Make, fields: dict[str, object], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        with_adapter(small(num_heads=4, num_kv_heads=2, width=16), **fields)


# --- as PEFT has it ---


@pytest.mark.parametrize("targets", SOME, ids="-".join)
def test_an_adapter_comes_back_as_it_was_written(tmp_path: Path, small: Make, targets: tuple[str, ...]) -> None:
    config = with_adapter(small(), targets=targets, is_rank_stabilized=True)
    write_adapter(tmp_path / "out", config, drawn(config))
    found, vector = read_adapter(tmp_path / "out", small())
    assert found == config
    assert torch.equal(vector, drawn(config))
    with pytest.raises(ConfigError, match="weft overwrites no folder"):
        write_adapter(tmp_path / "out", config, drawn(config))


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"peft_type": "IA3"}, "no LoRA adapter of PEFT's"),
        ({"bias": "all"}, "bias is 'all', which weft does not compute"),
        ({"use_dora": True}, "use_dora is True"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"rank_pattern": {"q_proj": 4}}, "rank_pattern"),
        ({"target_modules": ["lm_head"]}, "target_modules is .*lm_head.* weft knows adapters of q_proj"),
        ({"target_modules": "(q|v)_proj"}, "target_modules"),
        ({"target_modules": [3]}, "target_modules"),
        ({"r": 0}, "adapter_config.json: Expected"),
        ({"r": "two"}, "adapter_config.json: Expected"),
    ],
)
def test_what_weft_does_not_compute_is_refused(
    tmp_path: Path, small: Make, changes: dict[str, object], match: str
) -> None:
    config = with_adapter(small())
    write_adapter(tmp_path / "out", config, drawn(config))
    file = tmp_path / "out" / CONFIG
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(ConfigError, match=match):
        read_adapter(tmp_path / "out", small())


def test_an_adapter_of_another_base_is_refused(tmp_path: Path, small: Make) -> None:
    config = with_adapter(small())
    write_adapter(tmp_path / "out", config, drawn(config))
    with pytest.raises(ConfigError, match=r"lora_A\.weight has shape .* belongs to another base"):
        read_adapter(tmp_path / "out", small(width=64, head_width=8))
    with pytest.raises(ConfigError, match="is missing"):
        read_adapter(tmp_path / "out", small(num_layers=small().num_layers + 1))
    with pytest.raises(ConfigError, match="is too many"):
        read_adapter(tmp_path / "out", small(num_layers=small().num_layers - 1))


def test_broken_files_are_refused(tmp_path: Path, small: Make) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        read_adapter(tmp_path / "none", small())
    config = with_adapter(small())
    write_adapter(tmp_path / "out", config, drawn(config))
    tensors = load_file(tmp_path / "out" / WEIGHTS)
    save_file({name: tensor * float("nan") for name, tensor in tensors.items()}, tmp_path / "out" / WEIGHTS)
    with pytest.raises(ConfigError, match="not finite"):
        read_adapter(tmp_path / "out", small())
    (tmp_path / "out" / WEIGHTS).write_bytes(b"no tensors")
    with pytest.raises(ConfigError, match="cannot be read as safetensors"):
        read_adapter(tmp_path / "out", small())
    (tmp_path / "out" / CONFIG).write_text("{")
    with pytest.raises(ConfigError, match="not JSON"):
        read_adapter(tmp_path / "out", small())


# --- what a training step leaves out ---


def noisy(config: ModelConfig, words: list[int], *, has_recompute: bool = False, num: int = 0) -> tuple[Tensor, Tensor]:
    """Return logits and the gradient of their sum, of so many samples at a time; 0: all."""
    model = over(Transformer(config, has_recompute=has_recompute), drawn(config), initial_vector(plain(config), 1))
    tokens, found = tokens_of(config), list[Tensor]()
    noise = model.module.noise
    assert noise is not None
    for start in range(0, 2, num or 2):
        with noise.of(words[start : start + (num or 2)]):
            logits = model.module(tokens[start : start + (num or 2)])
            logits.square().sum().backward()
        found.append(logits.detach())
    return torch.cat(found), model.gradient


@pytest.fixture
def half(small: Make) -> ModelConfig:
    torch.manual_seed(0)
    return with_adapter(small(), dropout=0.5)


def test_what_is_left_out_follows_from_sample_and_matrix_alone(half: ModelConfig) -> None:
    torch.manual_seed(1)
    logits, gradient = noisy(half, [3, 9])
    for changes in ({"has_recompute": True}, {"num": 1}, {"has_recompute": True, "num": 1}):
        torch.manual_seed(1)
        again, same = noisy(half, [3, 9], **changes)  # type: ignore[arg-type]
        torch.testing.assert_close(again, logits)
        torch.testing.assert_close(same, gradient, rtol=1e-4, atol=1e-4)
    torch.manual_seed(1)
    other, _ = noisy(half, [3, 10])
    torch.testing.assert_close(other[0], logits[0])
    assert not torch.allclose(other[1], logits[1], atol=1e-3)


def test_each_matrix_leaves_out_others(half: ModelConfig) -> None:
    module = Transformer(half)
    assert module.noise is not None
    found = dict[str, Tensor]()
    with module.noise.of([5]), torch.no_grad():
        for name, each in module.named_modules():
            if isinstance(each, LowRank):
                found[name] = each._thinned(torch.ones(1, 40, each.a.shape[1]), 0.5)[0, :, :16]
    assert len(found) == 7 * half.num_layers
    flat = [each.flatten().tolist() for each in found.values()]
    assert len({tuple(each) for each in flat}) == len(flat)
    shares = [sum(each) / len(each) for each in flat]
    assert all(0.4 < share < 0.6 for share in shares)


def test_on_the_mean_nothing_is_missing_and_nothing_is_without_words(small: Make) -> None:
    """One linear layer: E[dropout(x) A B] = x A B."""
    config = AdapterConfig(rank=2, alpha=3.0, dropout=0.25)
    (matrix, *_), noise = tuple(adapted(with_adapter(small()), 0)), Noise(0.25)
    layer = LowRank(matrix, config, noise, 0)
    x = torch.randn(1, 3, matrix.num_in)
    with torch.no_grad():
        layer.a.normal_()
        layer.b.normal_()
        whole = layer(x)
        torch.testing.assert_close(whole, torch.nn.functional.linear(x, layer.b @ layer.a) * 1.5)
        drawn_so = []
        for word in range(4000):
            with noise.of([word]):
                drawn_so.append(layer(x))
    mean, spread = torch.stack(drawn_so).mean(0), torch.stack(drawn_so).std(0)
    assert ((mean - whole).abs() < 4.5 * spread / 4000**0.5).all()
    assert (spread > 0).all()


def test_a_model_without_dropout_has_no_noise(small: Make) -> None:
    assert Transformer(with_adapter(small())).noise is None
    assert Transformer(small()).noise is None


def test_peft_is_told_the_dropout_and_tells_it(half: ModelConfig, tmp_path: Path) -> None:
    write_adapter(tmp_path / "out", half, drawn(half))
    assert json.loads((tmp_path / "out" / CONFIG).read_text())["lora_dropout"] == 0.5
    assert read_adapter(tmp_path / "out", plain(half))[0] == half
