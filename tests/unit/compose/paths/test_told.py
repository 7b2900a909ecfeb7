"""What the benchmark of paths says of its figures: errors by file of text, seeds beside each other, claims."""

from dataclasses import replace
from math import isnan, sqrt

import numpy as np
import pytest
from benchmarks import _dipaco_told as told
from benchmarks import _domains, dipaco
from benchmarks._dipaco_told import Row, against, error_by_file

from weft.data.tokenizer import ByteTokenizer

FILES = [0, 0, 0, 1, 2, 2]  # of the documents below
EVERY = 64


def row(name: str, loss: float, seed: int = 1, setup: str = "2x2", steps: tuple[float, ...] = (0.0,) * 6) -> Row:
    """Return a row of six documents that is above `loss` by `steps`; each document has its own beside that."""
    each = [loss + number / 10 + step for number, step in enumerate(steps)]
    losses = {"python": each[:4], "prose": each[4:]}
    return Row(setup=setup, seed=seed, name=name, losses=losses, num_parameters=1000, num_steps=300.0, cpu_s=5.0)


def test_documents_of_one_file_count_as_one() -> None:
    apart = np.array([1.0, 1.0, 1.0, 3.0, 3.0, 3.0])
    # two files: what they are off the mean, summed, is -3 and 3
    assert error_by_file(apart, [7, 7, 7, 9, 9, 9]) == pytest.approx(sqrt(2 * (9 + 9)) / 6)
    assert isnan(error_by_file(apart, [7] * 6))


def test_where_each_document_is_a_file_the_error_is_that_of_the_mean() -> None:
    apart = np.array([0.5, -1.0, 2.0, 0.25])
    assert error_by_file(apart, [3, 1, 0, 2]) == pytest.approx(apart.std(ddof=1) / sqrt(4))


def test_a_difference_is_paired_by_document_and_by_seed() -> None:
    mine, others = [row("a", 2.0), row("a", 2.2, seed=2)], [row("b", 2.1, seed=2), row("b", 1.8)]
    assert against(mine, others, FILES) == "+0.1500 ± 0.0000 (+0.2000 / +0.1000)"
    assert against(mine[:1], others, FILES) == "+0.2000 ± 0.0000"


def test_rows_without_a_seed_in_common_or_without_losses_have_no_difference() -> None:
    assert against([row("a", 2.0)], [row("b", 2.0, seed=2)], FILES) == "-"
    assert against([row("a", 2.0)], [replace(row("b", 2.0), losses={})], FILES) == "-"


def test_a_claim_is_told_by_the_error_of_files() -> None:
    steps = (0.3, 0.3, 0.3, 0.0, 0.0, 0.0)
    rows = [row(told.often(told.ANEW, EVERY), 2.0, steps=steps), row(told.DEEP_ON, 2.0), row(told.PATH_SIZED, 2.0)]
    said = told.claims({"2x2": told.rows_of("2x2", rows)}, FILES, EVERY)
    error = error_by_file(np.array(steps), FILES)
    assert error > 1.5 * np.std(steps, ddof=1) / sqrt(6)
    line = f"| 2x2 | against dense of as many parameters with the compute of all | not told | +0.1500 ± {error:.4f} |"
    assert line in said.splitlines()
    assert len(said.splitlines()) == 2 + 2


def test_one_seed_is_told_as_one() -> None:
    rows = [row("a", 2.0), row("b", 2.0), row("a", 2.0, setup="4x4", seed=2)]
    assert told.of_seeds(told.rows_of("2x2", rows)).startswith("One seed (1): errors are of the held-out text, by file")
    several = told.of_seeds(told.rows_of("2x2", [*rows, row("a", 2.0, seed=2)]))
    assert several.startswith("Seeds 1, 2: means over them")


def test_a_table_has_the_mean_over_seeds() -> None:
    rows = [row(told.PATH_SIZED, 2.0), row("a", 1.0), row("a", 1.2, seed=2), row(told.PATH_SIZED, 2.0, seed=2)]
    rows.append(replace(row("paths at half time: gone", 0.0), losses={}, note="diverged"))
    mine = told.rows_of("2x2", rows)
    lines = told.of_models(mine, FILES).splitlines()
    assert lines[3].startswith("| a | 1.3500 | -0.9000 ± 0.0000 (-1.0000 / -0.8000) | 1,000 | 300 |")
    assert lines[4].startswith("| paths at half time: gone | - | - |")
    assert told.by_domain(mine).splitlines()[3] == "| a | 1.250 | 1.550 |"


def test_other_settings_are_another_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    before = dipaco.configured()
    assert dipaco.configured() == before
    monkeypatch.setitem(dipaco.SETUPS, "2x2", replace(dipaco.SETUPS["2x2"], every=41))
    assert dipaco.configured() != before


def test_a_document_knows_its_file() -> None:
    windows, files = _domains._windows(ByteTokenizer(), ["abcdefgh", "x", "ijklmnop"], seq_len=3)
    assert ["".join(map(chr, each)) for each in windows] == ["abcd", "efgh", "ijkl", "mnop"]
    assert files.tolist() == [0, 0, 2, 2]
    none, of_none = _domains._windows(ByteTokenizer(), [], seq_len=3)
    assert len(none) == len(of_none) == 0
