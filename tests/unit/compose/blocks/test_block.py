"""A block against an ordinary decoder of its layers, and what it must not see."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from weft.compose.blocks.block import DenoisingBlock, FlatBlock, block_layout, block_over, body_of, fresh
from weft.compose.blocks.noise import NoiseConfig, NoiseLevels, c_in, c_out, c_skip, loss_weight, normals
from weft.compose.space import Space, normed
from weft.errors import ConfigError
from weft.ids import Digest
from weft.model.config import ModelConfig
from weft.model.flat import assemble, layout
from weft.model.layers import Block, KVCache, rotate, rotation
from weft.sync.method.choices import AdamWConfig, MuonConfig
from weft.training import optimizer

VOCAB, WIDTH, LENGTH = 23, 16, 10
CONFIG = ModelConfig(
    vocab_size=VOCAB,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    width=WIDTH,
    ffn_width=24,
    max_seq_len=32,
    has_qk_norm=True,
)
NOISE = NoiseLevels(NoiseConfig(), WIDTH)
SPACE = Space(
    normed(normals((VOCAB, WIDTH), 0, "embed"), 0.0),
    torch.ones(WIDTH),
    normals((VOCAB, WIDTH), 0, "head"),
    CONFIG.norm_eps,
    Digest("0" * 64),
)
TOKENS = torch.arange(2 * LENGTH).view(2, LENGTH) * 7 % VOCAB
TARGETS = (TOKENS + 5) % VOCAB


def block_of(config: ModelConfig = CONFIG, *, seed: int = 1, number: int = 0, num_blocks: int = 1) -> FlatBlock:
    """Return a block none of whose parameters is as it began: what tells it of noise is not 0."""
    vector = fresh(config, seed)
    vector += 0.1 * normals((len(vector),), seed, "moved")
    return block_over(vector, config, SPACE, NOISE, (number, num_blocks))


def drawn(seed: int = 0, *, block: int = 0, num_blocks: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Return noisy targets, their levels and the noise."""
    sigma, noise = NOISE.draw(block, num_blocks, seed, 0, (2, LENGTH))
    return SPACE.embed[TARGETS] + sigma[..., None] * noise, sigma, noise


def reference(block: DenoisingBlock, tokens: Tensor, z: Tensor, sigma: Tensor) -> Tensor:
    """Return the logits as the papers arrange it: noisy rows after the clean ones in one sequence, one mask for all."""
    num = tokens.shape[1]
    share = NOISE.share_of(sigma)[..., None]
    waves = torch.cat([torch.sin((k - 0.5) * torch.pi * share) for k in range(1, 9)], -1).float()
    clean = SPACE.embed[tokens]
    x = torch.cat((clean, clean + share.float() * (c_in(sigma)[..., None] * z) @ block.target.weight.T), 1)
    is_seen = torch.zeros(2 * num, 2 * num, dtype=torch.bool)
    is_seen[:num, :num] = is_seen[num:, :num] = torch.ones(num, num, dtype=torch.bool).tril()
    turn = rotation(block.angle_bits.view(torch.float32), 0, num)
    for name, layer in block.layers.items():
        assert isinstance(layer, Block)
        gains = waves @ block.get_parameter(f"gains.{name}.weight").T
        none = torch.zeros(*gains.shape[:-1], WIDTH)
        attention_gain, ffn_gain = (1 + torch.cat((none, each), 1) for each in gains.split(WIDTH, -1))
        attention = layer.attention
        assert attention.q_norm is not None
        assert attention.k_norm is not None
        h = normed(x, CONFIG.norm_eps) * layer.attention_norm.weight * attention_gain
        q, k, v = (h @ attention.qkv.weight.T).split([WIDTH, WIDTH // 2, WIDTH // 2], -1)
        q, k, v = (each.view(2, 2 * num, -1, 4) for each in (q, k, v))
        q = normed(q, CONFIG.norm_eps) * attention.q_norm.weight
        k = normed(k, CONFIG.norm_eps) * attention.k_norm.weight
        q, k = (torch.cat([rotate(part, turn) for part in each.chunk(2, 1)], 1) for each in (q, k))
        k, v = (each.repeat_interleave(2, 2) for each in (k, v))
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / 4**0.5
        weights = scores.masked_fill(~is_seen, -torch.inf).softmax(-1)
        x = x + torch.einsum("bhqk,bkhd->bqhd", weights, v).flatten(2) @ attention.out.weight.T
        h = normed(x, CONFIG.norm_eps) * layer.ffn_norm.weight * ffn_gain
        gate, up = (h @ layer.ffn.gate_up.weight.T).chunk(2, -1)
        x = x + (torch.nn.functional.silu(gate) * up) @ layer.ffn.down.weight.T
    sigma = sigma[..., None]
    clean = c_skip(sigma) * z + c_out(sigma) * normed(x[:, num:], CONFIG.norm_eps)
    return normed(clean, CONFIG.norm_eps) @ SPACE.head.T


def test_two_streams_are_one_sequence_of_clean_and_noisy_rows_under_a_mask() -> None:
    block, (z, sigma, _) = block_of().block, drawn()
    found = block.predict(block.read(TOKENS), z, sigma)
    torch.testing.assert_close(found, reference(block, TOKENS, z, sigma), atol=1e-5, rtol=1e-4)


def test_a_block_whose_target_is_all_noise_is_an_ordinary_decoder_of_its_layers() -> None:
    flat = block_of()
    spans, vector = layout(CONFIG), torch.zeros(layout(CONFIG).num_parameters)
    ends = {"embed.weight": SPACE.embed, "norm.weight": SPACE.norm, "head.weight": SPACE.head}
    own = dict(flat.block.named_parameters())
    for span in spans:
        spans.view(vector, span).copy_(ends.get(span.name, own.get(span.name, torch.empty(0))))
    expected = assemble(CONFIG, vector)(TOKENS)
    noise = normals((2, LENGTH, WIDTH), 3, "noise")
    for far in (1e6, 1e9):
        sigma = torch.full((2, LENGTH), far)
        found = flat.block.predict(flat.block.read(TOKENS), SPACE.embed[TARGETS] + far * noise, sigma)
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)
    z, sigma, _ = drawn()
    assert not torch.allclose(flat.block.predict(flat.block.read(TOKENS), z, sigma), expected, atol=1e-2)
    plain = SPACE.logits(flat.block(SPACE.begin(TOKENS)))  # called as a module it is a body
    torch.testing.assert_close(plain, expected, atol=1e-5, rtol=1e-4)


def test_the_context_sees_neither_targets_nor_noise() -> None:
    """Its keys and values are all that other places read, and no target goes into it."""
    flat = block_of()
    z, sigma, _ = drawn()
    one = flat.block.read(TOKENS)
    changed = z.clone()
    changed[:, 4] += 3.0
    before, after = (flat.block.predict(one, each, sigma) for each in (z, changed))
    is_same = (before == after).all(-1)
    assert is_same.sum() == 2 * (LENGTH - 1)  # no other query saw that target
    assert not is_same[:, 4].any()
    z.requires_grad_()
    gradients = torch.autograd.grad(flat.block.predict(flat.block.read(TOKENS), z, sigma)[:, 6].sum(), z)[0]
    assert gradients[:, 6].abs().sum() > 0
    assert gradients[:, [*range(6), *range(7, LENGTH)]].abs().sum() == 0


def test_tokens_after_a_place_change_nothing_up_to_it() -> None:
    flat, (z, sigma, _) = block_of(), drawn()
    changed = TOKENS.clone()
    changed[:, 6:] = (changed[:, 6:] + 1) % VOCAB
    before, after = (flat.block.predict(flat.block.read(each), z, sigma) for each in (TOKENS, changed))
    torch.testing.assert_close(before[:, :6], after[:, :6])
    assert (before[:, 6:] - after[:, 6:]).abs().amax(-1).gt(1e-5).all()


def test_the_loss_is_weighted_cross_entropy_of_what_is_predicted() -> None:
    flat, (z, sigma, noise) = block_of(), drawn()
    losses = cross_entropy(flat.block.predict(flat.block.read(TOKENS), z, sigma).mT, TARGETS, reduction="none")
    torch.testing.assert_close(flat.block.loss_at(TOKENS, TARGETS, sigma, noise), (loss_weight(sigma) * losses).mean())
    torch.testing.assert_close(
        flat.block.loss_of_step(TOKENS, TARGETS, 0, 0), flat.block.loss_at(TOKENS, TARGETS, sigma, noise)
    )
    some = TARGETS.clone()
    some[:, 3:] = -100
    torch.testing.assert_close(
        flat.block.loss_at(TOKENS, some, sigma, noise), (loss_weight(sigma) * losses)[:, :3].mean()
    )


def test_a_target_that_noise_does_not_hide_is_read_off() -> None:
    """The pitfall: at low levels no text is needed to tell the target, so nothing is learnt of it."""
    told = []
    for length in (0.05, 1.0):
        noise = normals((2, LENGTH, WIDTH), 5, "noise") * length * WIDTH**0.5
        nearest = ((SPACE.embed[TARGETS] + noise) @ SPACE.embed.T).argmax(-1)
        told.append((nearest == TARGETS).float().mean().item())
    assert told[0] == 1.0
    assert told[1] < 0.5


def test_no_gradient_leaves_a_block() -> None:
    first, second = block_of(number=0, num_blocks=2), block_of(seed=2, number=1, num_blocks=2)
    first.block.loss_of_step(TOKENS, TARGETS, 0, 0).backward()  # type: ignore[no-untyped-call]
    assert not second.gradient.any()
    assert all(each.grad is None and not each.requires_grad for each in (SPACE.embed, SPACE.norm, SPACE.head))
    reached = [span.name for span in first.layout if first.layout.view(first.gradient, span).any()]
    assert reached == [span.name for span in first.layout]


def test_a_fresh_block_takes_no_heed_of_noise_and_can_learn_to() -> None:
    flat = block_over(fresh(CONFIG, 1), CONFIG, SPACE, NOISE, (0, 1))
    flat.block.loss_of_step(TOKENS, TARGETS, 0, 0).backward()  # type: ignore[no-untyped-call]
    for name in ("target.weight", "gains.0.weight", "gains.1.weight"):
        parameter = flat.block.get_parameter(name)
        assert not parameter.any()
        assert parameter.grad is not None
        assert parameter.grad.any()


@pytest.mark.parametrize("config", [AdamWConfig(), MuonConfig()])
def test_optimizers_train_a_block_as_any_model(config: AdamWConfig | MuonConfig) -> None:
    flat = block_over(fresh(CONFIG, 1), CONFIG, SPACE, NOISE, (0, 1))
    before, optimize = flat.vector.clone(), optimizer.build(config, flat)
    losses = []
    for step in range(12):
        flat.zero_gradient()
        loss = flat.block.loss_of_step(TOKENS, TARGETS, 0, step)
        loss.backward()  # type: ignore[no-untyped-call]
        optimize.step(0.01)
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.3
    moved = [
        span.name
        for span in flat.layout
        if not torch.equal(*(flat.layout.view(x, span) for x in (before, flat.vector)))
    ]
    assert moved == [span.name for span in flat.layout]


def test_a_blocks_layers_lie_as_in_a_body() -> None:
    flat = block_of()
    body = body_of(CONFIG, flat.vector)
    assert body.data_ptr() == flat.vector.data_ptr()
    spans = [span for span in block_layout(CONFIG) if span.name.startswith("layers.")]
    assert spans[-1].stop == len(body)
    assert flat.layout.num_decayed < len(body)


@pytest.mark.parametrize("cut", [(1,) * LENGTH, (4, 1, 5), (LENGTH,)])
def test_a_text_may_be_read_in_parts(cut: tuple[int, ...]) -> None:
    flat, (z, sigma, _) = block_of(), drawn()
    cache = KVCache(CONFIG, batch=2, capacity=LENGTH, device=torch.device("cpu"))
    found = [
        flat.block.predict(flat.block.read(tokens, cache), noisy, level)
        for tokens, noisy, level in zip(*(each.split(cut, 1) for each in (TOKENS, z, sigma)), strict=True)
    ]
    whole = flat.block.predict(flat.block.read(TOKENS), z, sigma)
    torch.testing.assert_close(torch.cat(found, 1), whole, atol=1e-5, rtol=1e-4)
    last = flat.block.predict(flat.block.read(TOKENS).last(), z[:, -1:], sigma[:, -1:])
    torch.testing.assert_close(last, whole[:, -1:], atol=1e-5, rtol=1e-4)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match="numbered from 0 to 1"):
        block_over(fresh(CONFIG, 1), CONFIG, SPACE, NOISE, (2, 2))
    with pytest.raises(ConfigError, match="width of the space"):
        block_over(fresh(CONFIG, 1), CONFIG, SPACE, replace(NOISE, width=8), (0, 1))
    with pytest.raises(ConfigError, match="different configs"):
        block_over(fresh(CONFIG, 1)[:-1], CONFIG, SPACE, NOISE, (0, 1))
