"""Products of eight bits are right whatever instructions a processor has, and exact numbers the same in every step."""

import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from blake3 import blake3

from unit.engine.test_step import CONFIG, CPU, Bench, text_of
from weft import rng
from weft.engine import numbers
from weft.engine.attention import Integers
from weft.engine.batch import Piece
from weft.engine.numbers import MAX_ACTIVATION, MAX_WEIGHT, normed, probe
from weft.engine.scheduling.pages import PAGE, num_pages

MOST = 127  # of a weight, with all eight bits
TELL = """
import json
from unit.engine.test_numbers import MAX_WEIGHT, MOST, are_right, probed
print(json.dumps({most: [are_right(most), probed(most)] for most in (MAX_WEIGHT, MOST)}))
"""


def are_right(most: int) -> bool:
    """Return whether products of weights up to `most` are those of int64: of the largest numbers, and of any."""
    draws = rng.stream(0, "products", str(most))
    for num_rows, num_in, num_out in ((1, 64, 96), (2, 1024, 64), (16, 576, 192), (33, 256, 64), (130, 96, 32)):
        x = torch.from_numpy(draws.integers(-MAX_ACTIVATION, MAX_ACTIVATION + 1, (num_rows, num_in)))
        weight = torch.from_numpy(draws.integers(-most, most + 1, (num_out, num_in)))
        x[0], weight[0], weight[1] = MAX_ACTIVATION, most, -most
        product = numbers._packed(weight.to(torch.int8), torch.ones(num_out))
        if not torch.equal(product(x.to(torch.int8)).long(), x @ weight.t()):
            return False
    return True


def probed(most: int) -> bool:
    """Return what `probe` says of weights up to `most`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(numbers, "MAX_WEIGHT", most)
        return probe(CPU)


@pytest.mark.full
@pytest.mark.parametrize("held", ["AVX2", pytest.param("AVX512_CORE", marks=pytest.mark.slow), None])
def test_products_of_eight_bits_are_right_with_whatever_instructions_and_probe_finds_where_they_are_not(
    held: str | None,
) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "ONEDNN_MAX_CPU_ISA"}
    told = subprocess.run(
        [sys.executable, "-c", TELL],
        env=environment | {"PYTHONPATH": os.pathsep.join(sys.path)} | ({"ONEDNN_MAX_CPU_ISA": held} if held else {}),
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    ).stdout
    found = {int(most): is_right for most, is_right in json.loads(told).items()}
    assert found[MAX_WEIGHT] == [True, True]
    are_right_with_most, is_found_right = found[MOST]
    assert is_found_right == are_right_with_most  # AVX512_CORE is right with these, too, where it was tried
    if held == "AVX2" and platform.machine() in ("x86_64", "AMD64"):
        assert not are_right_with_most, "sums of two products saturate in 16 bits"


NUM_TEXTS = 9
TEXTS = [text_of(3 + 11 * number, number) for number in range(NUM_TEXTS)]  # one or two pages


def digests(size: int, num_together: int) -> list[str]:
    """Return of each text a digest of its keys and values in all layers, and of the logits after each of its tokens.

    Args:
        size: of a piece, in tokens.
        num_together: texts in a step.
    """
    bench = Bench(CONFIG, "exact", 2 * NUM_TEXTS)
    pages = {number: [2 * number, 2 * number + 1][: num_pages(len(text))] for number, text in enumerate(TEXTS)}
    logits: dict[int, list[torch.Tensor]] = {number: [] for number in pages}
    for first in range(0, NUM_TEXTS, num_together):
        together = range(first, min(first + num_together, NUM_TEXTS))
        for start in range(0, max(len(TEXTS[number]) for number in together), size):
            read = [number for number in together if start < len(TEXTS[number])]
            nums = [min(size, len(TEXTS[number]) - start) for number in read]
            pieces = [
                Piece(TEXTS[number][start : start + num], start, pages[number], num_draws=num)
                for number, num in zip(read, nums, strict=True)
            ]
            for number, rows in zip(read, bench.stepper.step(pieces).split(nums), strict=True):
                logits[number].append(rows)
    found = []
    for number, text in enumerate(TEXTS):
        assert sum(map(len, logits[number])) == len(text)
        tensors = [torch.cat(logits[number]), *keys_and_values(bench, pages[number], len(text))]
        found.append(blake3(b"".join(each.contiguous().numpy().tobytes() for each in tensors)).hexdigest())
    return found


def keys_and_values(bench: Bench, pages: list[int], num: int) -> Iterator[torch.Tensor]:
    """Yield those of a text's first tokens and their scales, by layer: [kv heads, tokens, one's width]."""
    for kept in bench.stepper._kept.layers:
        assert isinstance(kept, Integers)
        for each in (kept._keys, kept._values, kept._key_scales, kept._value_scales):
            yield each[pages].transpose(0, 1).flatten(1, 2)[:, :num]


@pytest.mark.full
def test_keys_values_and_logits_of_exact_numbers_are_the_same_to_the_bit_in_every_step() -> None:
    whole = max(map(len, TEXTS))
    assert whole > PAGE
    ways = [(size, num) for num in (1, 8) for size in (1, whole, 16, 11)]
    one, *others = (digests(*way) for way in ways)
    assert len({*one}) == NUM_TEXTS
    for way, other in zip(ways[1:], others, strict=True):
        assert other == one, way


def test_a_row_of_zeros_stays_one() -> None:
    """As of a token that was never trained: its embedding may be all zeros."""
    weight = torch.ones(64)
    assert torch.equal(normed(torch.zeros(2, 64), weight, 1e-5), torch.zeros(2, 64))
    assert normed(torch.full((2, 64), 1e-38), weight, 1e-5).isfinite().all()
