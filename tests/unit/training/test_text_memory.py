"""What texts, and answers to tasks, take of a peer's memory, against what its process holds."""

import ctypes
import gc
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import msgspec
import psutil
import pytest
import torch

from unit.stages.pieces import RUN
from weft.codec.config import Bf16Config, Fp32Config
from weft.engine.load import required
from weft.engine.numbers import Kind
from weft.engine.scheduling.pages import num_pages
from weft.engine.step import KeysAndValues, Weights, page_nbytes
from weft.errors import ConfigError
from weft.model.config import AdapterConfig, ModelConfig, num_parameters, plain
from weft.model.flat import assemble
from weft.model.sections import num_section_parameters, sections
from weft.texts.member import MAX_VERSIONS
from weft.training.device import Device, with_texts
from weft.training.text_memory import LOG_SHARE, answer_memory, text_memory

MODEL = ModelConfig(
    vocab_size=8192, num_layers=6, num_heads=8, num_kv_heads=4, width=512, ffn_width=1536, max_seq_len=512
)
CPU, GPU = torch.device("cpu"), torch.device("cuda:0")
SERVE = 16 << 20
SEQ_LEN = 512
DEADLINE_S = 120.0


def loaded() -> Any:
    """Return what starts processes of their own, off one that has loaded torch and computed nothing."""
    context = get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


def resident_nbytes() -> int:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(psutil.Process().memory_info().rss)


def there_and_said(kind: Kind, num_stages: int) -> list[tuple[int, int]]:
    """Return, of each section, what its weights of two rounds, a copy, pages and log take, and what the closed form
    says. In a process of its own: in one that has freed much, the allocator takes from that."""
    first, *_ = cuts = sections(MODEL, num_stages)
    Weights(MODEL, torch.randn(num_section_parameters(MODEL, first)), kind, first)  # what torch takes once, for good
    found = []
    for section in cuts:
        num, num_layers = num_section_parameters(MODEL, section), len(section.layers)
        before = resident_nbytes()
        copy = torch.randn(num)
        versions = [Weights(MODEL, copy, kind, section) for _ in range(MAX_VERSIONS)]
        num_pages = int((1 - LOG_SHARE) * SERVE) // page_nbytes(MODEL, kind, num_layers)
        kept = KeysAndValues(MODEL, num_pages, CPU, kind, num_layers)
        for tensor in (each for each in vars(kept).values() if isinstance(each, torch.Tensor)):
            tensor.add_(0)  # memory that nobody has written to is not there yet
        log = b"\1" * int(LOG_SHARE * SERVE)
        said = text_memory(MODEL, section, kind, CPU, SERVE)
        found.append((resident_nbytes() - before, said.host + said.device))
        del copy, versions, kept, log
    return found


def drawing_and_said(config: ModelConfig) -> tuple[int, int]:
    """Return what a peer takes that draws answers and checks others', and what the closed form says."""
    small = ModelConfig(vocab_size=8, num_layers=1, num_heads=1, num_kv_heads=1, width=8, ffn_width=8, max_seq_len=8)
    assemble(small, torch.randn(num_parameters(small)))  # what torch takes once, for good
    trained, whole = torch.randn(num_parameters(config)), torch.randn(num_parameters(plain(config)))
    before = resident_nbytes()
    copy = trained.clone()
    merged = [copy, copy] if config == MODEL else [whole.clone(), whole.clone()]
    weights, kept = Weights(MODEL, merged[0], "fp32"), KeysAndValues(MODEL, num_pages(SEQ_LEN), CPU, "fp32")
    for tensor in (each for each in vars(kept).values() if isinstance(each, torch.Tensor)):
        tensor.add_(0)
    module = assemble(plain(config), merged[1])
    said = answer_memory(config, CPU, SEQ_LEN)
    found = resident_nbytes() - before
    del trained, whole, weights, module
    return found, said.host + said.device


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="only there the allocator gives back at once what is free")
@pytest.mark.parametrize("has_adapter", [False, True])
def test_drawing_answers_takes_what_the_closed_form_says(has_adapter: bool) -> None:
    config = msgspec.structs.replace(MODEL, adapter=AdapterConfig(rank=4)) if has_adapter else MODEL
    with ProcessPoolExecutor(1, mp_context=loaded()) as pool:
        there, said = pool.submit(drawing_and_said, config).result(DEADLINE_S)
    assert said == pytest.approx(there, rel=0.05)


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="only there the allocator gives back at once what is free")
@pytest.mark.parametrize(
    ("kind", "num_stages"),
    [
        *(("bf16", 1), ("int8", 3), ("exact", 1)),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in (("bf16", 3), ("int8", 1), ("exact", 3))),
    ],
)
def test_weights_of_two_rounds_pages_and_a_copy_are_what_the_closed_form_says(kind: Kind, num_stages: int) -> None:
    try:
        required(kind, CPU)
    except ConfigError as error:
        pytest.skip(str(error))
    with ProcessPoolExecutor(1, mp_context=loaded()) as pool:
        found = pool.submit(there_and_said, kind, num_stages).result(DEADLINE_S)
    assert len(found) == num_stages
    for there, said in found:
        assert said == pytest.approx(there, rel=0.05)


def test_texts_are_counted_where_they_lie() -> None:
    section, needed = sections(RUN.model, 2)[0], {"cpu": 1000, "cuda:0": 500}
    card = Device(GPU, "bf16", "a card")
    taken = text_memory(RUN.model, section, "bf16", GPU, SERVE)
    found = with_texts(needed, RUN.model, section, Bf16Config(), card, SERVE)
    assert found == {"cpu": 1000 + taken.host, "cuda:0": 500 + taken.device}
    assert taken.host == 4 * num_section_parameters(RUN.model, section) + int(LOG_SHARE * SERVE)
    assert with_texts(needed, RUN.model, section, Fp32Config(), card, 0) == needed
