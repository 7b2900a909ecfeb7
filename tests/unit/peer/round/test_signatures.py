"""A signature is checked once a round, and only what holds is remembered."""

import pytest

from weft import keys
from weft.keys import Identity
from weft.peer.round.inbox import MAX_HELD, Signatures

ALICE, BERT = (Identity.from_seed(bytes([number]) * 32) for number in (1, 2))


@pytest.fixture
def checked(monkeypatch):
    """Return the messages whose signature was checked, as that happens."""
    seen, verify = [], keys.verify

    def count(peer, message, signature):
        seen.append(message)
        return verify(peer, message, signature)

    monkeypatch.setattr(keys, "verify", count)
    return seen


def test_what_holds_is_checked_once_until_the_next_round(checked):
    signatures = Signatures()
    for _ in range(3):
        assert signatures.verify(ALICE.peer, b"vote", ALICE.sign(b"vote"))
    assert checked == [b"vote"]
    signatures.begin()
    assert signatures.verify(ALICE.peer, b"vote", ALICE.sign(b"vote"))
    assert checked == [b"vote"] * 2


def test_what_does_not_hold_is_never_remembered(checked):
    signatures, forged = Signatures(), BERT.sign(b"vote")
    assert [signatures.verify(ALICE.peer, b"vote", forged) for _ in range(2)] == [False, False]
    assert checked == [b"vote"] * 2


def test_a_signature_holds_for_one_message_of_one_peer(checked):
    signatures, signature = Signatures(), ALICE.sign(b"vote")
    assert signatures.verify(ALICE.peer, b"vote", signature)
    assert not signatures.verify(ALICE.peer, b"another", signature)
    assert not signatures.verify(BERT.peer, b"vote", signature)


def test_of_one_signer_so_many_are_remembered(checked):
    signatures = Signatures()
    messages = [bytes([number]) for number in range(MAX_HELD + 1)]
    for message in messages:
        assert signatures.verify(ALICE.peer, message, ALICE.sign(message))
    assert signatures.verify(ALICE.peer, messages[-1], ALICE.sign(messages[-1]))
    assert checked == messages
    assert signatures.verify(ALICE.peer, messages[0], ALICE.sign(messages[0]))
    assert checked == [*messages, messages[0]]
