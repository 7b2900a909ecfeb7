"""What auditors sealed, and what they open: anything else is found, once, and so is silence."""

from itertools import permutations

import pytest

from weft.ids import Digest, PeerId, Round
from weft.verify.seals import MAX_SEALS, ROUNDS, SECONDS, Place, Seals, seal_of
from weft.wire import digest

A, B = PeerId("aa" * 32), PeerId("bb" * 32)
PLACE, SALT, STATE = Place(A, digest(b"work"), 3), digest(b"salt"), digest(b"state")
SEAL = seal_of(SALT, STATE, A)


AT = Round(7), 100.0


def told(seal: Digest = SEAL) -> Seals:
    seals = Seals()
    assert seals.sealed(PLACE, seal, Round(7), 100.0)
    return seals


def late(seals: Seals, *members: PeerId) -> list[Place]:
    return seals.silent(members, Round(7 + ROUNDS + 1), 100.0 + SECONDS + 1)


def test_what_was_sealed_may_be_opened_and_nothing_else() -> None:
    assert told().opened(PLACE, STATE, SALT, *AT)
    assert not told().opened(PLACE, digest(b"another"), SALT, *AT)
    assert not told().opened(PLACE, STATE, digest(b"another"), *AT)
    assert not told(seal_of(SALT, STATE, B)).opened(PLACE, STATE, SALT, *AT), "a seal that another has made"


def test_of_what_nobody_has_sealed_nothing_is_found() -> None:
    assert late(Seals(), A) == []
    assert Seals().opened(PLACE, STATE, SALT, *AT)
    assert told().opened(PLACE._replace(before=4), digest(b"another"), SALT, *AT)
    assert told().opened(PLACE._replace(auditor=B), digest(b"another"), SALT, *AT)


def test_who_seals_two_things_is_found_once_and_who_says_it_again_is_not() -> None:
    seals = told()
    assert seals.sealed(PLACE, SEAL, Round(7), 100.0)
    assert not seals.sealed(PLACE, digest(b"another"), Round(7), 100.0)
    assert seals.is_over(PLACE)
    assert seals.sealed(PLACE, digest(b"a third"), Round(7), 100.0)
    assert seals.opened(PLACE, digest(b"another"), SALT, *AT)
    assert late(seals, A) == []


def test_a_seal_that_comes_once_it_was_opened_waits_for_nothing() -> None:
    seals = told()
    assert seals.opened(PLACE, STATE, SALT, *AT)
    assert seals.sealed(PLACE, SEAL, Round(8), 101.0)
    assert late(seals, A) == []


@pytest.mark.parametrize(("rounds", "seconds"), [(ROUNDS, SECONDS + 1), (ROUNDS + 1, SECONDS)])
def test_nobody_is_silent_before_both_rounds_and_seconds_are_over(rounds: int, seconds: float) -> None:
    seals = told()
    assert seals.silent((A, B), Round(7 + rounds), 100.0 + seconds) == []
    assert late(seals, A, B) == [PLACE]
    assert late(seals, A, B) == []


def test_who_has_left_is_not_silent() -> None:
    assert late(told(), B) == []


def test_one_auditor_is_remembered_no_more_than_so_often() -> None:
    seals = Seals()
    for number in range(2 * MAX_SEALS):
        assert seals.sealed(PLACE._replace(before=number), SEAL, Round(7), 100.0)
    assert seals.sealed(PLACE._replace(auditor=B), SEAL, Round(7), 100.0)
    assert len(late(seals, A, B)) == MAX_SEALS + 1


def test_in_whatever_order_words_come_who_lies_is_found_once_and_who_does_not_never() -> None:
    """A seal may come of its auditor and of the worker, before or after what is opened, doubled, or never."""
    lie = digest(b"copied")
    for opens, is_honest in ((STATE, True), (lie, False)):
        words = ["seal", "seal", "open", "open"]
        for num in range(len(words) + 1):
            for order in set(permutations(words, num)):
                seals, found = Seals(), 0
                for word in order:
                    is_right = (
                        seals.sealed(PLACE, SEAL, *AT) if word == "seal" else seals.opened(PLACE, opens, SALT, *AT)
                    )
                    found += not is_right
                is_heard = {"seal", "open"} <= set(order)
                assert found == (is_heard and not is_honest), order
                assert late(seals, A) == ([PLACE] if set(order) == {"seal"} else []), order
