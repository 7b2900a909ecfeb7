"""Streams: the same name gives the same words on every machine, another name gives others."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.rng import fresh_secret, integers64, order_key, stream

NAMES = st.lists(st.one_of(st.text(max_size=8), st.integers(-(2**70), 2**70)), max_size=4)

# Written down once. Another value here means that runs made before can no longer be recomputed.
GOLDEN_WORDS = {
    (0, ()): ["df5e6115be456bb2", "b158a5ec7a7d0d44", "ab0f54308b25f97e", "98848ae8d76121c2"],
    (1, ("data", 3, "peer")): ["1c52ba3d3b9097a6", "cf457d2fab0a7435", "3a904537350d9d56", "abae4b1e81c35285"],
}


@pytest.mark.parametrize(("seed", "name"), GOLDEN_WORDS)
def test_a_stream_gives_the_words_written_down(seed: int, name: tuple[str | int, ...]) -> None:
    assert [f"{word:016x}" for word in integers64(stream(seed, *name), 4)] == GOLDEN_WORDS[seed, name]


def test_the_order_key_is_the_one_written_down() -> None:
    assert order_key("run", 3, "peer") == "bbc39317f8aaf456e337d551a76eb329d3cb91f925a7e7566264fa4461db83f9"


@given(st.integers(0, 2**64), NAMES)
def test_a_stream_can_be_made_again(seed: int, name: list[str | int]) -> None:
    assert np.array_equal(integers64(stream(seed, *name), 3), integers64(stream(seed, *name), 3))


@given(st.tuples(st.integers(0, 2**64), NAMES), st.tuples(st.integers(0, 2**64), NAMES))
def test_two_names_share_no_stream(first: tuple[int, list[str | int]], second: tuple[int, list[str | int]]) -> None:
    same = np.array_equal(integers64(stream(first[0], *first[1]), 2), integers64(stream(second[0], *second[1]), 2))
    assert same == (first == second)


@pytest.mark.parametrize(
    ("one", "other"),
    [(("a", 1), ("a1",)), (("1",), (1,)), (("a", "b"), ("ab",)), (("a,", "b"), ("a", ",b")), ((), ("",))],
)
def test_names_are_told_apart_by_type_and_place(one: tuple[str | int, ...], other: tuple[str | int, ...]) -> None:
    assert integers64(stream(0, *one), 1)[0] != integers64(stream(0, *other), 1)[0]
    assert order_key(*one) != order_key(*other)


@pytest.mark.parametrize("part", [np.int64(3), True, 3.0, None, b"data"])
def test_a_name_that_prints_otherwise_elsewhere_is_refused(part: object) -> None:
    with pytest.raises(TypeError, match="named by str and int"):
        stream(0, part)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="named by str and int"):
        order_key(part)  # type: ignore[arg-type]


def test_words_continue_where_they_stopped() -> None:
    whole = integers64(stream(7, "x"), 10)
    generator = stream(7, "x")
    assert np.array_equal(whole, np.concatenate([integers64(generator, 3), integers64(generator, 7)]))
    assert whole.dtype == np.uint64


def test_words_are_spread_over_all_bits() -> None:
    words = integers64(stream(7, "spread"), 4096)
    ones = [int(((words >> np.uint64(bit)) & np.uint64(1)).sum()) for bit in range(64)]
    # Binomial(4096, 1/2) has standard deviation 32; the stream is fixed, so this cannot flicker.
    assert all(abs(count - 2048) < 5 * 32 for count in ones)


def test_secrets_are_fresh_and_as_long_as_asked() -> None:
    secrets = {fresh_secret(16) for _ in range(64)}
    assert len(secrets) == 64
    assert {len(secret) for secret in secrets} == {16}
    assert len(fresh_secret()) == 32
