"""Text comes out of tokens letter by letter, and no stop string or half character slips through."""

import pytest

from weft.serve.text import Unfolding

TEXT = "Käse, 3 € & ≈ 20 % 🧀\nthe end"


def told(text: str, stops: list[str], size: int) -> tuple[list[str], list[int], bool]:
    """Feed the bytes of a text in pieces of `size`, each with its number."""
    out, data = Unfolding[int](stops), text.encode()
    texts, numbers = [], []
    for number, place in enumerate(range(0, len(data), size)):
        some, with_it = out.feed(data[place : place + size], number)
        texts.append(some)
        numbers += with_it
        if out.is_stopped:
            break
    some, with_it = out.finish()
    return [*texts, some], [*numbers, *with_it], out.is_stopped


@pytest.mark.parametrize("size", [1, 2, 3, 100])
@pytest.mark.parametrize(
    ("stops", "expected"),
    [([], TEXT), (["end"], TEXT[:-3]), (["3 €", "🧀"], "Käse, "), (["endless", "the endx"], TEXT)],
)
def test_stop_strings_are_found_across_borders_and_never_told(size: int, stops: list[str], expected: str) -> None:
    texts, _, is_stopped = told(TEXT, stops, size)
    assert "".join(texts) == expected
    assert is_stopped == (expected != TEXT)
    assert not any("\ufffd" in each for each in texts)


def test_what_may_begin_a_stop_string_is_held_back_and_no_more() -> None:
    out = Unfolding[int](["stop"])
    assert out.feed(b"a st")[0] == "a "
    assert out.feed(b"e")[0] == "ste"
    assert out.feed(b"sto")[0] == ""
    assert out.finish()[0] == "sto"


def test_what_goes_with_a_token_goes_out_with_its_last_character() -> None:
    _, numbers, _ = told("ab🧀cd", [], 1)
    assert numbers == list(range(8))
    _, numbers, _ = told("abSTOPcd", ["STOP"], 1)
    assert numbers == [0, 1]


def test_half_a_character_at_the_end_is_told_as_such() -> None:
    out = Unfolding[int]()
    assert out.feed("é".encode()[:1])[0] == ""
    assert out.finish()[0] == "\ufffd"
