"""When a peer whose run is complete may go: once all members have told that they made the last outer step."""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import pytest

from weft.clock import VirtualClock
from weft.events import Event, Notice
from weft.ids import PeerId
from weft.peer.loop.lifecycle import LINGER_S, LOOK_S, Shutdown

ME, ANNA = PeerId("c" * 64), PeerId("a" * 64)
HEAD = SimpleNamespace(round=5, branch="b" * 64, members=(ANNA, ME))


def beat(round: int, *, has_begun: bool = True, is_anchor: bool = False) -> SimpleNamespace:
    branch = HEAD.branch if has_begun else "f" * 64
    manifest = "d" * 64 if has_begun else None
    return SimpleNamespace(round=round, branch=branch, manifest=manifest, is_anchor=is_anchor)


def lingered_s(
    beats: Callable[[float], SimpleNamespace | None],
    *,
    is_alive: bool = False,
    is_linked: bool = True,
    is_barred: bool = False,
    back_until_s: float | None = None,
    head: SimpleNamespace = HEAD,
    told: list[Event] | None = None,
    awaited_until_s: float = 0.0,
) -> float:
    """Return how long a peer stays.

    Args:
        beats: returns what anna has told at a time; None: nothing.
        is_alive: others say so, where she has told nothing.
        back_until_s: she is silent, and until then it is believed that she may come back.
        awaited_until_s: somebody fetches until then what this peer alone has.
    """
    clock = VirtualClock()
    node = SimpleNamespace(
        is_linked=lambda peer: is_linked and peer == ANNA, is_barred=lambda peer: is_barred and peer == ANNA
    )
    membership = SimpleNamespace(
        members=lambda: {ANNA} if is_alive or beats(clock.now()) else {},
        alive=lambda: (ANNA,) if back_until_s is None and (is_alive or beats(clock.now())) else (),
        silent=lambda _within_s: (ANNA,) if back_until_s is not None and clock.now() < back_until_s else (),
        heartbeat_of=lambda peer: beats(clock.now()) if peer == ANNA else None,
    )
    shutdown = Shutdown(
        node,  # type: ignore[arg-type]
        membership,  # type: ignore[arg-type]
        SimpleNamespace(head=head),  # type: ignore[arg-type]
        SimpleNamespace(rounds=None),  # type: ignore[arg-type]
        lambda event: None if told is None else told.append(event),
    )

    async def main() -> float:
        await shutdown.linger(lambda: clock.now() < awaited_until_s)
        return clock.now()

    return clock.run(main())


def test_it_goes_at_once_where_all_have_made_the_last_step_or_are_away() -> None:
    assert lingered_s(lambda _now: beat(5)) == 0
    assert lingered_s(lambda _now: None, is_linked=False) == 0
    assert lingered_s(lambda _now: None, is_alive=True, is_linked=False) == 0  # of a large run: others hear from it


@pytest.mark.parametrize(
    "before", [beat(4), beat(0, has_begun=False), None], ids=["behind", "spoke before the run began", "never spoke"]
)
def test_it_stays_until_a_member_says_so_and_not_for_ever(before: SimpleNamespace | None) -> None:
    assert lingered_s(lambda now: beat(5) if now > 3 else before) == pytest.approx(3, abs=2 * LOOK_S)
    assert lingered_s(lambda _now: before) == pytest.approx(LINGER_S)


def test_it_stays_for_who_fetches_the_state_whether_or_not_the_last_round_counted_it() -> None:
    others = SimpleNamespace(round=5, branch=HEAD.branch, members=(ME,))
    fetches = beat(0, has_begun=False)
    assert lingered_s(lambda now: beat(5) if now > 3 else fetches, head=others) == pytest.approx(3, abs=2 * LOOK_S)
    assert lingered_s(lambda _now: beat(0, has_begun=False, is_anchor=True), head=others) == 0


def test_it_stays_for_who_is_silent_as_long_as_that_one_may_come_back() -> None:
    stayed_s = partial(lingered_s, is_linked=False, back_until_s=20.0)
    told: list[Event] = []
    assert stayed_s(lambda now: beat(5) if now > 1 else beat(4), told=told) == pytest.approx(1, abs=2 * LOOK_S)
    assert told == []
    assert stayed_s(lambda now: beat(5) if now > 3 else beat(4), told=told) == pytest.approx(3, abs=2 * LOOK_S)
    (said,) = told
    assert isinstance(said, Notice)
    assert "aaaaaaaa has not made the last round yet: this peer waits" in said.text
    assert stayed_s(lambda _now: beat(4)) == pytest.approx(20, abs=2 * LOOK_S)
    assert stayed_s(lambda _now: beat(5)) == 0  # it fell silent after the last step
    assert stayed_s(lambda _now: beat(4), is_barred=True) == 0  # this peer itself turns it away


def test_it_stays_while_somebody_fetches_what_it_alone_has() -> None:
    stayed_s = partial(lingered_s, lambda _now: beat(5))
    assert stayed_s(awaited_until_s=3.0) == pytest.approx(3, abs=2 * LOOK_S)
    assert stayed_s(awaited_until_s=1e6) == pytest.approx(LINGER_S)
