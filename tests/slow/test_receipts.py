"""Receipts of 200 texts each: all of those of cheats are found by an audit, none of honest members.

With a small random model. What a model that has learnt something comes to is measured by `benchmarks/receipts.py`.
"""

import pytest
import torch
from benchmarks._signed_texts import HONEST, Cheat, SignedText, play, stages_of

from unit.texts.test_audit import CHEATS, VECTOR, WIDE, judged, prompts
from weft.engine.fingerprint import bounds_of
from weft.engine.numbers import Kind
from weft.texts.audit import EXACT, Bounds

pytestmark = pytest.mark.slow

NUM, BATCH, SLACK = 200, 50, 1.5


def texts(kind: Kind, num: int, seed: int, cheat: Cheat = HONEST) -> list[SignedText]:
    """Return texts that are served in steps of several sizes, honest ones by one thread and by two."""
    found = []
    for number, start in enumerate(range(0, num, BATCH)):
        torch.set_num_threads(1 + number % 2 if cheat == HONEST else 1)
        stages = stages_of(WIDE, VECTOR, kind, 1, 2 * BATCH, cheat)
        some = prompts(BATCH, seed + start)
        found += play(stages, some, 30, cheat=cheat, seed=(seed + start) % 251, piece=(64, 7, 16, 33)[number % 4])
    torch.set_num_threads(1)
    return found


def num_found(kind: Kind, played: list[SignedText], bounds: Bounds) -> int:
    return sum(not all(each.is_honest for each in found) for found in judged(kind, 1, played, 0, bounds))


@pytest.mark.parametrize("kind", ["exact", "bf16"])
def test_of_200_texts_each_all_cheats_are_found_and_no_honest_member(kind: Kind) -> None:
    bounds = EXACT
    if kind == "bf16":
        found = [each for of in judged(kind, 1, texts(kind, NUM, 5000), 0, EXACT) for each in of]
        margins = [one for each in found for one in each.margins]
        bounds = Bounds(bounds_of([one for each in found for one in each.apart], SLACK), SLACK * max(margins))
    assert num_found(kind, texts(kind, NUM, 0), bounds) == 0
    counts = {name: num_found(kind, texts(kind, NUM, 1000, cheat), bounds) for name, cheat in CHEATS.items()}
    if kind == "bf16":  # any other token may be one that the model finds as likely
        assert counts.pop("a token") >= NUM - 10
    assert counts == dict.fromkeys(counts, NUM)
