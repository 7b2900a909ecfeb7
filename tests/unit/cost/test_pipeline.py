"""Closed forms of a pipeline against what it really makes: messages, tensors that autograd keeps, operations."""

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from weft.codec.build import build
from weft.codec.config import Bf16Config, Fp32Config, Int8Config
from weft.codec.dense import Fp32
from weft.cost import pipeline as cost_pipeline
from weft.cost import training as cost
from weft.cost.pipeline import MicroBatch, Shape
from weft.model.backward import forward
from weft.model.config import ModelConfig
from weft.model.flat import flatten
from weft.model.sections import Section, sections
from weft.model.transformer import SectionModule
from weft.net.messages import BlobHeader, BlobRequest, Call, Note, Reply
from weft.net.transport.frame import encode_frame
from weft.pipeline.codec.build import Boundaries
from weft.pipeline.device import Given
from weft.pipeline.link import parcel
from weft.pipeline.messages import Backward, Computed, Forward, IsTaken, Verdict
from weft.pipeline.torch_device import TorchDevice
from weft.training.device import decoder
from weft.training.section_memory import shape_of
from weft.wire import encode

SAMPLES, SEQ_LEN = 4, 64
MICRO = MicroBatch(num_samples=SAMPLES, seq_len=SEQ_LEN)


def config(**changes: Any) -> ModelConfig:
    fields: dict[str, Any] = {
        "vocab_size": 257,
        "num_layers": 5,
        "num_heads": 4,
        "num_kv_heads": 4,
        "width": 128,
        "ffn_width": 384,
        "max_seq_len": SEQ_LEN,
    }
    return ModelConfig(**(fields | changes))


# --- operations ---


@pytest.mark.parametrize("num", [1, 2, 5])
def test_sections_compute_together_what_the_whole_model_does(num: int) -> None:
    model = config(num_kv_heads=2)
    found = [cost_pipeline.section_flops(shape_of(model, each), SEQ_LEN) for each in sections(model, num)]
    assert sum(each.total for each in found) == cost.flops_per_token(decoder(model), SEQ_LEN)


def test_operations_by_hand() -> None:
    whole = cost.Decoder(
        num_parameters=0, vocab_size=10, num_layers=3, num_heads=1, width=4, q_width=4, kv_width=4, ffn_width=8
    )
    shape = Shape(decoder=whole, num_parameters=0, num_layers=2, is_first=False, is_last=True)
    matrices = 2 * (4 * 4 * 4 + 3 * 4 * 8) + 10 * 4
    flops = cost_pipeline.section_flops(shape, 6)
    assert flops.weights == 2 * matrices
    assert flops.forward == 2 * matrices + 2 * 4 * 4 * 6
    assert flops.input == 2 * matrices + 2 * 8 * 4 * 6


# --- bytes ---


def frames(*records: Any) -> int:
    """Return the bytes of frames, each call, reply and note in its own."""
    total = 0
    for record in records:
        body, method = encode(record), type(record).__name__
        match record:
            case Forward() | Backward():
                record = Call(number=12_345, method=method, deadline_s=9.999999999, body=body)
            case IsTaken() | Verdict():
                record = Reply(number=12_345, body=body)
            case Computed():
                record = Note(method=method, body=body)
        total += len(encode_frame(encode(record)))
    return total


def test_letters_are_those_of_a_micro_batch() -> None:
    of: dict[str, Any] = {"stage": 3, "origin": "ab" * 32, "number": 123_456, "attempt": 0}
    digest = "cd" * 32
    ask, header = BlobRequest(digest=digest), BlobHeader(nbytes=10**6)  # type: ignore[arg-type]
    down = frames(Forward(**of, num_samples=4, tokens=b"", activations=digest), header, ask, Verdict(word="accepted"))
    up = frames(IsTaken(is_taken=True), Computed(**of), ask, Backward(**of, gradient=digest, loss=3.21), header)
    assert down == pytest.approx(cost_pipeline.DOWN_LETTERS_NBYTES, rel=0.1)
    assert up == pytest.approx(cost_pipeline.UP_LETTERS_NBYTES, rel=0.1)


def test_what_crosses_is_what_a_device_hands_on() -> None:
    model = config()
    codecs = Boundaries(Int8Config(), Bf16Config())
    num = SAMPLES * SEQ_LEN * 128
    micro = MicroBatch(
        num_samples=SAMPLES,
        seq_len=SEQ_LEN,
        activations_nbytes=build(Int8Config()).nbytes(num),
        gradients_nbytes=build(Bf16Config()).nbytes(num),
    )
    section = sections(model, 3)[1]
    with torch.random.fork_rng():
        device = TorchDevice(flatten(SectionModule(model, section), "cpu"), codecs, SEQ_LEN, SAMPLES)
    tokens = bytes(4 * SAMPLES * (SEQ_LEN + 1))
    assert len(tokens) == cost_pipeline.tokens_nbytes(micro)
    between = cost_pipeline.crossing(micro)
    assert between.down_nbytes - cost_pipeline.DOWN_LETTERS_NBYTES - len(tokens) == device.input_nbytes(SAMPLES)
    assert between.up_nbytes - cost_pipeline.UP_LETTERS_NBYTES == device.gradient_nbytes(SAMPLES)
    assert Given(SAMPLES, tokens, None).num_samples == micro.num_samples
    assert between.total_nbytes - cost_pipeline.entry(micro).total_nbytes == num + 4 * num // 256 + 2 * num


# --- memory ---


def passed_nbytes(model: ModelConfig, section: Section) -> tuple[int, int]:
    """Return the bytes of the distinct storages that a micro-batch keeps, before and after its gradient went back."""
    flat = flatten(SectionModule(model, section), "cpu")
    parameters = flat.vector.untyped_storage().data_ptr()
    storages: dict[int, torch.UntypedStorage] = {}  # holding them keeps addresses from being used again

    def note(tensor: Tensor) -> Tensor:
        if (storage := tensor.untyped_storage()).data_ptr() != parameters:
            storages[storage.data_ptr()] = storage
        return tensor

    targets = torch.zeros(SAMPLES, SEQ_LEN, dtype=torch.int64)
    x = torch.zeros_like(targets) if section.is_first else torch.ones(SAMPLES, SEQ_LEN, model.width)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        passed = forward(flat, lambda module: module.loss(x, targets) if section.is_last else module(x), x)
    for tensor in (passed._x, passed.output, *([targets] if section.is_last else [])):
        note(tensor)
    before = sum(storage.nbytes() for storage in storages.values())
    storages.clear()
    passed.input_gradient(None if section.is_last else torch.ones(SAMPLES, SEQ_LEN, model.width))
    for owed in passed._owed:
        for cell in owed.__closure__ or ():
            if isinstance(cell.cell_contents, Tensor):
                note(cell.cell_contents)
    for tensor in (passed._x, passed.output):
        note(tensor)
    return before, sum(storage.nbytes() for storage in storages.values())


@pytest.mark.parametrize("number", [0, 1, 2])
@pytest.mark.parametrize("changes", [{}, {"num_kv_heads": 2}, {"vocab_size": 2000, "is_tied": True}], ids=repr)
def test_a_micro_batch_keeps_to_the_byte_what_autograd_keeps(changes: dict[str, Any], number: int) -> None:
    model = config(**changes)
    section = sections(model, 3)[number]
    kept = cost_pipeline.kept_nbytes(shape_of(model, section), MICRO)
    before, after = passed_nbytes(model, section)
    assert kept == before
    assert 0.75 * kept < after < kept  # what weights' gradients are made of


def test_under_way_are_encoded_bytes_beside_by_hand() -> None:
    micro = MicroBatch(num_samples=2, seq_len=8, activations_nbytes=1000, gradients_nbytes=100)
    for number, num_crossings in enumerate((1, 2, 1)):
        model = config()
        shape = shape_of(model, sections(model, 3)[number])
        under_way = cost_pipeline.under_way_nbytes(shape, micro)
        assert under_way == cost_pipeline.kept_nbytes(shape, micro) + num_crossings * 1100 + 4 * 2 * 9
        two, three = (cost_pipeline.activation_nbytes(shape, micro, num) for num in (2, 3))
        assert three - two == under_way


def peak_nbytes(model: ModelConfig, section: Section, num: int = 1, *, has_recompute: bool = False) -> int:
    """Return the most bytes alive while micro-batches go through a section's device together and are counted."""
    flat = flatten(SectionModule(model, section), "cpu")
    device = TorchDevice(flat, Boundaries(Fp32Config()), SEQ_LEN, SAMPLES, has_recompute=has_recompute)
    tokens = bytes(4 * SAMPLES * (SEQ_LEN + 1))
    length = SAMPLES * SEQ_LEN * model.width
    incoming = None if section.is_first else Fp32().encode(torch.ones(length))
    gradient = None if section.is_last else Fp32().encode(torch.ones(length))

    def once() -> None:
        given = Given(SAMPLES, tokens, None if incoming is None else parcel(incoming))
        under_way = [device.forward(given) for _ in range(num)]
        for passed in under_way:
            passed.backward(gradient)
        for passed in under_way:
            passed.count()

    once()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        once()
    alive = peak = 0
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        alive += event.nbytes()
        peak = max(peak, alive)
    return peak


@pytest.mark.parametrize("number", [0, 1, 2])
@pytest.mark.parametrize("vocab_size", [257, 4000])
def test_one_micro_batch_alone_peaks_near_what_is_reckoned(vocab_size: int, number: int) -> None:
    model = config(vocab_size=vocab_size)
    section = sections(model, 3)[number]
    shape = shape_of(model, section)
    reckoned = cost_pipeline.kept_nbytes(shape, MICRO) + cost_pipeline.working_nbytes(shape, MICRO)
    assert 0.7 * reckoned < peak_nbytes(model, section) < 1.02 * reckoned


@pytest.mark.full
@pytest.mark.parametrize("number", [0, pytest.param(1, marks=pytest.mark.slow), 2])
def test_many_that_are_computed_again_peak_near_what_is_reckoned_and_below_those_that_are_not(number: int) -> None:
    model = config()
    section = sections(model, 3)[number]
    shape = shape_of(model, section)
    num_crossings = 2 if number == 1 else 1
    encoded = 4 * SAMPLES * SEQ_LEN * model.width
    micro = MicroBatch(num_samples=SAMPLES, seq_len=SEQ_LEN, activations_nbytes=encoded, gradients_nbytes=encoded)
    reckoned = cost_pipeline.activation_nbytes(shape, micro, 8, has_recompute=True)
    others = 8 * 2 * num_crossings * encoded  # which are bytes, and no tensors
    peak = peak_nbytes(model, section, 8, has_recompute=True)
    assert 0.7 * (reckoned - others) < peak < 1.02 * reckoned
    assert peak < 0.6 * peak_nbytes(model, section, 8)


def test_it_needs_neither_torch_nor_numpy() -> None:
    program = "import sys, weft.cost.pipeline; sys.exit(bool({'torch', 'numpy', 'msgspec'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", program], timeout=60, check=False).returncode == 0
