"""A step of a small model: as members train, and as the list of operations that it is."""

from typing import Any

import numpy as np
import torch
from msgspec.structs import replace

from weft.data.rows import Batch, batch_of
from weft.events import Event
from weft.model.config import ModelConfig
from weft.model.flat import FlatModel, over
from weft.model.initial import initial_vector
from weft.model.transformer import Transformer
from weft.training.backward import Backward
from weft.training.device import Device
from weft.training.numerics.arithmetic import CrossEntropy, Exact
from weft.verify.evidence.program.evaluate import evaluate
from weft.verify.evidence.program.grids import Array
from weft.verify.evidence.program.operation import Operation, Parameters
from weft.verify.evidence.program.step import Program, program

SMALL = ModelConfig(
    vocab_size=29, num_layers=2, num_heads=4, num_kv_heads=2, width=16, ffn_width=24, max_seq_len=96, is_tied=True
)


def words(model: ModelConfig, samples: int, tokens: int, seed: int = 0) -> Array:
    luck = np.random.default_rng(seed)
    return luck.integers(0, model.vocab_size, (samples, tokens + 1)).astype(np.uint32)


def model_of(config: ModelConfig, seed: int = 1, spread: float = 0.05) -> FlatModel:
    with torch.device("meta"):
        module = Transformer(config)
    start = initial_vector(config, seed)
    return over(module, start + spread * torch.randn(start.shape, generator=torch.Generator().manual_seed(seed)))


def trained(model: FlatModel, samples: Array, micro_batch: int) -> tuple[Array, float]:
    """Return the gradient of a step as members make it, and its length."""
    batch = batch_of(torch.from_numpy(samples.astype(np.int64)), has_rows=False)
    assert isinstance(batch, Batch)
    emit: Any = list[Event]().append
    backward = Backward(
        model,
        Device(torch.device("cpu"), "fp32", "cpu"),
        micro_batch,
        is_compiled=False,
        emit=emit,
        objective=CrossEntropy(),
        is_fixed=True,
        norm=Exact().norm,
    )
    _, length = backward.fill(batch)
    return model.gradient.numpy(), length


class Made:
    """All that the operations of a step come to."""

    def __init__(self, program: Program, parameters: Array, samples: Array) -> None:
        self.program = program
        self.parameters = parameters
        self.words = samples.reshape(-1)
        self.outputs = {number: output.copy() for number, output in evaluate(program, parameters, samples)}

    @property
    def gradient(self) -> Array:
        return self.outputs[self.program.gradient]

    @property
    def length(self) -> float:
        return float(self.outputs[len(self.program.operations) - 1][0])

    def one(self, number: int, at: int) -> Array:
        """Return a number of an operation, made of nothing but what it reads."""
        operation = self.program.operations[number]
        sources = [self.source(each) for each in operation.operands] or [self.words]

        def read(operand: int, start: int, num: int) -> Array:
            assert start >= 0
            assert start + num <= len(sources[operand])
            return sources[operand][start : start + num].copy()

        return operation.one(at, read)

    def source(self, operand: int | Parameters) -> Array:
        if isinstance(operand, int):
            return self.outputs[operand]
        return self.parameters[operand.start : operand.start + operand.num]

    def numbered(self, name: str) -> int:
        return next(number for number, each in enumerate(self.program.operations) if each.name.endswith(name))

    def operation(self, number: int) -> Operation:
        return self.program.operations[number]


def made(
    samples: int = 3, tokens: int = 9, micro_batch: int = 2, seed: int = 0, spread: float = 0.05, **form: Any
) -> Made:
    config = replace(SMALL, **form)
    given = words(config, samples, tokens, seed)
    vector = model_of(config, seed + 1, spread).vector.detach().numpy()
    return Made(program(config, samples, tokens, micro_batch), vector, given)
