"""How counts stand before a noun."""

import pytest

from weft.ids import several


@pytest.mark.parametrize(
    ("num", "one", "said"),
    [
        (0, "round", "0 rounds"),
        (1, "round", "1 round"),
        (2, "training step", "2 training steps"),
        (1024, "micro-batch", "1,024 micro-batches"),
        ("1", "pass", "1 pass"),
        ("1.5", "pass", "1.5 passes"),
        ("all 3", "sample", "all 3 samples"),
        (2, "copy", "2 copies"),
        (2, "key", "2 keys"),
    ],
)
def test_one_thing_is_no_many(num: int | str, one: str, said: str) -> None:
    assert several(num, one) == said
