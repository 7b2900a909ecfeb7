"""What `weft doctor -` says of each outcome, and that it tries a real member on loopback."""

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from unit.cli.small import Weft
from weft.cli.doctor.ticket import describe, judge_clock, judge_place, judge_speed, judge_ways
from weft.clock import SystemClock
from weft.errors import GenesisMismatch, Refused, Unreachable
from weft.ids import PeerId, RunId
from weft.keys import Identity
from weft.net.admission import ByTicket
from weft.net.link.handshake import Passport
from weft.net.link.trial import Trial
from weft.net.messages import Contact
from weft.net.node import Node
from weft.net.speed_test import Seen, Sighting, Speed, SpeedTest
from weft.net.ticket import issue
from weft.net.transport.tls import TlsConfig, TlsTransport

PEER = PeerId("cd" * 32)
RUN = RunId("ab" * 32)
SECRET = bytes(range(16))


def tried(address, outcome, said="words of the other side"):
    contact = Contact(peer=PEER, name="attic", addresses=(address,))
    is_open = outcome in ("admitted", "refused", "other run")
    return Trial(contact=contact, address=address, outcome=outcome, said=said, opened_s=0.0213 if is_open else None)


OPEN = "tls://198.51.100.7:4433"
IROH = f"iroh://{PEER}?addr=198.51.100.7:5&addr=[2001:db8::1]:6"


@pytest.mark.parametrize(
    ("trials", "failure", "said"),
    [
        ([], Unreachable, "no address"),
        ([tried("tls://192.168.1.5:1", "silent"), tried("tls://10.0.0.1:1", "no way")], Unreachable, "are private"),
        ([tried("tls://100.64.0.9:1", "silent"), tried("tls://[fd00::1]:1", "silent")], Unreachable, "are private"),
        ([tried("tls://192.168.1.5:1", "silent"), tried(OPEN, "silent")], Unreachable, "drops what is sent"),
        ([tried("tls://peer.example.org:1", "silent")], Unreachable, "drops what is sent"),
        ([tried(OPEN, "no peer"), tried(IROH, "silent")], Unreachable, "is not the member"),
        ([tried("tls://192.168.1.5:1", "no peer")], Unreachable, "is not the member"),
        ([tried(OPEN, "no way")], Unreachable, "no member listens at these ports"),
        (
            [tried(OPEN, "refused"), tried(IROH, "silent")],
            Refused,
            "do not admit this machine: words of the other side",
        ),
        ([tried(OPEN, "other run")], GenesisMismatch, "train another run"),
    ],
)
def test_where_no_way_leads_in_it_says_why_and_what_to_do(trials, failure, said):
    (finding,), found = judge_ways(trials)
    assert found is failure
    assert finding.level == "block"
    assert said in finding.text
    assert finding.fix


@pytest.mark.parametrize(
    ("trials", "level", "said"),
    [
        ([tried(OPEN, "admitted"), tried(IROH, "admitted")], "ok", "a way into the run"),
        ([tried(OPEN, "admitted"), tried("tls://10.0.0.1:1", "silent")], "ok", "a way into the run"),
        ([tried(OPEN, "admitted"), tried(IROH, "silent")], "note", "UDP does not get through"),
        ([tried(OPEN, "silent"), tried(IROH, "admitted")], "note", "TCP does not get through"),
    ],
)
def test_where_some_way_leads_in_it_says_what_is_missing(trials, level, said):
    (finding,), failure = judge_ways(trials)
    assert (finding.level, failure) == (level, None)
    assert said in finding.text


def test_each_address_has_its_line():
    assert (
        describe(tried(OPEN, "admitted")).text
        == "attic (cdcdcdcd): TLS over TCP to 198.51.100.7:4433, connected in 21 ms, admitted 0 ms later"
    )
    line = describe(tried(IROH, "no peer", "another answers there\x1b[0m")).text
    assert line.startswith("attic (cdcdcdcd): iroh over UDP to 198.51.100.7:5 and [2001:db8::1]:6, another answers")
    assert "\x1b" not in line


def sighting(source, ahead_s=0.0):
    return Sighting(seen=Seen(wall_s=0.0, source=source), round_trip_s=0.02, ahead_s=ahead_s)


def test_it_says_where_members_see_this_machine():
    own = ["192.168.1.2", "127.0.0.1"]
    assert "no router translates it" in judge_place([sighting("192.168.1.2"), sighting("192.168.1.2")], own).text
    assert "a router translates" in judge_place([sighting("203.0.113.9")], own).text
    assert "several public addresses" in judge_place([sighting("203.0.113.9"), sighting("203.0.113.10")], own).text
    assert "no member says" in judge_place([sighting("")], own).text


def test_clocks_and_speeds_are_judged():
    assert judge_clock("attic", sighting("", 0.5)).level == "ok"
    assert "+3600 s" in judge_clock("attic", sighting("", 3600.0)).text
    assert judge_speed("attic", "tls", Speed(up_bps=2e7, down_bps=1e8, nbytes=1 << 20)).level == "ok"
    slow = judge_speed("attic", "tls", Speed(up_bps=5e5, down_bps=1e8, nbytes=1 << 20))
    assert (slow.level, slow.fix != "") == ("note", True)
    assert "up 0.5 Mbit/s, down 100 Mbit/s over tls" in slow.text
    fast = judge_speed("attic", "tls", Speed(up_bps=3.28e9, down_bps=9.94e7, nbytes=1 << 20))
    assert "up 3,280 Mbit/s, down 99.4 Mbit/s over tls" in fast.text


@pytest.fixture(autouse=True)
def no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.cli.doctor.fit.usual_s", lambda _step, **_how: 0.5)


@pytest.fixture
async def member() -> AsyncIterator[Node]:
    identity = Identity.generate()
    passport = Passport(identity=identity, run=RUN, name="attic", admission=ByTicket(secret=SECRET))
    node = Node(passport, [TlsTransport(identity, TlsConfig(host="127.0.0.1"))], SystemClock(), lambda _: None)
    SpeedTest(node, SystemClock())
    async with node:
        yield node


async def test_a_member_on_this_machine_is_tried_and_measured(member: Node, weft: Weft, tmp_path) -> None:
    import asyncio

    machine = tmp_path / "machine.toml"
    machine.write_text('transports = ["tls"]\n[tls]\nhost = "127.0.0.1"\n')
    ticket = issue(RUN, member.contacts(), SECRET)
    answer = await asyncio.to_thread(weft, "doctor", ticket, "--machine", machine)
    assert answer.code == 0, answer.out + answer.err
    assert "there is a way into the run" in answer.out
    assert "Mbit/s over tls" in answer.out
    assert "round trip" in answer.out
    assert f"attic ({member.peer[:8]}): TLS over TCP to" in answer.out
    assert "no router translates it" in answer.out
    stranger = issue(RUN, member.contacts(), bytes(16))
    answer = await asyncio.to_thread(weft, "doctor", stranger, "--machine", machine)
    assert answer.code == Refused.exit_code
    assert "is not this run's" in answer.out
    assert member.peers == ()


async def test_programs_get_the_figures(member: Node, weft: Weft, tmp_path) -> None:
    import asyncio

    machine = tmp_path / "machine.toml"
    machine.write_text('transports = ["tls"]\n[tls]\nhost = "127.0.0.1"\n')
    ticket = issue(RUN, member.contacts(), SECRET)
    answer = await asyncio.to_thread(weft, "doctor", ticket, "--machine", machine, "--json")
    told = {each["topic"]: each["facts"] for each in json.loads(answer.out)["findings"]}
    assert told["path"]["outcome"] == "admitted"
    assert told["path"]["peer"] == member.peer
    assert told["path"]["opened_s"] >= 0
    assert told["speed"]["up_bps"] > 0
    assert told["clocks"]["round_trip_s"] > 0
    assert (told["place"]["seen_at"], told["place"]["is_translated"]) == (["127.0.0.1"], False)
    assert told["fit"] == {}  # a member that has nothing of the run to tell
    page = (Path(__file__).parents[4] / "docs" / "doctor.md").read_text()
    assert all(f"`{name}`" in page for facts in told.values() for name in facts)
    stranger = issue(RUN, member.contacts(), bytes(16))
    answer = await asyncio.to_thread(weft, "doctor", stranger, "--machine", machine, "--json")
    assert answer.code == json.loads(answer.out)["exit_code"] == Refused.exit_code
