"""Who audits what: as often as a run says, foreseen by nobody, and by each signature for itself."""

from collections import Counter
from collections.abc import Callable, Iterable
from functools import cache

import pytest

from weft.ids import BranchId, Digest, RunId
from weft.keys import Identity
from weft.rng import stream
from weft.verify.draw import Draw, drawn
from weft.wire import digest, seal

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


@pytest.mark.parametrize("rate", [pytest.param(0.1, marks=pytest.mark.full), 1.0])
def test_of_many_draws_the_rate_is_within_a_hundredth(rate: float) -> None:
    """What signatures an honest member makes nobody chooses: here they are 64 bytes drawn once."""
    num, electors = int(100_000 / rate), 3
    drawn_bytes = stream(0, "signatures").bytes(num + 64)
    works = [digest(b"work %d" % number) for number in range(8)]
    found = sum(
        drawn(drawn_bytes[number : number + 64], works[number % 8], rate, electors, 1) is not None
        for number in range(num)
    )
    assert found / num == pytest.approx(rate / (electors - 1), rel=0.01)


NUM_PROPOSED, NUM_WORKS, ELECTORS = 1000, 2000, 9
LEADER = 1  # its friend is the first; the others follow
IDENTITIES = [Identity.from_seed(bytes([number] * 32)) for number in range(ELECTORS)]


@cache
def ticket(elector: int, proposed: int) -> bytes:
    """Return what an elector signs once one of the leader's manifests is decided."""
    run = RunId("00" * 32)
    name = digest(b"manifest %d" % proposed)
    return seal(IDENTITIES[elector], Draw(run=run, branch=BranchId(run), round=1, manifest=name)).signature


def public(elector: int, proposed: int) -> bytes:
    """Return what all can know of a draw that hangs on the manifest alone."""
    return digest(b"%d of manifest %d" % (elector, proposed)).encode()[:64]


def auditors(work: Digest, proposed: int, electors: Iterable[int], signed: Callable[[int, int], bytes]) -> int:
    return sum(drawn(signed(elector, proposed), work, 1.0, ELECTORS, 1) is not None for elector in electors)


@pytest.mark.parametrize(
    ("signed", "foreseen", "least"),
    [(ticket, [LEADER], 1 - 1 / (ELECTORS - 1)), (public, range(LEADER, ELECTORS), 0.0)],
    ids=["by signatures", "by the manifest alone"],
)
def test_a_leader_that_proposes_again_spares_its_friend_no_more_than_its_own_part(
    signed: Callable[[int, int], bytes], foreseen: Iterable[int], least: float
) -> None:
    """It knows its own signatures, and takes a manifest by which nobody is drawn of whom it can foresee that."""
    honest = chosen = 0
    for number in range(NUM_WORKS):
        work = digest(b"friend's work %d" % number)
        tried = (each % NUM_PROPOSED for each in range(number, number + NUM_PROPOSED))
        best = next(each for each in tried if not auditors(work, each, foreseen, signed))
        honest += auditors(work, number % NUM_PROPOSED, range(LEADER, ELECTORS), signed)
        chosen += auditors(work, best, range(LEADER, ELECTORS), signed)
    assert honest / NUM_WORKS == pytest.approx(1.0, rel=0.05)
    assert chosen / NUM_WORKS == pytest.approx(least, rel=0.05, abs=0.0)
