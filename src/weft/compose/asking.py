"""Experts that were mixed or merged, as they are asked.

weighting_of              what each counts, for who measures losses
rule_of, engine_of        the same, for who draws texts
merged_plan, merged_engine        of a mixture, in which a router chooses
"""

from collections.abc import Callable, Sequence
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
from weft.engine.engine import Engine
from weft.engine.load import NUMBER_NBYTES, Beside, Plan, plan, weights_nbytes
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


def plan_of(
    configs: Sequence[ModelConfig],
    device: torch.device,
    kind: Kind,
    context: int,
    kv_nbytes: int | None,
    free_nbytes: int,
) -> Plan:
    """Return what serving experts will hold; arguments and errors are those of `engine.load.plan`."""
    first, *others = configs
    beside = Beside(
        called="the experts beside it",
        page_nbytes=sum(page_nbytes(each, kind) for each in others)
        + PAGE * token_nbytes([each.width for each in configs]),
        weights_nbytes=sum(weights_nbytes(each, kind) for each in others),
    )
    return plan(first, device, kind, context, kv_nbytes, free_nbytes, beside)


def engine_of(
    experts: Sequence[Expert],
    rule: Rule,
    device: torch.device,
    planned: Plan,
    context: int,
    on_step: Callable[[int, int, float], None],
) -> Engine:
    """Return an engine that asks experts together; vectors are read, and kept as `Weights` does."""
    steppers = [
        Stepper(
            Weights(config, vector.to(device), planned.kind),
            KeysAndValues(config, planned.num_pages, device, planned.kind),
        )
        for config, vector in experts
    ]
    return Engine(
        Together(steppers, [config.width for config, _ in experts], rule, planned.num_pages),
        vocab_size=experts[0][0].vocab_size,
        context=context,
        num_pages=planned.num_pages,
        on_step=on_step,
    )


# --- a mixture ---


def merged_plan(
    config: MixtureConfig, device: torch.device, kind: Kind, context: int, kv_nbytes: int | None, free_nbytes: int
) -> Plan:
    """Return what serving a mixture will hold; arguments and errors are those of `engine.load.plan`."""
    networks = sum(span.num for span in mixture_layout(config) if ".ffn.experts." in span.name)
    others = networks * (config.num_experts - 1) // config.num_experts
    beside = Beside("its other experts", 0, others * NUMBER_NBYTES[kind])
    return plan(config.model, device, kind, context, kv_nbytes, free_nbytes, beside)


def merged_engine(
    config: MixtureConfig,
    vector: Float[Tensor, " num"],
    device: torch.device,
    planned: Plan,
    context: int,
    on_step: Callable[[int, int, float], None],
) -> Engine:
    """Return an engine of a mixture; its vector is read, and kept as `Weights` does.

    Raises:
        ConfigError: exact numbers, which no router has.
    """
    spans = mixture_layout(config)
    weights = Weights(config.model, vector.to(device), planned.kind, spans=spans, top=config.top_k)
    # No graphs: which networks compute a row is known in the middle of a step.
    kept = KeysAndValues(config.model, planned.num_pages, device, planned.kind, has_graphs=False)
    return Engine(
        Stepper(weights, kept),
        vocab_size=config.model.vocab_size,
        context=context,
        num_pages=planned.num_pages,
        on_step=on_step,
    )
