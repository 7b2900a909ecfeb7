"""`weft serve key`: a key is shown once, the file holds its limits, and what is removed is gone."""

from pathlib import Path
from typing import Any

import pytest

from unit.cli.small import Weft
from unit.cli.test_bad_input import refused
from weft.clock import SystemClock
from weft.serve.keys import Admission, Limits, load_keys


def test_a_key_is_shown_once_and_known_by_its_file(weft: Weft, home: Path) -> None:
    made = weft("serve", "key", "add", "anna")
    secret = made.out.strip()
    file = home / "serve.keys"
    assert (made.code, made.out.count("\n")) == (0, 1)
    assert str(file) in made.err
    assert secret not in made.err + file.read_text() + weft("serve", "key", "list").out
    assert file.stat().st_mode & 0o077 == 0
    admission = Admission(load_keys(file), Limits(), SystemClock())
    assert admission.asker(f"Bearer {secret}", "").name == "anna"


# An option of `weft serve key add`, its value, what the file holds, and what the list says.
ROWS: list[tuple[str, Any, str, Any, str]] = [
    ("--requests-per-minute", 60, "requests_per_minute", 60, "60 requests a minute"),
    ("--tokens-per-minute", 2000, "tokens_per_minute", 2000, "2,000 tokens a minute"),
    ("--tokens-per-day", 10**6, "tokens_per_day", 10**6, "1,000,000 tokens a day"),
    ("--concurrent", 2, "concurrent", 2, "2 at a time"),
    ("--model", "mine", "models", ("mine",), "models mine"),
    ("--priority", "low", "priority", "low", "low priority"),
]


@pytest.mark.parametrize(("option", "value", "field", "held", "words"), ROWS)
def test_each_limit_reaches_the_file_and_the_list(
    weft: Weft, tmp_path: Path, option: str, value: Any, field: str, held: Any, words: str
) -> None:
    file = tmp_path / "keys"
    assert weft("serve", "key", "add", "anna", option, value, "--keys", file).code == 0
    (key,) = load_keys(file)
    assert getattr(key, field) == held
    assert weft("serve", "key", "list", "--keys", file).out == f"anna  {words}\n"


def test_a_key_may_end(weft: Weft, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    assert weft("serve", "key", "add", "anna", "--expires", "30d", "--keys", file).code == 0
    (key,) = load_keys(file)
    assert key.expires is not None
    assert 29 < (key.expires.timestamp() - SystemClock().wall()) / 86_400 <= 30
    assert f"until {key.expires:%Y-%m-%d}" in weft("serve", "key", "list", "--keys", file).out


def test_keys_are_listed_and_removed_one_by_one(weft: Weft, home: Path) -> None:
    assert "weft serve key add NAME" in weft("serve", "key", "list").err
    for name in ("anna", "bert"):
        weft("serve", "key", "add", name)
    assert weft("serve", "key", "list").out == "anna  no limits\nbert  no limits\n"
    assert weft("serve", "key", "remove", "anna").code == 0
    assert [key.name for key in load_keys(home / "serve.keys")] == ["bert"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("add", "anna"), "there is a key named anna already"),
        (("add", "a b"), "a key's name has 1 to 64"),
        (("add", "new", "--expires", "2001-01-01"), "--expires 2001-01-01: that time has passed"),
        (("add", "new", "--expires", "soon"), "--expires soon: weft reads no time in that. Allowed"),
        (("add", "new", "--concurrent", "0"), "--concurrent"),
        (("add", "new", "--priority", "highest"), "--priority"),
        (("remove", "nobody"), "there is no key named nobody"),
    ],
)
def test_what_cannot_be_is_refused_and_changes_nothing(weft: Weft, home: Path, arguments: Any, words: str) -> None:
    weft("serve", "key", "add", "anna")
    before = (home / "serve.keys").read_bytes()
    refused(weft, 2, words, "serve", "key", *arguments)
    assert (home / "serve.keys").read_bytes() == before


def test_a_file_that_is_damaged_is_not_written_over(weft: Weft, home: Path) -> None:
    home.mkdir(exist_ok=True)
    (home / "serve.keys").write_text("key = ")
    for verb in (("add", "anna"), ("list",), ("remove", "anna")):
        refused(weft, 2, "not valid TOML", "serve", "key", *verb)
    assert (home / "serve.keys").read_text() == "key = "
