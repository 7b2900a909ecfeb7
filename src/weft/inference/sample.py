"""One token after the other: read the prompt once, then one forward pass per token, keys and values cached.

The next token is the likeliest (temperature 0), or drawn after temperature, top-k and top-p by inverting the cumulative
distribution at one number from the caller's generator: equal logits and an equal generator give equal text.

A text may grow past the model's context. The cache cannot slide, since positions are inside its keys, so when it is
full the newest half of the context is read again and generation goes on from there.
"""

from collections.abc import Iterator, Sequence
from typing import Annotated

import msgspec
import numpy as np
import torch

from weft.clock import Clock, SystemClock
from weft.config import Config
from weft.errors import ConfigError, NotFinite
from weft.model.layers import KVCache
from weft.model.transformer import Transformer

FloatArray = np.ndarray[tuple[int], np.dtype[np.float64]]


class Sampling(Config, frozen=True, kw_only=True):
    """How tokens are chosen, and when to stop."""

    max_new_tokens: Annotated[int, msgspec.Meta(ge=0, description="tokens, at most")] = 256
    temperature: Annotated[float, msgspec.Meta(ge=0.0, le=100.0, description="0 takes the likeliest token")] = 0.8
    top_k: Annotated[int, msgspec.Meta(ge=0, description="keep the k likeliest tokens; 0 keeps all")] = 0
    top_p: Annotated[
        float, msgspec.Meta(gt=0.0, le=1.0, description="keep the likeliest tokens that reach this mass")
    ] = 1.0
    stop_id: Annotated[int, msgspec.Meta(ge=0, description="the token that ends a text")] | None = None


def generate(
    model: Transformer, prompt_ids: Sequence[int], sampling: Sampling, generator: np.random.Generator
) -> Iterator[int]:
    """Yield the tokens that follow `prompt_ids`, one by one; the stop token itself is not among them.

    Args:
        model: its parameters decide device and precision.
        prompt_ids: at least one token; of a prompt longer than the context, the newest part is read.
        generator: from `weft.rng`; not touched at temperature 0.

    Raises:
        ConfigError: an empty prompt, or a token the model does not have.
        NotFinite: the model's logits are NaN or infinite.
    """
    require_prompt(prompt_ids, model.config.vocab_size)
    return _generate(model, list(prompt_ids), sampling, generator)


def timely(tokens: Iterator[int], within_s: float, clock: Clock | None = None) -> Iterator[int]:
    """Yield `tokens` as long as none is begun after so many seconds."""
    clock = clock or SystemClock()
    until = clock.now() + within_s
    while clock.now() < until and (token := next(tokens, None)) is not None:
        yield token


def require_prompt(prompt_ids: Sequence[int], vocab_size: int, called: str = "the model's vocabulary of") -> None:
    """
    Args:
        called: what has so many tokens, for the message.

    Raises:
        ConfigError: an empty prompt, or a token that the model does not have.
    """
    wrong = next((token for token in prompt_ids if not 0 <= token < vocab_size), None)
    if wrong is not None:
        raise ConfigError(f"prompt: token {wrong} is outside {called} {vocab_size}. Wrong tokenizer?")
    if not prompt_ids:
        raise ConfigError("prompt: is empty. Give at least one token, for example the end-of-text token.")


def _generate(model: Transformer, text: list[int], sampling: Sampling, generator: np.random.Generator) -> Iterator[int]:
    weight = model.embed.weight
    context = model.config.max_seq_len
    capacity = min(context, len(text) + sampling.max_new_tokens)
    cache = KVCache(model.config, batch=1, capacity=capacity, device=weight.device, dtype=weight.dtype)
    unread = text[-context:]
    for _ in range(sampling.max_new_tokens):
        if cache.length + len(unread) > capacity:
            cache.clear()
            unread = text[-max(1, context // 2) :]
        with torch.inference_mode():  # not around the yield: the caller's code must not run inside it
            tokens = torch.tensor([unread], dtype=torch.int64, device=weight.device)
            logits = model.next_logits(tokens, cache)[0]
        token = choose(logits.cpu().numpy().astype(np.float64), sampling, generator)
        if token == sampling.stop_id:
            return
        yield token
        text.append(token)
        unread = [token]


def choose(logits: FloatArray, sampling: Sampling, generator: np.random.Generator) -> int:
    """Return the next token; of equally likely tokens the lowest comes first.

    Args:
        logits: one per token, float64.

    Raises:
        NotFinite: a logit is NaN or infinite.
    """
    if not np.isfinite(logits).all():
        raise NotFinite("the model's logits are NaN or infinite: its weights are broken. Load an earlier checkpoint.")
    if sampling.temperature == 0.0:
        return int(logits.argmax())
    order = np.arange(len(logits))
    if sampling.top_k or sampling.top_p < 1.0:
        order = np.argsort(-logits, kind="stable")[: sampling.top_k or None]
    scaled = (logits[order] - logits.max()) / sampling.temperature
    mass = np.exp(scaled).cumsum()
    if sampling.top_p < 1.0:
        # The smallest set of likeliest tokens whose mass reaches top_p of the whole.
        mass = mass[: int(np.searchsorted(mass, sampling.top_p * mass[-1])) + 1]
    drawn = int(np.searchsorted(mass, generator.random() * mass[-1], side="right"))
    return int(order[min(drawn, len(mass) - 1)])
