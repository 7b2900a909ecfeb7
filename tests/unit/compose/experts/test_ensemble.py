"""Mixed probabilities against the papers' formulas written out, and what mixtures of any experts have to keep."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from unit.compose.experts.texts import KINDS, documents
from weft.compose.experts.clusters import Clusters, clustered
from weft.compose.experts.ensemble import (
    Distance,
    Ensemble,
    Posterior,
    TopK,
    Uniform,
    Weighting,
    cached_prior,
    likelihoods,
    losses,
    mixed,
)
from weft.compose.experts.tfidf import learnt
from weft.data.tokenizer import ByteTokenizer
from weft.errors import ConfigError

BATCH, TOKENS, EXPERTS, VOCAB = 3, 40, 3, 256
DECODE = ByteTokenizer().decode


class Markov:
    """An expert: the next byte after each byte, by a table."""

    def __init__(self, seed: int) -> None:
        self.table = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(seed))

    def __call__(self, tokens: Tensor) -> Tensor:
        return self.table[tokens]


@pytest.fixture(scope="module")
def clusters() -> Clusters:
    texts = [document.text for document in documents(20)]
    tfidf = learnt(texts, seed=1)
    return clustered(tfidf, tfidf.vectors(texts), EXPERTS, seed=1)


def batch() -> tuple[Tensor, Tensor]:
    ids = torch.randint(97, 123, (BATCH, TOKENS + 1), generator=torch.Generator().manual_seed(5))
    text = "comet orbit planet anchor mast harbour apple pear plum"
    ids[0] = torch.tensor(list(text[: TOKENS + 1].encode()))
    return ids[:, :-1], ids[:, 1:]


def of_kind(name: str, clusters: Clusters) -> Weighting:
    prior = torch.tensor([0.2, 0.5, 0.3])
    return {
        "uniform": lambda: Uniform(EXPERTS),
        "posterior": lambda: Posterior(prior),
        "distance": lambda: Distance(clusters, DECODE, temperature=0.3, every=7),
        "top 2 of the posterior": lambda: TopK(Posterior(prior), 2),
        "top 1 by distance": lambda: TopK(Distance(clusters, DECODE, temperature=0.3, every=7), 1),
    }[name]()


NAMES = ("uniform", "posterior", "distance", "top 2 of the posterior", "top 1 by distance")


def reference_weights(name: str, clusters: Clusters, seen: Sequence[int], p: np.ndarray) -> np.ndarray:
    """Return the weights for the token after `seen`, whose tokens but the first had probabilities p [token, expert]."""
    if "posterior" in name:
        w = np.array([0.2, 0.5, 0.3]) * np.prod(p[: len(seen) - 1], axis=0)
    elif "distance" in name:
        looked = seen[: 1 + (len(seen) - 1) // 7 * 7]
        row = clusters.tfidf.vectors([DECODE(looked)])[0]
        gone = ((row - clusters.centres) ** 2).sum(1) if row.any() else np.zeros(EXPERTS)
        w = np.exp(-gone / 0.3)
    else:
        w = np.ones(EXPERTS)
    if name.startswith("top"):
        k = int(name.split()[1])
        w = np.where(np.isin(np.arange(EXPERTS), np.argsort(-w, kind="stable")[:k]), w, 0)
    return w / w.sum()


def reference_losses(name: str, clusters: Clusters, models: Sequence[Markov]) -> list[float]:
    tokens, targets = (each.tolist() for each in batch())
    tables = [torch.softmax(model.table.double(), -1).numpy() for model in models]
    found = []
    for row, wanted in zip(tokens, targets, strict=True):
        p = np.array([[table[here, there] for table in tables] for here, there in zip(row, wanted, strict=True)])
        total = 0.0
        for t in range(TOKENS):
            w = reference_weights(name, clusters, row[: t + 1], p)
            total -= math.log(float((w * p[t]).sum()))
        found.append(total / TOKENS)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_losses_are_those_of_the_formula(name: str, clusters: Clusters) -> None:
    models = [Markov(seed) for seed in range(EXPERTS)]
    tokens, targets = batch()
    found = losses(of_kind(name, clusters), tokens, targets, likelihoods(models, tokens, targets))
    assert found.dtype == torch.float32
    assert found.tolist() == pytest.approx(reference_losses(name, clusters, models), abs=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_who_draws_token_by_token_gets_the_same_probabilities(name: str, clusters: Clusters) -> None:
    models = [Markov(seed) for seed in range(EXPERTS)]
    tokens, targets = batch()
    ensemble = Ensemble(of_kind(name, clusters))
    for _ in range(2):  # and again: nothing stays of the texts before
        total = torch.zeros(BATCH)
        ensemble.begin(tokens[:, :1])
        for t in range(TOKENS):
            log_probabilities = ensemble.mix(torch.stack([model(tokens[:, t]) for model in models], 1))
            torch.testing.assert_close(log_probabilities.exp().sum(-1), torch.ones(BATCH))
            total -= log_probabilities.gather(1, targets[:, t, None])[:, 0]
            ensemble.update(targets[:, t])
        expected = losses(of_kind(name, clusters), tokens, targets, likelihoods(models, tokens, targets))
        torch.testing.assert_close(total / TOKENS, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("weighting", [Uniform(1), Posterior(torch.ones(1)), TopK(Uniform(1), 1)])
def test_one_expert_is_itself(weighting: Weighting) -> None:
    model, (tokens, targets) = Markov(1), batch()
    alone = -likelihoods([model], tokens, targets)[..., 0].mean(1)
    found = losses(weighting, tokens, targets, likelihoods([model], tokens, targets))
    torch.testing.assert_close(found, alone, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", NAMES)
def test_equal_experts_are_one(name: str, clusters: Clusters) -> None:
    model, (tokens, targets) = Markov(1), batch()
    alone = -likelihoods([model], tokens, targets)[..., 0].mean(1)
    found = losses(of_kind(name, clusters), tokens, targets, likelihoods([model] * EXPERTS, tokens, targets))
    torch.testing.assert_close(found, alone, atol=1e-5, rtol=0)


def test_the_posterior_goes_to_the_expert_whose_text_it_is() -> None:
    models, generator = [Markov(seed) for seed in range(EXPERTS)], torch.Generator().manual_seed(3)
    for own, model in enumerate(models):
        ids = torch.zeros(BATCH, TOKENS + 1, dtype=torch.int64)
        for t in range(TOKENS):
            ids[:, t + 1] = torch.multinomial(model(ids[:, t]).softmax(-1), 1, generator=generator)[:, 0]
        weighting = Posterior(torch.ones(EXPERTS))
        log_likelihoods = likelihoods(models, ids[:, :-1], ids[:, 1:])
        found = losses(weighting, ids[:, :-1], ids[:, 1:], log_likelihoods)
        assert (weighting.log_weights().exp()[:, own] > 0.999).all()
        # Not knowing whose it is costs the logarithm of how many it may be of, once.
        own_loss = -log_likelihoods[..., own].mean(1)
        assert (found <= own_loss + math.log(EXPERTS) / TOKENS + 1e-5).all()


def test_a_text_of_a_cluster_is_told_by_its_expert(clusters: Clusters) -> None:
    weighting = Distance(clusters, DECODE, every=1)
    texts = [document.text for document in documents(1, num_words=20, seed=9)]
    length = min(map(len, texts))
    weighting.begin(torch.tensor([list(text[:length].encode()) for text in texts]))
    weights = weighting.log_weights().exp()
    assert weights.argmax(1).tolist() == clusters.nearest(texts).tolist()
    assert sorted(weights.argmax(1).tolist()) == list(range(len(KINDS)))
    assert (weights.max(1).values > 0.9).all()


def test_a_context_of_which_nothing_is_known_is_equally_far_from_all(clusters: Clusters) -> None:
    weighting = Distance(clusters, DECODE)
    weighting.begin(torch.tensor([list(b"zebra")]))
    torch.testing.assert_close(weighting.log_weights().exp(), torch.full((1, EXPERTS), 1 / EXPERTS))


def test_experts_that_do_not_count_may_have_any_numbers(clusters: Clusters) -> None:
    log_weights = torch.tensor([[0.0, -torch.inf]])
    log_probabilities = torch.stack([torch.randn(1, VOCAB).log_softmax(-1), torch.full((1, VOCAB), torch.nan)], 1)
    assert torch.equal(mixed(log_probabilities, log_weights), log_probabilities[:, 0])
    # So by distance only those are asked that are chosen.
    weighting = TopK(Distance(clusters, DECODE), 1)
    weighting.begin(torch.tensor([list(b"anchor mast harbour")]))
    assert weighting.log_weights().isinf().sum() == EXPERTS - 1


def test_of_equal_experts_the_first_are_the_top() -> None:
    weighting = TopK(Uniform(4), 2)
    weighting.begin(torch.zeros(1, 1, dtype=torch.int64))
    torch.testing.assert_close(weighting.log_weights().exp(), torch.tensor([[0.5, 0.5, 0.0, 0.0]]))


def test_the_cached_prior_is_a_moving_average_with_a_floor() -> None:
    posteriors = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])
    expected = 0.7 * (0.7 * posteriors[0] + 0.3 * posteriors[1]) + 0.3 * posteriors[2]
    torch.testing.assert_close(cached_prior(posteriors), expected, atol=2e-6, rtol=0)
    assert float(cached_prior(posteriors).sum()) == pytest.approx(1)
    assert cached_prior(posteriors[:1])[1] > 0
    Posterior(cached_prior(posteriors[:1]))


def test_long_texts_leave_the_posterior_finite() -> None:
    weighting, each = Posterior(torch.ones(2)), torch.tensor([[-1.0, -9.0]])
    weighting.begin(torch.zeros(1, 1, dtype=torch.int64))
    for _ in range(5000):
        weighting.update(torch.zeros(1, dtype=torch.int64), each)
    log_weights = weighting.log_weights()
    assert log_weights.isfinite().all()
    assert log_weights[0, 0] == 0.0


@pytest.mark.parametrize(
    "make",
    [
        lambda _: Posterior(torch.tensor([0.5, 0.0])),
        lambda _: Posterior(torch.tensor([0.5, torch.nan])),
        lambda _: TopK(Uniform(2), 0),
        lambda _: TopK(Uniform(2), 3),
        lambda clusters: Distance(clusters, DECODE, temperature=0.0),
        lambda clusters: Distance(clusters, DECODE, every=0),
    ],
)
def test_what_has_no_meaning_is_refused(make: object, clusters: Clusters) -> None:
    with pytest.raises(ConfigError, match="Allowed"):
        make(clusters)  # type: ignore[operator]
