"""Cuts a model into sections: layers that follow one another, the embedding before the first, the head after the last.

    tokens ─► | embed, layers 0-3 | ─activations─► | layers 4-8 | ─activations─► | layers 9-11, norm, head | ─► loss

All layers of a model are alike, so a cut is how many each section has. It is a function of the config and the number of
sections alone: all peers cut alike. A tied matrix lies in both end sections; or apart from them, as a piece of its own,
where those who hold either keep one vector of it together (`pieces`). A model with an adapter is cut as its base is.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace

from weft.errors import ConfigError
from weft.ids import several
from weft.model.config import (
    ModelConfig,
    has_base,
    num_layer_parameters,
    num_norm_parameters,
    num_table_parameters,
    plain,
)


@dataclass(frozen=True)
class Section:
    """One of `num_sections`, in the order of the forward pass."""

    number: int
    num_sections: int
    layers: range
    has_table: bool = False
    """Whether it has the matrix of the embedding, which a tied head is, too."""

    @property
    def is_first(self) -> bool:
        """Whether it takes tokens; the others take what the section before makes of them."""
        return self.number == 0

    @property
    def is_last(self) -> bool:
        """Whether it computes logits and loss."""
        return self.number == self.num_sections - 1

    @property
    def is_table(self) -> bool:
        """Whether it is nothing but a tied matrix."""
        return self.number == self.num_sections


def whole(config: ModelConfig) -> Section:
    """Return the only section of a model that is not cut."""
    return Section(0, 1, range(config.num_layers), has_table=True)


def middle(config: ModelConfig) -> Section:
    """Return the section that is all layers and neither end."""
    return Section(1, 3, range(config.num_layers))


def sections(config: ModelConfig, num: int) -> tuple[Section, ...]:
    """Cut a model so that the largest section is as small as layers allow, and the others as equal as they can be.

    Each gets one layer; then each layer more goes to the smallest section so far, of equal ones to the first. Jobs that
    are all alike are shared out best that way.

    Raises:
        ConfigError: more sections than layers, or none.
    """
    if not 1 <= num <= config.num_layers:
        raise ConfigError(
            f"stages: {num} of a model of {several(config.num_layers, 'layer')}. Allowed: 1 to {config.num_layers}."
        )
    counts = [1] * num
    a_layer = num_layer_parameters(plain(config))
    sizes = [(num_section_parameters(plain(config), each), each.number) for each in _with(config, counts)]
    heapq.heapify(sizes)
    for _ in range(config.num_layers - num):
        size, number = sizes[0]
        counts[number] += 1
        heapq.heapreplace(sizes, (size + a_layer, number))
    return _with(config, counts)


def _with(config: ModelConfig, counts: Sequence[int]) -> tuple[Section, ...]:
    """Return sections of so many layers each."""
    num = len(counts)
    ends = {0, num - 1} if config.is_tied else {0}
    starts = [sum(counts[:number]) for number in range(num)]
    return tuple(Section(n, num, range(starts[n], starts[n] + counts[n]), n in ends) for n in range(num))


def pieces(config: ModelConfig, num: int) -> tuple[Section, ...]:
    """Cut a model as `sections` does; a tied matrix that is trained lies in none of them, and is the last piece.

    Raises:
        ConfigError: as `sections`.
    """
    cuts = sections(config, num)
    if not has_table_apart(config, num):
        return cuts
    return *(replace(each, has_table=False) for each in cuts), Section(num, num, range(0), has_table=True)


def has_table_apart(config: ModelConfig, num: int) -> bool:
    """Whether a model in so many sections has a tied matrix that both ends train."""
    return config.is_tied and not has_base(config) and num > 1


def num_section_parameters(config: ModelConfig, section: Section) -> int:
    """Return how many numbers a section is made of; a tied matrix counts in each that has it."""
    num_tables = section.has_table + (section.is_last and not config.is_tied)
    num_ends = num_tables * num_table_parameters(config) + section.is_last * num_norm_parameters(config)
    return len(section.layers) * num_layer_parameters(config) + num_ends


def num_section_base(config: ModelConfig, section: Section) -> int:
    """Return how many numbers of a section are frozen: what its adapter goes beside, or a space's ends; else none."""
    if not has_base(config):
        return 0
    whole = num_section_parameters(plain(config), section)
    return whole - num_section_parameters(config, section) if config.has_frozen_ends else whole
