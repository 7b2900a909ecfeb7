"""What the benchmark of stacks says of its figures: paired differences, repairs that hold, claims that are met."""

import pytest
from benchmarks import _stacks_told as told
from benchmarks._stacks_told import Difference, Row, Seed

NAMES = [value for name, value in vars(told).items() if name.isupper() and isinstance(value, str)]
SPREAD = (-0.2, -0.1, 0.0, 0.0, 0.1, 0.2)  # of sequences


def seeds(**losses: float) -> dict[int, Seed]:
    """Return two seeds in which all rows have a loss of 2, but for those that are named, and the naive stack's 4."""
    values = (
        dict.fromkeys(NAMES, 2.0) | {told.NAIVE: 4.0} | {getattr(told, name): each for name, each in losses.items()}
    )
    found = {}
    for number, off in ((1, 0.0), (2, 0.1)):
        rows = {
            name: Row(losses=tuple(value + off + each for each in SPREAD), cost_u=10.0, adds=0.5)
            for name, value in values.items()
        }
        found[number] = Seed(rows=rows, best=told.M1 if number == 1 else told.M2, geometry={"cosine": 0.5}, cpu_s=60.0)
    return found


def test_differences_are_paired() -> None:
    found = seeds(JOINT=1.9)
    assert told.difference(found, told.JOINT, told.M1) == pytest.approx((-0.1, 0.0), abs=1e-9)
    rows = dict(found[1].rows)
    rows[told.JOINT] = Row(losses=tuple(2.0 + 2 * each for each in SPREAD), cost_u=1.0)
    one = {1: Seed(rows=rows, best=told.M1, geometry={}, cpu_s=1.0)}
    apart = told.difference(one, told.JOINT, told.M1)
    assert apart.mean == pytest.approx(0.0, abs=1e-9)
    assert apart.error == pytest.approx((0.1 / 5) ** 0.5 / 6**0.5)


def test_the_best_single_is_that_of_each_seed() -> None:
    found = seeds(M1=1.5)
    assert told.difference(found, told.JOINT, told.best_single(found)).mean == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("name", "value", "holds"),
    [
        ("SAME_STACK", 2.39, True),
        ("SAME_STACK", 2.41, False),
        ("SAUCE", 2.59, True),
        ("SAUCE", 2.61, False),
        ("ONEWAY", 2.029, True),
        ("ONEWAY", 2.031, False),
        ("LOOP_JOINT", 1.979, True),
        ("LOOP_JOINT", 1.981, False),
        ("ONEWAY_SAUCE_ONEWAY", 1.999, True),
        ("ONEWAY_SAUCE_ONEWAY", 2.001, False),
        ("JOINT_RAW", 1.999, True),
        ("JOINT_RAW", 2.001, False),
    ],
)
def test_a_repair_holds_where_its_bar_is_reached(name: str, value: float, holds: bool) -> None:
    lines = told.repairs(seeds(**{name: value})).splitlines()
    (line,) = [each for each in lines if each.startswith(f"| {getattr(told, name)} |")]
    assert ("holds" in line, "missed" in line) == (holds, not holds)


@pytest.mark.parametrize(
    ("apart", "word"),
    [
        (Difference(-0.02, 0.001), "better"),
        (Difference(-0.014, 0.001), "tie"),
        (Difference(-0.02, 0.011), "tie"),
        (Difference(0.02, 0.001), "worse"),
    ],
)
def test_what_is_near_is_a_tie(apart: Difference, word: str) -> None:
    assert told.verdict(apart) == word


def test_a_stack_claims_only_what_it_is_better_at() -> None:
    said = told.claims(seeds(JOINT=1.9, JOINT_IDENTITY=1.8))
    assert said == f"U1 is met by {told.JOINT}; U2 is met by no stack; U3 is met by {told.JOINT}."


def test_every_row_is_in_the_table() -> None:
    lines = told.rows(seeds()).splitlines()
    assert len(lines) == 2 + len(NAMES)
    assert told.usefulness(seeds()).count("tie") == 3 * len(told.RIVALS)
