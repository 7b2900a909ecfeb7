"""What rare outer steps cost in loss: the published tables, and what is made of them between their rows."""

import pytest

from weft.plan.loss import penalty
from weft.plan.profiles import known


def test_at_a_row_of_the_table_the_loss_is_the_tables() -> None:
    for row in known().replicas.row:
        for count, loss in zip(known().replicas.counts, row.diloco, strict=True):
            found = penalty(row.parameters, count, 30, 10**9)
            assert found.share == pytest.approx(max(0.0, loss / row.plain - 1))
            assert found.notes == ()


def test_between_two_rows_it_lies_between_them() -> None:
    shares = [penalty(num, 4, 30, 10**9).share for num in (335_000_000, 400_000_000, 550_000_000)]
    assert shares == sorted(shares, reverse=True)
    assert len(set(shares)) == 3


def test_more_steps_and_more_replicas_cost_more() -> None:
    by_steps = [penalty(150_000_000, 4, every, 10**9).share for every in (30, 100, 300)]
    by_count = [penalty(150_000_000, count, 30, 10**9).share for count in (2, 3, 8, 16, 64)]
    assert by_steps == sorted(set(by_steps))
    assert by_count == sorted(set(by_count))


def test_a_hundred_steps_cost_what_was_measured_and_fewer_than_thirty_are_credited_with_nothing() -> None:
    thirty, hundred, ten = (penalty(1_300_000_000, 4, every, 10**10) for every in (30, 100, 10))
    assert hundred.nats - thirty.nats == pytest.approx(0.034, abs=0.0005)
    assert ten == thirty


def test_more_tokens_make_up_for_it_by_the_law_of_hoffmann() -> None:
    found, num_tokens = penalty(1_300_000_000, 8, 30, 26 * 10**9), 26e9
    assert found.more_tokens is not None
    gained = 410.7 / num_tokens**0.28 - 410.7 / (num_tokens * found.more_tokens) ** 0.28
    assert gained == pytest.approx(found.nats)
    assert penalty(1_300_000_000, 8, 30, 10**15).more_tokens is None  # nothing is left to gain


def test_what_is_stretched_is_said() -> None:
    assert penalty(886_000, 4, 30, 10**7).notes == ("measured from 35M to 2.4B parameters",)
    assert len(penalty(7 * 10**9, 64, 500, 10**12).notes) == 3
