import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.errors import TicketError
from weft.ids import RunId
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
TEXT = ticket.issue(ISSUER, RUN, CONTACTS, SECRET)


def test_ticket_says_what_was_put_in():
    read = ticket.read(TEXT)
    assert (read.run, read.issuer, read.contacts, read.secret) == (RUN, ISSUER.peer, CONTACTS, SECRET)
    assert read.admission() == ByTicket(secret=SECRET)


def test_ticket_without_secret_admits_by_other_rules():
    read = ticket.read(ticket.issue(ISSUER, RUN, CONTACTS, None))
    assert read.secret is None
    assert read.admission() == Anyone()


def test_ticket_is_one_word_that_survives_shouting_and_line_breaks():
    assert TEXT.isalnum()
    assert len(TEXT) < 520
    broken = "\n  ".join(TEXT[i : i + 60] for i in range(0, len(TEXT), 60))
    assert ticket.read(f"  {broken.upper()}\n") == ticket.read(TEXT)


def test_ticket_never_shows_its_secret():
    read = ticket.read(TEXT)
    assert SECRET.hex() not in repr(read)
    assert repr(SECRET) not in repr(read)
    assert repr(SECRET) not in repr(read.admission())
    assert SECRET.hex() not in str(read)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "not a ticket"),
        ("hello", "not a ticket"),
        ("weft", "not a ticket"),
        ("weft1", "cut short: 0 of"),
        (TEXT[:-1], "cut short"),
        (TEXT[: len(TEXT) // 2], f"cut short: {len(TEXT) // 2 - 5} of {len(TEXT) - 5} letters"),
        ("weft2" + TEXT[5:], "format 2 .* Upgrade"),
        ("weft0" + TEXT[5:], "format 0 .* fresh one"),
        ("weft9-entirely_different", "format 9"),
        (TEXT[:40] + ("a" if TEXT[40] != "a" else "b") + TEXT[41:], "checksum does not match"),
        (TEXT[:40] + "!" + TEXT[41:], "character '!'"),
        (TEXT + "aaaaaaaa", "do not belong to this ticket"),
        ("weft1" + "a" * 20_000, "at most 16384"),
    ],
)
def test_bad_ticket_is_refused_with_its_reason(text, reason):
    with pytest.raises(TicketError, match=reason):
        ticket.read(text)


def test_ticket_signed_by_another_key_is_refused():
    class Impostor:
        peer = ISSUER.peer
        sign = staticmethod(MEMBER.sign)

    with pytest.raises(TicketError, match="forged"):
        ticket.read(ticket.issue(Impostor(), RUN, CONTACTS, SECRET))


def test_ticket_needs_somebody_to_ask():
    with pytest.raises(TicketError, match="no member has an address"):
        ticket.issue(ISSUER, RUN, [Contact(peer=MEMBER.peer, name="", addresses=())], SECRET)


def test_ticket_of_long_addresses_keeps_the_best_contacts_and_its_bound():
    long = [Contact(peer=MEMBER.peer, name=str(i), addresses=(f"iroh://{i}" + "x" * 480,) * 12) for i in range(20)]
    text = ticket.issue(ISSUER, RUN, long, SECRET)
    read = ticket.read(text)
    assert len(text) <= ticket.MAX_CHARS
    assert read.contacts == tuple(long[: len(read.contacts)])
    assert read.contacts


@given(
    st.text(max_size=200)
    | st.text("weft1abcdefghijklmnopqrstuvwxyz234567", max_size=200).map(lambda tail: "weft1" + tail)
)
def test_any_text_is_a_ticket_or_a_ticket_error(text):
    with pytest.raises(TicketError):
        ticket.read(text)


@given(st.integers(5, len(TEXT) - 1), st.sampled_from("abcdefghijklmnopqrstuvwxyz234567"))
def test_any_one_wrong_letter_is_noticed(position, letter):
    changed = TEXT[:position] + letter + TEXT[position + 1 :]
    try:
        read = ticket.read(changed)
    except TicketError:
        return
    assert read == ticket.read(TEXT)  # the last letter's spare bits say nothing
