"""`weft act` on a run that trains in this process: what it decides, what it prints, and what it refuses."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from unit.cli.company import founder
from unit.cli.small import Weft
from unit.cli.test_bad_input import refused
from unit.peer.crew import Member
from weft.events import ActEnacted, ActRefused
from weft.keys import open_identity
from weft.run.outline import KeysAdmission

TLS = ("--transports", "tls")
LONG = {"num_rounds": 1_000_000, "wait_for": 1, "num_peers": 1}


@pytest.fixture
def key(tmp_path: Path) -> Path:
    with open_identity(tmp_path / "steward.pem", create=True):
        return tmp_path / "steward.pem"


@pytest.fixture
def steward(key: Path) -> str:
    with open_identity(key) as identity:
        return identity.peer


@pytest.fixture
def run(tmp_path: Path, steward: str) -> Iterator[Member]:
    with founder(tmp_path / "a", stewards=(steward,), **LONG) as member:
        yield member


def to(member: Member) -> tuple[str, ...]:
    return ("--ticket", member.ticket, *TLS)


@pytest.mark.full
def test_a_steward_amends_a_run_and_all_can_see_it(weft: Weft, run: Member, key: Path, steward: str) -> None:
    before = weft("act", "show", *to(run))
    assert f"steward   {steward}  0 acts" in before.out, before.err
    assert f"member    {run.id}" in before.out
    assert "every = 2" in before.out
    changes = ("--set", "method.every=3", "--set", "train.schedule.lr=2e-3", "--reason", "it is slow")
    answer = weft("act", "amend", "--key", key, *changes, *to(run))
    assert (answer.code, answer.out) == (0, "decided: amend\n"), answer.err
    after = weft("act", "show", *to(run)).out
    assert f"steward   {steward}  1 act" in after
    assert "every = 3" in after
    assert "lr = 0.002" in after
    (event,) = run.seen(ActEnacted)
    assert (event.reason, event.changes["every"]) == ("it is slow", "3")


@pytest.mark.full
def test_a_banned_key_is_listed_until_it_is_pardoned(weft: Weft, run: Member, key: Path) -> None:
    banned = "ab" * 32
    assert weft("act", "ban", banned, "--key", key, *to(run)).out == f"decided: ban {banned[:16]}\n"
    assert f"banned    {banned}" in weft("act", "show", *to(run)).out
    refused(weft, 32, "banned already", "act", "ban", banned, "--key", key, *to(run))
    refused(weft, 2, "no key begins with 'cd'", "act", "pardon", "cd", "--key", key, *to(run))
    assert weft("act", "pardon", "abab", "--key", key, *to(run)).out == f"decided: pardon {banned[:16]}\n"
    assert "banned" not in weft("act", "show", *to(run)).out


def test_a_run_ends_where_its_successor_is_named(weft: Weft, run: Member, key: Path) -> None:
    answer = weft("act", "succeed", "5e" * 32, "--key", key, "--at-once", "--reason", "a longer context", *to(run))
    assert answer.code == 0, answer.err
    assert "decided: succeed 5e5e" in answer.out or "waits" in answer.out


def test_what_has_no_effect_is_32_and_says_why(weft: Weft, run: Member, key: Path, tmp_path: Path) -> None:
    refused(weft, 32, "no member left", "act", "remove", run.id[:8], "--key", key, *to(run))
    refused(weft, 32, "more than the", "act", "amend", "--key", key, "--set", "train.seq_len=99999", *to(run))
    assert run.seen(ActRefused)
    with open_identity(tmp_path / "other.pem", create=True):
        other = ("--key", tmp_path / "other.pem")
    said = refused(weft, 32, "which may not change this run", "act", "remove", run.id, *other, *to(run))
    assert "Stewards: " in said
    refused(weft, 32, "only members vote", "act", "vote-out", run.id, *other, *to(run))
    for who in (("rewind", "999999", "--key", key), ("vote-rewind", "999999", *other)):
        refused(weft, 32, "not one of the last rounds", "act", *who, *to(run))


@pytest.mark.full
def test_a_run_without_stewards_refuses_acts(weft: Weft, key: Path, tmp_path: Path) -> None:
    with founder(tmp_path / "b", **LONG) as member:
        said = refused(weft, 32, "has no stewards", "act", "remove", member.id, "--key", key, *to(member))
        assert "weft act vote-out" in said
        assert "steward   none" in weft("act", "show", *to(member)).out


@pytest.mark.full
def test_a_steward_acts_on_a_run_that_admits_by_key(weft: Weft, key: Path, steward: str, tmp_path: Path) -> None:
    listed = KeysAdmission(keys=("ab" * 32,))
    with founder(tmp_path / "c", admission=listed, stewards=(steward,), **LONG) as member:
        answer = weft("act", "amend", "--key", key, "--set", "train.batch_size=1", *to(member))
        assert answer.out == "decided: amend\n", answer.err


def test_a_vote_in_a_run_that_admits_by_key_needs_a_key_to_come_with(
    weft: Weft, key: Path, steward: str, tmp_path: Path
) -> None:
    with open_identity(tmp_path / "voter.pem", create=True):
        voter = ("act", "vote-out", "ab" * 32, "--key", tmp_path / "voter.pem")
    listed = KeysAdmission(keys=("ab" * 32,))
    with founder(tmp_path / "f", admission=listed, stewards=(steward,), **LONG) as member:
        said = refused(weft, 24, "is not on this run's list", *voter, *to(member))
        assert "--connect-with" in said
        refused(weft, 32, "only members vote", *voter, "--connect-with", key, *to(member))


@pytest.mark.parametrize(
    ("words", "arguments"),
    [
        ('[train] has no field "lr"', ("amend", "--set", "train.lr=1")),
        ("method.every is 0", ("amend", "--set", "method.every=0")),
        ("train.schedule.type is", ("amend", "--set", "train.schedule.type=cosin")),
        ("it should read", ("amend", "--set", "train.tokens")),
        ("these settings already", ("amend", "--set", "method.every=2")),
        ("cannot become", ("amend", "--set", "method.apply={type='inner'}")),
        ("no key begins with 'zz'", ("remove", "zz")),
        ("one printable line", ("remove", "ab" * 32, "--reason", "a\x1bb")),
        ("one printable line", ("ban", "ab" * 32, "--reason", "a" * 301)),
    ],
    ids=str,
)
def test_what_was_mistyped_is_2_and_named(
    weft: Weft, run: Member, key: Path, words: str, arguments: tuple[str, ...]
) -> None:
    refused(weft, 2, words, "act", *arguments, "--key", key, *to(run))
    assert run.seen(ActEnacted) == []


def test_what_is_missing_is_said_before_anything_is_asked(weft: Weft, key: Path, tmp_path: Path) -> None:
    refused(weft, 17, "There is no run in", "act", "show")
    refused(weft, 15, "ticket", "act", "show", "--ticket", "weft1nonsense")
    assert weft("act", "remove", "ab" * 32).code == 2
    with founder(tmp_path / "d", **LONG) as member:
        refused(weft, 14, "there is no identity", "act", "remove", "ab", "--key", tmp_path / "none.pem", *to(member))
        refused(weft, 2, "no identity in", "act", "vote-out", "ab", *to(member))


def test_whoever_was_sent_to_nobody_is_told(weft: Weft, tmp_path: Path) -> None:
    with founder(tmp_path / "e", **LONG) as member:
        ticket = member.ticket
    refused(weft, 22, "nobody answered", "act", "show", "--ticket", ticket, *TLS)
