"""Every argument of `weft.Sync` and `weft.train`, and the test that shows what is said where it changes nothing."""

import inspect
from collections.abc import Callable
from pathlib import Path

import pytest

from weft.library.sync import Sync
from weft.library.train import train

HERE = Path(__file__).parent
ALWAYS = ("", "")  # does something, or is refused, wherever it is given

TICKET = ("test_sync.py", "test_what_has_no_effect_on_a_loop_is_told")
TABLE: dict[Callable[..., object], dict[str, tuple[str, str]]] = {
    Sync: {
        "model": ALWAYS,
        "config": ("test_sync.py", "test_a_config_that_is_not_the_runs_is_refused_beside_a_ticket"),
        "ticket": ALWAYS,
        "wait_for": TICKET,
        "wish": TICKET,
        "machine": TICKET,
        "on_ticket": ALWAYS,  # told of what happens, if it does
        "on_terms": ALWAYS,
    },
    train: {
        "config": ("test_train.py", "test_what_has_no_effect_is_told"),
        "ticket": ("test_train.py", "test_what_cannot_be_trained_is_refused_with_a_reason"),
        "data": ("test_train.py", "test_two_train_together_by_a_ticket"),
        "wait_for": TICKET,
        "wish": TICKET,
        "machine": ("test_train.py", "test_what_has_no_effect_is_told"),
        "callbacks": ALWAYS,
        "on_ticket": ALWAYS,
        "on_terms": ALWAYS,
    },
}


@pytest.mark.parametrize("call", TABLE, ids=lambda call: call.__name__)
def test_every_argument_has_a_row(call: Callable[..., object]) -> None:
    assert set(inspect.signature(call).parameters) == set(TABLE[call])
    shown = [row for row in TABLE[call].values() if row != ALWAYS]
    assert [row for row in shown if f"def {row[1]}(" not in (HERE / row[0]).read_text()] == []
