"""Averages of weights: several models that were branched from one become a model of the same size.

    uniform    mean of all
    given      sum w_i x_i / sum w_i                     such as the domain's posterior (Branch-Train-Merge, section 4)
    greedy     from the best on, each is taken into the mean if the mean then does no worse on dev text

Only what began at the same weights can be averaged: two models from seeds of their own lie in basins of their own, and
their mean is worse than either. So each ingredient names the weights it began at, and others are refused.

Model soups: Wortsman et al., arXiv:2203.05482, recipe 1 is the greedy one. Sums are in float64: the mean of equal
weights is those weights, bit for bit.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float32
from torch import Tensor

from weft.errors import ConfigError
from weft.ids import Digest, short

_CHUNK = 1 << 20  # numbers added up at a time: bounds the scratch memory


@dataclass(frozen=True, eq=False)
class Ingredient:
    """A model that may be averaged.

    Args:
        parent: what names the weights that its training began at.
    """

    name: str
    vector: Float32[Tensor, " num"]
    parent: Digest


@dataclass(frozen=True, eq=False)
class Soup:
    """
    Args:
        names: of what is in it, in the order in which it was taken.
        loss: on dev text.
    """

    vector: Float32[Tensor, " num"]
    names: tuple[str, ...]
    loss: float


def uniform(ingredients: Sequence[Ingredient]) -> Float32[Tensor, " num"]:
    """Return the mean of weights.

    Raises:
        ConfigError: as `require_one_parent`.
    """
    return weighted(ingredients, [1.0] * len(ingredients))


def weighted(ingredients: Sequence[Ingredient], weights: Sequence[float]) -> Float32[Tensor, " num"]:
    """Return the mean of weights, each counted as given.

    Args:
        weights: not negative, and not all 0; of any sum.

    Raises:
        ConfigError: as `require_one_parent`.
    """
    require_one_parent(ingredients)
    return mean([each.vector for each in ingredients], weights)


def greedy(ingredients: Sequence[Ingredient], loss: Callable[[Float32[Tensor, " num"]], float]) -> Soup:
    """Return the mean of those that lower the loss of the mean, tried from the best on.

    Args:
        loss: on dev text, which is neither trained on nor what the soup is judged by. Asked twice for each ingredient,
            but for one.

    Raises:
        ConfigError: as `require_one_parent`.
    """
    require_one_parent(ingredients)
    alone = [loss(each.vector) for each in ingredients]
    order = sorted(range(len(ingredients)), key=alone.__getitem__)
    taken, best, vector = [ingredients[order[0]]], alone[order[0]], ingredients[order[0]].vector.clone()
    for place in order[1:]:
        tried = [*taken, ingredients[place]]
        mixed = mean([each.vector for each in tried], [1.0] * len(tried))
        if (found := loss(mixed)) <= best:
            taken, best, vector = tried, found, mixed
    return Soup(vector, tuple(each.name for each in taken), best)


def require_one_parent(ingredients: Sequence[Ingredient]) -> None:
    """Refuse models whose weights cannot be averaged.

    Raises:
        ConfigError: there are none, they are of several sizes, or they began at several weights.
    """
    if not ingredients:
        raise ConfigError("an average of no models: name one or more.")
    first = ingredients[0]
    for each in ingredients[1:]:
        if each.parent != first.parent:
            raise ConfigError(
                f"{first.name} began at the weights {short(first.parent)}, {each.name} at {short(each.parent)}: models "
                "of several beginnings have no useful average. Mix what they predict instead (an ensemble), or branch "
                "them all from one model and train them again."
            )
        if each.vector.shape != first.vector.shape:
            raise ConfigError(
                f"{first.name} has {first.vector.numel():,} numbers, {each.name} {each.vector.numel():,}: models of "
                "several sizes have no average. Mix what they predict instead (an ensemble)."
            )


def mean(vectors: Sequence[Float32[Tensor, " num"]], weights: Sequence[float]) -> Float32[Tensor, " num"]:
    """Return sum w_i x_i / sum w_i, whoever they are of.

    Raises:
        ConfigError: a weight is negative or not finite, or all are 0.
    """
    total = sum(weights)
    if min(weights) < 0 or not 0 < total < float("inf"):
        raise ConfigError(f"weights of an average: {list(weights)}. Allowed: 0 or more, finite, and not all 0.")
    out = torch.empty_like(vectors[0])
    for start in range(0, out.numel(), _CHUNK):
        part = slice(start, start + _CHUNK)
        added = torch.zeros(out[part].shape, dtype=torch.float64, device=out.device)
        for vector, weight in zip(vectors, weights, strict=True):
            added.add_(vector[part].double(), alpha=weight)
        out[part] = added.div_(total)
    return out
