"""The factor on fp16 losses."""

from weft.training.backward import LossScale


def test_the_factor_doubles_after_enough_good_batches() -> None:
    scale = LossScale(is_needed=True)
    for _ in range(LossScale.GROWS_AFTER - 1):
        scale.grow()
    assert scale.value == 2.0**16
    scale.grow()
    assert scale.value == 2.0**17
    for _ in range(20 * LossScale.GROWS_AFTER):
        scale.grow()
    assert scale.value == LossScale.MOST


def test_an_overflow_halves_the_factor_and_begins_the_count_again() -> None:
    scale = LossScale(is_needed=True)
    for _ in range(LossScale.GROWS_AFTER - 1):
        scale.grow()
    assert scale.shrink()
    scale.grow()
    assert scale.value == 2.0**15
    while scale.shrink():
        pass
    assert scale.value == 1.0


def test_the_factor_is_restored_where_one_is_needed() -> None:
    scale = LossScale(is_needed=True)
    scale.shrink()
    scale.grow()
    other = LossScale(is_needed=True)
    other.load(scale.counters())
    assert (other.value, other.num_good) == (2.0**15, 1)
    plain = LossScale(is_needed=False)
    plain.load(scale.counters())
    plain.grow()
    assert plain.value == 1.0
    assert plain.counters() == {}
    assert not plain.shrink()
