"""docs/methods.md under test: its table is the one that `weft methods` prints of, and its example is a method."""

import re
import tomllib
from pathlib import Path
from typing import get_args

import msgspec
import pytest

from weft.plan.catalogue import CATALOGUE, table
from weft.sync.method.choices import Choices
from weft.sync.method.presets import MethodConfig

PAGE = (Path(__file__).parents[2] / "docs" / "methods.md").read_text(encoding="utf-8")


def test_the_table_is_that_of_the_code() -> None:
    lines = [line for line in PAGE.splitlines() if line.startswith("|") and not line.startswith("| ---")]
    found = [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in lines if "---" not in line]
    assert found == list(table())


def test_every_row_that_a_run_file_can_name_is_in_it() -> None:
    named = {each.__struct_config__.tag for each in get_args(MethodConfig)} - {"custom"}
    assert {each.name for each in CATALOGUE} == named
    assert len(CATALOGUE) == len(named)


def test_what_sends_less_says_so() -> None:
    bits = {each.name: each.bits for each in CATALOGUE}
    assert bits["sparseloco"] < bits["streaming"] < bits["diloco"] < bits["fedavg"] < bits["ddp"]
    assert bits["ddp"] == pytest.approx(24, rel=1e-3)
    assert bits["sparseloco"] == pytest.approx(bits["diloco"] / 60, rel=0.01)
    assert "`sparseloco` sends a sixtieth of `diloco`'s bytes" in PAGE
    # signs, scale and places of a chunk, both ways
    assert bits["sparseloco"] == pytest.approx(2 * 0.75 * (64 + 16 + 472) / 4096 / 30, rel=0.01)


def test_the_example_is_a_method() -> None:
    (text,) = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    choices = msgspec.convert(tomllib.loads(text)["method"], MethodConfig)
    assert isinstance(choices, Choices)
    assert choices.merge == "senders_mean"
