"""How far apart two members come to, of one micro-batch: honest ones by rounding, and who computes something else.

Two machines that round otherwise end at most 2e-6 apart after a training step in fp32; here ten times as much is held
for honest, whatever numbers are sent in.
"""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from unit.pipeline.stages import BATCH_SIZE, CONFIG, SEQ_LEN, packed
from weft.codec.config import Bf16Config, Fp8Config, Fp32Config, Int4Config, Int8Config
from weft.model.flat import FlatModel, cut, flatten
from weft.model.initial import initial_vector
from weft.model.sections import sections
from weft.model.transformer import SectionModule
from weft.pipeline.codec.activations import NumberConfig
from weft.pipeline.codec.build import Boundaries
from weft.pipeline.device import Given, Ways, again
from weft.pipeline.link import parcel
from weft.pipeline.torch_device import TorchDevice
from weft.verify.passages import NUMBERS, is_near
from weft.wire import Buffer

CODECS: dict[str, NumberConfig] = {
    "fp32": Fp32Config(),
    "bf16": Bf16Config(),
    "fp8": Fp8Config(block=32),
    "int8": Int8Config(block=32),
    "int4": Int4Config(block=32),
}
ROUNDING = 2e-5


class Trial(NamedTuple):
    device: TorchDevice
    given: Given
    returned: Buffer | None
    mine: Ways
    loss: float | None


def model_of(stage: int) -> FlatModel:
    vector = initial_vector(CONFIG, seed=5)
    vector[vector != 1] *= 10  # so that layers do something
    section = sections(CONFIG, 3)[stage]
    model = flatten(SectionModule(CONFIG, section), "cpu")
    model.vector.copy_(cut(CONFIG, vector, section))
    return model


def trial(name: str, stage: int, size: float = 1e-3) -> Trial:
    """Return what a section makes of a micro-batch.

    Args:
        size: of the gradient that comes back.
    """
    generator = torch.Generator().manual_seed(3)
    device = TorchDevice(model_of(stage), Boundaries(CODECS[name]), SEQ_LEN, BATCH_SIZE)
    tokens = torch.randint(0, CONFIG.vocab_size, (BATCH_SIZE, SEQ_LEN + 1), generator=generator)
    given = Given(BATCH_SIZE, packed(tokens), None)
    sent = device.edges(given)
    shape = (BATCH_SIZE, SEQ_LEN, CONFIG.width)
    x = None if stage == 0 else parcel(sent.output(torch.randn(shape, generator=generator)))  # type: ignore[arg-type]
    back = None if stage == 2 else sent.input_gradient(size * torch.randn(shape, generator=generator))
    given = Given(BATCH_SIZE, packed(tokens), x)
    return Trial(device, given, back, *again(device, given, back))


def changed(one: Trial, by: str) -> Ways:
    """Return what another member sends of the same: the same but for rounding, or something else."""
    edges, noise = one.device.edges(one.given), torch.Generator().manual_seed(4)

    def made(data: Buffer | None, came: Buffer | None, decode: str, encode: str) -> Buffer | None:
        if data is None:
            return None
        right: Tensor = getattr(edges, decode)(data)
        random, length = torch.randn(right.shape, generator=noise), right.double().norm().float()
        match by:
            case "rounding":
                wrong = right + ROUNDING * length * random / random.norm()
            case "zeros":
                wrong = torch.zeros_like(right)
            case "noise":
                wrong = length * random / random.norm()
            case "what came":
                wrong = torch.zeros_like(right) if came is None else getattr(edges, decode)(came)
            case _:
                wrong = 0.5 * right
        found: Buffer = getattr(edges, encode)(wrong)
        return found

    x = None if one.given.activations is None else one.given.activations.data
    return Ways(
        made(one.mine.output, x, "output_of", "output"),
        made(one.mine.gradient, one.returned, "input_gradient_of", "input_gradient"),
    )


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("name", NUMBERS)
def test_who_rounds_otherwise_is_held_for_honest_and_who_computes_something_else_is_not(name: str, stage: int) -> None:
    one = trial(name, stage)
    assert again(one.device, one.given, one.returned) == (one.mine, one.loss), "the same machine: the same bytes"
    losses = (0.0, 0.0)
    near = one.device.apart(one.given, one.returned, changed(one, "rounding"), one.mine)
    assert is_near(near, losses, name, name)
    assert all(each < NUMBERS[name] / 2 for each in near), near
    assert near.count(-1.0) == (stage != 1), "an end has one way"
    for by in ("zeros", "noise", "what came", "half"):
        far = one.device.apart(one.given, one.returned, changed(one, by), one.mine)
        assert all(each > 1.5 * NUMBERS[name] for each in far if each >= 0), (by, far)
        assert not is_near(far, losses, name, name)
    assert not torch.any(one.device.model.gradient), "nothing is counted"


@pytest.mark.parametrize("size", [1e30, 1e-20])
def test_however_large_numbers_are_that_a_neighbour_sends_honest_members_are_near_and_others_are_not(
    size: float,
) -> None:
    """Else a neighbour could send what makes an honest member look false, or a false one right."""
    one = trial("fp32", 1, size)
    assert is_near(
        one.device.apart(one.given, one.returned, changed(one, "rounding"), one.mine), (0.0, 0.0), "fp32", "fp32"
    )
    for by in ("zeros", "half"):
        _, far = one.device.apart(one.given, one.returned, changed(one, by), one.mine)
        assert far > 1.5 * NUMBERS["fp32"], by


def test_numbers_that_have_hardly_any_bits_tell_nothing() -> None:
    one = trial("fp32", 1, 1e-43)
    _, far = one.device.apart(one.given, one.returned, changed(one, "zeros"), one.mine)
    assert 0 <= far < 1e-9
