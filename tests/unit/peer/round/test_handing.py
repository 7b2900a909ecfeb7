"""What is small is here before it is asked for, of members alone, and is sent to nobody who never does the same."""

from types import SimpleNamespace

import msgspec
import pytest

from weft.codec.codec import Size
from weft.ids import PeerId
from weft.peer.messages import HANDED_NBYTES, Handed
from weft.peer.round.payloads import MAX_KEPT, MAX_UNANSWERED, Handing
from weft.wire import decode, digest, encode

ME, OTHER, STRANGER = (PeerId(letter * 64) for letter in "abc")


class FakeNode:
    """Keeps what is posted, if there is room."""

    def __init__(self):
        self.posted, self.has_room = [], True

    def on_note(self, kind, handler):
        assert kind is Handed
        self.hear = handler

    def on_link(self, callback):
        self.link = callback

    def post(self, peer, note):
        if self.has_room:
            self.posted.append((peer, note.data))
        return self.has_room


@pytest.fixture
def node():
    return FakeNode()


@pytest.fixture
def handing(node):
    return Handing(node, SimpleNamespace(base=SimpleNamespace(electorate=(ME, OTHER))))


def test_only_what_is_small_is_handed(node, handing):
    assert handing.hand([OTHER], bytes(HANDED_NBYTES)) == [OTHER]
    assert handing.hand([OTHER], memoryview(b"part")) == [OTHER]
    assert handing.hand([OTHER], bytes(HANDED_NBYTES + 1)) == []
    assert handing.hand([OTHER], b"") == []
    assert [data for _, data in node.posted] == [bytes(HANDED_NBYTES), b"part"]
    decode(encode(Handed(data=bytes(HANDED_NBYTES))), Handed)


def test_to_whom_it_could_not_leave_it_was_not_handed(node, handing):
    node.has_room = False
    assert handing.hand([OTHER], b"part") == []


async def test_who_never_hands_anything_is_handed_nothing_after_a_few_rounds(node, handing):
    handed = [bool(handing.hand([OTHER], b"part")) for _ in range(MAX_UNANSWERED + 2)]
    assert handed == [True] * MAX_UNANSWERED + [False] * 2
    await node.hear(OTHER, Handed(data=b"theirs"))  # it knows the note after all
    assert handing.hand([OTHER], b"part") == [OTHER]


def test_another_process_of_a_peer_is_tried_anew(node, handing):
    for _ in range(MAX_UNANSWERED):
        handing.hand([OTHER], b"part")
    node.link(OTHER, False, "it is gone")
    assert handing.hand([OTHER], b"part") == [OTHER]


async def test_what_was_handed_is_taken_once_and_only_from_who_handed_it(node, handing):
    await node.hear(OTHER, Handed(data=b"theirs"))
    assert handing.take(ME, digest(b"theirs"), Size(6)) is None
    assert handing.take(OTHER, digest(b"theirs"), Size(7)) is None  # another length than is due: it is asked for
    assert handing.take(OTHER, digest(b"theirs"), Size(6)) == b"theirs"
    assert handing.take(OTHER, digest(b"theirs"), Size(6)) is None


@pytest.mark.parametrize(("most", "is_taken"), [(5, False), (6, True), (7, True)])
async def test_what_may_be_shorter_is_taken_up_to_its_most(node, handing, most, is_taken):
    await node.hear(OTHER, Handed(data=b"theirs"))
    taken = handing.take(OTHER, digest(b"theirs"), Size(most, is_exact=False))
    assert taken == (b"theirs" if is_taken else None)


async def test_little_is_kept_of_a_member_and_nothing_of_others(node, handing):
    for number in range(MAX_KEPT + 1):
        for peer in (OTHER, STRANGER):
            await node.hear(peer, Handed(data=bytes([number])))
    kept = [handing.take(OTHER, digest(bytes([number])), Size(1)) for number in range(MAX_KEPT + 1)]
    assert kept == [None, *(bytes([number]) for number in range(1, MAX_KEPT + 1))]
    assert handing.take(STRANGER, digest(bytes([MAX_KEPT])), Size(1)) is None


def test_more_than_is_small_is_no_such_note():
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(encode(Handed(data=bytes(HANDED_NBYTES + 1))), type=Handed)
