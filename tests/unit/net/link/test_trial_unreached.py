"""Where nobody was reached, a person learns who was tried, what the answers mean together, and what to do."""

import errno

import pytest

from weft.ids import PeerId
from weft.net.link.trial import TURNED_AWAY, failed, nobody, one, verdict
from weft.net.messages import Contact

PEERS = [PeerId(f"{n:02x}" * 32) for n in range(16)]
SILENT = "no answer within 8 s"
CLOSED = str(ConnectionRefusedError(errno.ECONNREFUSED, "Connect call failed"))
NO_ROUTE = str(OSError(errno.ENETUNREACH, "Network is unreachable"))


def trial(address, said, peer=PEERS[0], name="attic"):
    return failed(Contact(peer=peer, name=name, addresses=()), address, said)


@pytest.mark.parametrize(
    ("trials", "text", "fix"),
    [
        ([("tls://192.168.1.5:1", SILENT), ("tls://10.0.0.1:1", SILENT)], "are private", "reachable from outside"),
        ([("tls://192.168.1.5:1", NO_ROUTE)], "are private", "[tls] advertise"),
        ([("tls://192.168.1.5:1", CLOSED), ("tls://10.0.0.1:1", SILENT)], "do not listen", "fresh ticket"),
        ([("tls://192.168.1.5:1", SILENT), ("tls://127.0.0.1:1", CLOSED)], "lets nobody in", "reachable from outside"),
        ([("tls://127.0.0.1:1", CLOSED), ("tls://[::1]:1", CLOSED)], "lead only to this machine", "--host 127.0.0.1"),
        ([("tls://127.0.0.1:1", CLOSED), ("tls://8.8.8.8:1", SILENT)], "drops what is sent", "[iroh] relays"),
        ([("tls://8.8.8.8:1", SILENT), ("tls://[2a00::1]:1", NO_ROUTE)], "drops what is sent", "Forward a port"),
        ([("tls://8.8.8.8:1", NO_ROUTE), ("tls://192.168.1.5:1", SILENT)], "no route", "a proxy"),
        ([("tls://8.8.8.8:1", CLOSED), ("tls://192.168.1.5:1", SILENT)], "no member listens", "fresh ticket"),
        ([("tls://8.8.8.8:1", "ab answers there, not cd")], "is not the member", "fresh ticket"),
        ([], "no address", "which transports"),
    ],
)
def test_what_trials_come_to(trials, text, fix):
    said, do = verdict([trial(*each) for each in trials])
    assert text in said
    assert fix in do


def test_a_router_in_between_is_not_cured_by_a_fresh_ticket():
    for said in (SILENT, NO_ROUTE):
        assert "fresh ticket" not in " ".join(verdict([trial("tls://192.168.1.5:1", said)]))


def test_a_relay_server_that_a_member_names_is_named():
    address = f"iroh://{PEERS[0]}?addr=192.168.1.5:1&relay=https://relay.example"
    assert "https://relay.example" in verdict([trial(address, SILENT)])[1]
    assert "of your own" in verdict([trial("tls://192.168.1.5:1", SILENT)])[1]


def test_one_paragraph_says_who_was_tried_how_and_what_to_do():
    iroh = f"iroh://{PEERS[0]}?addr=192.168.1.2:7"
    said = nobody([trial("tls://192.168.1.2:7", SILENT), trial(iroh, "x did not answer over iroh within 5 s")])
    assert said.startswith(
        "nobody answered. Tried attic (00000000): TLS over TCP to 192.168.1.2:7, no answer within 8 s; iroh over UDP "
        "to 192.168.1.2:7, no answer within 5 s. All these addresses are private"
    )
    assert said.endswith("`weft doctor -` tries each way and checks this machine.")
    assert PEERS[0] not in said
    assert "\n" not in said
    assert ".." not in said


def test_a_member_that_has_no_room_is_no_stale_ticket():
    full = f"x {TURNED_AWAY}: this peer has as many links as it can serve; ask another member"
    said = nobody([trial("tls://127.0.0.1:7", full), trial("tls://192.168.1.2:7", SILENT)])
    assert said.startswith("nobody let this peer in. Tried attic")
    assert "Try again in a minute" in said
    assert "fresh ticket" not in said


def test_of_many_members_a_few_are_named():
    said = nobody([trial("tls://192.168.1.5:1", SILENT, peer, f"m{n}") for n, peer in enumerate(PEERS)])
    assert "m2 (02020202)" in said
    assert "m3 (" not in said
    assert "And 13 more members." in said


def test_members_without_an_address_are_told_of():
    assert one("attic", PEERS[0], []) == "attic (00000000) has no address that this peer's transports can dial"
    said = nobody([], [one("attic", PEERS[0], [])])
    assert said.startswith("nobody answered. attic (00000000) has no address")
    assert "which transports the machine file turns on" in said
    assert one("", PEERS[1], [trial("tls://h:1", CLOSED, PEERS[1])]) == (
        "01010101 was not reached: TLS over TCP to h:1, nothing listens there"
    )
