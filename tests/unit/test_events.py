"""Events: what is emitted reaches every sink, survives a crash in a file, and holds no secret."""

import json
import math
import re
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sinks import MemorySink
from weft import events
from weft.clock import VirtualClock
from weft.errors import ConfigError
from weft.events import MAX_PER_MINUTE, ConnectionDropped, Entry, Event, EventLog, Notice, StepDone
from weft.ids import PeerId, Step
from weft.log import JsonlSink, LogTail, read_jsonl

PEER = PeerId("ab" * 32)


def kinds(base: type[Event] = Event) -> list[type[Event]]:
    return [kind for child in base.__subclasses__() for kind in (child, *kinds(child))]


KINDS = [kind for kind in kinds() if kind.__module__ == "weft.events"]


def entry(text: str) -> Entry:
    return Entry(v=events.VERSION, at=1.5, peer=PEER, event=Notice(text=text))


def texts(path: Path) -> list[str]:
    return [found.event.text for found in read_jsonl(path) if isinstance(found.event, Notice)]


class BrokenSink:
    """Fails after `num_good` entries."""

    def __init__(self, error: Exception, num_good: int = 0) -> None:
        self._error = error
        self._num_left = num_good
        self.num_tried = 0

    def write(self, entry: Entry) -> None:
        self.num_tried += 1
        if self._num_left == 0:
            raise self._error
        self._num_left -= 1

    def close(self) -> None:
        pass


# --- what an event may hold ---

SECRET = re.compile(r"ticket|secret|passphrase|password|private|credential|nonce|seed|(^|_)keys?($|_)|(^|_)token($|_)")


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_no_event_has_a_field_that_could_hold_a_secret(kind: type[Event]) -> None:
    for field in msgspec.structs.fields(kind):
        assert not SECRET.search(field.name), f"{kind.__name__}.{field.name}"
        assert field.type is not bytes, f"{kind.__name__}.{field.name} holds raw bytes"
        assert bytes not in get_args(field.type), f"{kind.__name__}.{field.name} holds raw bytes"


@pytest.mark.parametrize(
    "name", ["ticket", "new_ticket", "ticket_secret", "key", "private_key", "keys", "passphrase", "token"]
)
def test_the_search_for_secrets_finds_one(name: str) -> None:
    assert SECRET.search(name)


@pytest.mark.parametrize("name", ["tokens", "num_tokens", "tokens_per_s", "committed_tokens"])
def test_the_search_for_secrets_lets_training_tokens_pass(name: str) -> None:
    assert not SECRET.search(name)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_events_are_frozen_and_carry_their_name(kind: type[Event]) -> None:
    assert kind.__struct_config__.frozen
    assert kind.__struct_config__.tag == kind.__name__


def example(type_: Any) -> Any:
    """Return some value of an event field's type."""
    plain, parts = _plain(type_), get_args(type_)
    if plain in (str, int, float, bool):
        return {str: "é", int: 3, float: 0.5, bool: True}[plain]
    if isinstance(plain, type) and issubclass(plain, msgspec.Struct):
        return plain(**{field.name: example(field.type) for field in msgspec.structs.fields(plain)})
    if getattr(type_, "__origin__", None) is dict:
        return {"a": "b"}
    if type(None) in parts:
        return None
    if msgspec.UnsetType in parts:
        return example(parts[0])
    if getattr(type_, "__metadata__", None):
        return example(parts[0])
    return msgspec.convert([example(parts[0])] if parts else ["x"], type_)


def _plain(type_: Any) -> Any:
    return getattr(type_, "__supertype__", type_)  # a NewType is what it was made from


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_kind_survives_the_file(tmp_path: Path, kind: type[Event]) -> None:
    event = kind(**{field.name: example(field.type) for field in msgspec.structs.fields(kind)})
    sink = JsonlSink(tmp_path / "events.jsonl")
    log = EventLog(VirtualClock(), PEER, [sink])
    log.emit(event)
    log.close()
    assert read_jsonl(tmp_path / "events.jsonl") == [
        Entry(v=events.VERSION, at=VirtualClock.EPOCH, peer=PEER, event=event)
    ]


# --- sinks ---


def test_an_event_reaches_every_sink_with_its_origin() -> None:
    clock, memory, other = VirtualClock(), MemorySink(), MemorySink()
    log = EventLog(clock, PEER, [memory, other])
    clock.advance(2.0)
    log.emit(Notice(text="hello"))
    assert memory.entries == other.entries
    assert memory.entries == [Entry(v=1, at=VirtualClock.EPOCH + 2.0, peer=PEER, event=Notice(text="hello"))]


class FullAfter:
    """A file that takes so many bytes, as on a disk that is full."""

    def __init__(self, file: Any, num_bytes: int) -> None:
        self._file = file
        self._left = num_bytes

    def write(self, data: bytes) -> int:
        taken: int = self._file.write(data[: self._left])
        self._left -= taken
        return taken

    def truncate(self, num_bytes: int) -> int:
        self._left += self._file.tell() - num_bytes
        left: int = self._file.truncate(num_bytes)
        return left

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), ValueError("surrogates not allowed")])
def test_a_sink_that_fails_is_asked_again_and_the_others_are_told_once(error: Exception) -> None:
    broken, memory = BrokenSink(error, num_good=1), MemorySink()
    log = EventLog(VirtualClock(), PEER, [broken, memory])
    for text in ("a", "b", "c"):
        log.emit(Notice(text=text))
    said = [found.event.text for found in memory.entries if isinstance(found.event, Notice)]
    assert [text for text in said if not text.startswith("BrokenSink")] == ["a", "b", "c"]
    (told,) = [text for text in said if text.startswith("BrokenSink")]
    assert str(error) in told
    assert broken.num_tried == 4  # with that it has stopped


def test_a_file_on_a_disk_that_was_full_for_a_moment_goes_on_and_says_what_it_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink, memory = JsonlSink(tmp_path / "events.jsonl"), MemorySink()
    log = EventLog(VirtualClock(), PEER, [sink, memory])
    log.emit(Notice(text="before"))
    with monkeypatch.context() as full:
        whole = sink._file
        full.setattr(sink, "_file", FullAfter(whole, num_bytes=7))
        log.emit(Notice(text="lost"))
        log.emit(Notice(text="lost, too"))
    log.emit(Notice(text="after"))
    log.close()
    kept = [entry.event.text for entry in read_jsonl(tmp_path / "events.jsonl") if isinstance(entry.event, Notice)]
    assert kept == ["before", "after", "JsonlSink goes on, without 3 events"]
    said = [entry.event.text for entry in memory.entries if isinstance(entry.event, Notice)]
    assert [text for text in said if text.startswith("JsonlSink")] == [
        f"JsonlSink stopped: no room for another line in {tmp_path / 'events.jsonl'}",
        "JsonlSink goes on, without 3 events",
    ]


def test_a_file_that_could_not_be_begun_anew_is_when_it_can(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "events.jsonl"
    log = EventLog(VirtualClock(), PEER, [JsonlSink(path, max_nbytes=400)])
    log.emit(Notice(text="first"))
    path.rename(tmp_path / "away.jsonl")
    path.parent.rmdir()  # so that it can be neither renamed nor opened
    for number in range(8):
        log.emit(Notice(text=f"lost {number}"))
    path.parent.mkdir()
    log.emit(Notice(text="last"))
    log.close()
    assert next(entry.event for entry in read_jsonl(path)) == Notice(text="last")


def test_a_sink_that_fails_every_other_time_does_not_talk_without_end() -> None:
    class Fickle(MemorySink):
        num = 0

        def write(self, entry: Entry) -> None:
            self.num += 1
            if self.num % 2:
                raise OSError("now")
            super().write(entry)

    fickle, memory = Fickle(), MemorySink()
    log = EventLog(VirtualClock(), PEER, [fickle, memory])
    for _ in range(3):
        log.emit(Notice(text="x"))
    assert len(memory.entries) <= 6


def test_what_others_can_cause_at_will_is_counted_beyond_so_many_a_minute() -> None:
    clock, memory = VirtualClock(), MemorySink()
    log = EventLog(clock, PEER, [memory])
    dropped = ConnectionDropped(address="tls (incoming)", remote=None, reason="it hung up")
    for _ in range(MAX_PER_MINUTE + 500):
        log.emit(dropped)
    log.emit(Notice(text="others are told"))
    assert len(memory.entries) == MAX_PER_MINUTE + 1
    clock.advance(61.0)
    log.emit(dropped)
    more, again = memory.entries[-2:]
    assert more.event == Notice(text="500 more ConnectionDropped like those before were not written")
    assert again.event == dropped


def test_when_every_sink_fails_the_run_goes_on() -> None:
    log = EventLog(VirtualClock(), PEER, [BrokenSink(OSError("a")), BrokenSink(OSError("b"))])
    log.emit(Notice(text="nobody hears this"))
    log.emit(Notice(text="nor this"))
    log.close()


def test_a_bug_in_a_sink_is_not_hidden() -> None:
    log = EventLog(VirtualClock(), PEER, [BrokenSink(KeyError("bug"))])
    with pytest.raises(KeyError, match="bug"):
        log.emit(Notice(text="x"))


# --- the file ---


def test_each_line_is_one_json_object(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "events.jsonl")
    sink.write(entry("two\nlines"))
    line = (tmp_path / "events.jsonl").read_text()  # not closed yet: a line is there at once
    assert line.endswith("\n")
    assert json.loads(line) == {"v": 1, "at": 1.5, "peer": PEER, "event": {"type": "Notice", "text": "two\nlines"}}
    sink.close()


@given(st.lists(st.text(st.characters(exclude_categories=("Cs",)), max_size=20), max_size=8), st.data())
def test_a_file_cut_anywhere_gives_the_whole_lines_before_the_cut(
    tmp_path_factory: pytest.TempPathFactory, written: list[str], data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("log") / "events.jsonl"
    sink = JsonlSink(path)
    for text in written:
        sink.write(entry(text))
    sink.close()
    raw = path.read_bytes()
    cut = data.draw(st.integers(0, len(raw)))
    path.write_bytes(raw[:cut])
    assert texts(path) == written[: raw[:cut].count(b"\n")]


@pytest.mark.parametrize("cut_nbytes", [1, 20, 100, 200_000])
def test_a_log_opened_after_a_crash_goes_on_at_a_new_line(tmp_path: Path, cut_nbytes: int) -> None:
    path = tmp_path / "events.jsonl"
    first = JsonlSink(path)
    first.write(entry("kept"))
    first.write(entry("lost" * 60_000))
    first.close()
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - cut_nbytes)
    second = JsonlSink(path)
    second.write(entry("after"))
    second.close()
    assert texts(path) == ["kept", "after"]


def test_a_log_that_was_all_one_cut_line_begins_anew(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"v":1,' * 20_000)
    sink = JsonlSink(path)
    sink.write(entry("after"))
    sink.close()
    assert texts(path) == ["after"]


def test_a_full_file_moves_aside_and_the_oldest_goes(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    nbytes = len(msgspec.json.encode(entry("00"))) + 1
    sink = JsonlSink(path, max_nbytes=3 * nbytes, num_kept=3)
    for number in range(17):
        sink.write(entry(f"{number:02}"))
    sink.close()
    names = ["events.jsonl", "events.jsonl.1", "events.jsonl.2", "events.jsonl.3"]
    assert sorted(found.name for found in tmp_path.iterdir()) == names
    found = [texts(tmp_path / name) for name in names]
    assert found == [["15", "16"], ["12", "13", "14"], ["09", "10", "11"], ["06", "07", "08"]]
    assert all(each.stat().st_size <= 3 * nbytes for each in tmp_path.iterdir())


def test_a_log_opened_again_goes_on_where_it_stopped(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    nbytes = len(msgspec.json.encode(entry("0"))) + 1
    for text in "abc":
        sink = JsonlSink(path, max_nbytes=2 * nbytes)
        sink.write(entry(text))
        sink.close()
    assert texts(tmp_path / "events.jsonl.1") == ["a", "b"]
    assert texts(path) == ["c"]


def test_a_byte_order_mark_that_an_editor_left_is_skipped(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "events.jsonl")
    sink.write(entry("hello"))
    sink.close()
    (tmp_path / "events.jsonl").write_bytes(b"\xef\xbb\xbf" + (tmp_path / "events.jsonl").read_bytes())
    assert [found.event for found in read_jsonl(tmp_path / "events.jsonl")] == [Notice(text="hello")]


def test_a_loss_that_is_not_finite_is_read_back_as_nan(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "events.jsonl")
    log = EventLog(VirtualClock(), PEER, [sink])
    log.emit(
        StepDone(step=Step(1), loss=math.nan, learning_rate=0.1, gradient_norm=math.inf, num_tokens=1, duration_s=0.0)
    )
    log.close()
    (found,) = read_jsonl(tmp_path / "events.jsonl")
    assert isinstance(found.event, StepDone)
    assert math.isnan(found.event.loss)
    assert math.isnan(found.event.gradient_norm)
    assert found.event.learning_rate == 0.1


def test_kinds_and_versions_of_a_later_weft_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    lines = [
        {"v": 1, "at": 1.0, "peer": PEER, "event": {"type": "NotYetInvented", "x": 1}},
        {"v": 2, "at": 1.0, "peer": PEER, "event": {"type": "Notice", "text": "other shape"}},
        {"v": 1, "at": 1.0, "peer": PEER, "event": {"type": "Notice", "text": "known"}},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert texts(path) == ["known"]


@pytest.mark.parametrize(
    "line",
    [
        b"garbage",
        b"\xff\xfe",
        b"[]",
        b'{"v":1,"at":1.0,"peer":"a"}',
        b'{"v":1,"at":1.0,"peer":"a","event":{}}',
        b'{"v":1,"at":1.0,"peer":"a","event":{"type":["Notice"]}}',
        b'{"v":1,"at":1.0,"peer":"a","event":{"type":"Notice","text":3}}',
    ],
)
def test_a_line_that_is_no_event_is_named_by_its_number(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(msgspec.json.encode(entry("fine")) + b"\n" + line + b"\n")
    with pytest.raises(ConfigError, match=r"events\.jsonl: line 2 is not an event"):
        read_jsonl(path)


def test_a_log_is_read_while_it_grows_and_from_the_start_where_it_is_begun_anew(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    sink, tail = JsonlSink(path), LogTail(path)

    def read() -> list[str]:
        return [found.event.text for found in tail.read() if isinstance(found.event, Notice)]

    assert read() == []
    sink.write(entry("one"))
    sink.write(entry("two"))
    assert read() == ["one", "two"]
    assert read() == []
    whole = path.read_bytes().splitlines(keepends=True)[0]
    with path.open("ab") as file:
        file.write(whole[:10])
        file.flush()
        assert read() == []  # half a line, so far
        file.write(whole[10:])
    assert read() == ["one"]
    path.write_bytes(whole)
    assert read() == ["one"]
    sink.close()
