"""Choices as a record: equal ones have equal bytes."""

import msgspec

from weft.sync.method.choices import Choices, SgdConfig
from weft.wire import decode, encode


def test_a_number_that_was_read_is_the_default_that_it_equals() -> None:
    plain = Choices(every=3, send="delta", apply=SgdConfig())
    read = msgspec.convert(
        {"type": "custom", "every": 3, "send": "delta", "apply": {"type": "sgd"}, "proximal": float("0.0"), "mix": 0},
        Choices,
    )
    assert encode(read) == encode(plain)
    assert decode(encode(read), Choices) == plain


def test_a_number_that_is_no_default_is_written() -> None:
    assert b"proximal" in encode(Choices(every=3, send="delta", apply=SgdConfig(), proximal=0.5))
