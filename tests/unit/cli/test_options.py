"""`--until` as people type it, and a peer that leaves once it has contributed its share."""

from datetime import UTC, datetime

import pytest

from commits import committed
from weft.cli.options import Contributed, Until, until
from weft.errors import ConfigError
from weft.events import CountedThrough, Entry, Event, Notice, PeerStarted, RoundCommitted, StepDone
from weft.ids import PeerId, Round, RunId, Step, Tokens

NOW = datetime(2026, 11, 21, 19, 30, tzinfo=UTC)
ME, OTHER = PeerId("a" * 64), PeerId("b" * 64)


def moment(text: str) -> str:
    wall = until(text, NOW.timestamp(), UTC).wall
    assert wall is not None
    return datetime.fromtimestamp(wall, UTC).strftime("%Y-%m-%d %H:%M:%S")


@pytest.mark.parametrize(
    ("text", "at"),
    [
        ("20:00", "2026-11-21 20:00:00"),
        ("7:00", "2026-11-22 07:00:00"),
        ("19:30", "2026-11-22 19:30:00"),
        ("2h", "2026-11-21 21:30:00"),
        ("1d2h30m", "2026-11-22 22:00:00"),
        ("90min", "2026-11-21 21:00:00"),
        ("45s", "2026-11-21 19:30:45"),
        ("2026-12-01", "2026-12-01 00:00:00"),
        ("2026-12-01T07:00", "2026-12-01 07:00:00"),
        ("2026-12-01 07:00+02:00", "2026-12-01 05:00:00"),
    ],
)
def test_a_time_a_while_or_a_date(text: str, at: str) -> None:
    assert moment(text) == at


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("20rounds", Until(rounds=20)),
        ("1 round", Until(rounds=1)),
        ("5Mtokens", Until(tokens=5_000_000)),
        ("1.5k tokens", Until(tokens=1500)),
        ("20tokens", Until(tokens=20)),
    ],
)
def test_a_share_of_rounds_or_tokens(text: str, found: Until) -> None:
    assert until(text, NOW.timestamp(), UTC) == found


@pytest.mark.parametrize("text", ["", "soon", "25:00", "2", "0rounds", "2026-13-01", "2020-01-01", "-2h"])
def test_what_is_no_end_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--until"):
        until(text, NOW.timestamp(), UTC)


@pytest.mark.parametrize(("text", "readings"), [("2.000 tokens", "2,000 or 2"), ("1.500rounds", "1,500 or 1.5")])
def test_a_full_stop_before_three_digits_is_refused_where_whole_things_are_counted(text: str, readings: str) -> None:
    with pytest.raises(ConfigError, match=f"--until .*: that may be {readings}"):
        until(text, NOW.timestamp(), UTC)


def test_no_end_is_none() -> None:
    assert until(None, NOW.timestamp(), UTC) == Until()


def commit(*contributors: PeerId) -> RoundCommitted:
    return committed(contributors=contributors, tokens=Tokens(1), committed_tokens=Tokens(1))


class Watched:
    def __init__(self, until: Until) -> None:
        self.stops: list[str] = []
        self.told: list[Event] = []
        self.sink = Contributed(until, stop=self.stops.append, emit=self.told.append)

    def see(self, *events: Event) -> None:
        for event in events:
            self.sink.write(Entry(v=1, at=0.0, peer=ME, event=event))


STARTED = PeerStarted(run=RunId("0" * 64), name="a", software="weft", device="cpu", num_parameters=1)


def test_a_share_of_rounds_is_of_those_that_count_this_peer() -> None:
    watched = Watched(Until(rounds=2))
    watched.see(STARTED, commit(ME), commit(OTHER))
    assert watched.told == [Notice(text="this peer leaves after 2 rounds")]
    assert watched.stops == []
    watched.see(commit(ME, OTHER))
    assert watched.stops == ["it has contributed 2 rounds"]


def test_a_round_counts_a_peer_without_a_vote_that_its_aggregator_brought() -> None:
    watched, through = Watched(Until(rounds=2)), CountedThrough(round=Round(1), tokens=Tokens(5))
    watched.see(STARTED, through, commit(OTHER), commit(OTHER))
    assert watched.stops == []
    watched.see(through)
    assert watched.stops == ["it has contributed 2 rounds"]


def test_a_share_of_tokens_is_of_those_trained_here() -> None:
    watched = Watched(Until(tokens=100))
    step = StepDone(step=Step(1), loss=1.0, learning_rate=0.1, gradient_norm=1.0, num_tokens=50, duration_s=1.0)
    watched.see(STARTED, commit(ME), step)
    assert watched.stops == []
    watched.see(step)
    assert watched.stops == ["it has contributed 100 tokens"]


def test_without_an_end_nothing_is_said() -> None:
    watched = Watched(Until())
    watched.see(STARTED, commit(ME))
    assert (watched.told, watched.stops) == ([], [])
