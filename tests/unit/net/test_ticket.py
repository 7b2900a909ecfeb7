import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tickets import signed_ticket
from weft.errors import TicketError, TicketMismatch
from weft.ids import PeerId, RunId, is_named, start_of
from weft.keys import Identity
from weft.net import ticket
from weft.net.admission import Anyone, ByTicket
from weft.net.messages import Contact

ISSUER = Identity.from_seed(b"i" * 32)
MEMBER = Identity.from_seed(b"m" * 32)
RUN = RunId("5e" * 32)
SECRET = bytes(range(16))
CONTACTS = (
    Contact(peer=ISSUER.peer, name="loom", addresses=("tls://203.0.113.7:4433", "iroh://abc")),
    Contact(peer=MEMBER.peer, name="", addresses=("tls://[2001:db8::1]:4433",)),
)
TEXT = ticket.issue(RUN, CONTACTS, SECRET)
SIGNED = signed_ticket(ISSUER, RUN, CONTACTS, SECRET)
PEER = MEMBER.peer
RELAY = "https://relay.example/"
LONG_RELAY = f"https://{'a-very-long-name.' * 5}example/"


def held(*addresses: str) -> tuple[int, list[str]]:
    """Return how long a ticket with the addresses is, and those that it gives back."""
    text = ticket.issue(RUN, [Contact(peer=PEER, name="", addresses=addresses)], SECRET)
    return len(text), list(ticket.read(text).contacts[0].addresses)


def test_ticket_says_whom_to_ask_each_by_the_first_digits_of_its_key():
    read = ticket.read(TEXT)
    assert (read.run, read.issuer, read.secret) == (RUN, None, SECRET)
    assert read.contacts == (
        Contact(peer=start_of(ISSUER.peer), name="", addresses=("tls://203.0.113.7:4433",)),
        Contact(peer=start_of(MEMBER.peer), name="", addresses=CONTACTS[1].addresses),
    )
    assert read.admission() == ByTicket(secret=SECRET)


def test_ticket_of_format_1_is_read_as_before():
    read = ticket.read(SIGNED)
    assert (read.run, read.issuer, read.contacts, read.secret) == (RUN, ISSUER.peer, CONTACTS, SECRET)


def test_ticket_without_secret_admits_by_other_rules():
    read = ticket.read(ticket.issue(RUN, CONTACTS, None))
    assert read.secret is None
    assert read.admission() == Anyone()


def test_ticket_is_one_word_that_survives_shouting_and_line_breaks():
    assert TEXT.isalnum()
    broken = "\n  ".join(TEXT[i : i + 60] for i in range(0, len(TEXT), 60))
    assert ticket.read(f"  {broken.upper()}\n") == ticket.read(TEXT)


def test_ticket_never_shows_its_secret():
    read = ticket.read(TEXT)
    assert SECRET.hex() not in repr(read)
    assert repr(SECRET) not in repr(read)
    assert repr(SECRET) not in repr(read.admission())
    assert SECRET.hex() not in str(read)


# --- what fits into 200 letters ---


def iroh(*places: str, relay: str = "") -> str:
    return f"iroh://{PEER}?" + "&".join([f"addr={place}" for place in places] + ([f"relay={relay}"] if relay else []))


def test_a_machine_of_many_networks_and_both_transports_has_a_ticket_of_200_letters_at_most():
    hosts = ["203.0.113.7", "[2001:db8::1]", "192.168.1.5", "10.0.0.5", "172.17.0.1", "127.0.0.1"]
    length, found = held(*(f"tls://{host}:4433" for host in hosts), iroh(*(f"{host}:4000" for host in hosts)))
    assert length <= 200
    assert found == [
        *("tls://203.0.113.7:4433", "tls://[2001:db8::1]:4433", "tls://192.168.1.5:4433"),
        iroh("203.0.113.7:4000", "[2001:db8::1]:4000", "192.168.1.5:4000"),
    ]


def test_places_outside_come_first_then_a_relay_and_what_is_not_needed_is_left_out():
    length, found = held(
        "tls://192.168.1.5:1", "tls://127.0.0.1:1", "tls://203.0.113.7:9", iroh("192.168.1.5:2", relay=RELAY)
    )
    assert length <= 200
    assert found == ["tls://203.0.113.7:9", "tls://192.168.1.5:1", iroh("192.168.1.5:2", relay=RELAY)]


def test_loopback_is_named_where_nothing_else_offers_its_transport():
    assert held("tls://127.0.0.1:1")[1] == ["tls://127.0.0.1:1"]
    assert held("tls://127.0.0.1:1", iroh("192.168.1.5:2"))[1] == ["tls://127.0.0.1:1", iroh("192.168.1.5:2")]


def test_a_forwarded_port_of_the_same_host_is_kept_beside_its_own():
    addresses = ["tls://203.0.113.7:443", "tls://203.0.113.7:4433", "tls://peer.example:443"]
    assert held(*addresses)[1] == addresses


def test_a_long_relay_makes_a_longer_ticket_and_that_is_said():
    contact = Contact(peer=PEER, name="", addresses=("tls://192.168.1.5:1", iroh("192.168.1.5:2", relay=LONG_RELAY)))
    text = ticket.issue(RUN, [contact], SECRET)
    assert set(ticket.read(text).contacts[0].addresses) == set(contact.addresses)
    said = ticket.why_long(text)
    assert said is not None
    assert LONG_RELAY in said
    assert f"{len(text)} letters" in said
    assert ticket.why_long(TEXT) is None


def test_addresses_of_other_transports_are_spelled_out():
    for address in ("mem://a", "iroh://abc", f"iroh://{PEER}?new=1", "tls://host:1/path"):
        assert held(address)[1] == [address]


def some(letter: str, *addresses: str) -> Contact:
    return Contact(peer=PeerId(letter * 64), name=letter, addresses=addresses)


def named(*members: Contact) -> list[tuple[str, tuple[str, ...]]]:
    text = ticket.issue(RUN, members, SECRET)
    assert len(text) <= 200
    return [(each.peer, each.addresses) for each in ticket.read(text).contacts]


def test_three_members_of_one_home_or_three_servers_fit():
    for net in ("192.168.1", "203.0.113"):
        members = [
            some(letter, f"tls://{net}.{n}:{4000 + n}", f"tls://127.0.0.1:{4000 + n}") for n, letter in enumerate("abc")
        ]
        assert named(*members, some("d", "tls://192.168.1.9:1")) == [
            (letter * 30, (f"tls://{net}.{n}:{4000 + n}",)) for n, letter in enumerate("abc")
        ]


def test_the_first_member_is_reached_from_its_home_too_and_others_by_what_fits():
    a = some("a", "tls://[2001:db8::1]:4433", "tls://192.168.1.5:4433")
    b = some("b", "tls://[2001:db8::2]:4433", "tls://192.168.1.6:4433")
    assert named(a, b) == [("a" * 30, a.addresses), ("b" * 30, b.addresses[1:])]


def test_a_ticket_made_of_a_ticket_names_the_same():
    read = ticket.read(TEXT)
    assert ticket.read(ticket.issue(RUN, read.contacts, SECRET)) == read
    assert ticket.read(ticket.issue(RUN, read.contacts[:1], SECRET)).contacts == read.contacts[:1]


def test_room_that_is_left_is_shared_out_in_turns():
    def at(letter: str) -> Contact:
        return some(letter, *(f"tls://10.0.{net}.{ord(letter)}:4433" for net in range(9)))

    (_, first), (_, second) = named(at("a"), at("b"))
    assert (len(first), len(second)) == (4, 3)


def test_a_member_that_iroh_reaches_from_farther_is_named_by_its_whole_key():
    udp = Contact(peer=PEER, name="", addresses=("tls://192.168.1.5:3", iroh("203.0.113.7:2", "192.168.1.5:2")))
    assert named(some("a", "tls://203.0.113.8:1"), udp)[1] == (PEER, (iroh("203.0.113.7:2"),))
    both = Contact(peer=PEER, name="", addresses=("tls://203.0.113.7:1", iroh("203.0.113.7:2")))
    assert named(some("a", "tls://203.0.113.8:1"), both)[1] == (start_of(PEER), both.addresses[:1])


ADDRESSES = st.lists(
    st.one_of(
        st.ip_addresses(v=4).map(lambda ip: f"tls://{ip}:4433"),
        st.ip_addresses(v=6).map(lambda ip: f"tls://[{ip}]:4433"),
        st.ip_addresses().map(lambda ip: iroh(f"[{ip}]:7" if ip.version == 6 else f"{ip}:7")),
        st.from_regex(r"tls://[a-z]{1,23}\.example:[1-9][0-9]{0,3}", fullmatch=True),
    ),
    min_size=1,
    max_size=16,
)


@pytest.mark.full
@given(st.lists(ADDRESSES, min_size=1, max_size=5))
def test_a_ticket_of_members_is_short_and_names_only_what_there_is(each_at):
    members = [Contact(peer=PEER, name="", addresses=tuple(addresses)) for addresses in each_at]
    found = named(*members)
    assert 1 <= len(found) <= 3
    rest = iter(members)
    for key, addresses in found:  # in their order, though one whose every address is long may be left out
        assert is_named(PEER, PeerId(key))
        assert addresses
        assert any({each for each in addresses if each.startswith("tls")} <= set(member.addresses) for member in rest)


@settings(max_examples=40)
@given(ADDRESSES)
def test_a_ticket_without_long_names_is_short_and_names_only_what_there_is(addresses):
    length, found = held(*addresses)
    assert length <= 200
    assert found
    assert {each for each in found if each.startswith("tls")} <= set(addresses)


# --- whom it names ---


def test_it_names_who_is_reached_from_outside_then_an_anchor_then_who_makes_it():
    def member(letter: str, address: str) -> Contact:
        return Contact(peer=PeerId(letter * 64), name=letter, addresses=(address,))

    def standing(peer: PeerId) -> int | None:
        return {anchor.peer: 0, watcher.peer: None}.get(peer, 1)

    def named(*members: Contact) -> str:
        return "".join(each.name for each in ticket.best_first(members, me.peer, standing))

    me, anchor, other = (
        member("a", "tls://10.0.0.1:1"),
        member("b", "tls://10.0.0.2:1"),
        member("c", "tls://10.0.0.3:1"),
    )
    outside = member("d", "tls://203.0.113.7:1")
    watcher = member("w", "tls://203.0.113.9:1")
    by_relay = member("e", f"iroh://{'e' * 64}?addr=10.0.0.5:1&relay={RELAY}")
    assert named(other, me) == "ac"
    assert named(other, me, anchor) == "bac"
    assert named(other, me, anchor, outside) == "dbac"
    assert named(me, by_relay) == "ea"
    assert named(watcher, me) == "a"


# --- what is refused ---


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "not a ticket"),
        ("hello", "not a ticket"),
        ("weft", "not a ticket"),
        ("weft1", "cut short: it has 0 letters after weft1, and none has so few"),
        ("weft2", "cut short: it has 0 letters after weft2"),
        ("weft2abc", "cut short: it has 3 letters after weft2"),
        *(
            case
            for text in (TEXT, SIGNED)
            for case in (
                (text[:-1], "cut short"),
                (text[: len(text) // 2], f"cut short: {len(text) // 2 - 5} of {len(text) - 5} letters"),
                (text[:40] + ("a" if text[40] != "a" else "b") + text[41:], "checksum does not match"),
                (text[:40] + "!" + text[41:], "character '!'"),
                (text + "aaaaaaaa", "more follows this ticket"),
            )
        ),
        ("weft2" + SIGNED[5:], "more follows|cut short|checksum"),
        ("weft2" + "a" * 20_000, "at most 16384"),
    ],
)
def test_bad_ticket_is_refused_with_its_reason(text, reason):
    with pytest.raises(TicketError, match=reason):
        ticket.read(text)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("weft3" + TEXT[5:], "format 3 .* Upgrade"),
        ("weft0" + TEXT[5:], "format 0 .* fresh one"),
        ("weft9-entirely_different", "format 9"),
    ],
)
def test_ticket_of_another_format_is_refused_with_its_reason(text, reason):
    with pytest.raises(TicketMismatch, match=reason):
        ticket.read(text)


A, CUT, WHOLE = b"\x07" * 15, 0x40, 0xC0  # a key, and what begins a member that is named by the first bytes or all


def entry(kind: int, rest: bytes, key: bytes = A) -> bytes:
    return bytes([CUT | kind]) + key + rest


def framed(content: bytes) -> str:
    size = len(content)
    data = (bytes([size]) if size < 0x80 else (0x8000 | size).to_bytes(2, "big")) + content
    return "weft2" + ticket.spell(data + ticket._checksum(data, 2))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x08" + bytes(8 + 32) + entry(0x08, b"\x7f\0\0\1\0\1"),  # a short secret
        b"\0" + bytes(31),
        b"\0" + bytes(32),  # nobody
        b"\0" + bytes(32) + b"\x08\x7f\0\0\1\0\1",  # an address of nobody
        b"\0" + bytes(32) + b"\x88\x7f\0\0\1\0\1",
        b"\0" + bytes(32) + bytes([WHOLE | 8]) + bytes(31),
        *(
            b"\0" + bytes(32) + entries
            for entries in (
                entry(8, b"\x7f\0\0\1\0\0"),  # port 0
                entry(0, b"\x7f\0\0\1"),  # no port
                entry(0x28, b"\x7f\0\0\1"),  # ports as before, with none before
                entry(8, b"\x7f\0\0\1\0\1") + b"\x88\x7f\0\0\1\0\1",  # a whole key where no member begins
                entry(8, b"\x7f\0\0"),
                entry(0x0F, b"\x7f\0\0\1\0\1"),  # an unknown kind
                entry(0x0A, b"\x03a/b\0\1"),
                entry(5, b"\0\3abc"),
                entry(5, b"\0\x06a://\n!"),
                entry(0x10, b"\x7f\0\0\1\0\1"),  # iroh, which dials by the whole key alone
                entry(3, b"\x09a.example"),
                entry(8, b"\x7f\0\0\1\0\1") + b"\x28\x7f\0\0\1" * 16,  # more than a peer has
                entry(8, b"\x7f\0\0\1\0\1") * 9,  # more members than any weft names
            )
        ),
    ],
)
def test_what_no_weft_would_issue_is_refused(content):
    with pytest.raises(TicketError, match="forged"):
        ticket.read(framed(content))


@given(st.lists(st.tuples(st.integers(0, 255), st.binary(max_size=40)), max_size=4))
def test_any_members_are_read_or_refused(entries):
    content = b"".join(bytes([head]) + rest for head, rest in entries)
    try:
        read = ticket.read(framed(b"\0" + bytes(range(32)) + content))
    except TicketError:
        return
    assert all(each.addresses and len(each.peer) in (30, 64) for each in read.contacts)


def test_ticket_signed_by_another_key_is_refused():
    class Impostor:
        peer = ISSUER.peer
        sign = staticmethod(MEMBER.sign)

    with pytest.raises(TicketError, match="forged"):
        ticket.read(signed_ticket(Impostor(), RUN, CONTACTS, SECRET))


def test_ticket_needs_somebody_to_ask():
    with pytest.raises(TicketError, match="no member has an address"):
        ticket.issue(RUN, [Contact(peer=MEMBER.peer, name="", addresses=())], SECRET)


@pytest.mark.parametrize("prefix", ["weft1", "weft2"])
@given(data=st.data())
def test_any_text_is_a_ticket_or_a_ticket_error(prefix, data):
    tail = st.text("weftabcdefghijklmnopqrstuvwxyz1234567", max_size=200)
    text = data.draw(st.text(max_size=200) | tail.map(lambda tail: prefix + tail))
    with pytest.raises(TicketError):
        ticket.read(text)


@pytest.mark.parametrize("text", [TEXT, SIGNED])
@given(data=st.data())
def test_any_one_wrong_letter_is_noticed(text, data):
    position = data.draw(st.integers(5, len(text) - 1))
    changed = text[:position] + data.draw(st.sampled_from("abcdefghijklmnopqrstuvwxyz234567")) + text[position + 1 :]
    try:
        read = ticket.read(changed)
    except TicketError:
        return
    assert read == ticket.read(text)  # the last letter's spare bits say nothing
