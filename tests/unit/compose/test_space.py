"""A space: ends that stay as they are, between which members train their layers."""

import json
from pathlib import Path

import msgspec
import pytest
import torch

from weft.compose.space import Space, normed, read_space, write_space
from weft.data.tokenizer import ByteTokenizer, CharTokenizer
from weft.errors import ConfigError
from weft.model.config import ModelConfig, num_base_parameters, num_parameters
from weft.model.flat import assemble, attach, base_layout, cut, layout, over, paste, plain_vector
from weft.model.initial import initial_vector
from weft.model.sections import num_section_base, num_section_parameters, sections
from weft.model.transformer import SectionModule, Transformer

BYTES = ByteTokenizer()
WHOLE = ModelConfig(
    vocab_size=257, num_layers=3, num_heads=2, num_kv_heads=1, width=16, ffn_width=24, max_seq_len=32, is_tied=False
)
LAYERS = msgspec.structs.replace(WHOLE, has_frozen_ends=True)
TOKENS = torch.arange(40).view(2, 20) * 5 % 257


def space(*, is_tied: bool = True) -> Space:
    config = msgspec.structs.replace(WHOLE, num_layers=1, is_tied=is_tied)
    vector = initial_vector(config, 7)
    model = assemble(config, vector)
    model.norm.weight.copy_(torch.linspace(0.5, 2.0, 16))
    return Space.of(model, BYTES.digest)


@pytest.mark.parametrize("is_tied", [True, False])
def test_its_input_has_root_mean_square_one_and_its_head_the_norms_gain(*, is_tied: bool) -> None:
    config = msgspec.structs.replace(WHOLE, num_layers=1, is_tied=is_tied)
    model = assemble(config, initial_vector(config, 7))
    model.norm.weight.copy_(torch.linspace(0.5, 2.0, 16))
    made = Space.of(model, BYTES.digest)
    squares = made.begin(TOKENS).square().mean(-1)
    assert torch.allclose(squares, torch.ones_like(squares), atol=1e-4)
    x = torch.randn(2, 20, 16, generator=torch.Generator().manual_seed(1))
    assert torch.allclose(made.logits(x), model.logits(x), atol=1e-6)
    assert torch.allclose(normed(made.embed, made.norm_eps), made.embed, atol=1e-4)


def test_layers_between_its_ends_are_an_ordinary_decoder() -> None:
    ends = space()
    vector, frozen = initial_vector(LAYERS, 1), ends.ends(LAYERS)
    inside = assemble(LAYERS, vector, frozen)
    alone = assemble(WHOLE, plain_vector(LAYERS, frozen, vector))
    assert torch.equal(inside(TOKENS), alone(TOKENS))
    body = SectionModule(WHOLE, sections(WHOLE, 3)[1])
    assert torch.equal(ends.logits(alone.begin(TOKENS)), ends.logits(ends.begin(TOKENS)))
    assert body.norm is None
    assert Space.between(LAYERS, frozen, BYTES.digest).digest == ends.digest


def test_a_step_changes_layers_and_no_end() -> None:
    ends = space()
    frozen = ends.ends(LAYERS)
    with torch.device("meta"):
        module = Transformer(LAYERS)
    flat = over(module, initial_vector(LAYERS, 1), frozen)
    assert {name for name, each in module.named_parameters() if not each.requires_grad} == {
        "embed.weight",
        "norm.weight",
        "head.weight",
    }
    module.loss(TOKENS[:, :-1], TOKENS[:, 1:]).backward()
    assert float(flat.gradient.abs().max()) > 0
    flat.vector.sub_(flat.gradient)
    assert Space.between(LAYERS, frozen, BYTES.digest).digest == ends.digest


def test_what_is_trained_and_what_is_frozen_are_the_whole() -> None:
    assert num_parameters(LAYERS) == layout(LAYERS).num_parameters
    assert num_base_parameters(LAYERS) == base_layout(LAYERS).num_parameters == 2 * 257 * 16 + 16
    assert num_parameters(LAYERS) + num_base_parameters(LAYERS) == num_parameters(WHOLE)


@pytest.mark.parametrize("num", [2, 3])
def test_sections_have_their_share_of_layers_and_ends(num: int) -> None:
    vector, frozen = initial_vector(LAYERS, 1), space().ends(LAYERS)
    x = TOKENS
    again, ends = torch.zeros_like(vector), torch.zeros_like(frozen)
    for section in sections(LAYERS, num):
        part, base = cut(LAYERS, vector, section), cut(LAYERS, frozen, section, base_layout)
        assert (len(part), len(base)) == (num_section_parameters(LAYERS, section), num_section_base(LAYERS, section))
        paste(LAYERS, again, section, part)
        paste(LAYERS, ends, section, base, base_layout)
        with torch.device("meta"):
            module = SectionModule(LAYERS, section)
        attach(module, part, base)
        x = module(x)
    assert torch.equal(again, vector)
    assert torch.equal(ends, frozen)
    assert torch.equal(x, assemble(LAYERS, vector, frozen)(TOKENS))


def test_a_folder_gives_it_back_and_says_what_was_altered(tmp_path: Path) -> None:
    made = space()
    write_space(tmp_path / "space", made, BYTES)
    found = read_space(tmp_path / "space")
    assert found.digest == made.digest
    assert torch.equal(found.head, made.head)
    record = json.loads((tmp_path / "space" / "space.json").read_bytes())
    record["head"] = record["embed"]
    (tmp_path / "space" / "space.json").write_text(json.dumps(record))
    with pytest.raises(ConfigError, match="another space: head differ"):
        read_space(tmp_path / "space")
    with pytest.raises(ConfigError, match="is no space"):
        read_space(tmp_path)
    with pytest.raises(ConfigError, match="not the one"):
        write_space(tmp_path / "other", made, CharTokenizer.of(["abc"]))


def test_ends_of_another_size_are_refused() -> None:
    with pytest.raises(ConfigError, match="257 tokens and a width of 32"):
        space().ends(msgspec.structs.replace(LAYERS, width=32))
    with pytest.raises(msgspec.ValidationError, match="is_tied"):
        msgspec.convert(msgspec.to_builtins(LAYERS) | {"is_tied": True}, ModelConfig)
