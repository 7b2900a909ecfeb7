"""What every codec of a boundary promises, of activations and of their gradients: sized, checked, repeatable, alone."""

from collections.abc import Callable

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from weft import config as files
from weft.codec.config import Bf16Config, Fp8Config, Fp32Config, Int4Config, Int8Config
from weft.errors import ConfigError, NotFinite, PayloadError
from weft.pipeline.codec.activations import ActivationConfig, AqSgdConfig, GradientConfig, LplrConfig, SubspaceConfig
from weft.pipeline.codec.boundary import ActivationCodec, Samples, Shape
from weft.pipeline.codec.build import Boundaries
from weft.pipeline.codec.subspace import drawn

SHAPE = Shape(seq_len=6, width=32, vocab_size=11)
RANK = 5

# The largest error as a share of the largest magnitude in sight, of numbers that the codec is made for.
CASES: list[tuple[ActivationConfig, GradientConfig | None, float]] = [
    (Fp32Config(), None, 0.0),
    (Bf16Config(), None, 1 / 256),
    (Fp8Config(block=32), None, 1 / 8),
    (Int8Config(), None, 1 / 250),
    (Int4Config(block=32), None, 1 / 13),
    (Int4Config(), Int8Config(), 1 / 13),
    (LplrConfig(rank=RANK), None, 1 / 40),
    (LplrConfig(rank=32), None, 1 / 40),
    (SubspaceConfig(rank=RANK, values="fp32"), None, 1e-6),
    (SubspaceConfig(rank=RANK, values="bf16", fixed_std=0.1), None, 1 / 100),
    (SubspaceConfig(rank=RANK, values="int8", seed=7), None, 1 / 50),
    (AqSgdConfig(), None, 1 / 12),
    (AqSgdConfig(values="int8", held_nbytes=0), Bf16Config(), 1 / 120),
]
every_case = pytest.mark.parametrize(("config", "gradients", "bound"), CASES, ids=[repr(case[:2]) for case in CASES])
every_way = pytest.mark.parametrize("way", ["activations", "gradients"])


class Ends:
    """Both sides of a boundary, and one of the ways through it."""

    def __init__(self, config: ActivationConfig, gradients: GradientConfig | None, way: str) -> None:
        made = Boundaries(config, gradients)
        self.config, self.is_activations = config, way == "activations"
        self.before, self.after = made.boundary(SHAPE), made.boundary(SHAPE)

    @property
    def there(self) -> ActivationCodec:
        """Return what encodes."""
        return self.before.activations if self.is_activations else self.after.gradients

    @property
    def here(self) -> ActivationCodec:
        """Return what decodes."""
        return self.after.activations if self.is_activations else self.before.gradients

    def numbers(self, samples: Samples, scale: float = 1.0) -> Tensor:
        """Return such activations, or gradients, as the codec is made for."""
        luck = torch.Generator().manual_seed(0)
        x = scale * torch.randn(len(samples), SHAPE.seq_len, SHAPE.width, generator=luck)
        match self.config:
            case LplrConfig():
                down = torch.randn(SHAPE.width, RANK, generator=luck)
                return x @ down @ torch.randn(RANK, SHAPE.width, generator=luck)
            case SubspaceConfig():
                space = drawn(self.config, SHAPE.width, SHAPE.vocab_size)
                x = x @ space.directions @ space.directions.T
                return x + space.fixed[samples.tokens] if self.is_activations else x
        return x


def samples_of(num: int, seed: int = 0) -> Samples:
    tokens = torch.randint(0, SHAPE.vocab_size, (num, SHAPE.seq_len), generator=torch.Generator().manual_seed(seed))
    return Samples(tokens, tuple(range(100, 100 + num)))


def bits(x: Tensor) -> bytes:
    return x.contiguous().numpy().tobytes()


@every_case
@every_way
@pytest.mark.parametrize("num", [1, 2, 7])
def test_a_message_is_as_long_as_is_said_and_decodes_to_what_is_close(
    config: ActivationConfig, gradients: GradientConfig | None, bound: float, way: str, num: int
) -> None:
    ends, samples = Ends(config, gradients, way), samples_of(num)
    x = ends.numbers(samples)
    data = ends.there.encode(x, samples)
    assert len(data) == ends.here.nbytes(num) == ends.there.nbytes(num)
    found = ends.here.decode(data, samples)
    assert (found.shape, found.dtype) == (x.shape, torch.float32)
    assert float((found - x).abs().max()) <= bound * float(x.abs().max())


@every_case
@every_way
def test_equal_numbers_have_equal_bytes_and_decode_alike_again(
    config: ActivationConfig, gradients: GradientConfig | None, bound: float, way: str
) -> None:
    ends, others, samples = Ends(config, gradients, way), Ends(config, gradients, way), samples_of(3)
    x = ends.numbers(samples)
    data = bytes(ends.there.encode(x, samples))
    assert bytes(others.there.encode(x.clone(), samples)) == data
    assert bytes(others.there.encode(others.numbers(samples, 2.0), samples)) != data
    first = ends.here.decode(data, samples)
    assert bits(ends.here.decode(memoryview(bytearray(data)), samples)) == bits(first)


@every_case
@every_way
def test_what_was_decoded_shares_no_memory_with_the_message(
    config: ActivationConfig, gradients: GradientConfig | None, bound: float, way: str
) -> None:
    ends, samples = Ends(config, gradients, way), samples_of(2)
    data = bytearray(ends.there.encode(ends.numbers(samples), samples))
    found = ends.here.decode(data, samples)
    before = bits(found)
    data[:] = bytes(len(data))
    assert bits(found) == before


@every_case
@every_way
@pytest.mark.parametrize("change", [-1, 1, 64])
def test_another_length_is_refused(
    config: ActivationConfig, gradients: GradientConfig | None, bound: float, way: str, change: int
) -> None:
    ends = Ends(config, gradients, way)
    with pytest.raises(PayloadError, match="bytes where"):
        ends.here.decode(bytes(ends.here.nbytes(3) + change), samples_of(3))
    with pytest.raises(PayloadError, match="bytes where"):
        ends.here.decode(bytes(ends.here.nbytes(2)), samples_of(3))


@every_case
@every_way
def test_damaged_bytes_are_refused_or_finite(
    config: ActivationConfig, gradients: GradientConfig | None, bound: float, way: str
) -> None:
    ends, samples, luck = Ends(config, gradients, way), samples_of(2), np.random.default_rng(1)
    data = bytes(ends.there.encode(ends.numbers(samples), samples))
    num_refused = 0
    for number in range(300):
        damaged = bytearray(data)
        if number < 200:
            damaged[luck.integers(len(data))] ^= int(luck.integers(1, 256))
        else:
            damaged[:] = luck.bytes(len(data))
        try:
            found = ends.here.decode(damaged, samples)
        except PayloadError:
            num_refused += 1
        else:
            assert bool(torch.isfinite(found).all())
            assert found.shape == (2, SHAPE.seq_len, SHAPE.width)
    assert num_refused > 0


@every_case
@every_way
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_numbers_that_are_not_finite_are_not_sent(
    config: ActivationConfig, gradients: GradientConfig | None, bound: float, way: str, bad: float
) -> None:
    ends, samples = Ends(config, gradients, way), samples_of(2)
    x = ends.numbers(samples)
    x[1, 2, 3] = bad
    with pytest.raises(NotFinite):
        ends.there.encode(x, samples)


@every_case
@every_way
@pytest.mark.parametrize("scale", [0.0, 1e-42, 1e-20, 1e20])
def test_zeros_and_numbers_far_from_one_have_encodings(
    config: ActivationConfig, gradients: GradientConfig | None, bound: float, way: str, scale: float
) -> None:
    ends, samples = Ends(config, gradients, way), samples_of(2)
    x = ends.numbers(samples, scale)
    found = ends.here.decode(ends.there.encode(x, samples), samples)
    assert bool(torch.isfinite(found).all())
    if scale >= 1e-20:  # a block of numbers below that is one of zeros
        assert float((found - x).abs().max()) <= bound * float(x.abs().max())


@pytest.mark.parametrize(
    ("config", "fill"),
    [
        (LplrConfig(rank=RANK), lambda end: _int8(RANK * 6, 256, 1e30) + _int8(RANK * 32, 32, 1e30)),
        (SubspaceConfig(rank=RANK, values="fp32"), lambda end: np.full(RANK * 6, 3e38, "<f4").tobytes()),
        (AqSgdConfig(values="bf16"), lambda end: bytes(8) + np.full(6 * 32, 0x7F7F, "<u2").tobytes()),
    ],
    ids=["lplr", "subspace", "aqsgd"],
)
def test_finite_factors_of_what_is_not_finite_are_refused(
    config: ActivationConfig, fill: Callable[[ActivationCodec], bytes]
) -> None:
    ends = Ends(config, None, "activations")
    if isinstance(config, AqSgdConfig):  # once more the largest: too large
        x = torch.full((1, 6, 32), 2e38)
        ends.here.decode(ends.there.encode(x, samples_of(1)), samples_of(1))
        ends.before.gradients.decode(ends.after.gradients.encode(torch.zeros_like(x), samples_of(1)), samples_of(1))
        tag = bytes(ends.there.encode(x, samples_of(1)))[:8]
        assert tag != bytes(8)
        with pytest.raises(PayloadError):
            ends.here.decode(tag + fill(ends.here)[8:], samples_of(1))
        return
    data = fill(ends.here)
    assert len(data) == ends.here.nbytes(1)
    with pytest.raises(PayloadError, match="NaN or infinity"):
        ends.here.decode(data, samples_of(1))


def _int8(num: int, block: int, scale: float) -> bytes:
    """Return int8 of numbers that are all 127 times a scale."""
    scales = (np.full(-(-num // block), scale, "<f4").view("<u4") & 0xFFFFFF80).astype("<u4")
    return scales.tobytes() + bytes([127]) * num


def test_what_lies_outside_of_the_low_rank_is_what_is_lost() -> None:
    """Nothing of that rank is nearer to activations than their largest directions: it is 3 % from those."""
    shape = Shape(seq_len=64, width=32, vocab_size=11)
    codec = Boundaries(LplrConfig(rank=8)).boundary(shape).activations
    luck = torch.Generator().manual_seed(3)
    samples = Samples(torch.zeros(4, 64, dtype=torch.long), (0, 1, 2, 3))
    slopes = torch.diag(0.9 ** torch.arange(32.0))
    x = torch.randn(4, 64, 32, generator=luck) @ slopes
    found = codec.decode(codec.encode(x, samples), samples)
    left = torch.linalg.svdvals(x.flatten(0, 1))[8:].square().sum().sqrt()
    assert float(left) <= float((found - x).norm()) <= 1.03 * float(left)


def test_codecs_of_vectors_are_boundaries_whose_messages_have_one_form() -> None:
    boundary = Boundaries(Bf16Config(), Fp32Config()).boundary(SHAPE)
    samples = samples_of(2)
    x = torch.randn(2, 6, 32, generator=torch.Generator().manual_seed(2))
    for codec, size in ((boundary.activations, 2), (boundary.gradients, 4)):
        data = bytes(codec.encode(x, samples))
        assert len(data) == size * x.numel()
        assert bytes(codec.encode(codec.decode(data, samples), samples)) == data


@pytest.mark.parametrize(
    ("tree", "expected"),
    [
        ({"type": "bf16"}, Bf16Config()),
        ({"type": "fp8", "block": 64}, Fp8Config(block=64)),
        ({"type": "lplr", "rank": 8}, LplrConfig(rank=8)),
        ({"type": "subspace", "rank": 4, "values": "int8"}, SubspaceConfig(rank=4, values="int8")),
        ({"type": "aqsgd", "held_nbytes": 5}, AqSgdConfig(held_nbytes=5)),
    ],
)
def test_a_run_file_names_them(tree: dict[str, object], expected: ActivationConfig) -> None:
    class Run(files.Config, frozen=True, kw_only=True):
        activations: ActivationConfig

    found = files.from_tree({"activations": tree}, Run, where="run.toml")
    assert found.activations == expected
    assert msgspec.to_builtins(found)["activations"]["type"] == tree["type"]
    with pytest.raises(ConfigError, match="ran"):
        files.from_tree({"activations": {**tree, "rang": 1}}, Run, where="run.toml")


@pytest.mark.parametrize(
    "bad", [{"type": "lplr", "rank": 0}, {"type": "aqsgd", "held_nbytes": -1}, {"type": "subspace", "fixed_std": -1.0}]
)
def test_what_is_out_of_range_is_refused(bad: dict[str, object]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(bad, ActivationConfig)  # type: ignore[arg-type]  # a union is no class


def test_ranks_above_the_width_and_gradients_beside_a_subspace_are_refused() -> None:
    with pytest.raises(ConfigError, match="rank: 33 is above the model's width, 32"):
        Boundaries(Bf16Config(), LplrConfig(rank=33)).boundary(SHAPE)
    with pytest.raises(ConfigError, match="rank: 33 is above the model's width, 32"):
        Boundaries(SubspaceConfig(rank=33)).boundary(SHAPE)
    with pytest.raises(ConfigError, match="gradients"):
        Boundaries(SubspaceConfig(), Int8Config())
