import asyncio
import itertools
from contextlib import suppress

import pytest

from tickets import signed_ticket
from weft.errors import (
    CallFailed,
    DeadlineExceeded,
    GenesisMismatch,
    NetError,
    PeerError,
    PortInUse,
    Refused,
    Unreachable,
    WireError,
)
from weft.events import AdmissionRefused, ConnectionDropped, FellBack, LinkDown, LinkUp, Notice
from weft.ids import Digest, PeerId, RunId, start_of
from weft.net import ticket
from weft.net.admission import ByKeys, ByTicket
from weft.net.link.handshake import Passport, prove
from weft.net.messages import PROTOCOL, Acquaint, Contact, Hello, Rejected
from weft.net.node import Node
from weft.net.transport.frame import FrameReader, write_frame
from weft.wire import Record, decode, encode

SECRET = bytes(range(16))


class Double(Record, frozen=True, kw_only=True):
    number: int


class Doubled(Record, frozen=True, kw_only=True):
    number: int


class Told(Record, frozen=True, kw_only=True):
    number: int


async def double(peer, request):
    return Doubled(number=2 * request.number)


# --- dialling ---


def test_call_dials_on_demand_and_the_link_stays(world):
    async def scenario():
        a, b = await world.started(2)
        b.serve(Double, double)
        assert (await a.call(b.peer, Double(number=4), Doubled, deadline_s=5)).number == 8
        assert a.peers == (b.peer,)
        assert b.peers == (a.peer,)
        assert await a.call(b.peer, Double(number=5), Doubled, deadline_s=5) == Doubled(number=10)
        assert [event.address for event in world.seen(0, LinkUp)] == [f"memory://{b.peer}"]

    world.run(scenario)


def test_link_says_which_addresses_failed_before(world):
    async def scenario():
        a, b = await world.started(2)
        a.remember(b.peer, ["memory://" + world.ids[5], "udp://nothing.here:1"])
        await a.connect(b.peer)
        (link,) = world.seen(0, LinkUp)
        assert link.transport == "memory"
        assert len(link.tried) == 1
        assert world.ids[5] in link.tried[0]
        assert "nothing listens" in link.tried[0]

    world.run(scenario)


def test_transports_are_tried_in_the_order_given(world):
    dialled = []

    class Deaf:
        def __init__(self, name):
            self.name = name

        async def start(self, accept):
            return (f"{self.name}://here",)

        async def dial(self, peer, address, lane):
            dialled.append(address)
            if self.name == "slow":
                await asyncio.sleep(3600)
            raise PeerError("reset")

        async def aclose(self):
            pass

    async def scenario():
        node = Node(world.passport(0), [Deaf("tls"), Deaf("slow")], world.clock, world.events[world.ids[0]].append)
        world.nodes.append(node)
        assert await node.start() == ("tls://here", "slow://here")
        node.remember(world.ids[1], ["slow://b", "tls://b", "tls://c"])
        with pytest.raises(
            Unreachable, match=r"was not reached: TLS over TCP to b and c, reset; slow to b, no answer within 8 s$"
        ):
            await node.connect(world.ids[1])
        assert dialled == ["tls://b", "tls://c", "slow://b"]
        assert world.clock.now() == 8.0
        with pytest.raises(Unreachable, match="no address"):
            await node.connect(world.ids[2])

    world.run(scenario)


def test_missing_transport_is_an_event_and_none_at_all_an_error(world):
    class Absent:
        name = "iroh"

        async def start(self, accept):
            raise NetError("no wheel for this machine")

    class Taken(Absent):
        async def start(self, accept):
            raise PortInUse("port 4433 is taken")

    async def scenario():
        emit = world.events[world.ids[0]].append
        memory = world.network.transport(world.ids[0])
        node = Node(world.passport(0), [Absent(), memory], world.clock, emit)
        world.nodes.append(node)
        assert await node.start() == (f"memory://{world.ids[0]}",)
        assert world.seen(0, FellBack) == [FellBack(wanted="iroh", used="memory", reason="no wheel for this machine")]
        with pytest.raises(NetError, match="no transport works here: iroh: no wheel"):
            await Node(world.passport(1), [Absent()], world.clock, emit).start()
        with pytest.raises(PortInUse, match="4433"):
            await Node(world.passport(1), [world.network.transport(world.ids[1]), Taken()], world.clock, emit).start()
        assert world.ids[1] not in world.network.listening  # what had started was stopped

    world.run(scenario)


def test_one_dial_serves_all_who_wait_and_one_who_gives_up_ends_nothing(world):
    async def scenario():
        a, b = await world.started(2)
        b.serve(Double, double)
        impatient = asyncio.create_task(a.call(b.peer, Double(number=1), Doubled, deadline_s=5))
        others = [asyncio.create_task(a.call(b.peer, Double(number=i), Doubled, deadline_s=5)) for i in range(9)]
        await asyncio.sleep(0.005)
        impatient.cancel()
        assert [answer.number for answer in await asyncio.gather(*others)] == [2 * i for i in range(9)]
        assert len(world.seen(0, LinkUp)) == 1

    world.run(scenario)


@pytest.mark.parametrize("lead_s", [0.0, 0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05])
@pytest.mark.parametrize("is_lower_first", [True, False])
def test_simultaneous_dials_leave_one_connection_and_lose_no_call(world, lead_s, is_lower_first):
    async def scenario():
        a, b = await world.started(2)
        for node in (a, b):
            node.serve(Double, double)
        first, second = (a, b) if is_lower_first else (b, a)
        calls = [first.call(second.peer, Double(number=i), Doubled, deadline_s=5) for i in range(3)]
        early = asyncio.gather(*calls)
        await asyncio.sleep(lead_s)
        late = await second.call(first.peer, Double(number=50), Doubled, deadline_s=5)
        assert [answer.number for answer in await early] == [0, 2, 4]
        assert late.number == 100
        await asyncio.sleep(20)
        for index, node in enumerate((a, b)):
            assert len(world.seen(index, LinkUp)) == 1
            assert world.seen(index, LinkDown) == []
            assert world.seen(index, ConnectionDropped) == []
            assert len(node.peers) == 1
        if is_lower_first or lead_s < 0.01:  # both had said hello: the lower key's connection wins
            assert world.seen(0, LinkUp)[0].address == f"memory://{b.peer}"

    world.run(scenario)


def test_killed_and_restarted_peer_replaces_its_link(world):
    async def scenario():
        a, b = await world.started(2)
        ups = []
        a.on_link(lambda peer, is_up, reason: ups.append(is_up))
        await b.connect(a.peer)
        world.network.partition(a.peer, b.peer)
        world.network.kill(b.peer)  # a cannot hear of it
        world.network.heal(a.peer, b.peer)
        again = world.node(1)
        again.serve(Double, double)
        await again.start()
        await again.connect(a.peer)
        assert (await a.call(b.peer, Double(number=3), Doubled, deadline_s=5)).number == 6
        assert ups[-1] is True
        assert ups.count(True) == 2

    world.run(scenario)


def test_silently_lost_link_is_replaced_because_its_dialler_says_so(world):
    async def scenario():
        a, b = await world.started(2)
        a.serve(Double, double)
        await b.connect(a.peer)
        world.network.partition(a.peer, b.peer)
        b.drop(a.peer, "silent")
        await asyncio.sleep(1)
        assert a.is_linked(b.peer)  # a heard nothing
        for one, other in ((a.peer, b.peer), (b.peer, a.peer)):
            world.network.link(one, other).is_cut = False  # dials pass; what was under way never arrives
        assert (await b.call(a.peer, Double(number=3), Doubled, deadline_s=5)).number == 6
        assert [event.reason for event in world.seen(0, LinkDown)] == ["replaced by a newer connection"]

    world.run(scenario)


def test_a_key_in_two_places_is_refused_at_the_second_while_the_first_answers(world):
    async def scenario():
        a, b = await world.started(2)
        await b.connect(a.peer)
        copy = world.node(1)  # another process with b's key
        with pytest.raises(Refused, match=r"another process takes part in this run with the same key.*--key second"):
            await copy.connect(a.peer)
        assert a.is_linked(b.peer)
        assert not world.seen(0, LinkDown)
        (told,) = world.seen(0, AdmissionRefused)
        assert "the same key" in told.reason
        b._links.get(a.peer).session._dispatch = lambda _frame: None  # its machine is off, and nobody has noticed
        await copy.connect(a.peer)
        assert [event.reason for event in world.seen(0, LinkDown)] == ["replaced by a newer connection"]

    world.run(scenario)


def test_who_redials_with_a_key_that_is_in_use_elsewhere_is_told_once(world):
    async def scenario():
        a, b, c = await world.started(3)
        await b.connect(a.peer)
        await b.connect(c.peer)
        copy = world.node(1)  # its home was copied: it goes on from a checkpoint and waits for nobody's answer
        copy.keep(a.peer)
        copy.keep(c.peer)
        await asyncio.sleep(120)
        assert not copy.peers
        (told,) = world.seen(1, Notice)
        assert "another process takes part in this run with the same key" in told.text
        assert "--key second.pem" in told.text

    world.run(scenario)


def test_kept_link_comes_back_with_growing_pauses(world):
    async def scenario():
        a, b = await world.started(2)
        attempts = []
        dial = a._dialer.connect

        async def counted(peer):
            attempts.append(world.clock.now())
            return await dial(peer)

        a._dialer.connect = counted
        a.keep(b.peer)
        await asyncio.sleep(1)
        world.network.kill(b.peer)
        await asyncio.sleep(119)
        assert not a.is_linked(b.peer)
        pauses = [later - earlier for earlier, later in itertools.pairwise(attempts[1:])]
        assert 5 < len(attempts) < 15
        assert pauses[0] <= 0.6
        assert all(15 <= pause <= 30.1 for pause in pauses[7:])
        again = world.node(1)
        await again.start()
        await asyncio.sleep(31)
        assert a.is_linked(b.peer)
        a.release(b.peer)
        a.drop(b.peer, "released")
        await asyncio.sleep(60)
        assert not a.is_linked(b.peer)

    world.run(scenario)


def test_calls_under_way_fail_cleanly_when_the_link_goes_down(world):
    async def scenario():
        a, b = await world.started(2)

        async def never(peer, request):
            await asyncio.sleep(3600)
            return Doubled(number=0)

        b.serve(Double, never)
        calls = [asyncio.create_task(a.call(b.peer, Double(number=i), Doubled, deadline_s=60)) for i in range(80)]
        await asyncio.sleep(1)
        world.network.kill(b.peer)
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        assert all(isinstance(outcome, PeerError) for outcome in outcomes)
        assert "went down during a call" in str(outcomes[0])
        assert "was not sent" in str(outcomes[-1])  # beyond the bound on calls in flight
        assert world.clock.now() < 1.1

    world.run(scenario)


def test_call_to_nobody_ends_at_its_deadline(world):
    async def scenario():
        a, b = await world.started(2)
        world.network.partition(a.peer, b.peer)
        with pytest.raises(DeadlineExceeded, match=r"no link to .* within 2 s; Double was not sent"):
            await a.call(b.peer, Double(number=1), Doubled, deadline_s=2)
        assert world.clock.now() == 2.0
        assert a.post(b.peer, Told(number=1)) is False
        with pytest.raises(Unreachable):
            await a.note(b.peer, Told(number=1))

    world.run(scenario)


# --- contacts ---


def test_members_learn_of_each_other_through_whoever_they_ask(world):
    async def scenario():
        nodes = []
        for index in range(4):
            node = world.node(index)
            await node.start()
            nodes.append(node)
            for peer in world.ids:  # everybody knows only the first
                if peer != world.ids[0]:
                    node._book._entries.pop(peer, None)
        heard = []
        nodes[3].on_contact(lambda contact: heard.append(contact.peer))
        for node in nodes[1:]:
            await node.connect(world.ids[0])
        await asyncio.sleep(1)
        for node in nodes[1:]:
            for other in nodes[1:]:
                if node is not other:
                    assert node.known_addresses()[other.peer] == (f"memory://{other.peer}",)
        assert set(heard) == {world.ids[0], world.ids[1], world.ids[2]}
        await nodes[1].connect(world.ids[3])
        assert nodes[3].contact(world.ids[1]).name == "peer-1"

    world.run(scenario)


def test_who_only_visits_is_linked_and_nobody_is_told_of_it(world):
    async def scenario():
        a, b = await world.started(2)
        visitor = world.node(2, is_listed=False)
        await visitor.start()
        for node in (a, b):
            node._book._entries.pop(visitor.peer)
        await visitor.connect(a.peer)
        await b.connect(a.peer)
        newcomer = world.node(3)
        newcomer._book._entries.pop(visitor.peer)
        await newcomer.start()
        await newcomer.connect(a.peer)
        await asyncio.sleep(1)
        assert visitor.peer in a.peers
        assert visitor.addresses == ()
        for node in (a, b, newcomer):
            assert not node.known_addresses().get(visitor.peer)
        assert b.peer in visitor.known_addresses()

    world.run(scenario)


def test_what_others_say_displaces_nothing_that_a_linked_peer_said_of_itself(world):
    async def scenario():
        a, b, c = await world.started(3)
        await a.connect(b.peer)
        await c.connect(a.peer)
        await asyncio.sleep(1)
        a._book.announce(Contact(peer=b.peer, name="b", addresses=("memory://new",)))
        stale = Contact(peer=b.peer, name="b", addresses=("memory://old",))
        await c.note(a.peer, Acquaint(contacts=(stale, Contact(peer=world.ids[6], name="", addresses=("memory://x",)))))
        await asyncio.sleep(1)
        assert a.contact(b.peer).addresses == ("memory://new", f"memory://{b.peer}")
        assert "memory://x" in a.contact(world.ids[6]).addresses
        a.drop(b.peer, "test")
        await c.note(a.peer, Acquaint(contacts=(stale,)))
        await asyncio.sleep(1)
        assert a.contact(b.peer).addresses == ("memory://new", f"memory://{b.peer}", "memory://old")

    world.run(scenario)


def test_book_is_bounded_whatever_a_member_invents(world):
    async def scenario():
        a, b = await world.started(2)
        for start in range(0, 640, 64):
            invented = [f"{number:064x}" for number in range(start, start + 64)]
            contacts = tuple(Contact(peer=peer, name="", addresses=("memory://x",)) for peer in invented)
            await a.note(b.peer, Acquaint(contacts=contacts))
        await asyncio.sleep(1)
        assert len(b.known_addresses()) == 256
        assert set(world.ids[2:]) <= set(b.known_addresses())  # hearsay displaces only hearsay

    world.run(scenario)


def test_full_book_forgets_the_oldest_that_is_not_linked_and_dials_it_no_more(world):
    async def scenario():
        a, b = await world.started(2)
        await a.connect(b.peer)
        a.keep(world.ids[2])
        strangers = [PeerId(f"{number:064x}") for number in range(256)]
        for peer in strangers:
            a.remember(peer, ["memory://x"])
        await asyncio.sleep(1)
        assert len(a.known_addresses()) == 256
        assert set(a.known_addresses()) == {b.peer, *strangers[1:]}
        assert world.ids[2] not in a._dialer._kept

    world.run(scenario)


def test_two_stories_about_one_peer_come_to_rest_where_they_were_told(world):
    async def scenario():
        nodes = await world.started(4)
        for one, other in itertools.combinations(nodes, 2):
            await one.connect(other.peer)
        await asyncio.sleep(1)
        notes, writes = [], []
        for node in nodes[:3]:
            node.on_contact(notes.append)
            node.on_contacts_settled(lambda: writes.append(world.clock.now()))
        liar, invented = nodes[3], PeerId("ab" * 32)
        for number, victim in enumerate(nodes[:2]):
            story = Contact(peer=invented, name="", addresses=(f"memory://{number}",))
            liar.post(victim.peer, Acquaint(contacts=(story,)))
        await asyncio.sleep(20)
        assert len(notes) == 2
        assert invented not in nodes[2].known_addresses()
        began = world.clock.now()
        for number in range(100):
            story = Contact(peer=invented, name="", addresses=(f"memory://{number}",))
            liar.post(nodes[0].peer, Acquaint(contacts=(story,)))
        await asyncio.sleep(20)
        assert [at for at in writes if at > began] == [pytest.approx(began + 1, abs=0.1)]
        assert all(len(node.peers) == 3 for node in nodes)

    world.run(scenario)


def test_who_moved_is_found_at_its_new_address_by_those_it_has_not_told(world):
    async def scenario():
        a, b, c = await world.started(3)
        await a.connect(b.peer)
        await a.connect(c.peer)
        for node in (a, b, c):
            node._book._entries = {peer: entry for peer, entry in node._book._entries.items() if peer != world.ids[3]}
        moved = world.node(3)
        await moved.start()
        for address in ("memory://first", f"memory://{moved.peer}"):
            moved._book.own = (address,)
            await moved.connect(a.peer)
            await asyncio.sleep(1)
            moved.drop(a.peer, "moves")
            await asyncio.sleep(1)
        assert moved.peer not in b.peers
        await b.connect(moved.peer)

    world.run(scenario)


def test_a_ticket_of_format_1_leads_a_newcomer_to_any_of_its_contacts(world):
    async def scenario():
        a, b = world.node(0, ByTicket(secret=SECRET)), world.node(1, ByTicket(secret=SECRET))
        await a.start()
        await b.start()
        await a.connect(b.peer)
        held = ticket.read(signed_ticket(world.identities[0], a.run, a.contacts(), SECRET))
        assert [contact.peer for contact in held.contacts] == [a.peer, b.peer]
        world.network.kill(a.peer)
        newcomer = world.node(2, held.admission())
        newcomer._book._entries.clear()
        await newcomer.start()
        for contact in held.contacts:
            newcomer.remember(contact.peer, contact.addresses, contact.name)
        assert await newcomer.connect_any([contact.peer for contact in held.contacts]) == b.peer

    world.run(scenario)


def test_the_first_digits_of_keys_lead_to_whoever_is_left(world):
    async def scenario():
        nodes = [world.node(number, ByTicket(secret=SECRET)) for number in range(3)]
        for node in nodes:
            await node.start()
        newcomer = world.node(3, ByTicket(secret=SECRET))
        newcomer._book._entries.clear()
        await newcomer.start()
        starts = [start_of(node.peer) for node in nodes]
        for start, node in zip(starts, nodes, strict=True):
            newcomer.remember(start, [f"memory://{node.peer}"])
        assert newcomer.known_addresses() == {}  # which are of whole keys, and kept on disk
        world.network.kill(nodes[0].peer)
        world.network.kill(nodes[1].peer)
        assert await newcomer.connect_any(starts) == nodes[2].peer
        assert set(newcomer.known_addresses()) == {nodes[2].peer}
        assert await newcomer.connect_any([starts[2]]) == nodes[2].peer  # known by its whole key now: no second link
        assert len(world.seen(3, LinkUp)) == 1

    world.run(scenario)


def test_a_key_that_begins_otherwise_is_refused_with_the_reason(world):
    async def scenario():
        a, newcomer = world.node(0, ByTicket(secret=SECRET)), world.node(1, ByTicket(secret=SECRET))
        await a.start()
        await newcomer.start()
        wrong = start_of(world.ids[5])
        newcomer.remember(wrong, [f"memory://{a.peer}"])
        with pytest.raises(Unreachable, match=rf"Tried {wrong[:8]}: .*is {a.peer[:8]}, not {wrong[:8]}"):
            await newcomer.connect_any([wrong])
        assert a.peers == ()

    world.run(scenario)


def test_newcomer_that_nobody_lets_in_learns_why(world):
    async def scenario():
        a, b, c = world.node(0, ByTicket(secret=SECRET)), world.node(1, run=RunId("cd" * 32)), world.node(2)
        await a.start()
        await c.start()
        with pytest.raises(
            Unreachable, match=r"^nobody answered\. Tried .*nothing listens.*nothing listens.*`weft doctor -`"
        ):
            await c.connect_any(world.ids[4:6])
        with pytest.raises(Unreachable, match=r"no address.*Ask a member for a fresh ticket"):
            await c.connect_any([])
        with pytest.raises(Refused):
            await c.connect_any([b.peer, a.peer])
        await b.start()
        with pytest.raises(GenesisMismatch):
            await c.connect_any([b.peer, a.peer])

    world.run(scenario)


def test_last_heard_and_traffic_follow_what_arrives(world):
    async def scenario():
        a, b = await world.started(2)
        b.serve(Double, double)
        assert a.last_heard(b.peer) is None
        await a.call(b.peer, Double(number=1), Doubled, deadline_s=5)
        before = a.traffic[b.peer].received_nbytes
        await asyncio.sleep(10)
        await a.call(b.peer, Double(number=1), Doubled, deadline_s=5)
        assert a.last_heard(b.peer) == world.clock.now()
        assert 10 < a.traffic[b.peer].received_nbytes - before < 100
        assert a.traffic[b.peer].sent_nbytes > 0

    world.run(scenario)


# --- admission ---


@pytest.mark.parametrize("joiner_secret", [bytes(16), None])
def test_joiner_without_the_secret_is_refused_and_told_what_to_do(world, joiner_secret):
    async def scenario():
        member = world.node(0, ByTicket(secret=SECRET))
        joiner = world.node(1, ByTicket(secret=joiner_secret) if joiner_secret else None)
        await member.start()
        await joiner.start()
        with pytest.raises(Refused, match="weft ticket"):
            await joiner.connect(member.peer)
        assert [event.remote for event in world.seen(0, AdmissionRefused)] == [joiner.peer]
        assert member.peers == joiner.peers == ()

    world.run(scenario)


def test_holders_of_the_secret_admit_each_other(world):
    async def scenario():
        a, b = world.node(0, ByTicket(secret=SECRET)), world.node(1, ByTicket(secret=SECRET))
        await a.start()
        await b.start()
        await b.connect(a.peer)
        assert a.peers == (b.peer,)

    world.run(scenario)


def test_listed_keys_are_admitted_and_others_refused(world):
    async def scenario():
        member = world.node(0, ByKeys(allowed=(world.ids[1],)))
        listed, unlisted = world.node(1), world.node(2)
        for node in (member, listed, unlisted):
            await node.start()
        await listed.connect(member.peer)
        with pytest.raises(Refused, match=f"not on this run's list; ask its maker to add {unlisted.peer}"):
            await unlisted.connect(member.peer)

    world.run(scenario)


def test_dialler_refuses_a_member_that_cannot_prove_its_own_admission(world):
    async def scenario():
        stranger, joiner = world.node(0), world.node(1, ByTicket(secret=SECRET))
        await stranger.start()
        await joiner.start()
        with pytest.raises(PeerError, match="could not prove its own admission"):
            await joiner.connect(stranger.peer)
        await asyncio.sleep(1)
        assert joiner.peers == stranger.peers == ()

    world.run(scenario)


def test_member_of_another_run_is_a_genesis_mismatch(world):
    async def scenario():
        a, b = world.node(0), world.node(1, run=RunId("cd" * 32))
        await a.start()
        await b.start()
        with pytest.raises(
            GenesisMismatch, match="this peer trains run abababab, not cdcdcdcd; ask a member for a fresh ticket"
        ):
            await b.connect(a.peer)

    world.run(scenario)


def test_member_that_went_to_another_run_is_a_fault_of_that_peer_only(world):
    async def scenario():
        a, b = world.node(0), world.node(1, run=RunId("cd" * 32))
        await a.start()
        await b.start()
        digest = Digest("0" * 64)
        with pytest.raises(PeerError, match="trains another run"):
            await a.call(b.peer, Double(number=1), Doubled, deadline_s=5)
        with pytest.raises(PeerError, match="trains another run"):
            await a.note(b.peer, Told(number=1))
        with pytest.raises(PeerError, match="trains another run"):
            await a.fetch(b.peer, digest, bytearray(1))
        with pytest.raises(PeerError, match="trains another run"):
            await a.fetch_small(b.peer, digest, 1)
        with pytest.raises(PeerError, match=r"nobody delivered blob .*trains another run"):
            await a.fetch_any([b.peer], digest, 1)

    world.run(scenario)


async def knock(world, payload, lane="control"):
    """Send `payload` as the first frame of a stranger; return the answer's bytes."""
    transport = world.network.transport(world.ids[7])
    stream = await transport.dial(world.ids[0], f"memory://{world.ids[0]}", lane)
    await write_frame(stream, payload)
    answer = await FrameReader(stream).read()
    await stream.close()
    return answer


def hello_of(world, **changes):
    fields = {
        "version": PROTOCOL,
        "run": "ab" * 32,
        "name": "",
        "proof": b"",
        "addresses": (),
        "link": bytes(8),
        "instance": bytes(8),
    }
    return Hello(**{**fields, **changes})


class HelloOfTheFuture(Record, frozen=True, kw_only=True, tag="hello"):
    version: int
    what_else: str


def test_other_protocol_version_is_told_apart_whatever_its_fields(world):
    async def scenario():
        await world.started(1)
        rejected = decode(await knock(world, encode(HelloOfTheFuture(version=9, what_else=""))), Rejected)
        assert rejected.code == "version"
        assert "one side has protocol 9, the other 1" in rejected.reason
        assert "update" in rejected.reason

    world.run(scenario)


def test_joiner_of_another_version_gets_a_wire_error(world, monkeypatch):
    async def scenario():
        a, b = await world.started(2)
        monkeypatch.setattr("weft.net.messages.PROTOCOL", 2)
        with pytest.raises(WireError, match="speaks another version of weft: one side has protocol 2, the other 1"):
            await b.connect(a.peer)

    world.run(scenario)


def test_replayed_proof_admits_nobody_else(world):
    async def scenario():
        member = world.node(0, ByTicket(secret=SECRET))
        await member.start()
        overheard = prove(ByTicket(secret=SECRET), member.run, world.ids[1], member.peer)
        rejected = decode(await knock(world, encode(hello_of(world, proof=overheard))), Rejected)
        assert rejected.code == "admission"
        to_another = prove(ByTicket(secret=SECRET), member.run, world.ids[7], world.ids[1])
        rejected = decode(await knock(world, encode(hello_of(world, proof=to_another))), Rejected)
        assert rejected.code == "admission"

    world.run(scenario)


def test_garbage_instead_of_hello_is_dropped_with_an_event(world):
    async def scenario():
        await world.started(1)
        assert await knock(world, b"\xc1garbage") is None
        assert await knock(world, encode(Double(number=1))) is None
        dropped = world.seen(0, ConnectionDropped)
        assert [event.remote for event in dropped] == [world.ids[7]] * 2

    world.run(scenario)


def test_stranger_that_says_nothing_is_dropped_in_time(world):
    async def scenario():
        (a,) = await world.started(1)
        transport = world.network.transport(world.ids[7])
        stream = await transport.dial(a.peer, f"memory://{a.peer}", "control")
        assert await stream.recv_into(memoryview(bytearray(1))) == 0
        assert 5 <= world.clock.now() < 5.1
        assert "no hello within 5 s" in world.seen(0, ConnectionDropped)[0].reason

    world.run(scenario)


def test_crowd_of_strangers_turns_out_its_own_oldest_and_no_newcomer(world):
    async def scenario():
        (a,) = await world.started(1)
        b = world.node(1)
        await b.start()
        strangers = [world.network.transport(PeerId(f"{number:064x}")) for number in range(70)]

        async def stranger(transport):  # says nothing, and comes again when it is turned out
            while True:
                stream = await transport.dial(a.peer, f"memory://{a.peer}", "control")
                with suppress(PeerError):
                    await stream.recv_into(memoryview(bytearray(1)))
                await stream.close()

        crowd = [asyncio.create_task(stranger(transport)) for transport in strangers]
        await asyncio.sleep(1)
        await b.connect(a.peer)
        assert world.clock.now() < 1.1
        dropped = world.seen(0, ConnectionDropped)
        assert {event.remote for event in dropped} <= {transport.peer for transport in strangers}
        assert "64 connections are not admitted; the oldest is dropped" in dropped[0].reason
        assert len(a._listener._strangers) <= 64
        for task in crowd:
            task.cancel()
        await asyncio.sleep(6)
        assert len(a._listener._strangers) == 0

    world.run(scenario)


def test_strangers_from_one_place_are_bounded_by_themselves(world):
    async def scenario():
        (a,) = await world.started(1)
        transport = world.network.transport(world.ids[7])
        silent = [await transport.dial(a.peer, f"memory://{a.peer}", "control") for _ in range(17)]
        await asyncio.sleep(0.1)
        (dropped,) = world.seen(0, ConnectionDropped)
        assert f"16 connections from {world.ids[7]} are not admitted" in dropped.reason
        assert await silent[0].recv_into(memoryview(bytearray(1))) == 0
        assert world.clock.now() < 1
        assert len(a._listener._strangers) == 16

    world.run(scenario)


def test_bulk_before_admission_is_dropped(world):
    async def scenario():
        await world.started(1)
        assert await knock(world, b"", lane="bulk") is None
        assert "before admission" in world.seen(0, ConnectionDropped)[0].reason

    world.run(scenario)


def test_passport_shows_no_secret(world):
    assert repr(SECRET) not in repr(
        Passport(identity=world.identities[0], run=RunId("ab" * 32), name="", admission=ByTicket(secret=SECRET))
    )


def test_answer_of_another_type_drops_the_link(world):
    async def scenario():
        a, b = await world.started(2)

        async def liar(peer, request):
            return Told(number=1) if request.number else Rejected(code="x", reason="y")

        b.serve(Double, liar)
        with pytest.raises(WireError):
            await a.call(b.peer, Double(number=0), Doubled, deadline_s=5)
        assert not a.is_linked(b.peer)
        assert "is no Doubled" in world.seen(0, ConnectionDropped)[0].reason
        with pytest.raises(CallFailed, match="nobody here serves Told"):
            await a.call(b.peer, Told(number=1), Doubled, deadline_s=5)

    world.run(scenario)


def test_who_breaks_the_protocol_again_and_again_is_barred_for_a_minute(world):
    async def scenario():
        a, b = await world.started(2)
        for _ in range(3):
            await a.connect(b.peer)
            await asyncio.sleep(1)
            a._links.get(b.peer).session.post("Acquaint", b"\xc1")
            await asyncio.sleep(1)
            assert not b.is_linked(a.peer)
        with pytest.raises(PeerError, match="repeatedly"):
            await b.connect(a.peer)
        with pytest.raises(Unreachable, match="come back in a minute"):
            await a.connect(b.peer)
        await asyncio.sleep(60)
        await b.connect(a.peer)
        assert len(world.seen(1, ConnectionDropped)) == 3

    world.run(scenario)


def test_a_dial_ends_when_the_other_side_gets_through(world):
    async def scenario():
        a, b = await world.started(2)
        world.network.partition(a.peer, b.peer)
        dialling = asyncio.ensure_future(a.connect(b.peer))
        await asyncio.sleep(1)
        world.network.heal(a.peer, b.peer)
        await b.connect(a.peer)
        await asyncio.wait_for(dialling, 1)  # its own dial began in the partition and has four seconds to go
        assert a.is_linked(b.peer)

    world.run(scenario)
