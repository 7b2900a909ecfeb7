"""Experts in one engine, against the ensemble that is told each text token by token."""

import asyncio
from collections.abc import Sequence
from functools import partial

import pytest
import torch
from torch import Tensor

from unit.compose.experts.texts import IN_ALL, KINDS, documents
from weft.compose.experts.clusters import Clusters, clustered
from weft.compose.experts.ensemble import Distance, Ensemble, Posterior, TopK, Uniform, Weighting, by_words
from weft.compose.experts.tfidf import learnt
from weft.compose.experts.together import Rule, Together
from weft.engine.batch import Piece
from weft.engine.draw import Drawing
from weft.engine.engine import Engine
from weft.engine.scheduling.pages import PAGE, num_pages
from weft.engine.step import KeysAndValues, Stepper, Weights
from weft.engine.text import Wanted
from weft.errors import ConfigError
from weft.model.config import ModelConfig
from weft.model.flat import assemble
from weft.model.initial import initial_vector
from weft.rng import integers64, stream

VOCAB, NUM_PAGES = 64, 12
CONFIGS = [
    ModelConfig(vocab_size=VOCAB, num_layers=2, num_heads=2, num_kv_heads=2, width=16, ffn_width=24, max_seq_len=256),
    ModelConfig(vocab_size=VOCAB, num_layers=1, num_heads=2, num_kv_heads=1, width=24, ffn_width=32, max_seq_len=256),
    ModelConfig(vocab_size=VOCAB, num_layers=2, num_heads=2, num_kv_heads=2, width=16, ffn_width=24, max_seq_len=256),
]
VECTORS = [3 * initial_vector(config, seed) for seed, config in enumerate(CONFIGS)]
PRIOR = torch.tensor([0.5, 0.2, 0.3])


WORDS = [*(word for words in KINDS.values() for word in words), *IN_ALL]


def decode(tokens: Sequence[int]) -> str:
    return " ".join(WORDS[token % len(WORDS)] for token in tokens)


def _clusters() -> Clusters:
    texts = [each.text for each in documents(12)]
    tfidf = learnt(texts, 0, 8)
    return clustered(tfidf, tfidf.vectors(texts), 3, 0)


CLUSTERS = _clusters()


def text_of(num: int, seed: int) -> list[int]:
    return [int(each) % VOCAB for each in integers64(stream(seed, "text"), num)]


def together(kind: str, top: int | None = None) -> Together:
    experts = [
        Stepper(Weights(config, vector, "fp32"), KeysAndValues(config, NUM_PAGES, torch.device("cpu"), "fp32"))
        for config, vector in zip(CONFIGS, VECTORS, strict=True)
    ]
    prior = PRIOR.log() if kind == "posterior" else torch.full((3,), 1 / 3).log()
    words = partial(by_words, CLUSTERS, decode) if kind == "distance" else None
    rule = Rule(kind, prior, words, top)  # type: ignore[arg-type]
    return Together(experts, [config.width for config in CONFIGS], rule, NUM_PAGES)


def weighting(kind: str, top: int | None = None) -> Weighting:
    found: Weighting = {
        "uniform": lambda: Uniform(3),
        "posterior": lambda: Posterior(PRIOR),
        "distance": lambda: Distance(CLUSTERS, decode),
    }[kind]()
    return found if top is None else TopK(found, top)


def one_by_one(text: Sequence[int], told: Weighting) -> Tensor:
    """Return the mixed logarithms after each token."""
    tokens = torch.tensor(text)[None]
    logits = [assemble(config, vector)(tokens)[0] for config, vector in zip(CONFIGS, VECTORS, strict=True)]
    ensemble, found = Ensemble(told), list[Tensor]()
    ensemble.begin(tokens[:, :1])
    for at in range(len(text)):
        found.append(ensemble.mix(torch.stack([each[at] for each in logits])[None])[0])
        if at + 1 < len(text):
            ensemble.update(tokens[:, at + 1])
    return torch.stack(found).detach()


@pytest.mark.parametrize("top", [None, 2])
@pytest.mark.parametrize("kind", ["uniform", "posterior", "distance"])
def test_texts_in_pieces_are_mixed_as_one_token_after_the_other(kind: str, top: int | None) -> None:
    stepper = together(kind, top)
    texts = [text_of(150, 1), text_of(70, 2), text_of(131, 3)]
    pages = [[0, 5, 2], [7, 1], [3, 9, 4]]
    wanted = [one_by_one(text, weighting(kind, top)) for text in texts]
    found: list[list[Tensor]] = [[], [], []]
    starts, sizes = [0, 0, 0], iter([1, 30, 64, 7, 33, 2, 50, 1, 1, 90, 8, 40] * 20)
    while any(start < len(text) for start, text in zip(starts, texts, strict=True)):
        pieces, whose = [], []
        for number, text in enumerate(texts):
            num = min(next(sizes), len(text) - starts[number])
            if num:
                tokens = text[starts[number] : starts[number] + num]
                pieces.append(Piece(tokens, starts[number], pages[number][: num_pages(starts[number] + num)], num))
                whose.append((number, num))
                starts[number] += num
        rows = stepper.step(pieces).split([num for _, num in whose])
        for (number, _), some in zip(whose, rows, strict=True):
            found[number].append(some)
    for number, text in enumerate(wanted):
        assert (torch.cat(found[number]) - text).abs().max() < 5e-4
        assert torch.cat(found[number]).logsumexp(-1).abs().max() < 1e-4  # probabilities


def test_a_guess_that_turned_out_otherwise_leaves_nothing_behind() -> None:
    text, stepper = text_of(40, 4), together("posterior")
    wrong = [(each + 1) % VOCAB for each in text[20:26]]
    stepper.step([Piece(text[:20], 0, [0], 1)])
    stepper.step([Piece(wrong, 20, [0], 6)])
    rows = stepper.step([Piece(text[20:], 20, [0], 20)])
    assert torch.allclose(rows, one_by_one(text, weighting("posterior"))[20:], atol=5e-4)


async def test_an_engine_draws_what_the_ensemble_would() -> None:
    engine = Engine(together("posterior"), vocab_size=VOCAB, context=2 * PAGE, num_pages=NUM_PAGES, has_guesses=True)
    try:
        prompts = [text_of(num, num) for num in (3, 17, 64, 65)]
        greedy = Drawing(temperature=0.0)
        texts = [engine.begin(Wanted("key", tuple(each), 12, greedy)) for each in prompts]
        with pytest.raises(ConfigError, match="no embeddings"):  # and nobody else hears of it
            engine.begin(Wanted("key", (1, 2), 1, is_mean=True))
        found = await asyncio.gather(*(_drawn(text) for text in texts))
    finally:
        engine.close()
    for prompt, drawn in zip(prompts, found, strict=True):
        whole = [*prompt, *drawn]
        after = one_by_one(whole, weighting("posterior"))[len(prompt) - 1 : -1]
        assert after.argmax(-1).tolist() == drawn


async def _drawn(text: object) -> list[int]:
    return [each.token async for each in text]  # type: ignore[attr-defined]
