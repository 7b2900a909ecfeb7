"""Cuts a model into sections: layers that follow one another, the embedding before the first, the head after the last.

    tokens ─► | embed, layers 0-3 | ─activations─► | layers 4-8 | ─activations─► | layers 9-11, norm, head | ─► loss

All layers of a model are alike, so a cut is how many each section has. It is a function of the config and the number of
sections alone: all peers cut alike. A tied matrix lies in both end sections.

It does not know torch, nor who holds a section.
"""

import heapq
from dataclasses import dataclass

from weft.errors import ConfigError
from weft.model.config import ModelConfig, num_layer_parameters, num_table_parameters


@dataclass(frozen=True)
class Section:
    """One of `num_sections`, in the order of the forward pass."""

    number: int
    num_sections: int
    layers: range

    @property
    def is_first(self) -> bool:
        """Whether it takes tokens; the others take what the section before makes of them."""
        return self.number == 0

    @property
    def is_last(self) -> bool:
        """Whether it computes logits and loss."""
        return self.number == self.num_sections - 1


def whole(config: ModelConfig) -> Section:
    """Return the only section of a model that is not cut."""
    return Section(0, 1, range(config.num_layers))


def sections(config: ModelConfig, num: int) -> tuple[Section, ...]:
    """Cut a model so that the largest section is as small as layers allow, and the others as equal as they can be.

    Each gets one layer; then each layer more goes to the smallest section so far, of equal ones to the first. Jobs that
    are all alike are shared out best that way.

    Raises:
        ConfigError: more sections than layers, or none.
    """
    if not 1 <= num <= config.num_layers:
        raise ConfigError(f"stages: {num} of a model of {config.num_layers} layers. Allowed: 1 to {config.num_layers}.")
    counts = [1] * num
    a_layer = num_layer_parameters(config)
    sizes = [(_ends(config, number, num) + a_layer, number) for number in range(num)]
    heapq.heapify(sizes)
    for _ in range(config.num_layers - num):
        size, number = sizes[0]
        counts[number] += 1
        heapq.heapreplace(sizes, (size + a_layer, number))
    starts = [sum(counts[:number]) for number in range(num)]
    return tuple(Section(n, num, range(starts[n], starts[n] + counts[n])) for n in range(num))


def num_section_parameters(config: ModelConfig, section: Section) -> int:
    """Return how many numbers a section is made of; a tied matrix counts in each that has it."""
    return len(section.layers) * num_layer_parameters(config) + _ends(config, section.number, section.num_sections)


def _ends(config: ModelConfig, number: int, num: int) -> int:
    is_first, is_last = number == 0, number == num - 1
    num_tables = 1 if is_first and is_last and config.is_tied else is_first + is_last
    return num_tables * num_table_parameters(config) + is_last * config.width
