"""What a run may name of code from outside the package, and who may compute with it."""

from importlib import import_module
from pathlib import Path

import msgspec
import pytest
import torch

import weft
from charters import charter
from example import EXAMPLES, example
from weft import wire
from weft.codec.build import build
from weft.codec.config import ExtensionCodecConfig
from weft.errors import ConfigError, NotFinite, PayloadError
from weft.extension import ExtensionConfig, learn, make
from weft.sync.amendments import amended_settings
from weft.sync.governance import Void
from weft.sync.merge import outer as optimizers
from weft.sync.merge.outer import Outer, State, StepContext
from weft.sync.merge.reduce import legacy_codec_in, require
from weft.sync.method.choices import Choices, ExtensionOuterConfig, SgdConfig
from weft.sync.records.acts import Amend


class Sized:
    """A codec of whatever it is told; each promise can be broken."""

    def __init__(self, data: bytes = b"", num: int = 0, value: float = 0.0) -> None:
        self.data, self.num, self.value = data, num, value

    def encode(self, vector: torch.Tensor) -> bytes:
        return self.data

    def decode(self, data: bytes, num: int, out: torch.Tensor | None = None) -> torch.Tensor:
        if data == b"x" * num:
            return torch.full((num + self.num,), self.value)
        raise KeyError(data)

    def nbytes(self, num: int) -> int:
        return num


class Remembers:
    def __init__(self, name: str = "m", num: int = 1) -> None:
        self.name, self.num = name, num

    def init(self, num: int) -> State:
        return {self.name: torch.zeros(num * self.num)}

    def apply(self, outer: torch.Tensor, state: State, merged: torch.Tensor, context: StepContext) -> None:
        outer.sub_(merged)


def sized(**settings: object) -> ExtensionCodecConfig:
    known = learn("test.sized", lambda **more: Sized(**settings, **more))  # type: ignore[arg-type]
    return ExtensionCodecConfig(name=known.name, source=known.source)


def test_the_text_of_its_file_is_what_names_it() -> None:
    known = weft.extend("example.bits12", example("extension_codec").Bits12).codec()
    assert known.source == wire.digest((EXAMPLES / "extension_codec.py").read_bytes())


def test_another_text_under_the_same_name_is_refused_and_so_is_what_nobody_knows() -> None:
    config = ExtensionConfig(name="test.sized", source="ab" * 32)
    sized()
    with pytest.raises(ConfigError, match="its text here is"):
        make(config)
    with pytest.raises(ConfigError, match="this process has none of that name"):
        make(msgspec.structs.replace(config, name="test.unheard"))


def test_a_method_that_names_what_is_not_known_is_refused_as_a_whole() -> None:
    codec = ExtensionCodecConfig(name="test.unheard", source="ab" * 32)
    outer = ExtensionOuterConfig(name="test.unheard", source="ab" * 32)
    require(Choices(every=1, send="delta", apply=SgdConfig()))
    for choices in (
        Choices(every=1, send="delta", apply=SgdConfig(), codec=codec),
        Choices(every=1, send="delta", apply=SgdConfig(), reply_codec=codec),
        Choices(every=1, send="delta", apply=outer),
    ):
        with pytest.raises(ConfigError, match=r"test\.unheard"):
            require(choices)


def test_a_strangers_names_and_settings_are_bounded() -> None:
    for fields in (
        {"name": "../lib"},
        {"name": "Upper"},
        {"source": "xyz"},
        {"settings": [["a", 1], ["a", 2]]},
        {"settings": [["__class__", 1]]},
        {"settings": [["a", [1]]]},
        {"settings": [["a", "/etc/passwd"]]},
        {"settings": [[f"a{number:02}", 1] for number in range(33)]},
    ):
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert({"name": "fine", "source": "ab" * 32} | fields, ExtensionConfig)


def test_settings_that_it_refuses_are_a_mistake_in_the_run() -> None:
    yogi = weft.extend("example.yogi", example("extension_method").Yogi)
    for settings in ({"lr": -1.0}, {"rate": 1.0}):
        with pytest.raises(ConfigError, match=r"example\.yogi: it cannot be made with"):
            require(Choices(every=1, send="delta", apply=yogi.outer(**settings)))


@pytest.mark.parametrize("name", ["Bad Name!", "", "1st", "a" * 65, 7])
def test_a_name_that_no_run_could_have_is_refused_where_it_is_given(name: str) -> None:
    with pytest.raises(ConfigError, match=r"an extension's name is .*Allowed: lower-case letters"):
        weft.extend(name, Plain)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"path": "/etc/passwd"}, "its setting path is '/etc/passwd'. Allowed: a number"),
        ({"of": [1]}, r"its setting of is \[1\]"),
        ({"lr": float("nan")}, "its setting lr is nan"),
        ({"big": 1 << 64}, "its setting big is 18446744073709551616"),
        ({"Upper": 1}, "a setting's name is 'Upper'"),
        ({f"a{number}": 1 for number in range(33)}, "it is made with 33 settings"),
    ],
)
def test_settings_that_no_member_would_take_are_refused_where_they_are_given(
    settings: dict[str, object], words: str
) -> None:
    known = weft.extend("test.plain", Plain)
    for use in (known.codec, known.outer):
        with pytest.raises(ConfigError, match=f"test.plain: {words}"):
            use(**settings)  # type: ignore[arg-type]


def test_a_file_that_is_not_utf_8_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "latin.py").write_bytes("# coding: latin-1\nclass Latin:\n    word = 'é'\n".encode("latin-1"))
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"test\.latin: the file of .* is not UTF-8"):
        weft.extend("test.latin", import_module("latin").Latin)


def test_what_has_no_file_cannot_be_named() -> None:
    with pytest.raises(ConfigError, match="comes from no file"):
        weft.extend("test.builtin", dict)


def test_a_codec_is_held_to_its_lengths_and_to_finite_values() -> None:
    vector = torch.ones(3)
    with pytest.raises(ValueError, match="made 0 bytes and says that they are 3"):
        build(sized()).encode(vector)
    with pytest.raises(NotFinite):
        build(sized()).encode(torch.full((3,), torch.inf))
    with pytest.raises(PayloadError):
        build(sized()).decode(b"xx", 3)
    with pytest.raises(PayloadError, match="KeyError"):
        build(sized()).decode(b"abc", 3)
    with pytest.raises(PayloadError):
        build(sized(value=torch.nan)).decode(b"xxx", 3)
    with pytest.raises(PayloadError, match="3 of fp32 are due"):
        build(sized(num=1)).decode(b"xxx", 3)
    assert build(sized(value=2.0)).decode(b"xxx", 3).tolist() == [2.0] * 3


class Plain:
    """fp32 as it lies in memory, which decodes, or makes a step, as its subclasses say."""

    def encode(self, vector: torch.Tensor) -> bytes:
        return vector.numpy().tobytes()

    def decode(self, data: bytes, num: int, out: torch.Tensor | None = None) -> object:
        return torch.frombuffer(bytearray(data), dtype=torch.float32)

    def nbytes(self, num: int) -> int:
        return 4 * num


class CannotEncode(Plain):
    def encode(self, vector: torch.Tensor) -> bytes:
        raise KeyError("typo")


class CannotDecode(Plain):
    def decode(self, data: bytes, num: int, out: torch.Tensor | None = None) -> object:
        raise KeyError("typo")


class DecodesNaN(Plain):
    def decode(self, data: bytes, num: int, out: torch.Tensor | None = None) -> object:
        return torch.full((num,), torch.nan)


class DecodesMore(Plain):
    def decode(self, data: bytes, num: int, out: torch.Tensor | None = None) -> object:
        return torch.zeros(num + 1)


class DecodesNothing(Plain):
    def decode(self, data: bytes, num: int, out: torch.Tensor | None = None) -> object:
        return None


def codec_of(kind: type) -> ExtensionCodecConfig:
    return weft.extend(f"test.{kind.__name__.lower()}", kind).codec()


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (CannotEncode, "cannot encode 3 numbers: KeyError: 'typo'"),
        (CannotDecode, "cannot decode what it has made itself: .*KeyError: 'typo'"),
        (DecodesNaN, "cannot decode what it has made itself: .*NaN"),
        (DecodesMore, "cannot decode what it has made itself: .*3 of fp32 are due"),
        (DecodesNothing, "cannot decode what it has made itself: .*NoneType"),
    ],
)
def test_a_codec_that_cannot_read_its_own_payload_is_told_so_where_it_encodes(kind: type, words: str) -> None:
    with pytest.raises(ConfigError, match=f"codec test.{kind.__name__.lower()} {words}"):
        build(codec_of(kind)).encode(torch.ones(3))


def test_a_codec_that_takes_no_notice_of_where_to_decode_to_has_it_copied_there() -> None:
    out = torch.zeros(3)
    codec = build(codec_of(Plain))
    assert codec.decode(codec.encode(torch.ones(3)), 3, out) is out
    assert out.tolist() == [1.0] * 3


def test_what_is_neither_codec_nor_outer_step_is_refused_as_such() -> None:
    known = weft.extend("test.remembers", Remembers)
    with pytest.raises(
        ConfigError, match=r"test\.remembers: Remembers is not a codec: it needs encode, decode and nbytes"
    ):
        build(known.codec())
    with pytest.raises(ConfigError, match=r"test\.plain: Plain is not an outer step: it needs init and apply"):
        optimizers.build(weft.extend("test.plain", Plain).outer())


def test_what_is_encoded_once_is_not_encoded_by_a_codec_that_may_lose_it() -> None:
    choices = Choices(every=1, send="delta", apply=SgdConfig(), codec=sized())
    assert legacy_codec_in(choices, 0).nbytes(256) == 256 + 4  # int8


@pytest.mark.parametrize("settings", [{"name": "outer"}, {"name": "a b"}, {"num": 2}])
def test_the_state_of_an_outer_step_is_vectors_as_long_as_the_parameters(settings: dict[str, object]) -> None:
    known = learn("test.remembers", Remembers)
    config = ExtensionOuterConfig(name=known.name, source=known.source, settings=tuple(settings.items()))  # type: ignore[arg-type]
    assert isinstance(optimizers.build(config), Outer)
    with pytest.raises(ConfigError, match=r"test\.remembers"):
        optimizers.build(config).init(4)


class Steps:
    """An outer step with one vector of state; subclasses break one promise each."""

    def init(self, num: int) -> State:
        return {"m": torch.zeros(num)}

    def apply(self, outer: torch.Tensor, state: State, merged: torch.Tensor, context: StepContext) -> None:
        outer.sub_(merged)


class Grows(Steps):
    def apply(self, outer: torch.Tensor, state: State, merged: torch.Tensor, context: StepContext) -> None:
        state["new"] = torch.zeros(2)


class Replaces(Steps):
    def apply(self, outer: torch.Tensor, state: State, merged: torch.Tensor, context: StepContext) -> None:
        state["m"] = state["m"] + merged


class Lengthens(Steps):
    def apply(self, outer: torch.Tensor, state: State, merged: torch.Tensor, context: StepContext) -> None:
        state["m"].resize_(9)


class BreaksItself(Steps):
    def apply(self, outer: torch.Tensor, state: State, merged: torch.Tensor, context: StepContext) -> None:
        raise KeyError("typo")


class MakesNaN(Steps):
    def apply(self, outer: torch.Tensor, state: State, merged: torch.Tensor, context: StepContext) -> None:
        outer.fill_(torch.nan)


class RemembersInfinity(Steps):
    def apply(self, outer: torch.Tensor, state: State, merged: torch.Tensor, context: StepContext) -> None:
        state["m"].fill_(torch.inf)


class BeginsWithNaN(Steps):
    def init(self, num: int) -> State:
        return {"m": torch.full((num,), torch.nan)}


class BeginsWithNothing(Steps):
    def init(self, num: int) -> State:
        return None  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("kind", "error", "words"),
    [
        (Grows, ConfigError, "its state was 'm' and is 'm', 'new' after a step"),
        (Replaces, ConfigError, "its state 'm' is another tensor"),
        (Lengthens, ConfigError, "its state 'm' is another tensor after a step, or of another shape"),
        (BreaksItself, ConfigError, "step 7 raised KeyError: 'typo'"),
        (MakesNaN, NotFinite, "what it made of the parameters holds NaN or infinity"),
        (RemembersInfinity, NotFinite, "its state 'm' holds NaN or infinity"),
        (BeginsWithNaN, NotFinite, "its first state 'm' holds NaN or infinity"),
        (BeginsWithNothing, ConfigError, "its state is a NoneType"),
    ],
)
def test_an_outer_step_is_held_to_its_state_and_to_finite_values(
    kind: type, error: type[Exception], words: str
) -> None:
    name = f"test.{kind.__name__.lower()}"
    step = optimizers.build(weft.extend(name, kind).outer())
    with pytest.raises(error, match=f"{name}: {words}"):
        step.apply(torch.zeros(4), step.init(4), torch.ones(4), StepContext(number=7))


def test_an_outer_step_that_keeps_to_it_is_made() -> None:
    step, outer = optimizers.build(weft.extend("test.steps", Steps).outer()), torch.zeros(4)
    step.apply(outer, step.init(4), torch.ones(4), StepContext(number=1))
    assert outer.tolist() == [-1.0] * 4


def test_the_method_of_the_example_is_the_papers() -> None:
    """FedYogi, 2003.00295, algorithm 2, in float64."""
    config = weft.extend("example.yogi", example("extension_method").Yogi).outer(lr=0.1, tau=1e-2)
    step, luck = optimizers.build(config), torch.Generator().manual_seed(1)
    outer = torch.randn(50, generator=luck)
    x, state = outer.double(), step.init(50)
    m, v = torch.zeros(50).double(), torch.full((50,), 1e-4).double()
    for number in range(1, 11):
        d = torch.randn(50, generator=luck)
        step.apply(outer, state, d, StepContext(number=number))
        d = d.double()
        m = 0.9 * m + 0.1 * d
        v = v - 0.01 * d**2 * (v - d**2).sign()
        x = x - 0.1 * m / (v.sqrt() + 1e-2)
    assert torch.allclose(outer.double(), x, rtol=1e-4, atol=1e-5)


def test_no_amendment_brings_in_a_codec_from_outside() -> None:
    with pytest.raises(Void, match="from outside of weft"):
        amended_settings(charter(), Amend(reason="faster", codec=sized()))
    charter_with = charter(codec=sized())
    assert amended_settings(charter_with, Amend(reason="longer", every=7)).method.every == 7
