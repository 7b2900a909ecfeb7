"""What benchmarks measure is still there: members that average as a run's do, functions where a profile looks."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks import text_lines
from benchmarks._member import averaging, swarm
from benchmarks.rounds import WHERE

from weft.codec.config import Fp32Config
from weft.engine.text import Wanted

DEADLINE_S = 60.0
NUM, ROUNDS = 1000, 3
SOURCE = Path(__file__).parents[2] / "src"


async def test_members_of_a_benchmark_average_round_after_round() -> None:
    vectors = [torch.full((NUM,), float(number)) for number in range(3)]
    async with asyncio.timeout(DEADLINE_S), swarm(3, NUM, averaging(Fp32Config()), "memory") as members:
        for turn in range(ROUNDS):
            outs = [torch.empty(NUM) for _ in members]
            given = [vector + turn for vector in vectors]
            each = zip(members, given, outs, strict=True)
            manifests = await asyncio.gather(*(member.average(vector, out) for member, vector, out in each))
            assert {manifest.round for manifest in manifests} == {turn + 1}
            assert all(torch.equal(out, torch.full((NUM,), 1.0 + turn)) for out in outs)
    assert all(sum(member.traffic()) > 0 for member in members)


def test_functions_whose_share_of_a_round_is_measured_are_where_a_profile_is_asked_for_them() -> None:
    named = [each for functions in WHERE.values() for each in functions if each[0] != "~"]  # "~": of Python's own
    assert [
        (file, name)
        for file, name in named
        if not (SOURCE / file).exists() or f"def {name}(" not in (SOURCE / file).read_text(encoding="utf-8")
    ] == []


def test_places_that_draw_texts_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a machine that becomes slower meanwhile is slower for some of them alone."""
    asked = list[tuple[str, int]]()

    class Process:
        def __init__(self, name: str) -> None:
            self._name = name

        def tell(self, prompt: tuple[int, ...], **_: object) -> None:
            asked.append((self._name, prompt[0]))

        def hear(self, *_: str) -> dict[str, object]:
            return {"event": "drawn", "token_s": 0.5 + len(asked), "first_s": 1.0, "tokens": [asked[-1][1]]}

    monkeypatch.setattr(text_lines, "requests", lambda _work, _num, _tokenizer, number: [Wanted("", (number,), 1)])
    places: list[text_lines.Place] = [("here", False), ("there", False), ("there", True)]
    processes: Any = {place: Process(f"{place[0]}{' with guesses' * place[1]}") for place in places}
    found = text_lines.drawn(processes, "code", None, 3)  # type: ignore[arg-type]
    turns = [asked[at : at + 3] for at in range(0, 12, 3)]
    assert [{number for _, number in turn} for turn in turns] == [{0}, {1}, {2}, {3}]
    assert all(len({name for name, _ in turn}) == 3 for turn in turns)
    assert [turn[0][0] for turn in turns] == ["here", "there", "there with guesses", "here"]
    assert [found[place].texts for place in places] == [[[1], [2], [3]]] * 3  # the first only warms up
