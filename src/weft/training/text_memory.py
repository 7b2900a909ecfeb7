"""Memory that texts take of a peer beside training, in closed form.

    host      a copy of what is trained, until weights are made of it; the log
    device    weights of two rounds, one of them in the making, and what they are made of; pages

On a CPU both are one.
"""

from typing import NamedTuple

import torch

from weft.engine.load import weights_nbytes
from weft.engine.numbers import Kind
from weft.model.config import ModelConfig
from weft.model.sections import Section, num_section_parameters
from weft.texts.member import MAX_VERSIONS

LOG_SHARE = 0.2  # of what texts may take; the rest is for pages


class TextMemory(NamedTuple):
    """Bytes."""

    host: int
    device: int


def text_memory(
    config: ModelConfig, section: Section, kind: Kind, device: torch.device, serve_nbytes: int
) -> TextMemory:
    """Return what texts of a section take, at most.

    Args:
        section: with a tied matrix where it computes with one.
        serve_nbytes: as of the machine's settings.
    """
    copy = 4 * num_section_parameters(config, section)
    log = int(LOG_SHARE * serve_nbytes)
    weights = MAX_VERSIONS * weights_nbytes(config, kind, section)
    moved = 0 if device.type == "cpu" else copy
    return TextMemory(host=copy + log, device=weights + moved + serve_nbytes - log)
