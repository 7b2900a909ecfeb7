"""What watchers are told of events: no address, path or ticket, whatever the words say."""

import typing
from typing import Any

import msgspec
import pytest

from weft.events import (
    CheckpointSaved,
    ConnectionDropped,
    Event,
    LinkUp,
    Notice,
    PeerStarted,
    RoundMissed,
    Sampled,
    StepDone,
    TransportUp,
)
from weft.ids import Digest, PeerId, Round, RunId, Step
from weft.log import _all_events
from weft.observe.redact import HIDDEN, MAX_TEXT, PRIVATE, public, scrubbed

SECRETS = (
    "10.1.2.3:4411",
    "203.0.113.77",
    "[2001:db8::17]:4433",
    "fe80::1",
    "home.example.org:4433",
    "tls://home.example.org",
    "/var/lib/weft/keys/peer-0.pem",
    "~/.weft/keys",
    "C:\\Users\\someone\\weft",
    "weft1" + "ab2c" * 40,
)


@pytest.mark.parametrize("secret", SECRETS)
def test_words_lose_what_leads_to_a_machine(secret: str) -> None:
    found = scrubbed(f"cannot reach {secret}, which is needed")
    assert secret not in found
    assert found == f"cannot reach {HIDDEN}, which is needed"


@pytest.mark.parametrize(
    "text",
    [
        "rounds waited 7.1 % of 52.3 s, 5 % are allowed",
        "1/4 of the tokens/s, and/or 3.5 GB",
        "method.every = 20 (was 30); train.schedule.lr = 1e-3",
        "member 9f3c... is left out: its payload holds NaN",
    ],
)
def test_words_about_the_run_stay_as_they_are(text: str) -> None:
    assert scrubbed(text) == text


def test_words_that_steer_a_terminal_or_never_end_are_cut() -> None:
    assert scrubbed("a\x1b[2Jb") == "a?[2Jb"
    assert len(scrubbed("word " * 10_000)) == MAX_TEXT


def filled(kind: type[Event]) -> Event:
    """Return an event that says all secrets in each field that can say anything."""

    def value(hint: Any) -> Any:
        origin, args = typing.get_origin(hint), typing.get_args(hint)
        if hint is str:
            return " ".join(SECRETS)
        if getattr(hint, "__supertype__", None) is str:
            return "ab" * 32
        if origin is tuple:
            return (value(args[0]),)
        if origin is dict:
            return {value(args[0]) if args[0] is not str else "name": value(args[1])}
        if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
            return hint(**{name: value(each) for name, each in typing.get_type_hints(hint).items()})
        if args:
            return value(args[0])
        return getattr(hint, "__supertype__", hint)(1)

    hints = typing.get_type_hints(kind)
    return kind(**{field.name: value(hints[field.name]) for field in msgspec.structs.fields(kind)})


@pytest.mark.parametrize(
    "kind", [kind for kind in _all_events() if kind is not Sampled], ids=lambda kind: kind.__name__
)
def test_no_event_tells_a_secret(kind: type[Event]) -> None:
    told = public(filled(kind))
    assert (told is None) == (kind in PRIVATE)
    text = "" if told is None else msgspec.json.encode(told).decode()
    assert not [secret for secret in SECRETS if secret in text.replace("\\\\", "\\")]


def test_what_is_about_the_run_is_told_whole() -> None:
    step = StepDone(step=Step(3), loss=2.5, learning_rate=1e-3, gradient_norm=0.5, num_tokens=64, duration_s=0.1)
    assert public(step) is step
    started = PeerStarted(run=RunId("ab" * 32), name="rack", software="weft 1", device="cpu", num_parameters=9)
    assert public(started) == started
    missed = RoundMissed(round=Round(2), carried_tokens=64, reason="it was slow")  # type: ignore[arg-type]
    assert public(missed) == missed


def test_a_link_is_told_without_its_address_and_a_checkpoint_without_its_path() -> None:
    remote = PeerId("cd" * 32)
    link = public(LinkUp(remote=remote, transport="tls", address="10.0.0.1:5", tried=("10.0.0.2:5: refused",)))
    assert link == LinkUp(remote=remote, transport="tls", address="", tried=())
    saved = public(CheckpointSaved(path="weft/runs/x", round=Round(1), digest=Digest("ab" * 32), nbytes=3))
    assert saved == CheckpointSaved(path="", round=Round(1), digest=Digest("ab" * 32), nbytes=3)


def test_who_knocks_at_this_machine_is_not_told() -> None:
    assert public(ConnectionDropped(address="10.0.0.1:5", remote=None, reason="garbage")) is None
    assert public(TransportUp(transport="tls", addresses=("10.0.0.1:5",))) is None


def test_what_a_model_wrote_is_told_as_it_wrote_it() -> None:
    sampled = Sampled(round=Round(1), prompt="import", text=" os\nos.listdir('/tmp/a')\n" * 100)
    assert public(sampled) is sampled
    assert public(Notice(text="x")) == Notice(text="x")
