"""Experts asked together: their probabilities of the next token, mixed by how much each counts.

    p(x_t | x_<t) = sum_j w_j(x_<t) p_j(x_t | x_<t)

    Uniform      w_j = 1 / k
    Posterior    w_j ~ p(j) prod_{s<t} p_j(x_s | x_<s)          whose text is this? Bayes, told each token that came
    Distance     w_j ~ exp(-|context - centre_j|^2 / T)         whose cluster is its tf-idf near?
    TopK         the k that count most of any of them, the rest 0

One implementation serves both who draws texts, token by token, and who measures losses: all is by rows of a batch, and
each is told what came. A posterior needs the probabilities of all experts; a distance knows before they compute which
k to ask.

Posterior: Branch-Train-Merge, arXiv:2208.03306, section 2.2, after DEMix, arXiv:2108.05036, section 5, whose prior is
cached: an exponential moving average of posteriors of dev texts (`cached_prior`). Distance: c-BTM, arXiv:2303.14177,
equation 4, with the temperature of its code.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from math import inf, log

import torch
from jaxtyping import Float, Float32, Int64
from torch import Tensor

from weft.compose.experts.clusters import Clusters
from weft.compose.experts.tfidf import MOST_LETTERS
from weft.errors import ConfigError

ALPHA = 0.3  # of the moving average, as in both papers
TEMPERATURE = 0.1
AT_ONCE = 2048  # tokens whose logits are held, of two experts
EVERY = 32  # tokens between two looks at what a context is about

LogWeights = Float32[Tensor, "batch experts"]
Model = Callable[[Tensor], Tensor]  # tokens [batch, tokens] to logits [batch, tokens, vocab]


class Weighting(ABC):
    """How much each expert counts for the next token of each text of a batch, told what came before."""

    @property
    @abstractmethod
    def num_experts(self) -> int: ...

    @abstractmethod
    def begin(self, tokens: Int64[Tensor, "batch tokens"]) -> None:
        """Forget all texts; others begin with these tokens, which nobody has predicted."""

    @abstractmethod
    def log_weights(self) -> LogWeights:
        """Return logarithms of weights that add up to 1."""

    @abstractmethod
    def update(self, tokens: Int64[Tensor, " batch"], log_likelihoods: LogWeights) -> None:
        """Take the next token of each text, and how likely each expert held it."""


class Uniform(Weighting):
    """Each counts alike."""

    def __init__(self, num_experts: int) -> None:
        self._log_weights = torch.full((1, num_experts), -log(num_experts))

    @property
    def num_experts(self) -> int:
        return self._log_weights.shape[1]

    def begin(self, tokens: Int64[Tensor, "batch tokens"]) -> None:
        self._log_weights = self._log_weights[:1].repeat(len(tokens), 1).to(tokens.device)

    def log_weights(self) -> LogWeights:
        return self._log_weights

    def update(self, tokens: Int64[Tensor, " batch"], log_likelihoods: LogWeights) -> None:
        pass


class Posterior(Weighting):
    """Each counts as likely as the text so far is its own.

    Args:
        prior: how likely each is before anything is known, of any sum; `cached_prior` makes one.
    """

    def __init__(self, prior: Float[Tensor, " experts"]) -> None:
        if not (prior > 0).all() or not prior.isfinite().all():
            raise ConfigError(f"a prior of {prior.tolist()}. Allowed: more than 0 each; an expert of 0 never counts.")
        self._log_prior = prior.float().log()
        self._log_joint = self._log_prior[None]

    @property
    def num_experts(self) -> int:
        return len(self._log_prior)

    def begin(self, tokens: Int64[Tensor, "batch tokens"]) -> None:
        self._log_joint = self._log_prior.repeat(len(tokens), 1).to(tokens.device)

    def log_weights(self) -> LogWeights:
        # p(j | x_<t) = p(j) p(x_<t | j) / sum_i p(i) p(x_<t | i)
        return self._log_joint.log_softmax(-1)

    def update(self, tokens: Int64[Tensor, " batch"], log_likelihoods: LogWeights) -> None:  # noqa: ARG002  # they say it
        # Normalized in each step: in a long text sums would grow until fp32 tells no two of them apart.
        self._log_joint = (self._log_joint + log_likelihoods.float()).log_softmax(-1)


class Distance(Weighting):
    """Each counts by how near its cluster's centre is to what the text so far is about.

    Args:
        decode: the tokenizer's.
        every: tokens between two looks, each of which takes up to a millisecond for each text.
    """

    def __init__(
        self,
        clusters: Clusters,
        decode: Callable[[Sequence[int]], str],
        temperature: float = TEMPERATURE,
        every: int = EVERY,
    ) -> None:
        if not temperature > 0 or every < 1:
            raise ConfigError(f"a temperature of {temperature}, a look every {every} tokens. Allowed: more than 0.")
        self._clusters, self._decode = clusters, decode
        self._temperature, self._every = temperature, every
        self._texts, self._num_new = list[list[int]](), 0
        self._log_weights = torch.full((1, clusters.num), -log(clusters.num))

    @property
    def num_experts(self) -> int:
        return self._clusters.num

    def begin(self, tokens: Int64[Tensor, "batch tokens"]) -> None:
        self._texts = tokens.tolist()
        self._look(tokens.device)

    def log_weights(self) -> LogWeights:
        return self._log_weights

    def update(self, tokens: Int64[Tensor, " batch"], log_likelihoods: LogWeights) -> None:  # noqa: ARG002  # words say it
        for text, token in zip(self._texts, tokens.tolist(), strict=True):
            text.append(token)
        self._num_new += 1
        if self._num_new == self._every:
            self._look(tokens.device)

    def _look(self, device: torch.device) -> None:
        self._num_new = 0
        for text in self._texts:
            del text[:-MOST_LETTERS]  # as many tokens have about as many letters, or more
        self._log_weights = by_words(self._clusters, self._decode, self._texts, self._temperature).to(device)


def by_words(
    clusters: Clusters,
    decode: Callable[[Sequence[int]], str],
    texts: Sequence[Sequence[int]],
    temperature: float = TEMPERATURE,
) -> LogWeights:
    """Return how much each expert counts by what texts are about, their last words at least."""
    words = [decode(text[-MOST_LETTERS:])[-MOST_LETTERS:] for text in texts]
    vectors = clusters.tfidf.vectors(words)
    distances = torch.from_numpy(clusters.distances(vectors))
    distances[~torch.from_numpy(vectors.any(1))] = 0.0  # of what nothing is known, all are equally far
    # w_j ~ exp(-|context - centre_j|^2 / T)
    return (-distances / temperature).log_softmax(-1).float()


class TopK(Weighting):
    """Of a weighting the k that count most, of equal ones the first; what the others had goes to them in proportion.

    An expert of weight 0 (a logarithm of minus infinity) need not compute, unless the weighting is told by likelihoods.
    """

    def __init__(self, weighting: Weighting, k: int) -> None:
        if not 1 <= k <= weighting.num_experts:
            raise ConfigError(f"the top {k} of {weighting.num_experts} experts. Allowed: 1 to {weighting.num_experts}.")
        self._weighting, self._k = weighting, k

    @property
    def num_experts(self) -> int:
        return self._weighting.num_experts

    def begin(self, tokens: Int64[Tensor, "batch tokens"]) -> None:
        self._weighting.begin(tokens)

    def log_weights(self) -> LogWeights:
        return top_of(self._weighting.log_weights(), self._k)

    def update(self, tokens: Int64[Tensor, " batch"], log_likelihoods: LogWeights) -> None:
        self._weighting.update(tokens, log_likelihoods)


def top_of(log_weights: LogWeights, k: int) -> LogWeights:
    """Return the k largest of each row, of equal ones the first, so that they add up to 1; minus infinity else."""
    order = log_weights.argsort(dim=-1, descending=True, stable=True)
    return log_weights.scatter(1, order[:, k:], -inf).log_softmax(-1)


class Ensemble:
    """Experts' logits of the next token become one distribution, token after token.

        ensemble.begin(prompt[:, :1])
        for token in ...: mixed = ensemble.mix(logits); token = draw(mixed); ensemble.update(token)

    A prompt's other tokens are mixed and updated like those that are drawn.
    """

    def __init__(self, weighting: Weighting) -> None:
        self._weighting = weighting
        self._log_probabilities: Float32[Tensor, "batch experts vocab"] | None = None

    def begin(self, tokens: Int64[Tensor, "batch tokens"]) -> None:
        self._weighting.begin(tokens)
        self._log_probabilities = None

    def mix(self, logits: Float[Tensor, "batch experts vocab"]) -> Float32[Tensor, "batch vocab"]:
        """Return the logarithms of the mixed probabilities."""
        self._log_probabilities = logits.float().log_softmax(-1)
        return mixed(self._log_probabilities, self._weighting.log_weights())

    def update(self, tokens: Int64[Tensor, " batch"]) -> None:
        """Take the token that came, of each text, which the last `mix` was of."""
        assert self._log_probabilities is not None, "a token is taken after what was predicted for it"
        at = tokens[:, None, None].expand(-1, self._weighting.num_experts, 1)
        self._weighting.update(tokens, self._log_probabilities.gather(-1, at)[..., 0])
        self._log_probabilities = None


def mixed(
    log_probabilities: Float32[Tensor, "batch experts vocab"], log_weights: LogWeights
) -> Float32[Tensor, "batch vocab"]:
    """Return log sum_j w_j p_j."""
    # An expert that was not asked may have any numbers: 0 times those is 0.
    added = (log_probabilities + log_weights[..., None]).masked_fill(log_weights[..., None] == -inf, -inf)
    return added.logsumexp(1)


# --- on held-out text ---


@torch.no_grad()
def likelihoods(
    models: Sequence[Model], tokens: Int64[Tensor, "batch tokens"], targets: Int64[Tensor, "batch tokens"]
) -> Float32[Tensor, "batch tokens experts"]:
    """Return the logarithm of the probability that each expert gives each target: all that losses are made of."""
    at_once, parts = max(1, AT_ONCE // tokens.shape[1]), []
    for here in (slice(start, start + at_once) for start in range(0, len(tokens), at_once)):
        wanted = targets[here, :, None]
        found = [model(tokens[here]).float().log_softmax(-1).gather(-1, wanted)[..., 0] for model in models]
        parts.append(torch.stack(found, -1))
    return torch.cat(parts)


def losses(
    weighting: Weighting,
    tokens: Int64[Tensor, "batch tokens"],
    targets: Int64[Tensor, "batch tokens"],
    log_likelihoods: Float32[Tensor, "batch tokens experts"],
) -> Float32[Tensor, " batch"]:
    """Return the mean loss of each sequence, nats per token.

    Args:
        targets: the tokens that follow; the last one is the only that is not among `tokens`.
        log_likelihoods: as `likelihoods` returns them.
    """
    weighting.begin(tokens[:, :1])
    total = torch.zeros(len(tokens), device=tokens.device)
    for target, each in zip(targets.unbind(1), log_likelihoods.unbind(1), strict=True):
        total -= (weighting.log_weights() + each).logsumexp(-1)
        weighting.update(target, each)
    return total / targets.shape[1]


def cached_prior(posteriors: Float32[Tensor, "texts experts"], alpha: float = ALPHA) -> Float32[Tensor, " experts"]:
    """Return the exponential moving average of posteriors, text after text; of the first one alone, that.

    It is a prior of texts like these: one of each domain, from dev text of that domain.

    Args:
        posteriors: after the last token of each dev text: `Posterior.log_weights`, exponentiated.
    """
    prior = posteriors[0]
    for posterior in posteriors[1:]:
        prior = (1 - alpha) * prior + alpha * posterior
    # A domain that no dev text was of may come yet: Bayes never gives weight to what has none.
    floor = 1e-6
    return (prior + floor) / (1 + floor * posteriors.shape[1])
