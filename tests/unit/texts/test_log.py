"""Rows of a text by their place: what is asked for is what was added last at each place, as far as it is here."""

from hypothesis import given
from hypothesis import strategies as st

from weft.texts.log import Log, Strip

Acts = st.lists(
    st.tuples(st.sampled_from(["add", "cut", "forget"]), st.integers(0, 30), st.integers(1, 4)), max_size=40
)


@given(acts=Acts, start=st.integers(0, 40), num=st.integers(0, 12))
def test_a_part_is_what_was_added_there(acts: list[tuple[str, int, int]], start: int, num: int) -> None:
    strip, at = Strip(2), dict[int, bytes]()
    for number, (act, place, size) in enumerate(acts):
        if act == "add":
            place = min(place, strip.stop)
            rows = [bytes((number, row)) for row in range(size)]
            at = {each: row for each, row in at.items() if each < place}
            if place != strip.stop and not at:
                at = {}
            at |= dict(zip(range(place, place + size), rows, strict=True))
            strip.add(place, b"".join(rows))
        elif act == "cut":
            at = {each: row for each, row in at.items() if each < place}
            strip.cut(place)
        else:
            strip.forget(place)
        at = {each: row for each, row in at.items() if strip.start <= each < strip.stop}
        assert strip.nbytes == 2 * (strip.stop - strip.start) == 2 * len(at)
    assert strip.part(start, start + num) == b"".join(at[each] for each in range(start, start + num) if each in at)


def test_who_asks_for_the_last_row_of_a_long_text_waits_for_no_other() -> None:
    log = Log(1, 1 << 20)
    for place in range(1000):
        log.add(b"text", place, bytes([place % 256]))
    looked_at = 0

    class Counted(list[tuple[int, bytes]]):
        def __reversed__(self):  # type: ignore[no-untyped-def]
            nonlocal looked_at
            for each in super().__reversed__():
                looked_at += 1
                yield each

    strip = log._strips[b"text"]
    strip._parts = Counted(strip._parts)  # type: ignore[assignment]
    assert log.part(b"text", 999, 1000) == bytes([999 % 256])
    assert looked_at <= 2
    assert log.part(b"text", 3, 6) == bytes([3, 4, 5])
