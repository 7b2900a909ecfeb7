"""Every interleaving of false works that are found, taken out, dropped and brought: each goes once, and none twice."""

from collections.abc import Sequence
from typing import Any

import pytest
from msgspec import UNSET
from msgspec.structs import replace

from model.counter_world import Bounds, CounterSearch, Kept, Twice, Wrong
from model.search import break_rules
from weft.ids import PeerId
from weft.sync.records import counters, rewinds
from weft.sync.records.ancestry import History
from weft.sync.records.charter import Charter
from weft.sync.records.messages import Base

ALONE = Bounds(num_rounds=6, num_counted=2, can_part=False, num_back=1)
APART = Bounds(num_rounds=5)
BACK = Bounds(num_rounds=5, num_back=1)


@pytest.mark.parametrize(
    "bounds",
    [
        ALONE,
        APART,
        pytest.param(BACK, marks=pytest.mark.full),
        pytest.param(Bounds(num_rounds=6, num_counted=2, num_back=1), marks=pytest.mark.slow),
    ],
)
def test_what_is_false_is_taken_out_once_whatever_comes_first(bounds: Bounds) -> None:
    search = CounterSearch(bounds)
    assert search.run() > 100
    assert search.num_out > 0
    assert (search.num_brought > 0) == bounds.can_part


# --- the search can fail ---

DUE = counters.is_due


def all_taken_out(base: Base, charter: Charter, peers: Sequence[PeerId]) -> Charter | None:
    if not counters.are_due(base, peers):
        return None
    out = (replace(each, taken_out=base.round) if each.peer in peers else each for each in charter.false_works or ())
    return replace(charter, false_works=tuple(out))


BROKEN: dict[str, tuple[dict[tuple[Any, str], Any], Bounds, type[Wrong]]] = {
    "what was taken out is due again": (
        {
            (counters, "is_due"): lambda base, work: DUE(base, replace(work, taken_out=UNSET)),
            (counters, "of"): lambda charter, _peer: (charter.false_works or (None,))[-1],
        },
        ALONE,
        Twice,
    ),
    "of several of one key all count as taken out": ({(counters, "with_taken_out"): all_taken_out}, ALONE, Kept),
    "what another branch has counted is due": ({(History, "holds"): lambda *_: True}, APART, Twice),
    "a branch brings what it has taken out of both": ({(counters, "is_mixed"): lambda *_: False}, APART, Twice),
    "a branch brings less than both had": ({(counters, "is_behind"): lambda *_: False}, BACK, Twice),
    "what was dropped is due": ({(counters, "is_dropped"): lambda *_: False}, ALONE, Twice),
    "what was taken out before going back is not due": (
        {(rewinds, "without_dropped"): lambda charter: charter},
        ALONE,
        Twice,
    ),
}


@pytest.mark.parametrize("rule", BROKEN)
def test_each_rule_is_needed(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    broken, bounds, found = BROKEN[rule]
    break_rules(monkeypatch, broken)
    with pytest.raises(found):
        CounterSearch(bounds).run()
