"""Who gives pages up for whom, and who is next."""

from weft.engine.scheduling.shares import all_who_make_way, by_turns, most_held, who_makes_way, who_yields


def test_who_holds_most_yields_to_whoever_holds_less_even_with_what_it_asks_for() -> None:
    held = {"a": 10, "b": 3}
    assert who_yields(held, "c", 9) == "a"
    assert who_yields(held, "b", 6) == "a"
    assert who_yields(held, "b", 7) is None  # it would hold as much
    assert who_yields(held, "c", 10) is None
    assert who_yields(held, "a", 1) is None  # nobody yields to itself
    assert who_yields({}, "a", 1) is None


def test_of_equals_the_first_holds_most() -> None:
    assert most_held({"a": 2, "b": 3, "c": 3}) == "b"


def test_yielding_ends_where_all_hold_alike() -> None:
    """Texts of 3 pages are given up and asked for again: nobody takes back what it gave."""
    held = {"a": 12, "b": 0}
    while who_yields(held, "b", 3) == "a":
        held["a"] -= 3
        held["b"] += 3
    assert held == {"a": 6, "b": 6}
    assert who_yields(held, "a", 3) is None


def test_every_key_has_its_turn_before_any_has_its_second() -> None:
    assert by_turns(["a1", "a2", "a3", "b1", "c1", "b2"], lambda each: each[0]) == ["a1", "b1", "c1", "a2", "b2", "a3"]
    assert by_turns([], lambda each: each) == []


def test_texts_of_one_request_have_places_all_or_none() -> None:
    waiting = {"many": (4, 0.75), "high": (9, 1.0)}
    for num_free, num, fits in ((0, 2, True), (0, 3, False), (1, 3, False), (2, 3, True), (3, 3, True)):
        found = all_who_make_way(waiting, "other", 0.75, num_free, num)
        assert (found is not None) == fits
        assert found is None or found == ["many"] * max(0, num - num_free)
    assert waiting == {"many": (4, 0.75), "high": (9, 1.0)}
    assert all_who_make_way({}, "other", 0.75, 1, 1) == []
    assert all_who_make_way({}, "other", 0.75, 0, 1) is None


def test_who_waits_most_makes_way_but_not_for_who_is_asked_less() -> None:
    waiting = {"many": (2, 0.75), "one": (1, 0.75)}
    assert who_makes_way(waiting, "other", 0.75) == "many"
    assert who_makes_way(waiting, "one", 0.75) is None
    assert who_makes_way(waiting, "many", 0.75) is None
    assert who_makes_way(waiting, "other", 0.25) is None
    waiting["high"] = (3, 1.0)
    assert who_makes_way(waiting, "other", 0.75) == "many"
    assert who_makes_way(waiting, "other", 1.0) == "high"
