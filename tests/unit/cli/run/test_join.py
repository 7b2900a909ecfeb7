"""What a person is shown before joining, and told when it turns out to be more."""

from dataclasses import replace
from pathlib import Path

import pytest

from unit.launch.test_terms import SteppingClock, made
from weft.cli.run.join import TrafficWatch, describe
from weft.events import Entry, Event, Notice, RoundCommitted
from weft.ids import Attempt, BranchId, Digest, PeerId, Round, Tokens
from weft.launch.terms import Pace

ME = PeerId("e" * 64)


def committed(nbytes: float) -> Entry:
    event = RoundCommitted(
        branch=BranchId("b" * 64),
        round=Round(1),
        attempt=Attempt(0),
        manifest=Digest("d" * 64),
        contributors=(ME,),
        left_out={},
        tokens=Tokens(1),
        committed_tokens=Tokens(1),
        sent_nbytes=round(nbytes / 2),
        received_nbytes=round(nbytes / 2),
        duration_s=1.0,
        work_s=1.0,
    )
    return Entry(v=1, at=0.0, peer=ME, event=event)


def test_a_person_reads_what_the_day_is_reckoned_from(tmp_path: Path) -> None:
    *_, bytes_line, speed_line = describe(made(tmp_path)).splitlines()
    assert "a round among 4 peers with this one, up to about" in bytes_line
    assert "4 training steps at" in speed_line
    assert "the best measured here" in speed_line


def test_a_pace_that_members_tell_is_said_as_theirs(tmp_path: Path) -> None:
    *_, bytes_line, speed_line = describe(made(tmp_path, pace=Pace(num_members=1, tokens_per_s=5340.0))).splitlines()
    assert "a round among 2 peers with this one, about" in bytes_line
    assert "4 training steps at 5.34k tokens/s, as the fastest member says" in speed_line


def test_memory_is_that_of_the_program_and_of_training(tmp_path: Path) -> None:
    found = replace(made(tmp_path), process_nbytes=290_000_000, memory_nbytes=212_000_000)
    assert "memory    about 502 MB: 290 MB for this program as it stands, 212 MB to train" in describe(found)


@pytest.mark.parametrize(
    ("round_s", "said"),
    [(0.01, "0.01 s"), (0.6432, "0.64 s"), (9.96, "10 s"), (97.2, "97 s"), (149.6, "2 min"), (36_000, "10 h")],
)
def test_a_rounds_time_is_said_as_people_say_it(tmp_path: Path, round_s: float, said: str) -> None:
    assert f"(in rounds of {said}: " in describe(replace(made(tmp_path), round_s=round_s))


def test_more_traffic_than_the_terms_said_is_an_event(tmp_path: Path) -> None:
    told: list[Event] = []
    watch = TrafficWatch(SteppingClock(0.0))
    watch.write(committed(1e15))  # before anything was agreed to
    terms = made(tmp_path)
    watch.agreed(terms)
    watch.started(told.append)
    watch.write(committed(terms.fetch_nbytes + terms.day_nbytes / 24))
    assert told == []
    watch.write(committed(terms.day_nbytes))
    (notice,) = told
    assert isinstance(notice, Notice)
    assert "the terms said" in notice.text
    assert "Ctrl-C leaves it" in notice.text
