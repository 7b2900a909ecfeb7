"""Steps over many sequences give the logits that the model gives each alone."""

import dataclasses
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from weft import rng
from weft.engine.batch import Piece
from weft.engine.numbers import MATRICES, Kind, probe
from weft.engine.scheduling.pages import PAGE
from weft.engine.step import KeysAndValues, Stepper, Weights
from weft.model.config import ModelConfig, YarnScaling, num_parameters
from weft.model.flat import assemble, cut
from weft.model.sections import sections

CONFIG = ModelConfig(
    vocab_size=96, num_layers=3, num_heads=4, num_kv_heads=2, width=64, ffn_width=96, max_seq_len=512, is_tied=True
)
CPU = torch.device("cpu")
FORMS: dict[str, dict[str, Any]] = {
    "grouped": {},
    "apart": {"num_kv_heads": 4, "is_tied": False},
    "norms of heads": {"has_qk_norm": True, "head_width": 32},
    "biases": {"has_qkv_bias": True, "has_out_bias": True},
    "window": {"window": 70},
    "window of some": {"window": 70, "first_windowed": 1},
    "stretched": {"yarn": YarnScaling(factor=4.0, score_factor=1.1, original_seq_len=128)},
}


def vector_of(config: ModelConfig) -> torch.Tensor:
    draws = rng.stream(0, "test of steps").standard_normal(num_parameters(config))
    return torch.from_numpy(draws).float() * 0.15


DIGEST = """
import torch
torch.set_num_threads({threads})
from blake3 import blake3
from unit.engine.test_numbers import digests
from unit.engine.test_step import CONFIG, Bench, text_of
bench = Bench(CONFIG, "exact")
texts = [text_of(60 + 50 * number, number) for number in range(5)]
found = [bench.read(*((name, text, 0, len(text) - 20) for name, text in enumerate(texts)))]
for at in range(-20, -1):
    found.append(bench.read(*((name, text, len(text) + at, len(text) + at + 1) for name, text in enumerate(texts))))
print(blake3(torch.stack(found).numpy().tobytes()).hexdigest())
print(*digests(16, 8), sep="\\n")  # keys and values, too
"""


class Bench:
    """A model as a step has it, and as training has it."""

    def __init__(
        self, config: ModelConfig, kind: Kind = "fp32", num_pages: int = 64, *, has_graphs: bool = False
    ) -> None:
        vector = vector_of(config)
        self.model = assemble(config, vector)
        weights = Weights(config, vector, kind)
        self.stepper = Stepper(weights, KeysAndValues(config, num_pages, CPU, kind, has_graphs=has_graphs))
        self._free = list(range(num_pages))
        self.pages: dict[int, list[int]] = {}

    def read(self, *given: tuple[int, list[int], int, int]) -> torch.Tensor:
        """Read tokens `start ..< stop` of texts in one step, and return the logits after each."""
        pieces = []
        for name, text, start, stop in given:
            pages = self.pages.setdefault(name, [])
            while len(pages) * PAGE < stop:
                pages.append(self._free.pop())
            pieces.append(Piece(text[start:stop], start, pages, num_draws=1))
        return self._step(pieces)

    def _step(self, pieces: list[Piece]) -> torch.Tensor:
        return self.stepper.step(pieces)

    @torch.inference_mode()
    def wanted(self, *texts: list[int]) -> torch.Tensor:
        return torch.stack([self.model(torch.tensor([text]))[0, -1] for text in texts])


class InSections(Bench):
    """The same model in three sections."""

    def __init__(self, config: ModelConfig, kind: Kind, *, has_graphs: bool = False) -> None:
        super().__init__(config, kind)
        self.steppers = []
        for part in sections(config, 3):
            weights = Weights(config, cut(config, vector_of(config), part), kind, part)
            kept = KeysAndValues(config, 64, CPU, kind, len(part.layers), has_graphs=has_graphs)
            self.steppers.append(Stepper(weights, kept))

    def _step(self, pieces: list[Piece]) -> torch.Tensor:
        *before, last = self.steppers
        for stepper in before:
            given = stepper.pass_on(pieces)
            pieces = [dataclasses.replace(piece, tokens=rows) for piece, rows in zip(pieces, given, strict=True)]
        return last.step(pieces)


def text_of(num: int, seed: int) -> list[int]:
    return [int(each) for each in rng.stream(seed, "text").integers(0, CONFIG.vocab_size, num)]


@pytest.mark.parametrize("form", FORMS)
def test_texts_of_unequal_length_together_have_the_logits_of_each_alone(form: str) -> None:
    bench = Bench(replace(CONFIG, **FORMS[form]))
    a, b, c = text_of(200, 1), text_of(3, 2), text_of(65, 3)
    bench.read((0, a, 0, 128), (1, b, 0, 2))
    found = bench.read((0, a, 128, 200), (1, b, 2, 3), (2, c, 0, 65))
    torch.testing.assert_close(found, bench.wanted(a, b, c), rtol=1e-4, atol=1e-4)
    for _ in range(4):  # and as they grow
        for text, row in zip((a, b, c), found, strict=True):
            text.append(int(row.argmax()))
        found = bench.read(*((name, text, len(text) - 1, len(text)) for name, text in enumerate((a, b, c))))
        torch.testing.assert_close(found, bench.wanted(a, b, c), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["fp32", "exact"])
@pytest.mark.parametrize("form", ["grouped", "apart", "window of some"])
def test_sections_one_after_the_other_give_the_logits_of_the_whole_model(form: str, kind: Kind) -> None:
    config = replace(CONFIG, **FORMS[form])
    whole, cut_up = Bench(config, kind), InSections(config, kind)
    a, b = text_of(70, 1), text_of(3, 2)
    for rows in (((0, a, 0, 64), (1, b, 0, 2)), ((1, b, 2, 3), (0, a, 64, 70))):
        expected, found = whole.read(*rows), cut_up.read(*rows)
        if kind == "exact":
            assert torch.equal(found, expected)
        else:
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("kind", "share"), [("bf16", 0.02), ("w8a16", 0.02), ("int8", 0.05), ("exact", 0.05)])
def test_smaller_numbers_are_near(kind: Kind, share: float) -> None:
    full, small = Bench(CONFIG), Bench(CONFIG, kind)
    text = text_of(100, 1)
    expected, found = full.read((0, text, 0, 100)), small.read((0, text, 0, 100))
    assert float((found - expected).norm() / expected.norm()) < share


def test_products_of_eight_bits_are_right_here_and_exact_ones_alike_beside_any_others() -> None:
    assert probe(CPU)
    draws = rng.stream(0, "eight")
    matrix = MATRICES["exact"](torch.from_numpy(draws.standard_normal((96, 64))).float())
    x = torch.from_numpy(draws.standard_normal((40, 64))).float()
    together = matrix(x)
    for rows in (slice(0, 1), slice(3, 11), slice(7, 40)):
        assert torch.equal(matrix(x[rows]), together[rows])
    assert torch.equal(matrix(torch.zeros(1, 64)), torch.zeros(1, 96))


@pytest.mark.parametrize("form", FORMS)
def test_exact_numbers_are_the_same_to_the_bit_in_whatever_steps_a_text_is_read(form: str) -> None:
    config = replace(CONFIG, **FORMS[form])
    text = text_of(97, 1)
    alone = Bench(config, "exact")
    one_by_one = torch.cat([alone.read((0, text, at, at + 1)) for at in range(len(text))])
    assert not torch.equal(one_by_one[-2], one_by_one[-1])
    others = [text_of(60, 2 + number) for number in range(7)]
    for size in (97, 16, 11):
        bench = Bench(config, "exact")
        for number, start in enumerate(range(0, len(text), size)):
            stop = min(start + size, len(text))
            beside = [
                (1 + each, other, number * each, (number + 1) * each)
                for each, other in enumerate(others)
                if each and size == 11
            ]
            assert torch.equal(bench.read((0, text, start, stop), *beside)[0], one_by_one[stop - 1])


@pytest.mark.slow
def test_exact_numbers_are_the_same_to_the_bit_on_every_kind_of_processor() -> None:
    held = {"ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}
    found = {
        subprocess.run(
            [sys.executable, "-c", DIGEST.format(threads=threads)],
            env=os.environ | changed | {"PYTHONPATH": os.pathsep.join(sys.path)},
            check=True,
            capture_output=True,
            text=True,
            timeout=120,
        ).stdout
        for threads, changed in ((1, {}), (2, {}), (1, held), (2, {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"}))
    }
    assert len(found) == 1
    assert {len(line) for line in found.pop().split()} == {64}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("is_cut", [False, True])
def test_padded_steps_have_the_bits_of_others_in_exact_numbers(form: str, is_cut: bool) -> None:
    config = replace(CONFIG, **FORMS[form])
    benches = [
        InSections(config, "exact", has_graphs=each) if is_cut else Bench(config, "exact", has_graphs=each)
        for each in (False, True)
    ]
    texts = {name: text_of(250, name) for name in range(5)}
    for name, num in enumerate((1, 3, 63, 64, 190)):
        one, other = (bench.read((name, texts[name], 0, num)) for bench in benches)
        assert torch.equal(one, other)
    read = dict(enumerate((1, 3, 63, 64, 190)))
    for nums in ((1, 1, 1, 1, 1), (1, 4, 9, 2, 1), (3, 1, 1, 2, 9), (1, 12, 1, 1, 1), (1, 1, 1, 1, 1)):
        given = [(name, texts[name], read[name], read[name] + num) for name, num in enumerate(nums)]
        one, other = (bench.read(*given) for bench in benches)
        assert torch.equal(one, other), nums
        read = {name: stop for name, _, _, stop in given}
    if is_cut:
        return
    graphs = benches[1].stepper._graphs
    assert graphs is not None
    assert {(num, new) for num, new, _ in graphs._made} == {(1, 1), (1, 9), (8, 1), (8, 9)}


BROKEN, OTHER = 5, 6  # tokens: the embedding of the first is no number
WAYS = [("fp32", False), ("fp32", True), ("exact", False), ("exact", True)]


def without_numbers(monkeypatch: pytest.MonkeyPatch, config: ModelConfig) -> None:
    vector = vector_of(config)
    vector[BROKEN * config.width : (BROKEN + 1) * config.width] = float("nan")
    monkeypatch.setattr(sys.modules[__name__], "vector_of", lambda _config: vector)


def near(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("kind", "has_graphs"), WAYS)
@pytest.mark.parametrize("make", [Bench, InSections])
@pytest.mark.parametrize("num", [1, 3])
def test_a_text_that_comes_to_no_numbers_harms_no_other(
    monkeypatch: pytest.MonkeyPatch, make: type[Bench], num: int, kind: Kind, *, has_graphs: bool
) -> None:
    """Neither those in the same step, nor one that has its pages afterwards: what is masked is read, too.

    Args:
        num: tokens of each text in a step. With graphs three are written as nine.
    """
    config = replace(CONFIG, **FORMS["apart"])
    broken, shorts, long = [OTHER] * 66 + [BROKEN] * num, [[7] * 6, [8] * 7], [*range(6, 76)]
    sound = make(config, kind, has_graphs=has_graphs)
    for name, short in enumerate(shorts):
        sound.read((name, short, 0, len(short) - num))
    wanted = [sound.read((name, short, len(short) - num, len(short)))[0] for name, short in enumerate(shorts)]
    of_long = sound.read((9, long, 0, 66))
    without_numbers(monkeypatch, config)
    bench = make(config, kind, has_graphs=has_graphs)
    bench._free = [3, 2, 0, 1]
    bench.read((9, broken, 0, 66))
    for name, short in enumerate(shorts):
        bench.read((name, short, 0, len(short) - num))
    assert bench.pages == {9: [1, 0], 0: [2], 1: [3]}
    rows = [(name, short, len(short) - num, len(short)) for name, short in enumerate(shorts)]
    none, *beside = bench.read((9, broken, 66, 66 + num), *rows)
    assert not none.isfinite().any()
    near(torch.stack(beside), torch.stack(wanted))
    for name, short in enumerate(shorts):
        bench.pages[name].clear()
        bench._free = [2 + name]
        bench.read((name, short, 0, len(short) - num))
    near(bench.read(*rows), torch.stack(wanted))  # what pads them has nothing of it, either
    bench.pages.pop(9)
    bench._free = [0, 1]
    near(bench.read((8, long, 0, 66)), of_long)


@pytest.mark.parametrize(("kind", "has_graphs"), WAYS)
def test_a_text_with_a_token_that_comes_to_no_numbers_never_comes_to_any_again(
    monkeypatch: pytest.MonkeyPatch, kind: Kind, *, has_graphs: bool
) -> None:
    """It is not gone on with as if that token had not been there: whoever draws says so."""
    config = replace(CONFIG, **FORMS["apart"])
    without_numbers(monkeypatch, config)
    bench, text = Bench(config, kind, has_graphs=has_graphs), [OTHER] * 10 + [BROKEN] + [OTHER] * 150
    for start, stop in ((0, 64), (64, 128), (128, 130), (130, 131)):
        assert not bench.read((0, text, start, stop)).isfinite().any()


@pytest.mark.parametrize("kind", ["fp32", "exact"])
def test_what_graphs_write_over_the_end_of_a_texts_pages_harms_no_other(
    monkeypatch: pytest.MonkeyPatch, kind: Kind
) -> None:
    """Three tokens are written as nine, in a page that is nobody's."""
    config = replace(CONFIG, **FORMS["apart"])
    broken, sound = [OTHER] * 60 + [BROKEN] * 3, [7] * 61  # which reach 5 and 3 places over
    first = Bench(config, kind, has_graphs=True)
    first.read((0, sound, 0, 58))
    wanted = first.read((0, sound, 58, 61))
    without_numbers(monkeypatch, config)
    bench = Bench(config, kind, has_graphs=True)
    bench.read((0, broken, 0, 60))
    bench.read((1, sound, 0, 58))
    assert not bench.read((0, broken, 60, 63)).isfinite().any()
    near(bench.read((1, sound, 58, 61)), wanted)
