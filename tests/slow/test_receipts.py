"""Receipts of 200 texts each: cheats are found by an audit, and no honest member is accused.

With a small random model. What a model that has learnt something comes to is measured by `benchmarks/receipts.py`.
"""

from itertools import chain

import pytest
import torch
from benchmarks._signed_texts import HONEST, Cheat, SignedText, play, stages_of

from unit.texts.receipts.test_audit import CHEATS, VECTOR, WIDE, judged, prompts
from weft.engine.numbers import Kind
from weft.texts.receipts.audit import Bounds, Verdict, calibrated, verdict

pytestmark = pytest.mark.slow

NUM, BATCH = 200, 50
OF_MEMBER = 20  # texts


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


def verdicts(kind: Kind, played: list[SignedText], bounds: Bounds | None) -> list[Verdict]:
    """Return what is said of each text with exact numbers, and otherwise of each member, by `OF_MEMBER` texts."""
    each = judged(kind, 1, played, 0)
    num = 1 if bounds is None else OF_MEMBER
    return [verdict([*chain.from_iterable(each[at : at + num])], bounds) for at in range(0, len(each), num)]


@pytest.mark.parametrize("kind", ["exact", "bf16"])
def test_of_200_texts_each_all_cheats_are_found_and_no_honest_member(kind: Kind) -> None:
    bounds = None
    if kind == "bf16":
        played = judged(kind, 1, texts(kind, NUM, 5000), 0)
        ways = [[*chain.from_iterable(played[at : at + BATCH])] for at in range(0, NUM, BATCH)]
        bounds = calibrated(ways)
    honest = verdicts(kind, texts(kind, NUM, 0), bounds)
    assert set(honest) == {"honest"}
    for name, cheat in CHEATS.items():
        assert set(verdicts(kind, texts(kind, NUM, 1000, cheat), bounds)) == {"cheating"}, name
