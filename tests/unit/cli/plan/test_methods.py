"""`weft methods custom`: of the method that is no row, what can be set."""

from msgspec.structs import fields

from unit.cli.small import Weft
from weft.sync.method.choices import Choices


def test_the_method_that_is_no_row_says_what_can_be_set(weft: Weft) -> None:
    answer = weft("methods", "custom")
    assert (answer.code, answer.err) == (0, "")
    assert '[method] type = "custom" needs every, send, apply, and may set codec, ' in answer.out
    assert all(field.name in answer.out for field in fields(Choices))


def test_a_method_that_is_none_is_told_of_those_that_are(weft: Weft) -> None:
    answer = weft("methods", "adam")
    assert answer.code == 2
    assert "there is no method 'adam'. There are ddp, " in answer.err
    assert " noloco; and custom, which names each choice" in " ".join(answer.err.split())
