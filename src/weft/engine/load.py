"""From a model's parameters to an engine that serves it: which numbers, how many pages, whether that fits."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import psutil
import torch
from jaxtyping import Float
from torch import Tensor

from weft.engine.draft import Draft
from weft.engine.engine import Engine, Turns
from weft.engine.numbers import Kind, can_multiply, probe, product_s
from weft.engine.scheduling.pages import PAGE, num_pages
from weft.engine.step import KeysAndValues, Stepper, Weights, page_nbytes
from weft.errors import ConfigError, TooLarge
from weft.model.config import ModelConfig, num_layer_parameters, num_table_parameters
from weft.model.sections import Section, whole

KV_SHARE = 0.25  # of the memory that is free once the model is there
NUMBER_NBYTES: dict[Kind, int] = {
    "fp32": 4,
    "bf16": 2,
    "w8a16": 1,
    "int8": 1,
    "exact": 1,
}  # of a matrix that is multiplied by
SLOWER = 3.0  # times as slow as by halves, that products of eight bits must be to give way
FULL_TEXTS = 64  # as long as the context: pages for more are of no use on most machines


@dataclass(frozen=True)
class Plan:
    """What serving a model will hold.

    Args:
        num_pages: of keys and values.
        weights_nbytes, kv_nbytes: of each.
    """

    kind: Kind
    num_pages: int
    weights_nbytes: int
    kv_nbytes: int

    @property
    def num_tokens(self) -> int:
        """Return how many tokens of all texts together are held."""
        return self.num_pages * PAGE


def kind_for(device: torch.device) -> Kind:
    """Return the smallest numbers that are right on this device, and fast."""
    if device.type == "cpu" and probe(device):
        return "int8"
    return "bf16"


def kind_alone(device: torch.device) -> Kind:
    """Return the numbers of a machine that serves a whole model by itself: as `kind_for`, but eight-bit weights times
    halves where a processor has no instructions for products of eight bits, so that those are slower."""
    kind = kind_for(device)
    if not can_multiply("w8a16", device) or (kind == "int8" and product_s("int8") <= SLOWER * product_s("w8a16")):
        return kind
    return "w8a16"


def kind_as_trained(device: torch.device) -> Kind:
    """Return the numbers that are as trained on a CPU, and fast on a GPU."""
    return "fp32" if device.type == "cpu" else "bf16"


def required(kind: Kind, device: torch.device) -> Kind:
    """Return the kind, if this device computes it rightly.

    Raises:
        ConfigError: it does not.
    """
    if can_multiply(kind, device):
        return kind
    if kind == "w8a16":
        raise ConfigError(f"w8a16 is for CPUs, and {device} does not compute it. Choose bf16.")
    raise ConfigError(f"{device} does not multiply eight-bit integers rightly, which {kind} needs. Choose bf16.")


@dataclass(frozen=True)
class DraftModel:
    """A smaller model whose guesses a model verifies.

    Args:
        vector: flat, fp32; read, and kept as `Weights` does.
        kind: of its own numbers; they need not be the model's.
    """

    config: ModelConfig
    vector: Float[Tensor, " num"]
    kind: Kind

    @property
    def beside(self) -> "Beside":
        return Beside("its draft model", page_nbytes(self.config, self.kind), weights_nbytes(self.config, self.kind))


@dataclass(frozen=True)
class Beside:
    """What is held beside a model.

    Args:
        called: in a sentence that begins with the model.
        page_nbytes: of one page.
    """

    called: str
    page_nbytes: int
    weights_nbytes: int


@dataclass(frozen=True)
class Needs:
    """What serving a model takes.

    Args:
        held: the beginning of a sentence that says so.
        page_nbytes: of one page.
        context: tokens of the longest text.
    """

    held: str
    kind: Kind
    weights_nbytes: int
    page_nbytes: int
    context: int

    @property
    def num_least(self) -> int:
        """Return how many pages the longest text takes."""
        return num_pages(self.context)

    @property
    def text_nbytes(self) -> int:
        """Return what the longest text takes."""
        return self.num_least * self.page_nbytes


def needs(config: ModelConfig, kind: Kind, context: int, beside: Beside | None = None) -> Needs:
    """Return what a model takes, with what is beside it; `context` as of `Needs`."""
    held = f"the model and {beside.called} take" if beside else "the model takes"
    weights = weights_nbytes(config, kind) + (beside.weights_nbytes if beside else 0)
    return Needs(held, kind, weights, page_nbytes(config, kind) + (beside.page_nbytes if beside else 0), context)


def plan(
    config: ModelConfig, device: torch.device, kind: Kind, context: int, kv_nbytes: int | None, free_nbytes: int
) -> Plan:
    """Return what is held for a model, and for how many tokens there is room.

    Args:
        context: tokens of the longest text.
        kv_nbytes, free_nbytes: as of `plan_together`.

    Raises:
        TooLarge, ConfigError: as `plan_together`.
    """
    return plan_together([needs(config, kind, context)], device, kv_nbytes, free_nbytes)[0]


def plan_together(models: Sequence[Needs], device: torch.device, kv_nbytes: int | None, free_nbytes: int) -> list[Plan]:
    """Return what is held for each of several models, each with room for as many of its longest texts as the others.

    Args:
        kv_nbytes: for keys and values of all of them; None: a share of what is free.
        free_nbytes: of the device's memory.

    Raises:
        TooLarge: there is no room for the models, or beside them for one text of each.
        ConfigError: `kv_nbytes` does not hold one text of each.
    """
    weights, least = sum(each.weights_nbytes for each in models), sum(each.text_nbytes for each in models)
    left = free_nbytes - weights
    alone = models[0] if len(models) == 1 else None
    if left < least:
        held, texts = f"{len(models)} models take", "a text of the context of each"
        if alone is not None:
            held, texts = alone.held, f"a text of {alone.context:,} tokens"
        raise TooLarge(
            f"{held} {_size(weights)} as {models[0].kind}, and {texts} {_size(least)} more; of {device} "
            f"{_size(free_nbytes)} are free. Close other programs, {'' if alone else 'serve fewer models, '}or choose "
            "a smaller context."
        )
    if kv_nbytes is None:
        given = min(max(least, int(KV_SHARE * left)), FULL_TEXTS * least)
    elif (given := min(kv_nbytes, left)) < least:
        said = f"do not hold a text of the context of each of {len(models)} models;"
        if alone is not None:
            said = (
                f"hold {given // alone.page_nbytes * PAGE:,} tokens; one text of the context has {alone.context:,}, and"
            )
        raise ConfigError(
            f"{_size(kv_nbytes)} for keys and values {said} that takes {_size(least)}. Give more, or choose a smaller "
            "context."
        )
    nums = [each.num_least * given // least for each in models]
    return [
        Plan(each.kind, num, each.weights_nbytes, num * each.page_nbytes)
        for each, num in zip(models, nums, strict=True)
    ]


def weights_nbytes(config: ModelConfig, kind: Kind, section: Section | None = None) -> int:
    """Return about how many bytes the matrices of a model, or of a section, take; a tied head is there twice, for it
    is read in two ways."""
    section = section or whole(config)
    embedded = section.is_first * num_table_parameters(config) * (4 if kind == "fp32" else 2)
    return embedded + num_multiplied(config, section) * NUMBER_NBYTES[kind]


def num_multiplied(config: ModelConfig, section: Section) -> int:
    """Return how many parameters of a section each token is multiplied by: all but those of the embedding."""
    head = section.is_last * (num_table_parameters(config) + config.width)
    return len(section.layers) * num_layer_parameters(config) + head


def free_nbytes(device: torch.device) -> int:
    """Return how much memory of the device nobody uses."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)


def engine_of(
    config: ModelConfig,
    vector: Float[Tensor, " num"],
    device: torch.device,
    planned: Plan,
    context: int,
    on_step: Callable[[int, int, float], None] = lambda _drawn, _read, _s: None,
    *,
    has_guesses: bool = True,
    draft: DraftModel | None = None,
    turns: Turns | None = None,
) -> Engine:
    """Return an engine; `vector` is read, and kept as `Weights` does."""
    weights = Weights(config, vector.to(device), planned.kind)
    kept = KeysAndValues(config, planned.num_pages, device, planned.kind)
    return Engine(
        Stepper(weights, kept),
        vocab_size=config.vocab_size,
        context=context,
        num_pages=planned.num_pages,
        has_guesses=has_guesses,
        draft=None if draft is None else _draft(draft, device, planned.num_pages, config.vocab_size),
        on_step=on_step,
        turns=turns,
    )


def _draft(draft: DraftModel, device: torch.device, num_pages: int, vocab_size: int) -> Draft:
    weights = Weights(draft.config, draft.vector.to(device), draft.kind)
    return Draft(Stepper(weights, KeysAndValues(draft.config, num_pages, device, draft.kind)), vocab_size)


def _size(nbytes: int) -> str:
    """Return a size in words, so that one that is refused and one that is asked for differ."""
    unit, each = next(((unit, each) for unit, each in (("GB", 1e9), ("MB", 1e6)) if nbytes >= each), ("kB", 1e3))
    return f"{nbytes / each:.2f} {unit}"
