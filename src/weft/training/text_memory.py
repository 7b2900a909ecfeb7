"""Memory that texts, and answers to tasks, take of a peer beside training, in closed form.

    host      a copy of what is trained, until weights are made of it; the log
    device    weights of two rounds, one of them in the making, and what they are made of; pages

of answers

    host      a copy of what is trained, or what an adapter goes beside merged with that
    device    what draws them, with pages of a text, and what checks others'

On a CPU both are one.
"""

from typing import NamedTuple

import torch

from weft.engine.load import kind_as_trained, weights_nbytes
from weft.engine.numbers import Kind
from weft.engine.scheduling.pages import num_pages
from weft.engine.step import page_nbytes
from weft.model.config import ModelConfig, num_base_parameters, num_parameters, num_table_parameters, plain
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


def answer_memory(config: ModelConfig, device: torch.device, seq_len: int) -> TextMemory:
    """Return what a peer takes that learns from answers, at the least: of longer ones fewer are drawn together.

    Args:
        config: of the model that is trained, with its adapter.
        seq_len: tokens of a task and its answer.
    """
    drawn_from, kind = plain(config), kind_as_trained(device)
    copy, whole = 4 * num_parameters(config), 4 * num_parameters(drawn_from)
    merged = whole if num_base_parameters(config) else 0
    pages = num_pages(seq_len) * page_nbytes(drawn_from, kind)
    if device.type == "cpu":  # the copy's numbers are read where they are, but for the embedding's
        return TextMemory(host=copy + 2 * merged, device=4 * num_table_parameters(drawn_from) + pages)
    drawing = weights_nbytes(drawn_from, kind) + whole  # the latter while weights are made of it
    return TextMemory(host=copy + merged, device=drawing + whole + pages)
