"""Experts that were mixed or merged, as they are asked.

weighting_of                      what each counts, for who measures losses
rule_of, needs_of, steps_of       the same, for who draws texts
merged_needs, merged_steps        of a mixture, in which a router chooses
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from weft.compose.composed import Experts, clusters_of
from weft.compose.experts.ensemble import Distance, Posterior, TopK, Uniform, Weighting, by_words
from weft.compose.experts.mixture import MixtureConfig, mixture_layout
from weft.compose.experts.together import Rule, Together, token_nbytes
from weft.data.tokenizer import Tokenizer
from weft.engine.load import NUMBER_NBYTES, Beside, Needs, Plan, needs, weights_nbytes
from weft.engine.numbers import Kind
from weft.engine.scheduling.pages import PAGE
from weft.engine.step import KeysAndValues, Stepper, Weights, page_nbytes
from weft.model.config import ModelConfig

Expert = tuple[ModelConfig, Float[Tensor, " num"]]


def weighting_of(folder: Path, told: Experts, words: Tokenizer) -> Weighting:
    """Return how much each expert counts, told token by token.

    Raises:
        ConfigError: the folder lacks what it needs.
    """
    found: Weighting = Uniform(len(told.members))
    if (clusters := clusters_of(folder, told)) is not None:
        found = Distance(clusters, words.decode)
    elif told.weighting == "posterior":
        found = Posterior(torch.tensor(told.prior))
    return found if told.top is None else TopK(found, told.top)


def rule_of(folder: Path, told: Experts, words: Tokenizer, device: torch.device) -> Rule:
    """Return the same, for an engine.

    Raises:
        ConfigError: as `weighting_of`.
    """
    clusters = clusters_of(folder, told)
    about = None if clusters is None else partial(by_words, clusters, words.decode)
    prior = torch.tensor(told.prior, device=device)
    return Rule(told.weighting, (prior / prior.sum()).log(), about, told.top)


def needs_of(configs: Sequence[ModelConfig], kind: Kind, context: int) -> Needs:
    """Return what serving experts takes; arguments are those of `engine.load.needs`."""
    first, *others = configs
    beside = Beside(
        called="the experts beside it",
        page_nbytes=sum(page_nbytes(each, kind) for each in others)
        + PAGE * token_nbytes([each.width for each in configs]),
        weights_nbytes=sum(weights_nbytes(each, kind) for each in others),
    )
    return needs(first, kind, context, beside)


def steps_of(experts: Sequence[Expert], rule: Rule, device: torch.device, planned: Plan) -> Together:
    """Return the steps of experts that are asked together; vectors are read, and kept as `Weights` does."""
    steppers = [
        Stepper(
            Weights(config, vector.to(device), planned.kind),
            KeysAndValues(config, planned.num_pages, device, planned.kind),
        )
        for config, vector in experts
    ]
    return Together(steppers, [config.width for config, _ in experts], rule, planned.num_pages)


# --- a mixture ---


def merged_needs(config: MixtureConfig, kind: Kind, context: int) -> Needs:
    """Return what serving a mixture takes; arguments are those of `engine.load.needs`."""
    networks = sum(span.num for span in mixture_layout(config) if ".ffn.experts." in span.name)
    others = networks * (config.num_experts - 1) // config.num_experts
    return needs(config.model, kind, context, Beside("its other experts", 0, others * NUMBER_NBYTES[kind]))


def merged_steps(config: MixtureConfig, vector: Float[Tensor, " num"], device: torch.device, planned: Plan) -> Stepper:
    """Return the steps of a mixture; its vector is read, and kept as `Weights` does.

    Raises:
        ConfigError: exact numbers, which no router has.
    """
    spans = mixture_layout(config)
    weights = Weights(config.model, vector.to(device), planned.kind, spans=spans, top=config.top_k)
    # No graphs: which networks compute a row is known in the middle of a step.
    return Stepper(weights, KeysAndValues(config.model, planned.num_pages, device, planned.kind, has_graphs=False))
