"""`weft chat` against a server without a model: pipes, a conversation, keys, and what goes wrong."""

import io
import json
import os
import pty
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from api_stub import CODE, Stub, serving
from unit.cli.small import Kept, Weft
from weft.cli.chat.chat import ADDRESS, Came, Talk, converse
from weft.cli.chat.server import Piece, Server
from weft.errors import CallFailed, ConfigError, PeerError, Refused, Unreachable

KEY = "sk-secret"


@pytest.fixture(scope="module")
def stub() -> Iterator[Stub]:
    with serving() as found:
        yield found


@pytest.fixture
def piped(monkeypatch: pytest.MonkeyPatch) -> Callable[[bytes], None]:
    def put(data: bytes) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))

    return put


# --- a pipe ---


def test_a_question_from_a_pipe_is_answered_on_standard_output(
    weft: Weft, stub: Stub, piped: Callable[[bytes], None]
) -> None:
    piped("wie gehts, Zoë?\n".encode())
    answer = weft(
        *("chat", f"{stub.address}v1", "--model", "other", "--system", "Be brief."),
        *("--temperature", "0", "--max-tokens", "9"),
    )
    assert (answer.code, answer.out, answer.err) == (0, "wie gehts, Zoë?\n! (2)\n", "")
    asked = stub.asked[-1]
    assert [asked[name] for name in ("model", "temperature", "max_tokens", "stream")] == ["other", 0, 9, True]
    assert asked["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "wie gehts, Zoë?\n"},
    ]


def test_a_home_that_is_given_out_of_habit_is_not_spoken_of_with_each_answer(
    weft: Weft, stub: Stub, piped: Callable[[bytes], None], tmp_path: Path
) -> None:
    piped(b"hello")
    assert weft("--home", tmp_path, "chat", stub.address).err == ""


def test_what_steers_a_terminal_is_shown_as_dots(weft: Weft, stub: Stub, piped: Callable[[bytes], None]) -> None:
    piped(b"hostile")
    answer = weft("chat", stub.address)
    assert "\x1b" not in answer.out
    assert answer.out.endswith(" .[2J\n")


@pytest.mark.parametrize(
    ("question", "code", "words"),
    [
        (b"error", 30, "failed in the middle of its answer"),
        (b"bare", 26, "the answer broke off"),
        (b"busy", 30, "Try again in 7 s."),
        (b" \n", 2, "standard input is empty"),
        (b"\xff\xfe\xfd", 11, "no text"),
    ],
)
def test_what_goes_wrong_has_a_code_and_says_what_to_do(
    weft: Weft, stub: Stub, piped: Callable[[bytes], None], question: bytes, code: int, words: str
) -> None:
    piped(question)
    answer = weft("chat", stub.address)
    assert answer.code == code, answer
    assert answer.err.startswith("weft: ")
    assert words in answer.err
    assert answer.err.count("\n") == 1
    assert answer.out in ("", "Some words.\n")  # what there is of an answer


@pytest.mark.parametrize(
    "address", ["ftp://x", "http://", "http://me:secret@there/v1", "http://x:99999", "http://a?b=c", "a\nb"]
)
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match=r"no address of a server.*--key-file"):
        Server(address)


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("127.0.0.1:8000", "http://127.0.0.1:8000/v1"),
        ("https://there.example/", "https://there.example/v1"),
        ("http://[::1]:1/api/v3/", "http://[::1]:1/api/v3"),
    ],
)
def test_an_address_may_be_short(given: str, meant: str) -> None:
    assert Server(given).address == meant


def test_a_key_that_goes_out_in_the_open_is_said(
    weft: Weft, stub: Stub, piped: Callable[[bytes], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [Server(each).is_private for each in (ADDRESS, "http://localhost", "https://a.example")] == [True] * 3
    assert not Server("http://10.1.2.3").is_private
    (tmp_path / "key").write_text(KEY)
    for is_private, said in ((True, False), (False, True)):
        monkeypatch.setattr(Server, "is_private", is_private)
        piped(b"hello")
        answer = weft("chat", stub.address, "--key-file", tmp_path / "key")
        assert answer.code == 0
        assert ("unencrypted" in answer.err) == said


def test_nobody_there_is_22_and_at_the_usual_address_it_is_said_what_serves(
    weft: Weft, piped: Callable[[bytes], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    piped(b"hello")
    answer = weft("chat", f"http://127.0.0.1:{port}")
    assert answer.code == 22
    assert f"nobody answers at http://127.0.0.1:{port}/v1" in answer.err
    assert "weft serve" not in answer.err
    monkeypatch.setattr("weft.cli.chat.chat.ADDRESS", f"http://127.0.0.1:{port}/v1")
    piped(b"hello")
    assert "weft serve last" in weft("chat", f"http://127.0.0.1:{port}").err


def test_the_name_of_a_run_is_no_address_and_how_to_talk_to_it_is_said(
    weft: Weft, piped: Callable[[bytes], None], kept: Kept
) -> None:
    for given, is_said in ((kept.run.name, True), ("no-such-run", False)):
        piped(b"hello")
        answer = weft("chat", given)
        assert answer.code == 22
        assert (f"weft serve {given}; then: weft chat" in answer.err) == is_said


@pytest.mark.parametrize(
    ("reply", "error", "words"),
    [
        (b"SSH-2.0-x\r\n", Unreachable, "speaks no HTTP"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi", PeerError, "something else than a list of models"),
        (b"HTTP/1.1 301 Gone\r\nLocation: http://b/\r\nContent-Length: 0\r\n\r\n", CallFailed, "sends elsewhere"),
        (b"HTTP/1.1 502 Bad\r\nContent-Length: 6\r\n\r\n<html>", CallFailed, "the server failed .502."),
        (
            b"HTTP/1.1 404 No\r\nContent-Length: 2\r\n\r\n{}",
            CallFailed,
            "another kind of server is there.*OpenAI API. ",
        ),
        (b"", Unreachable, "hangs up"),
    ],
)
def test_what_is_no_such_server_is_said(reply: bytes, error: type[Exception], words: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            with listener.accept()[0] as line:
                line.recv(65536)
                line.sendall(reply)

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(error, match=words):
            Server(f"127.0.0.1:{listener.getsockname()[1]}").models()
        thread.join()


def test_a_model_that_is_not_there_is_named_with_those_that_are(
    weft: Weft, stub: Stub, piped: Callable[[bytes], None]
) -> None:
    piped(b"hello")
    answer = weft("chat", stub.address, "--model", "gone")
    assert answer.code == 2
    assert "--model gone" in answer.err
    assert "has no model of that name" in answer.err
    assert "stub, other" in answer.err


def test_a_key_is_read_from_a_file(weft: Weft, piped: Callable[[bytes], None], tmp_path: Path) -> None:
    path = tmp_path / "key"
    with serving(KEY) as stub:
        for text, code in ((f"{KEY}\r\n", 0), ("wrong", 24), ("", 11), ("two words", 11), (None, 11)):
            path.unlink(missing_ok=True)
            if text is not None:
                path.write_text(text)
            piped(b"hello")
            answer = weft("chat", stub.address, "--key-file", path)
            assert answer.code == code, answer
            assert KEY not in answer.err
        piped(b"hello")
        assert "takes API keys only" in weft("chat", stub.address).err


# --- a conversation ---


def typed(talk: Talk, *lines: str) -> None:
    left = list(lines)

    def line(_prompt: str) -> str:
        if not left:
            raise EOFError
        return left.pop(0)

    converse(talk, line)


def talk(stub: Stub, written: list[str]) -> Talk:
    return Talk(Server(stub.address), {"model": "stub"}, write=written.append)


def test_a_conversation_goes_on_and_commands_change_it(
    stub: Stub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written: list[str] = []
    path = tmp_path / "talk.json"
    typed(
        talk(stub, written),
        *("one", "two \\", "lines", "/system Be brief.", "code", f"/save {path}", f"/save {path}", "/save"),
        *("/retry", "/clear", "/retry", "/fly", "//fly", "", "/help", "/quit", "never"),
    )
    assert "".join(written) == f"one! (1)\ntwo \nlines! (3)\n{CODE}\n{CODE}\n/fly! (2)\n"
    told = json.loads(path.read_text())
    assert (told["format"], told["version"], told["model"]) == ("weft-chat", 1, "stub")
    assert [each["role"] for each in told["messages"]] == ["system"] + ["user", "assistant"] * 3
    said = capsys.readouterr().err
    for words in ("is there already", "needs the name of a file", "nothing was asked yet", "no such command", "/quit"):
        assert words in said
    assert "2 tokens" in said
    assert "round-7" in said


def test_a_failure_is_said_and_the_conversation_goes_on(stub: Stub, capsys: pytest.CaptureFixture[str]) -> None:
    written: list[str] = []
    here = talk(stub, written)
    typed(here, "busy", "error", "/retry", "hello")
    said = capsys.readouterr().err
    assert "Try again in 7 s" in said
    assert said.count("stage 2 is gone") == 2
    assert [each["content"] for each in here.messages] == ["error", "Some words.", "hello", "hello! (3)"]


def test_a_stopped_answer_stays_and_the_server_is_told(stub: Stub, capsys: pytest.CaptureFixture[str]) -> None:
    written: list[str] = []
    stub.is_left.clear()

    def write(text: str) -> None:
        written.append(text)
        if len(written) == 5:
            raise KeyboardInterrupt

    here = talk(stub, written)
    here.write = write
    typed(here, "slow", "hello")
    assert "stopped; another Ctrl-C ends" in capsys.readouterr().err
    assert here.messages[1] == {"role": "assistant", "content": "word0 word1 word2 word3 word4 "}
    assert here.messages[-1]["content"] == "hello! (3)"
    assert stub.is_left.wait(30)


def test_figures_are_told_as_far_as_they_are_known() -> None:
    whole = Came(last=Piece(version="fp", num_tokens=11, finish="length"), first_s=0.5, took_s=2.5, is_stopped=False)
    assert whole.words.startswith("(11 tokens, 5 tokens/s, first after 0.50 s, fp, cut off: ")
    assert Came(last=Piece(), first_s=0.5, took_s=2.5, is_stopped=False).words == "(first after 0.50 s)"


@pytest.mark.parametrize(
    ("max_tokens", "num_read", "words"),
    [
        (11, 117, "cut off after 11 tokens, as --max-tokens says"),
        (100, 117, "cut off: a conversation may have 128 tokens here"),
        (None, 117, "cut off: a conversation may have 128 tokens here"),
        (None, 50, "cut off: the server allows no longer answer; ask for more with --max-tokens"),
        (100, None, "cut off: the server allows no longer answer; ask it to go on"),
    ],
)
def test_which_limit_cut_an_answer_off_is_said(max_tokens: int | None, num_read: int | None, words: str) -> None:
    last = Piece(num_tokens=11, num_read=num_read, finish="length")
    came = Came(last=last, first_s=0.5, took_s=2.5, is_stopped=False, max_tokens=max_tokens, context=128)
    assert str(came.lacks).startswith(words)


@pytest.mark.parametrize(
    ("question", "words"), [(b"long", "may have 4,096 tokens here"), (b"nothing", "the answer is empty")]
)
def test_an_answer_from_a_pipe_that_lacks_something_says_so(
    weft: Weft, stub: Stub, piped: Callable[[bytes], None], question: bytes, words: str
) -> None:
    piped(question)
    answer = weft("chat", stub.address)
    assert answer.code == 0
    assert words in answer.err


def test_ctrl_c_in_a_pipe_is_130(
    weft: Weft, stub: Stub, piped: Callable[[bytes], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(text: str) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr("weft.cli.chat.chat.legible", interrupted)
    piped(b"slow")
    assert weft("chat", stub.address).code == 130


def test_a_key_that_is_none_is_refused() -> None:
    with serving(KEY) as stub:
        with pytest.raises(Refused, match="takes API keys only"):
            Server(stub.address).models()
        with pytest.raises(Refused, match="does not know this API key") as refused:
            Server(stub.address, "wrong").models()
        assert "--key-file" not in str(refused.value)
        assert Server(stub.address, KEY).models() == ["stub", "other"]


@pytest.mark.full
def test_at_a_terminal_ctrl_c_stops_an_answer_and_another_one_ends(tmp_path: Path) -> None:
    with serving(KEY) as stub:
        ours, theirs = pty.openpty()
        chat = subprocess.Popen(
            [sys.executable, "-m", "weft", "chat", stub.address],
            **dict.fromkeys(("stdin", "stdout", "stderr"), theirs),
            env={**os.environ, "WEFT_HOME": str(tmp_path), "TERM": "dumb"},
            start_new_session=True,
        )
        os.close(theirs)
        said = Said(ours)
        try:
            said.until("API key: ")  # what is typed before the echo is off is dropped
            os.write(ours, f"{KEY}\n".encode())
            said.until("> ")
            os.write(ours, b"slow\n")
            said.until("word9 ")
            chat.send_signal(signal.SIGINT)
            said.until("stopped; another Ctrl-C ends")
            said.until("> ")
            os.write(ours, b"hello\n")
            said.until("hello! (3)")
            said.until("tokens")
            said.until("> ")
            wait_until_it_reads(chat.pid)
            chat.send_signal(signal.SIGINT)
            assert chat.wait(30) == 0
        finally:
            chat.kill()
            chat.wait()
            os.close(ours)
        assert KEY not in said.text  # nothing echoes it


def wait_until_it_reads(pid: int) -> None:
    """Python hears a signal between the prompt of `input` and its read only with the next key."""
    deadline = time.monotonic() + 60
    while psutil.Process(pid).status() != psutil.STATUS_SLEEPING:
        assert time.monotonic() < deadline
        time.sleep(0.01)


class Said:
    """What a process writes to a terminal."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._at = 0
        self.text = ""

    def until(self, words: str) -> None:
        """Read until `words` came, after those that were waited for before."""
        while (at := self.text.find(words, self._at)) < 0:
            assert select.select([self._number], [], [], 60)[0], f"{words!r} did not come: {self.text!r}"
            self.text += os.read(self._number, 65536).decode(errors="replace")
        self._at = at + len(words)
