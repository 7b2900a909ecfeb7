"""A member that becomes a block, trained alone, and what blocks are worth one after the other."""

from math import log
from pathlib import Path

import msgspec
import pytest
import torch
from benchmarks.blocks import operations
from torch.nn.functional import cross_entropy

from unit.compose.stacks.small import CONFIG, SEQ_LEN, TRAINING, batch, draw, member, space, text
from weft.compose.blocking import BlockDescent, Blocking, block_flops, decoder_of, told
from weft.compose.blocks.decode import DenoisingModel
from weft.compose.blocks.kept import BLOCK, read_block, write_block
from weft.compose.blocks.noise import NoiseConfig
from weft.compose.controls import losses
from weft.compose.descent import DescentConfig, windows
from weft.compose.stacks.body import vector_of
from weft.compose.stacks.stack import Stack
from weft.errors import ConfigError
from weft.ids import Digest
from weft.model.config import ModelConfig

LESS = NoiseConfig(low=0.05, high=2.0)  # a small space, in which blocks learn something of a noisy row
WEIGHTS = Digest("1" * 64)


def blocking(number: int = 0, training: DescentConfig = TRAINING, config: ModelConfig = CONFIG) -> Blocking:
    return Blocking(
        space=space(),
        body=member(1 + number, config),
        noise=LESS,
        place=(number, 2),
        training=training,
        batch_size=4,
        seq_len=SEQ_LEN,
        seed=5,
    )


def descent(seed: int = 5) -> BlockDescent:
    return BlockDescent(TRAINING, space(), blocking().block(), draw(), seed)


def test_a_block_begins_as_the_decoder_that_the_member_is() -> None:
    work, held = blocking(), batch(2)
    block = work.block().block
    assert vector_of(decoder_of(block)).equal(vector_of(work.body))
    z = torch.zeros(*held.tokens.shape, space().width)
    far = block.predict(block.read(held.tokens), z, torch.full(held.tokens.shape, 1e6))
    assert torch.allclose(far, Stack(space(), (work.body,)).logits(held.tokens), atol=1e-3)


def test_a_block_that_was_stopped_goes_on_to_the_same_bits() -> None:
    whole, first, second, other = descent(), descent(), descent(), descent(seed=6)
    whole.run()
    other.run()
    first.run(until=3)
    second.load(first.state())
    second.run()
    assert torch.equal(second.vector, whole.vector)
    assert not torch.equal(other.vector, whole.vector)


def test_a_block_learns_to_tell_a_token_by_its_noisy_row() -> None:
    training, held = DescentConfig(steps=80, lr=1e-2, warmup_steps=5), windows(text(), SEQ_LEN, 16, 99)(0)
    work = blocking(1, training)
    flat = work.block()
    before = work.told(flat, held)
    BlockDescent(training, space(), flat, draw(), 5).run()
    assert (after := work.told(flat, held)) < 0.75 * before
    assert work.told(flat, held) == after  # by the same noise
    assert work.tokens == 80 * 4 * SEQ_LEN
    assert work.digest(WEIGHTS) != blocking(0, training).digest(WEIGHTS)


@pytest.mark.parametrize(("num_layers", "num_kv_heads"), [(1, 2), (2, 1), (4, 2)])
def test_operations_are_those_that_are_counted_in_a_step(num_layers: int, num_kv_heads: int) -> None:
    config = msgspec.structs.replace(CONFIG, num_layers=num_layers, num_kv_heads=num_kv_heads)
    block, held = blocking(config=config).block().block, batch(2)
    counted = operations(lambda each, step: block.loss_of_step(each.tokens, each.targets, 0, step), held)
    assert block_flops(config, space(), held.tokens.shape[1]) == pytest.approx(counted / held.tokens.numel(), rel=0.1)


def test_blocks_are_told_by_their_mean_over_draws_beside_each_of_them_alone() -> None:
    blocks, held = [blocking(number).block().block for number in (0, 1)], batch(3)
    found = told(blocks, held, seed=7, num_draws=3, size=2)
    model = DenoisingModel(blocks)
    contexts = model.read(held.tokens)
    draws = [
        [
            -cross_entropy(each.flatten(0, 1), held.targets.flatten(), reduction="none").view_as(held.targets)
            for each in model.exits(contexts, model.noise(7, number)[: held.tokens.shape[1]])
        ]
        for number in range(3)
    ]
    mixed = torch.logsumexp(torch.stack([each[-1] for each in draws]).double(), 0) - log(3)
    assert torch.allclose(found.blocks, -mixed.mean(1).float(), atol=1e-5)
    assert torch.allclose(found.draw, -draws[0][-1].mean(1), atol=1e-5)
    assert torch.allclose(found.exits[0], -draws[0][0].mean(1), atol=1e-5)
    for number, alone in enumerate(found.alone):
        assert torch.allclose(alone, losses(Stack(space(), (member(1 + number),)).logits, held), atol=1e-5)
    mean = torch.stack([Stack(space(), (member(each),)).logits(held.tokens).softmax(-1) for each in (1, 2)]).mean(0)
    asked = -mean.gather(-1, held.targets[..., None])[..., 0].log().mean(1)
    assert torch.allclose(found.ensemble, asked, atol=1e-5)
    with pytest.raises(ConfigError, match="give each block of one cut once"):
        told([blocks[1]], held, 7, 1)


def test_a_block_is_written_beside_its_layers_and_belongs_to_them(tmp_path: Path) -> None:
    flat = blocking(1).block()
    flat.vector.data += torch.linspace(-1, 1, len(flat.vector))
    layers = vector_of(decoder_of(flat.block))
    write_block(flat, tmp_path, WEIGHTS)
    again = read_block(tmp_path, CONFIG, WEIGHTS, space(), layers)
    assert again.vector.equal(flat.vector)
    assert (again.block.number, again.block.num_blocks, again.block.levels) == (1, 2, flat.block.levels)
    with pytest.raises(ConfigError, match="belongs to the weights 11111111, and beside it are 22222222"):
        read_block(tmp_path, CONFIG, Digest("2" * 64), space(), layers)
    (tmp_path / BLOCK).write_bytes((tmp_path / BLOCK).read_bytes()[:-3])
    with pytest.raises(ConfigError, match="cannot be read"):
        read_block(tmp_path, CONFIG, WEIGHTS, space(), layers)
    (tmp_path / BLOCK).unlink()
    with pytest.raises(ConfigError, match="no block"):
        read_block(tmp_path, CONFIG, WEIGHTS, space(), layers)
