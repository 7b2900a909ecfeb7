"""How a ticket comes to a command without its command line: standard input, a file, the environment."""

import io
import sys
from pathlib import Path

import pytest

from unit.cli.small import Weft
from unit.cli.test_bad_input import LOCAL, a_ticket, refused
from weft.ids import RunId, start_of
from weft.keys import Identity
from weft.net.messages import Contact
from weft.net.ticket import issue

TAKE_ONE = [
    *(("join", "--yes", *LOCAL), ("anchor",), ("gather",), ("watch",), ("status",), ("inspect",)),
    ("serve", "--port", "0"),
    pytest.param(("doctor",), marks=pytest.mark.full),
]
NOBODY = "4cb5abf6"  # whom `a_ticket` names, and who is not there


@pytest.fixture(autouse=True)
def nothing_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WEFT_TICKET", raising=False)


def goes(weft: Weft, verb: str, *words: str) -> None:
    """Run a command, which must have read the ticket: it names whom that leads to."""
    answer = weft(verb, *words)
    assert NOBODY in answer.err + answer.out, answer.err


@pytest.mark.usefixtures("timed_once")
@pytest.mark.parametrize("words", TAKE_ONE, ids=lambda words: words[0])
def test_every_verb_reads_its_ticket_from_a_file_and_the_environment(
    weft: Weft, words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    verb, *options = words
    file = tmp_path / "ticket.txt"
    file.write_text(f"{a_ticket()}\r\n", encoding="utf-16")  # as PowerShell writes it
    goes(weft, verb, f"@{file}", *options)
    monkeypatch.setenv("WEFT_TICKET", a_ticket())
    goes(weft, verb, *options)


def test_an_act_takes_the_ticket_of_the_environment_unless_a_run_is_named(
    weft: Weft, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEFT_TICKET", a_ticket())
    goes(weft, "act", "show")
    refused(weft, 17, "'abab' is not a run of this home", "act", "show", "--run", "abab")


@pytest.mark.parametrize("verb", ["join", "anchor", "gather", "inspect"])
def test_without_any_ticket_it_is_said_where_one_may_come_from(weft: Weft, verb: str) -> None:
    said = refused(weft, 15, "weft needs a ticket", verb)
    assert '"-"' in said
    assert "@FILE" in said
    assert "WEFT_TICKET" in said


def test_a_file_without_a_ticket_is_told(weft: Weft, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.touch()
    refused(weft, 15, "is empty", "join", f"@{empty}", "--yes")
    refused(weft, 15, "No such file", "join", f"@{tmp_path / 'none'}", "--yes")
    empty.write_bytes(b"\xff\xff\x00\xd8")
    refused(weft, 15, "not a ticket", "join", f"@{empty}", "--yes")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    "words",
    [("inspect", "-"), ("inspect",), ("join", "--yes", *LOCAL), ("anchor",), ("gather",)],
    ids=lambda words: " ".join(words[:2]),
)
def test_who_types_is_asked_for_the_ticket(weft: Weft, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", Terminal(a_ticket() + "\n"))
    answer = weft(*words)
    assert "Paste the ticket here" in answer.err
    assert NOBODY in answer.err + answer.out


def test_who_types_is_not_asked_where_the_environment_has_a_ticket(weft: Weft, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_TICKET", a_ticket())
    monkeypatch.setattr(sys, "stdin", Terminal("no ticket\n"))
    answer = weft("inspect")
    assert "Paste the ticket here" not in answer.err
    assert NOBODY in answer.out


def test_weft_ticket_says_why_a_ticket_is_long(weft: Weft, home: Path) -> None:
    peer = Identity.from_seed(bytes(32)).peer
    relay = f"https://{'a-very-long-name.' * 5}example/"
    contact = Contact(peer=peer, name="", addresses=(f"iroh://{peer}?addr=192.168.1.5:2&relay={relay}",))
    text = issue(RunId("ab" * 32), [contact], bytes(16))
    folder = home / "runs" / ("ab" * 32) / peer
    folder.mkdir(parents=True)
    (folder / "ticket").write_text(text)
    answer = weft("ticket")
    assert answer.out == f"{text}\n"
    assert relay in answer.err
    assert "usual 200" in answer.err


def test_a_key_that_the_ticket_cuts_is_shown_as_cut(weft: Weft) -> None:
    members = [
        Contact(peer=Identity.from_seed(bytes([n]) * 32).peer, name="", addresses=(f"tls://127.0.0.1:{n}",))
        for n in (1, 2)
    ]
    out = weft("inspect", issue(RunId("ab" * 32), members, None)).out
    for each in members:
        assert f"member   {start_of(each.peer)}...\n         {each.addresses[0]}\n" in out
