import asyncio
import math
from contextlib import suppress

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.clock import VirtualClock
from weft.errors import CallFailed, ConfigError, DeadlineExceeded, PayloadError, PeerError, WireError
from weft.events import ConnectionDropped, LinkDown, Notice
from weft.net.link.rpc import (
    FAILED_AGAIN_S,
    MAX_IN_FLIGHT,
    MAX_QUEUED_NOTES,
    TURN_FRAMES,
    TURN_NBYTES,
    TURN_NOTES,
    Handlers,
    LinkTraffic,
    Session,
)
from weft.net.messages import (
    MAX_BODY_NBYTES,
    PROTOCOL,
    Admitted,
    Call,
    Cancel,
    Failed,
    Greeting,
    Hello,
    Note,
    Reply,
    RpcFrame,
)
from weft.net.transport.frame import FrameReader, encode_frame, write_frame
from weft.wire import Record, decode, encode


class Ask(Record, frozen=True, kw_only=True):
    text: str


class Answer(Record, frozen=True, kw_only=True):
    text: str


class Large(Record, frozen=True, kw_only=True):
    body: bytes


class Item(Record, frozen=True, kw_only=True):
    number: int


def ask(a, b, text="", deadline_s=5.0):
    return a.call(b.peer, Ask(text=text), Answer, deadline_s=deadline_s)


def test_answers_come_in_any_order(world):
    async def scenario():
        a, b = await world.started(2)

        async def slow_first(peer, request):
            await asyncio.sleep(1.0 / int(request.text))
            return Answer(text=request.text)

        b.serve(Ask, slow_first)
        answers = asyncio.as_completed([ask(a, b, str(i)) for i in range(1, 5)])
        assert [(await answer).text for answer in answers] == ["4", "3", "2", "1"]

    world.run(scenario)


def test_deadline_ends_the_call_here_and_the_handler_there(world):
    async def scenario():
        a, b = await world.started(2)
        ended = []

        async def sleepy(peer, request):
            try:
                await asyncio.sleep(3600)
            finally:
                ended.append(world.clock.now())

        b.serve(Ask, sleepy)
        await a.connect(b.peer)
        at = world.clock.now()
        with pytest.raises(DeadlineExceeded, match=r"did not answer Ask within 2 s"):
            await ask(a, b, deadline_s=2.0)
        assert world.clock.now() == pytest.approx(at + 2.0)
        await asyncio.sleep(0.1)
        assert ended == [pytest.approx(at + 2.0, abs=0.02)]

    world.run(scenario)


def test_giving_up_cancels_the_handler(world):
    async def scenario():
        a, b = await world.started(2)
        ended = []

        async def sleepy(peer, request):
            try:
                await asyncio.sleep(3600)
            finally:
                ended.append(world.clock.now())

        b.serve(Ask, sleepy)
        call = asyncio.create_task(ask(a, b, deadline_s=3000.0))
        await asyncio.sleep(1)
        call.cancel()
        await asyncio.sleep(0.1)
        assert ended == [pytest.approx(1.0, abs=0.02)]

    world.run(scenario)


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (CallFailed("no such round"), "no such round"),
        (PayloadError("holds NaN"), "holds NaN"),
        (ConfigError("/home/ann/run.toml: bad"), "answered: ConfigError$"),
        (FileNotFoundError(2, "gone", "/home/ann/secret"), "answered: FileNotFoundError$"),
        (ZeroDivisionError("x" * 10_000), "answered: ZeroDivisionError$"),
        (TimeoutError("mine"), "answered: TimeoutError$"),
    ],
)
def test_handler_that_fails_is_one_failed_call_and_shows_nothing_of_its_machine(world, error, text):
    async def scenario():
        a, b = await world.started(2)

        async def broken(peer, request):
            if request.text == "fail":
                raise error
            return Answer(text="fine")

        b.serve(Ask, broken)
        with pytest.raises(CallFailed, match=text):
            await ask(a, b, "fail")
        assert (await ask(a, b)).text == "fine"
        assert world.seen(1, LinkDown) == []
        assert bool(world.seen(1, Notice)) == (not isinstance(error, PeerError))

    world.run(scenario)


def test_answer_above_the_bound_fails_the_call_and_request_above_it_is_a_bug(world):
    async def scenario():
        a, b = await world.started(2)

        async def long(peer, request):
            return Answer(text="x" * (MAX_BODY_NBYTES if request.text == "too long" else MAX_BODY_NBYTES - 100))

        b.serve(Ask, long)
        assert len((await ask(a, b)).text) == MAX_BODY_NBYTES - 100
        with pytest.raises(CallFailed, match="above"):
            await ask(a, b, "too long")
        with pytest.raises(ValueError, match="send it as a blob"):
            await ask(a, b, "x" * MAX_BODY_NBYTES)

    world.run(scenario)


def test_calls_beyond_the_bound_wait_for_their_turn(world):
    async def scenario():
        a, b = await world.started(2)
        num_now, num_most = 0, 0

        async def busy(peer, request):
            nonlocal num_now, num_most
            num_now += 1
            num_most = max(num_most, num_now)
            await asyncio.sleep(1)
            num_now -= 1
            return Answer(text="")

        b.serve(Ask, busy)
        await asyncio.gather(*(ask(a, b, deadline_s=60.0) for _ in range(200)))
        assert num_most == MAX_IN_FLIGHT
        assert 4.0 < world.clock.now() < 5.0
        assert world.seen(1, ConnectionDropped) == []

    world.run(scenario)


def test_notes_keep_their_order_and_a_failing_one_ends_nothing(world):
    async def scenario():
        a, b = await world.started(2)
        got = []

        async def take(peer, item):
            await asyncio.sleep(0.01 if item.number % 2 else 0.0)
            got.append(item.number)
            if item.number == 5:
                raise KeyError("five")

        b.on_note(Item, take)
        for number in range(20):
            await a.note(b.peer, Item(number=number))
        await a.note(b.peer, Ask(text="nobody takes this"))
        assert a.post(b.peer, Item(number=20))
        await asyncio.sleep(1)
        assert got == list(range(21))
        assert world.seen(1, LinkDown) == []
        assert "KeyError" in world.seen(1, Notice)[0].text

    world.run(scenario)


def test_a_handler_that_fails_again_and_again_is_told_once_and_counted(world):
    async def scenario():
        a, b = await world.started(2)

        async def take(peer, item):
            raise KeyError(str(item.number))

        b.on_note(Item, take)
        for number in range(100):
            await a.note(b.peer, Item(number=number))
        await asyncio.sleep(FAILED_AGAIN_S + 1)
        await a.note(b.peer, Item(number=100))
        await asyncio.sleep(1)
        first, last = (event.text for event in world.seen(1, Notice))
        assert first == "handler of a note failed: KeyError: '0'"
        assert last == "handler of a note failed: KeyError: '100'; 99 more like it before"

    world.run(scenario)


def test_note_handler_may_call_the_peer_that_sent_it(world):
    async def scenario():
        a, b = await world.started(2)
        got = []

        async def answer(peer, request):
            return Answer(text="yes")

        async def take(peer, item):
            got.append((await b.call(peer, Ask(text="?"), Answer, deadline_s=1)).text)

        a.serve(Ask, answer)
        b.on_note(Item, take)
        await a.note(b.peer, Item(number=1))
        await asyncio.sleep(1)
        assert got == ["yes"]

    world.run(scenario)


def test_peer_that_reads_nothing_is_given_up_and_holds_nobody_else_back(world):
    async def scenario():
        a, b, c = await world.started(3)

        async def answer(peer, request):
            return Answer(text="yes")

        c.serve(Ask, answer)
        await a.connect(b.peer)
        world.network.partition(a.peer, b.peer)
        num_queued = 0
        while a.post(b.peer, Ask(text="x" * 1_000_000)):
            num_queued += 1
        assert 8 <= num_queued <= 10
        assert (await ask(a, c)).text == "yes"
        await asyncio.sleep(31)
        assert "did not take a frame within 30 s" in world.seen(0, LinkDown)[0].reason

    world.run(scenario)


def test_second_handler_for_a_method_is_a_bug(world):
    async def handler(peer, request):
        return Answer(text="")

    node = world.node(0)
    node.serve(Ask, handler)
    with pytest.raises(ValueError, match="Ask has a handler already"):
        node.serve(Ask, handler)


# --- peers that break the protocol after their admission ---


async def intruder(world):
    """Return an admitted control stream to node 0 that a test may abuse."""
    transport = world.network.transport(world.ids[7])
    stream = await transport.dial(world.ids[0], f"memory://{world.ids[0]}", "control")
    hello = Hello(
        version=PROTOCOL, run="ab" * 32, name="mallory", proof=b"", addresses=(), link=bytes(8), instance=bytes(8)
    )
    await write_frame(stream, encode(hello))
    reader = FrameReader(stream)
    assert isinstance(decode(await reader.read(), Greeting), Admitted)
    return stream, reader


async def drained(reader):
    """Return once the other side has closed or reset the stream."""
    with suppress(PeerError):
        while await reader.read() is not None:
            pass


def call(number, body=None, deadline_s=5.0, method="Ask"):
    body = encode(Ask(text="sleep")) if body is None else body
    return encode_frame(encode(Call(number=number, method=method, deadline_s=deadline_s, body=body)))


def note(number):
    return encode_frame(encode(Note(method="Item", body=encode(Item(number=number)))))


def large_note():
    body = encode(Large(body=bytes(MAX_BODY_NBYTES - 100)))
    return encode_frame(encode(Note(method="Large", body=body)))


OFFENCES = {
    "garbage": (encode_frame(b"\xff\xfe\xfd"), "bytes are no"),
    "other record": (encode_frame(encode(Item(number=1))), "bytes are no"),
    "other frame version": (b"\x00\x00\x00\x01\x63x", "frame of version 99"),
    "oversize frame": (b"\x7f\xff\xff\xff\x01", "exceeds the bound"),
    "not canonical": (encode_frame(b"\x82\xa6number\xcc\x01\xa4type\xa6cancel"), "not canonical"),
    "answer never asked for": (encode_frame(encode(Reply(number=3, body=b""))), "never made"),
    "failure never asked for": (encode_frame(encode(Failed(number=3, code="error", reason=""))), "never made"),
    "number repeated": (call(4) + call(4), "must count up"),
    "bad request": (call(0, body=b"\x80"), "no Ask"),
    "bad note": (encode_frame(encode(Note(method="Item", body=b"\x01"))), "no Item"),
    "no deadline": (call(0, deadline_s=0.0), "deadline"),
    "deadline of a year": (call(0, deadline_s=3e7), "deadline"),
    "deadline not a number": (call(0, deadline_s=math.nan), "deadline"),
    "call flood": (b"".join(call(i) for i in range(MAX_IN_FLIGHT + 1)), "more than 64 calls in flight"),
    "note flood": (b"".join(note(i) for i in range(MAX_QUEUED_NOTES + 3)), "more than 1024 notes"),
    "flood of large notes": (b"".join(large_note() for _ in range(17)), "notes of more than 16777216 bytes"),
    "unfinished frame": (call(0)[:-1], "not finished within 30 s"),
    "method of a thousand letters": (call(0, method="x" * 1000), "bytes are no"),
}


@pytest.mark.parametrize("offence", OFFENCES)
def test_offender_is_dropped_with_its_reason_and_others_are_served(world, offence):
    sent, reason = OFFENCES[offence]

    async def scenario():
        a, b = await world.started(2)

        async def handler(peer, request):
            await asyncio.sleep(3600 if request.text == "sleep" else 1.0)
            return Answer(text="fine")

        async def slow(peer, item):
            await asyncio.sleep(3600)

        a.serve(Ask, handler)
        a.on_note(Item, slow)
        a.on_note(Large, slow)
        honest = asyncio.create_task(ask(b, a))
        stream, reader = await intruder(world)
        assert world.ids[7] in a.peers
        await stream.send(sent)
        await drained(reader)
        (dropped,) = world.seen(0, ConnectionDropped)
        assert dropped.remote == world.ids[7]
        assert reason in dropped.reason
        assert a.peers == (b.peer,)
        assert (await honest).text == "fine"
        assert (await ask(b, a)).text == "fine"

    world.run(scenario)


def test_more_notes_than_may_wait_are_no_offence_where_each_is_handled_at_once(world):
    async def scenario():
        (a,) = await world.started(1)
        got = []

        async def take(peer, item):
            got.append(item.number)

        a.on_note(Item, take)
        stream, _ = await intruder(world)
        num = 4 * MAX_QUEUED_NOTES
        await stream.send(b"".join(note(number) for number in range(num)))
        await asyncio.sleep(1)
        assert got == list(range(num))
        assert a.peers == (world.ids[7],)

    world.run(scenario)


def test_terminal_commands_in_a_reason_are_made_harmless(world):
    async def scenario():
        (a,) = await world.started(1)
        stream, reader = await intruder(world)
        asking = asyncio.create_task(a.call(world.ids[7], Ask(text=""), Answer, deadline_s=5))
        asked = decode(await reader.read(), RpcFrame)
        await write_frame(stream, encode(Failed(number=asked.number, code="error", reason="\x1b[2J\x07boo\n")))
        with pytest.raises(CallFailed) as caught:
            await asking
        assert str(caught.value).endswith("answered: ?[2J?boo?")

    world.run(scenario)


def test_late_answer_to_a_cancelled_call_is_no_offence(world):
    async def scenario():
        (a,) = await world.started(1)
        stream, reader = await intruder(world)
        with pytest.raises(DeadlineExceeded):
            await a.call(world.ids[7], Ask(text=""), Answer, deadline_s=0.5)
        asked, cancelled = decode(await reader.read(), RpcFrame), decode(await reader.read(), RpcFrame)
        assert isinstance(asked, Call)
        assert asked.deadline_s == pytest.approx(0.5, abs=0.05)
        assert cancelled == Cancel(number=asked.number)
        await write_frame(stream, encode(Reply(number=asked.number, body=encode(Answer(text="late")))))
        await asyncio.sleep(1)
        assert a.peers == (world.ids[7],)

    world.run(scenario)


# --- any bytes ---


class Silent:
    """A stream of given bytes that swallows what is sent."""

    peer = "f" * 64
    source = "nowhere"

    def __init__(self, data):
        self._data = data

    async def send(self, data):
        pass

    async def recv_into(self, buffer):
        taken = self._data[: len(buffer)]
        self._data = self._data[len(buffer) :]
        buffer[: len(taken)] = taken
        return len(taken)

    async def close(self):
        pass


class Turns:
    """Counts the turns that a task gets which always wants one. Virtual time stands still while it does."""

    def __init__(self):
        self.num = 0
        self._task = asyncio.ensure_future(self._take())

    async def _take(self):
        while True:
            self.num += 1
            await asyncio.sleep(0)

    def end(self):
        self._task.cancel()
        return self.num


@pytest.mark.parametrize(
    ("frame", "num_frames", "num_turns"),
    [
        (encode_frame(encode(Cancel(number=5))), 100 * TURN_FRAMES, 100),
        (encode_frame(encode(Note(method="Nobody", body=bytes(TURN_NBYTES // 2)))), 16, 8),
    ],
    ids=["small", "large"],
)
def test_a_stream_of_frames_without_end_leaves_others_their_turns(frame, num_frames, num_turns):
    async def scenario():
        stream = Silent(frame * num_frames)
        session = Session(stream, FrameReader(stream), Handlers(), LinkTraffic(VirtualClock()), lambda event: None)
        turns = Turns()
        with pytest.raises(PeerError, match="closed the connection"):
            await session.run()
        assert turns.end() >= num_turns

    VirtualClock().run(scenario())


def test_a_backlog_of_notes_leaves_others_their_turns(world):
    async def scenario():
        a, b = await world.started(2)
        may_go, done = asyncio.Event(), asyncio.Event()

        async def take(peer, item):
            await may_go.wait()
            if item.number == 999:
                done.set()

        b.on_note(Item, take)
        for number in range(1000):
            await a.note(b.peer, Item(number=number))
        await asyncio.sleep(1)
        turns = Turns()
        may_go.set()
        await done.wait()
        assert turns.end() >= 1000 // TURN_NOTES

    world.run(scenario)


FRAMES = st.one_of(
    st.binary(max_size=200),
    st.builds(
        lambda number, method, deadline_s, body: encode(
            Call(number=number, method=method, deadline_s=deadline_s, body=body)
        ),
        st.integers(-1, 3),
        st.sampled_from(["Ask", "Item", "", "x"]),
        st.floats(),
        st.binary(max_size=40) | st.builds(lambda text: encode(Ask(text=text)), st.text(max_size=5)),
    ),
    st.builds(lambda number, body: encode(Reply(number=number, body=body)), st.integers(-1, 3), st.binary(max_size=40)),
    st.builds(lambda number: encode(Cancel(number=number)), st.integers(-1, 3)),
    st.builds(lambda body: encode(Note(method="Item", body=body)), st.binary(max_size=40)),
    st.recursive(
        st.none() | st.integers(-(2**63), 2**64 - 1) | st.text(max_size=5) | st.binary(max_size=5),
        lambda inner: st.dictionaries(st.sampled_from(["type", "number", "method", "body"]), inner) | st.lists(inner),
        max_leaves=8,
    ).map(msgspec.msgpack.encode),
)


@pytest.mark.full
@settings(max_examples=100, deadline=None)
@given(st.lists(FRAMES.map(encode_frame) | st.binary(max_size=20), max_size=8))
def test_session_ends_on_any_bytes_with_a_fault_of_the_peer(chunks):
    async def scenario():
        handlers, clock = Handlers(), VirtualClock()

        async def answer(peer, request):
            return Answer(text=request.text)

        handlers.serve(Ask, answer)
        stream = Silent(b"".join(chunks))
        session = Session(stream, FrameReader(stream, finish_s=1.0), handlers, LinkTraffic(clock), lambda event: None)
        with pytest.raises(PeerError):
            await session.run()

    VirtualClock().run(scenario())


@pytest.mark.full
@settings(max_examples=100)
@given(st.binary(max_size=300) | FRAMES)
def test_any_bytes_are_a_handshake_or_a_wire_error(data):
    for kind in (Hello, Greeting):
        try:
            record = decode(data, kind)
        except WireError:
            continue
        assert encode(record) == data
