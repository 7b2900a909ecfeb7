"""Blocks in a row against Euler's method written out, the likelihood they give, and texts drawn from it."""

from itertools import pairwise
from math import log

import numpy as np
import pytest
import torch
from torch import Tensor

from weft.compose.blocks.block import DenoisingBlock, block_over, fresh
from weft.compose.blocks.decode import DenoisingModel
from weft.compose.blocks.noise import NoiseConfig, NoiseLevels, normals
from weft.compose.space import Space, normed
from weft.errors import ConfigError
from weft.ids import Digest
from weft.inference.sample import Sampling
from weft.model.config import ModelConfig
from weft.rng import stream

VOCAB, WIDTH, LENGTH = 13, 16, 9
CONFIG = ModelConfig(
    vocab_size=VOCAB, num_layers=1, num_heads=4, num_kv_heads=2, width=WIDTH, ffn_width=24, max_seq_len=16
)
NOISE = NoiseLevels(NoiseConfig(), WIDTH)
SPACE = Space(
    normed(normals((VOCAB, WIDTH), 0, "embed"), 0.0),
    torch.ones(WIDTH),
    normals((VOCAB, WIDTH), 0, "head"),
    CONFIG.norm_eps,
    Digest("0" * 64),
)
TOKENS = torch.arange(2 * LENGTH).view(2, LENGTH) * 5 % VOCAB
TARGETS = TOKENS.roll(-1, 1)


def block_of(number: int, num_blocks: int, space: Space = SPACE, noise: NoiseLevels = NOISE) -> DenoisingBlock:
    vector = fresh(CONFIG, number)
    vector += 0.2 * normals((len(vector),), number, "moved")
    block = block_over(vector, CONFIG, space, noise, (number, num_blocks)).block
    return block.requires_grad_(False)


def model_of(num_blocks: int = 3, num_steps: int = 1) -> DenoisingModel:
    return DenoisingModel([block_of(number, num_blocks) for number in range(num_blocks)], num_steps)


def reference(model: DenoisingModel, tokens: Tensor, noise: Tensor) -> Tensor:
    """Return the last logits of Euler's method on dz / dsigma = (z - D(z, sigma)) / sigma, from pure noise on."""
    num = len(model.blocks) * model.num_steps
    sigmas = [float(NOISE.sigma_of(torch.tensor(each / num, dtype=torch.float64))) for each in range(num)]
    z = sigmas[0] * noise[: tokens.shape[1]].expand(*tokens.shape, -1)
    for step, (sigma, following) in enumerate(pairwise([*sigmas, sigmas[-1]])):
        block = model.blocks[step // model.num_steps]
        logits = block.predict(block.read(tokens), z, torch.full(tokens.shape, sigma))
        slope = (z - logits.softmax(-1) @ SPACE.embed) / sigma
        z = z + (following - sigma) * slope
    return logits


@pytest.mark.parametrize("num_steps", [1, 3])
def test_blocks_are_steps_of_eulers_method(num_steps: int) -> None:
    model = model_of(num_steps=num_steps)
    noise = model.noise(0, 0)
    found = model.logits(model.read(TOKENS), noise[:LENGTH])
    torch.testing.assert_close(found, reference(model, TOKENS, noise), atol=1e-5, rtol=1e-4)
    assert len(list(model.exits(model.read(TOKENS), noise[:LENGTH]))) == 3 * num_steps


def test_each_block_is_asked_at_its_own_levels() -> None:
    model = model_of(4, 2)
    cuts = NOISE.cuts(4).tolist()
    for step, sigma in enumerate(model.sigmas):
        assert cuts[step // 2 + 1] < sigma <= cuts[step // 2] * (1 + 1e-12)
    assert list(model.sigmas) == sorted(model.sigmas, reverse=True)


def test_tokens_after_a_place_change_nothing_up_to_it() -> None:
    model, changed = model_of(), TOKENS.clone()
    changed[:, 5:] = (changed[:, 5:] + 1) % VOCAB
    before, after = (model.logits(model.read(each), model.noise(0, 0)[:LENGTH]) for each in (TOKENS, changed))
    torch.testing.assert_close(before[:, :5], after[:, :5])
    assert (before[:, 5:] - after[:, 5:]).abs().amax(-1).gt(1e-5).all()


def test_every_mean_over_draws_is_a_likelihood_that_no_target_changes() -> None:
    """Probabilities of all next tokens sum to 1, for noise knows neither texts nor targets."""
    model = model_of()
    for num_draws in (1, 5):
        every = [model.log_likelihoods(TOKENS, torch.full_like(TOKENS, token), 0, num_draws) for token in range(VOCAB)]
        torch.testing.assert_close(torch.stack(every).exp().sum(0), torch.ones(2, LENGTH, dtype=torch.float64))
        found = model.log_likelihoods(TOKENS, TARGETS, 0, num_draws)
        torch.testing.assert_close(found, torch.stack(every).gather(0, TARGETS[None])[0])
        alone = model.log_likelihoods(TOKENS[1:], TARGETS[1:], 0, num_draws)
        torch.testing.assert_close(alone, found[1:], atol=1e-5, rtol=1e-4)  # whatever stands beside it


def test_the_mean_over_draws_loses_less_than_draws_on_the_mean() -> None:
    model = model_of()
    contexts, losses = model.read(TOKENS), []
    for draw in range(6):
        logits = model.logits(contexts, model.noise(0, draw)[:LENGTH])
        losses.append(logits.double().log_softmax(-1).gather(-1, TARGETS[..., None])[..., 0])
    together = model.log_likelihoods(TOKENS, TARGETS, 0, 6)
    torch.testing.assert_close(together, torch.stack(losses).logsumexp(0) - log(6), atol=1e-5, rtol=1e-4)
    assert (together > torch.stack(losses).mean(0)).all()


def test_what_is_not_predicted_counts_nothing() -> None:
    model, some = model_of(), TARGETS.clone()
    some[:, 4:] = -100
    found = model.log_likelihoods(TOKENS, some, 0, 2)
    assert (found[:, 4:] == 0).all()
    assert (found[:, :4] < 0).all()


def test_a_text_has_the_tokens_that_are_likeliest_when_it_is_read_whole() -> None:
    model, prompt = model_of(), [3, 1, 4]
    text = [*prompt, *model.generate(prompt, Sampling(max_new_tokens=8, temperature=0.0), 2, stream(0, "text"))]
    logits = model.logits(model.read(torch.tensor([text])), model.noise(2, 0)[: len(text)])
    assert logits[0, 2:-1].argmax(-1).tolist() == text[3:]
    assert not torch.equal(logits, model.logits(model.read(torch.tensor([text])), model.noise(3, 0)[: len(text)]))


def test_a_text_is_drawn_again_by_its_seed_and_may_outgrow_the_context() -> None:
    model, sampling = model_of(), Sampling(max_new_tokens=3 * CONFIG.max_seq_len, temperature=1.0)
    texts = [[*model.generate([3], sampling, 2, stream(7, "text"))] for _ in range(2)]
    assert texts[0] == texts[1]
    assert len(texts[0]) == 3 * CONFIG.max_seq_len
    assert len(np.unique(texts[0])) > 3
    stop = Sampling(max_new_tokens=20, temperature=1.0, stop_id=texts[0][5])
    assert [*model.generate([3], stop, 2, stream(7, "text"))] == texts[0][: texts[0].index(texts[0][5])]


def test_blocks_that_do_not_belong_together_are_refused() -> None:
    with pytest.raises(ConfigError, match="blocks none"):
        DenoisingModel([])
    with pytest.raises(ConfigError, match="1 of 2, 0 of 2"):
        DenoisingModel([block_of(1, 2), block_of(0, 2)])
    other = Space(SPACE.embed, SPACE.norm, SPACE.head * 2, SPACE.norm_eps, SPACE.tokenizer)
    with pytest.raises(ConfigError, match="another space: head differ"):
        DenoisingModel([block_of(0, 2), block_of(1, 2, other)])
    with pytest.raises(ConfigError, match="other noise levels"):
        DenoisingModel([block_of(0, 2), block_of(1, 2, noise=NoiseLevels(NoiseConfig(low=0.5), WIDTH))])
    with pytest.raises(ConfigError, match="at least 1"):
        model_of(num_steps=0)
    with pytest.raises(ConfigError, match="outside the space"):
        model_of().generate([VOCAB], Sampling(), 0, stream(0))
    with pytest.raises(ConfigError, match="is empty"):
        model_of().generate([], Sampling(), 0, stream(0))
