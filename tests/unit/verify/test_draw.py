"""Who audits what: as often as a run says, foreseen by nobody, and by each signature for itself."""

from collections import Counter

import pytest

from weft.ids import Digest
from weft.verify.draw import drawn
from weft.wire import digest

WORK = digest(b"work")


def signature(number: int) -> bytes:
    return digest(b"%d" % number).encode()[:64]


def draws(num: int, rate: float, electors: int, links: int, work: Digest = WORK) -> list[int]:
    found = (drawn(signature(number), work, rate, electors, links) for number in range(num))
    return [link for link in found if link is not None]


@pytest.mark.parametrize(("rate", "electors"), [(0.1, 2), (0.1, 9), (1.0, 5), (0.5, 33)])
def test_a_contribution_has_as_many_auditors_as_its_rate_says(rate: float, electors: int) -> None:
    num = 200_000
    expected = num * rate / (electors - 1)
    assert len(draws(num, rate, electors, 7)) == pytest.approx(expected, abs=5 * expected**0.5)


def test_with_rate_one_the_only_other_member_audits_each() -> None:
    assert len(draws(1000, 1.0, 2, 3)) == 1000


def test_each_step_is_drawn_as_often_as_any_other() -> None:
    found = Counter(draws(100_000, 1.0, 2, 8))
    assert set(found) == set(range(8))
    assert max(found.values()) - min(found.values()) < 1000  # nine standard deviations


def test_one_signature_draws_for_each_work_anew() -> None:
    works = [digest(b"work %d" % number) for number in range(2000)]
    found = [drawn(signature(0), work, 0.5, 2, 3) is not None for work in works]
    assert 900 < sum(found) < 1100


@pytest.mark.parametrize(("electors", "links"), [(1, 3), (0, 3), (2, 0)])
def test_nobody_audits_where_there_is_nobody_else_or_nothing_to_do(electors: int, links: int) -> None:
    assert draws(100, 1.0, electors, links) == []
