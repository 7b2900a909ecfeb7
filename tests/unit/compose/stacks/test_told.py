"""What the benchmark of stacks says of its figures: paired differences, repairs that hold, claims that are met.

And which seeds it puts beside each other.
"""

from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from benchmarks import _stacks_told as told
from benchmarks import stacks
from benchmarks._stacks_told import NAMES, Difference, Row, Seed
from benchmarks.stacks import Corpus, Held, Kept, configured, keep, kept_seeds

from weft.compose.stacks.align import JointConfig
from weft.compose.stacks.latents import EntropyConfig, LatentConfig
from weft.compose.stacks.sauce import SauceConfig

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


def test_every_row_that_is_told_of_is_made() -> None:
    made = Path(stacks.__file__).read_text(encoding="utf-8")
    constants = [name for name, value in vars(told).items() if name.isupper() and isinstance(value, str)]
    assert len(constants) == len(NAMES) == len(set(NAMES))
    assert [name for name in constants if f"told.{name}" not in made] == []


def test_members_of_one_backbone_are_told_beside_their_own_controls() -> None:
    line = told.usefulness(seeds(BRANCH_JOINT=1.9, BRANCH_ENSEMBLE=1.8, BRANCH_IDENTITY=1.7)).splitlines()[-1]
    assert line.startswith(f"| {told.BRANCH_JOINT} | +0.100 ± 0.000: worse | +0.200 ± 0.000: worse | -0.100")


# --- which seeds stand beside each other ---


def texts(number: int = 0) -> Corpus:
    tokens = torch.arange(number, number + 300)
    return Corpus({"shared": tokens}, Held(tokens[None]), Held(tokens[None]))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ALIGN_LR", 1e-3),
        ("MEMBER_STEPS", 1000),
        ("NUM_DROPPED", 2),
        ("MEMBER", msgspec.structs.replace(stacks.MEMBER, ffn_width=256)),
        ("SauceConfig", partial(SauceConfig, eta=0.25)),  # as another default would
        ("JointConfig", partial(JointConfig, exits="all")),
        ("LOOPS", stacks.LOOPS[:-1]),
        ("LOOPS", (stacks.LOOPS[0]._replace(config=LatentConfig(select=EntropyConfig(threshold=1.0))),)),
    ],
)
def test_other_settings_are_another_digest(monkeypatch: pytest.MonkeyPatch, name: str, value: Any) -> None:
    before = configured(texts())
    assert configured(texts()) == before
    monkeypatch.setattr(stacks, name, value)
    assert configured(texts()) != before


def test_other_text_and_other_rows_are_another_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    assert configured(texts(1)) != configured(texts())
    before = configured(texts())
    monkeypatch.setattr(told, "NAMES", NAMES[1:])
    assert configured(texts()) != before


def test_a_file_goes_on_with_the_seeds_of_its_own_settings(tmp_path: Path) -> None:
    file = tmp_path / "seeds.json"
    assert kept_seeds(None, 1.0, "now") == kept_seeds(file, 1.0, "now") == {}
    keep(file, Kept(1.0, seeds(), "now"))
    assert kept_seeds(file, 1.0, "now") == seeds()


def test_seeds_of_other_settings_are_not_put_beside_these(tmp_path: Path) -> None:
    file = tmp_path / "seeds.json"
    keep(file, Kept(1.0, seeds(), "before"))
    with pytest.raises(SystemExit, match=r"2 seeds of other settings.*Name another file with --into"):
        kept_seeds(file, 1.0, "now")
    with pytest.raises(SystemExit, match=r"scale 1, and 0\.5 is asked for"):
        kept_seeds(file, 0.5, "before")


def test_a_file_that_says_nothing_of_settings_is_read_as_one_of_others(tmp_path: Path) -> None:
    file = tmp_path / "seeds.json"
    file.write_bytes(msgspec.json.encode({"scale": 1.0, "seeds": seeds()}))
    with pytest.raises(SystemExit, match="2 seeds of other settings"):
        kept_seeds(file, 1.0, "now")
