"""What came of an address reads as a person would say it, and cannot steer a terminal."""

import errno
import os

import pytest

from weft.ids import PeerId
from weft.net.link.trial import called, failed, listed, places, told
from weft.net.messages import Contact

PEER = PeerId("cd" * 32)
TLS = "tls://198.51.100.7:4433"
IROH = f"iroh://{PEER}?addr=198.51.100.7:5&addr=[2001:db8::1]:6&relay=https://relay.example"


def trial(address, said):
    return failed(Contact(peer=PEER, name="attic", addresses=()), address, said)


def refused(code, address="('198.51.100.7', 4433)"):
    return f"{TLS}: {OSError(code, f'Connect call failed {address}')}"


@pytest.mark.parametrize(
    ("address", "said", "words"),
    [
        (TLS, f"{TLS} did not answer within 10 s", "TLS over TCP to 198.51.100.7:4433, no answer within 10 s"),
        (TLS, "no answer within 8 s", "TLS over TCP to 198.51.100.7:4433, no answer within 8 s"),
        (TLS, refused(errno.ECONNREFUSED), "TLS over TCP to 198.51.100.7:4433, nothing listens there"),
        (TLS, refused(errno.ENETUNREACH), "TLS over TCP to 198.51.100.7:4433, no route there from this machine"),
        (TLS, f"{TLS}: [Errno -2] Name or service not known", "198.51.100.7:4433, Name or service not known"),
        (
            TLS,
            f"{TLS}: {PEER} answers there, not me",
            "TLS over TCP to 198.51.100.7:4433, cdcdcdcd answers there, not me",
        ),
        (TLS, f"{TLS} is not a weft peer: \x1b[2Jx", "TLS over TCP to 198.51.100.7:4433, is not a weft peer: ?[2Jx"),
        (
            IROH,
            "cdcdcdcd did not answer over iroh within 5 s",
            "iroh over UDP to 198.51.100.7:5 and [2001:db8::1]:6, no answer within 5 s",
        ),
        (IROH, "cannot reach cdcdcdcd over iroh: closed (connect)", "[2001:db8::1]:6, closed (connect)"),
        (f"via://{PEER}", "it passes nothing on", "through cdcdcdcd, it passes nothing on"),
    ],
)
def test_what_came_of_an_address_is_said_without_keys_urls_and_numbers_of_errors(address, said, words):
    line = told([trial(address, said)])
    assert line.endswith(words)
    assert not any(raw in line for raw in (PEER, "://", "Errno", "\x1b"))


def test_each_way_is_said_once_with_a_few_of_its_places():
    silent = "no answer within 8 s"
    trials = [trial(f"tls://10.0.0.{n}:1", silent) for n in range(1, 7)]
    assert told([*trials, trial(IROH, silent)]) == (
        "TLS over TCP to 10.0.0.1:1, 10.0.0.2:1, 10.0.0.3:1 and 3 more, no answer within 8 s; "
        "iroh over UDP to 198.51.100.7:5 and [2001:db8::1]:6, no answer within 8 s"
    )
    two = [trial("tls://10.0.0.1:1", silent), trial("tls://10.0.0.2:1", refused(errno.ECONNREFUSED))]
    assert told(two) == (
        "TLS over TCP to 10.0.0.1:1, no answer within 8 s; TLS over TCP to 10.0.0.2:1, nothing listens there"
    )


def test_the_members_own_loopback_address_is_left_out_where_it_has_another():
    own = trial("tls://127.0.0.1:1", refused(errno.ECONNREFUSED))
    away = trial(f"iroh://{PEER}?addr=10.0.0.1:1&addr=127.0.0.1:1", "no answer within 8 s")
    assert told([own, away]) == "iroh over UDP to 10.0.0.1:1, no answer within 8 s"
    assert told([own]) == "TLS over TCP to 127.0.0.1:1, nothing listens there"


def test_words_of_others_stay_short():
    assert len(told([trial(TLS, "x" * 5000)])) < 200


def test_outcomes_are_told_apart():
    outcomes = {
        "did not answer within 4 s": "silent",
        f"{TLS}: {os.strerror(errno.ETIMEDOUT).lower()}": "silent",
        "another key answers there": "no peer",
        "ada turned the connection away: this peer has as many links as it can serve": "full",
        refused(errno.ECONNREFUSED): "no way",
    }
    assert [trial(TLS, said).outcome for said in outcomes] == list(outcomes.values())


def test_lists_and_names():
    assert [listed(list("abcde")[:n], 3) for n in range(1, 6)] == [
        "a", "a and b", "a, b and c", "a, b, c and 1 more", "a, b, c and 2 more",
    ]  # fmt: skip
    assert called("", PEER) == "cdcdcdcd"
    assert called("at\x1btic", PEER) == "at?tic (cdcdcdcd)"
    assert places(IROH) == ["198.51.100.7:5", "[2001:db8::1]:6"]
