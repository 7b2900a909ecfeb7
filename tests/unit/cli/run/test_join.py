"""What a person is shown before joining, and told when it turns out to be more."""

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from commits import committed
from unit.cli.company import founder
from unit.cli.small import Weft
from unit.launch.test_terms import HERE, TICKET, SteppingClock, cut, made, news, told
from unit.peer.tiny import run_config, tokens
from weft.cli.run.join import TrafficWatch, describe, with_yes
from weft.dashboard import figures
from weft.errors import ConfigError
from weft.events import Entry, Event, Notice
from weft.ids import PeerId, Round
from weft.launch.terms import Heard, Kept, terms
from weft.run.trust import AuditedTrust
from weft.store.home import Home
from weft.training.device import audits_nbytes

ME = PeerId("e" * 64)


def moved(nbytes: float) -> Entry:
    event = committed(contributors=(ME,), sent_nbytes=round(nbytes / 2), received_nbytes=round(nbytes / 2))
    return Entry(v=1, at=0.0, peer=ME, event=event)


def test_a_person_reads_what_members_measured_and_what_a_day_comes_to(tmp_path: Path) -> None:
    *_, bytes_line, measured = describe(made(tmp_path, told(2, round_s=83, round_nbytes=1_100_000))).splitlines()
    assert bytes_line == "network   1.5 MB a round among 3 peers with this one, about 1.56 GB a day"
    assert (
        "as a member measured: 1.1 MB a round among 2, and 83 s from one to the next, of 4 training steps" in measured
    )


def test_a_person_reads_who_leads_into_the_run_by_name_and_what_is_left_of_it(tmp_path: Path) -> None:
    """A member says its name itself: a short ticket has none."""
    run = run_config()
    names = {contact.peer: name for contact, name in zip(TICKET.contacts, ("anna", "bert", "cleo"), strict=True)}
    nameless = tuple(msgspec.structs.replace(each, name="", peer=each.peer[:20]) for each in TICKET.contacts)
    ticket = msgspec.structs.replace(TICKET, contacts=nameless)
    heard = told(2, names=names, committed_tokens=run.train.tokens // 2)
    lines = describe(terms(run, ticket, Home(tmp_path), HERE, heard)).splitlines()
    assert "through   anna, bert and cleo, named on the ticket" in lines
    (length,) = (line for line in lines if line.startswith("length    "))
    assert "50 % done; about " in length
    assert length.endswith(" left by those who train now")
    assert any("until the run is complete" in line for line in lines)
    assert not any(" a day" in line for line in lines)
    assert "through   aaaaaaaa, bbbbbbbb and cccccccc" in describe(terms(run, ticket, Home(tmp_path), HERE, told(2)))


@pytest.mark.parametrize("is_here", [False, True])
def test_a_complete_run_is_said_first_and_in_two_lines(tmp_path: Path, is_here: bool) -> None:
    heard = Heard(num_members=1, committed_tokens=run_config().train.tokens)
    found = terms(run_config(), TICKET, Home(tmp_path), HERE, heard, is_here=is_here)
    first, second = describe(found).splitlines()
    assert "is complete: nothing is left to train" in first
    assert ("weft generate ffffffff" if is_here else "to fetch") in second


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        ("-", "weft join - --yes"),
        ("@my ticket.txt", "weft join '@my ticket.txt' --yes"),
        (None, "weft join --yes"),
        ("weft2secret", "weft join TICKET --yes"),
    ],
)
def test_the_hint_has_the_ticket_as_it_was_given_and_shows_no_secret(given: str | None, hint: str) -> None:
    assert with_yes(given) == hint


def test_a_person_reads_why_a_day_is_not_known_and_what_is(tmp_path: Path) -> None:
    *_, bytes_line, why = describe(made(tmp_path)).splitlines()
    assert "a round among 4 peers with this one" in bytes_line
    assert "a day" not in bytes_line
    assert "not known: no member has said yet" in why
    *_, why = describe(made(tmp_path, told(1, round_s=0.05))).splitlines()
    assert "trains alone" in why
    assert "a round alone takes 0.05 s, of 4 training steps" in why
    assert "weft doctor -" in why


@pytest.mark.parametrize(
    ("kept", "then"),
    [
        (Kept(Round(45), 15.0), "it waits 15 s for the others and then goes on alone"),
        (Kept(Round(45), 0.0), "it goes on alone"),
        (Kept(Round(45), None), "it goes on once a majority of its members is back"),
    ],
)
def test_where_nobody_answers_the_terms_say_so_and_name_nobody(tmp_path: Path, kept: Kept, then: str) -> None:
    found = terms(run_config(), TICKET, Home(tmp_path), HERE, kept=kept)
    text = describe(found)
    assert "through   nobody: no peer of this run answers now\n" in text
    assert f"from      round 45 or later, which this machine has kept. If you join, {then}\n" in text
    assert "named on the ticket" not in text
    assert "a round among 2 peers with this one; nothing while alone" in text
    assert f"this machine has it at round 45 or later: {then};" in str(found)


def test_what_this_machine_has_is_not_said_to_be_fetched(tmp_path: Path) -> None:
    """Where nobody answers it goes on from its own state; where its data are missing, members have them."""
    home, run, kept = Home(tmp_path), run_config(), Kept(Round(17), 15.0)
    info = msgspec.structs.replace(run.data.train[0], digest=home.shards.put(tokens().tobytes()))
    here = msgspec.structs.replace(run, data=msgspec.structs.replace(run.data, train=(info,), heldout=(info,)))
    found = terms(here, TICKET, home, HERE, kept=kept)
    assert "to fetch  nothing\n" in describe(found)
    assert "data      the run's, which this machine has already\n" in describe(found)
    assert "; nothing to fetch, " in str(found)
    (missing,) = home.shards.missing(run.data)
    lacking = terms(run, TICKET, home, HERE, kept=kept)
    assert lacking.fetch_nbytes == missing.nbytes
    assert "data      the run's, fetched from members\n" in describe(lacking)
    joined = terms(here, TICKET, home, HERE, told(2))  # others have gone further
    assert joined.fetch_nbytes == 4 * joined.num_parameters
    assert "to fetch  nothing" not in describe(joined)


def test_of_a_model_that_is_cut_a_person_reads_which_part_this_machine_would_hold(tmp_path: Path) -> None:
    both = {PeerId("a" * 64): news(0, 1), PeerId("b" * 64): news(2)}
    heard = Heard(num_members=2, num_linked=2, news=both)
    text = describe(terms(cut(), TICKET, Home(tmp_path), HERE, heard))
    assert "parameters; this machine would hold" in text
    assert "of them, stage" in text
    assert "of 3" in text


def test_memory_is_that_of_the_program_and_of_training(tmp_path: Path) -> None:
    found = replace(made(tmp_path), process_nbytes=290_000_000, memory_nbytes=212_000_000, micro_batch=2)
    said = (
        "memory    about 502 MB: 290 MB for the program itself, 212 MB to train on 2 samples at a time; a batch has 4"
    )
    assert said in describe(found)


def test_nobody_is_told_of_more_traffic_who_was_shown_no_terms(tmp_path: Path) -> None:
    """As in a demo, which starts its peers itself."""
    events: list[Event] = []
    watch = TrafficWatch(SteppingClock(0.0), is_told=False)
    watch.agreed(made(tmp_path, told(2)))
    watch.started(events.append)
    watch.write(moved(1e15))
    assert events == []


def test_more_traffic_than_the_terms_said_is_an_event(tmp_path: Path) -> None:
    events: list[Event] = []
    watch = TrafficWatch(SteppingClock(0.0))
    watch.write(moved(1e15))  # before anything was agreed to
    shown = made(tmp_path, told(2))
    assert shown.day_nbytes is not None
    watch.agreed(shown)
    watch.started(events.append)
    watch.write(moved(shown.fetch_nbytes + shown.day_nbytes / 24))
    assert events == []
    watch.write(moved(shown.day_nbytes))
    (notice,) = events
    assert isinstance(notice, Notice)
    assert "the terms said" in notice.text
    assert "Ctrl-C leaves it" in notice.text


@pytest.mark.full
def test_without_a_terminal_the_terms_are_shown_and_how_to_say_yes(weft: Weft, tmp_path: Path) -> None:
    """A script that forgot --yes has joined nothing, and ends as one that failed; the member goes on."""
    machine = tmp_path / "machine.toml"
    machine.write_text('device = "cpu"\nthreads = 1\ntransports = ["tls"]\n[tls]\nhost = "127.0.0.1"\n')
    with founder(tmp_path / "crew", wait_for=1, num_peers=1, num_rounds=1_000_000) as member:
        answer = weft("join", member.ticket, "--machine", machine)
        assert answer.code == ConfigError.exit_code
        assert "memory    about" in answer.out
        assert "network   " in answer.out
        assert "weft join TICKET --yes" in answer.err
        assert not list((tmp_path / "home").glob("runs/*")), "terms that were read leave no run behind"
        assert "no run was trained in this home. There is no run" in " ".join(weft("generate", "last").err.split())
        assert not member.task.done()


def test_terms_say_what_audits_hold(tmp_path: Path) -> None:
    found = made(tmp_path, told(2))
    audited = msgspec.structs.replace(found.run, trust=AuditedTrust())
    plain, more = (describe(terms(each, found.ticket, Home(tmp_path), HERE, told(2))) for each in (found.run, audited))
    (memory,) = [line for line in more.splitlines() if line.startswith("memory")]
    assert f", {figures.nbytes(audits_nbytes(audited))} for audits; a batch" in memory
    assert "audits" not in plain
