"""The board that is shipped asks for figures that there are, and lies on Grafana's grid."""

import json
import re
from itertools import combinations
from typing import Any

import pytest

from example import EXAMPLES
from unit.dashboard.test_history import A, B, commit, history, said, started, step
from weft.dashboard.page import metrics_of
from weft.dashboard.view import About
from weft.events import Evaluated
from weft.ids import Round, Tokens

BOARD: dict[str, Any] = json.loads((EXAMPLES / "grafana.json").read_text(encoding="utf-8"))
WIDTH = 24  # columns


def figures() -> str:
    evaluated = Evaluated(round=Round(1), loss=2.0, nats_per_byte=1.0, num_tokens=9, committed_tokens=Tokens(100))
    entries = (said(A, started("anna")), said(A, step(3.0)), said(A, commit(1, 100, A, B)), said(A, evaluated))
    return metrics_of(history(*entries, run=About(total_tokens=1000, tokens_per_step=10))).decode()


def expressions() -> list[str]:
    return [target["expr"] for panel in BOARD["panels"] for target in panel["targets"]]


@pytest.mark.parametrize("expression", expressions())
def test_what_the_board_asks_for_is_told(expression: str) -> None:
    told = set(re.findall(r"^(\w+)", figures(), re.MULTILINE))
    names = re.findall(r"weft_\w+", expression)
    assert names
    assert set(names) <= told


def test_panels_are_on_the_grid_and_none_on_another() -> None:
    places = [panel["gridPos"] for panel in BOARD["panels"]]
    assert all(place["x"] + place["w"] <= WIDTH for place in places)
    for one, other in combinations(places, 2):
        apart_x = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        apart_y = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert apart_x or apart_y


def test_the_board_is_bound_to_no_one_s_server() -> None:
    (source,) = BOARD["templating"]["list"]
    assert (source["type"], source["query"]) == ("datasource", "prometheus")
    asked = [panel["datasource"] for panel in BOARD["panels"]]
    asked += [target["datasource"] for panel in BOARD["panels"] for target in panel["targets"]]
    assert {each["uid"] for each in asked} == {f"${{{source['name']}}}"}
    ids = [panel["id"] for panel in BOARD["panels"]]
    assert len(set(ids)) == len(ids)


def test_what_each_peer_moved_is_told_of_those_that_are_heard() -> None:
    text = figures()
    assert f'weft_peer_bytes_total{{direction="sent",name="anna",peer="{A[:16]}"}} 10.0' in text
    assert f'weft_peer_missed_rounds_total{{name="anna",peer="{A[:16]}"}} 0.0' in text
    assert f'name="",peer="{B[:16]}"' in text
    assert not re.search(rf'weft_peer_bytes_total{{.*peer="{B[:16]}"', text)
