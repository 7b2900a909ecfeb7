"""Blocks one after the other, as steps of the ODE that takes noise to a row: logits of the next token, and texts.

    z_0 = sigma_0 n                                   n normal: of each place of a text, whatever stands there
    logits_i = block of sigma_i (context, z_i, sigma_i)           D_i = softmax(logits_i) · table
    z_i+1 = D_i + sigma_i+1 / sigma_i (z_i - D_i)                 Euler's step of dz / dsigma = (z - D) / sigma

The last logits are the answer. Each block reads the text itself, once; a step costs its layers for the queries alone.

What is the likelihood of a text? Noise is drawn by seed and place, before any text is looked at. Given the noise n, the
logits at t depend on the tokens up to t alone, so p(next | text, n) sums to 1: one draw is a language model, and its
loss is the cross entropy that BlockTrain tells. Texts are drawn from the mean of p(next | text, n) over n, the model
proper. Its loss is lower, by Jensen's inequality; that of the mean over some draws, which sums to 1 as well, lies
between. The lower the last level, the more a draw has decided already, and the farther its loss is above the model's.

Deterministic sampling: EDM, arXiv:2206.00364, algorithm 1 without its second order. D from softmax: DiffusionBlocks,
arXiv:2506.14202.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import log

import numpy as np
import torch
from jaxtyping import Float32, Float64, Int64
from torch import Tensor
from torch.nn.functional import cross_entropy, softmax

from weft.compose.blocks.block import Context, DenoisingBlock
from weft.compose.blocks.noise import normals
from weft.errors import ConfigError
from weft.inference.sample import Sampling, choose, require_prompt
from weft.model.layers import KVCache


@dataclass(frozen=True, eq=False)
class DenoisingModel:
    """
    Args:
        blocks: of one space and one cut of the noise levels, all of them, in order.
        num_steps: of each block.
    """

    blocks: Sequence[DenoisingBlock]
    num_steps: int = 1

    def __post_init__(self) -> None:
        places = [(block.number, block.num_blocks) for block in self.blocks]
        if not places or places != [(number, len(places)) for number in range(len(places))]:
            found = ", ".join(f"{number} of {num}" for number, num in places)
            raise ConfigError(f"blocks {found or 'none'}: give each block of one cut once, from 0 on.")
        if self.num_steps < 1:
            raise ConfigError(f"{self.num_steps} steps of each block: at least 1.")
        for block in self.blocks[1:]:
            block.space.require(self.blocks[0].space.record, f"block {block.number}")
            if block.levels != self.blocks[0].levels:
                raise ConfigError(f"block {block.number} was trained at other noise levels than block 0.")

    @cached_property
    def sigmas(self) -> tuple[float, ...]:
        """Return the level of each step: of a block, equal parts of its own levels, the highest first."""
        num = len(self.blocks) * self.num_steps
        return tuple(self.blocks[0].levels.sigma_of(torch.arange(num, dtype=torch.float64) / num).tolist())

    @property
    def max_seq_len(self) -> int:
        return min(block.config.max_seq_len for block in self.blocks)

    def noise(self, seed: int, draw: int) -> Float32[Tensor, "places width"]:
        """Return the noise of a draw, for each place of a text; the same whatever the text, and for all texts."""
        space = self.blocks[0].space
        return normals((self.max_seq_len, space.width), seed, "ode", draw).to(space.embed.device)

    def read(self, tokens: Int64[Tensor, "batch tokens"], caches: Sequence[KVCache] | None = None) -> list[Context]:
        """Return what each block has read of a text."""
        if caches is None:
            return [block.read(tokens) for block in self.blocks]
        return [block.read(tokens, cache) for block, cache in zip(self.blocks, caches, strict=True)]

    def exits(
        self, contexts: Sequence[Context], noise: Float32[Tensor, "places width"]
    ) -> Iterator[Float32[Tensor, "batch tokens vocab"]]:
        """Yield the logits of each next token after each step; the last are the answer.

        Args:
            noise: of the places of these tokens.
        """
        batch, num_tokens, _ = contexts[0].rows.shape
        table, sigmas = self.blocks[0].space.embed, self.sigmas
        z = (sigmas[0] * noise).expand(batch, num_tokens, -1)
        for number, sigma in enumerate(sigmas):
            block, context = self.blocks[number // self.num_steps], contexts[number // self.num_steps]
            logits = block.predict(context, z, torch.full((batch, num_tokens), sigma, device=z.device))
            yield logits
            if number + 1 < len(sigmas):
                clean = softmax(logits, -1) @ table
                # z + (sigma' - sigma) (z - D) / sigma
                z = clean + sigmas[number + 1] / sigma * (z - clean)

    def logits(
        self, contexts: Sequence[Context], noise: Float32[Tensor, "places width"]
    ) -> Float32[Tensor, "batch tokens vocab"]:
        """Return the logits of each next token, given the noise. The arguments are those of `exits`."""
        *_, last = self.exits(contexts, noise)
        return last

    @torch.inference_mode()
    def log_likelihoods(
        self, tokens: Int64[Tensor, "batch tokens"], targets: Int64[Tensor, "batch tokens"], seed: int, num_draws: int
    ) -> Float64[Tensor, "batch tokens"]:
        """Return ln of the mean over draws of p(target | tokens up to it, noise), nats; 0 where a target is -100.

        Args:
            targets: one place further.
        """
        contexts, found = self.read(tokens), list[Tensor]()
        for draw in range(num_draws):
            logits = self.logits(contexts, self.noise(seed, draw)[: tokens.shape[1]])
            losses = cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
            found.append(-losses.double().view_as(targets))
        return torch.logsumexp(torch.stack(found), 0) - log(num_draws)

    # --- texts ---

    def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, seed: int, generator: np.random.Generator
    ) -> Iterator[int]:
        """Yield the tokens that follow `prompt_ids`, one by one, as `weft.inference.sample.generate` does.

        Args:
            seed: of the noise, which is that of draw 0.
            generator: from `weft.rng`: by it tokens are chosen.

        Raises:
            ConfigError: an empty prompt, or a token the space does not have.
            NotFinite: logits are NaN or infinite.
        """
        require_prompt(prompt_ids, self.blocks[0].space.vocab_size, "the space's")
        return self._generate(list(prompt_ids), sampling, seed, generator)

    def _generate(
        self, text: list[int], sampling: Sampling, seed: int, generator: np.random.Generator
    ) -> Iterator[int]:
        noise, most = self.noise(seed, 0), self.max_seq_len
        capacity, device = min(most, len(text) + sampling.max_new_tokens), noise.device
        caches = [KVCache(block.config, batch=1, capacity=capacity, device=device) for block in self.blocks]
        unread = text[-most:]
        for _ in range(sampling.max_new_tokens):
            if caches[0].length + len(unread) > capacity:
                for cache in caches:
                    cache.clear()
                unread = text[-max(1, most // 2) :]
            with torch.inference_mode():  # not around the yield: the caller's code must not run inside it
                tokens = torch.tensor([unread], dtype=torch.int64, device=device)
                contexts = [context.last() for context in self.read(tokens, caches)]
                place = contexts[0].start
                logits = self.logits(contexts, noise[place : place + 1])[0, -1]
            token = choose(logits.cpu().numpy().astype(np.float64), sampling, generator)
            if token == sampling.stop_id:
                return
            yield token
            text.append(token)
            unread = [token]
