"""What keeps a peer out of a run, or ends it there: a paragraph, an exit code of its own, and nothing is lost."""

import errno
import os
from collections.abc import Callable
from contextvars import ContextVar
from pathlib import Path
from typing import TypeVar

import msgspec
import pytest
from torch import Tensor

from unit.cli.company import founder
from unit.cli.small import Weft
from unit.cli.test_bad_input import LOCAL, refused
from weft.cli.run.running import Report
from weft.events import CheckpointFailed, CheckpointSaved, Event, Notice, RoundCommitted
from weft.ids import RunId
from weft.keys import Identity
from weft.log import read_jsonl
from weft.model.transformer import Transformer
from weft.net.ticket import issue, read
from weft.peer.loop import lifecycle
from weft.peer.state.checkpoint import load, read_contents
from weft.run import genesis as seal
from weft.run.outline import KeysAdmission
from weft.store.chunks import state_index
from weft.wire import digest_of

E = TypeVar("E", bound=Event)

JOIN = ("--yes", *LOCAL)
FIVE_ROUNDS = ("--set", "method={type='fedavg', every=2}")


def ended(weft: Weft, code: int, words: str, *arguments: object) -> str:
    """Run a command that must fail on its way, and hold the last thing it says to the form."""
    answer = weft(*arguments)
    assert answer.code == code, answer.err
    *_, last = answer.err.splitlines()
    assert last.startswith("weft: ")
    assert words in last
    assert "Traceback" not in answer.err
    assert answer.err.count("weft: ") == 1
    return last


def forged(ticket: str, *, run: RunId | None = None, secret: bytes | None = None) -> str:
    """Return the ticket with another run or secret."""
    given = read(ticket)
    return issue(run or given.run, given.contacts, secret or given.secret)


def the(folder: Path, pattern: str) -> Path:
    (path,) = folder.glob(pattern)
    return path


# --- at the door ---


def test_who_is_turned_away_reads_why_and_the_run_goes_on_without_harm(
    weft: Weft, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with founder(tmp_path / "a") as member:
        other, wrong = (forged(member.ticket, run=RunId("ab" * 32)), forged(member.ticket, secret=b"another secret!!"))
        said = refused(weft, 16, "run abababab, and the members it leads to do not train that", "join", other, *JOIN)
        assert "weft ticket" in said
        said = refused(weft, 24, "the ticket's secret is not this run's", "join", wrong, *JOIN)
        assert "weft ticket" in said
        monkeypatch.setattr(lifecycle, "LINGER_S", 0.1)
        answer = weft("join", member.ticket, *JOIN)  # the same home, the same key, the right ticket
        assert answer.code == 0, answer.err
        assert "complete" in answer.out


def test_a_key_that_is_not_listed_is_24_and_reads_what_to_ask_for(weft: Weft, tmp_path: Path, home: Path) -> None:
    listed = KeysAdmission(keys=(Identity.from_seed(bytes(32)).peer,))
    with founder(tmp_path / "a", admission=listed) as member:
        said = refused(weft, 24, "is not on this run's list; ask its maker to add", "join", member.ticket, *JOIN)
    (key,) = (home / "keys").glob("*.pem")
    assert weft("keys", "show", key).out.strip() in said


def test_first_weights_other_than_the_makers_are_25(
    weft: Weft, tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A maker with another version of weft, whose first weights come out otherwise."""
    real = seal.seeded
    too_much = ContextVar("too_much", default=1.0)  # the maker's thread keeps it, this one sets its own
    monkeypatch.setattr(seal, "seeded", lambda *given: real(*given) + too_much.get())
    too_much.set(0.0)
    with founder(tmp_path / "a") as member:
        ended(weft, 25, "runs another version of weft; install the maker's", "join", member.ticket, *JOIN)
        assert not list((home / "shards").glob("*"))  # said before any data were fetched


def test_a_member_of_another_protocol_says_which_side_is_older(
    weft: Weft, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from weft.net import messages

    with founder(tmp_path / "a") as member:
        monkeypatch.setattr(messages, "PROTOCOL", messages.PROTOCOL + 1)
        refused(weft, 27, "pip install -U weft", "join", member.ticket, *JOIN)


# --- on the way ---


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """Settings with which a checkpoint follows every commit."""
    path = tmp_path / "machine.toml"
    path.write_text("checkpoint_every_s = 1e-6\n")
    return path


def said(home: Path, kind: type[E]) -> list[E]:
    entries = read_jsonl(the(home, "runs/*/*/log.jsonl"))
    return [entry.event for entry in entries if isinstance(entry.event, kind)]


def files_in(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def fill_disk(monkeypatch: pytest.MonkeyPatch, is_full: Callable[[], bool], number: int = errno.ENOSPC) -> None:
    """Let the system refuse what a process has written, for want of room or for `number`, as long as `is_full`."""
    flush, write = os.fsync, Path.write_bytes

    def refuse_if_full() -> None:
        if is_full():
            raise OSError(number, os.strerror(number))

    def fsync(handle: int) -> None:
        refuse_if_full()
        flush(handle)

    def write_bytes(path: Path, data: bytes) -> int:
        if path.parent.name == "journal":  # which is never flushed
            refuse_if_full()
        return write(path, data)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "write_bytes", write_bytes)


def test_a_disk_that_fills_up_is_41_and_takes_no_checkpoint_away(
    weft: Weft, run_path: Path, machine: Path, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training goes on without checkpoints, and the end says that the last of it was not saved, and what was."""
    train = ("train", run_path, *FIVE_ROUNDS, "--machine", machine, *LOCAL)
    with monkeypatch.context() as disk:
        third = "runs/*/*/checkpoint/private-3.safetensors"  # after the start and the first round
        fill_disk(disk, lambda: any(home.glob(third)) and not any(home.glob(third.replace("3", "2"))))
        last = ended(weft, 41, "the earlier one after round 2 is intact", *train)
        assert "Free some, then start again" in last
        ended(weft, 41, "Free some and start again", *train)  # nothing can be promised, either
    commits = [event.round for event in said(home, RoundCommitted)]
    assert commits == [1, 2, 3, 4, 5]
    assert [event.round for event in said(home, CheckpointSaved)] == [0, 1, 2]  # 0: before anybody hears of it
    assert len(said(home, CheckpointFailed)) == 5  # after three commits, and twice at the end: there may be room again
    assert sum("are not kept" in event.text for event in said(home, Notice)) == 2  # each process, once

    kept = load(the(home, "runs/*/*/checkpoint"))  # every chunk checked
    assert kept.head is not None
    assert kept.head.round == 2
    assert not list(home.rglob("*part-*"))
    assert weft("generate", "last", "def ", "--max-tokens", 4).code == 0

    answer = weft(*train, "--report", tmp_path / "report.json")  # there is room again
    assert answer.code == 0, answer.err
    report = msgspec.json.decode((tmp_path / "report.json").read_bytes(), type=Report)
    assert (report.reason, report.committed_tokens) == ("complete", 320)


def test_a_folder_that_cannot_be_written_is_like_a_full_disk_and_40_at_the_end(
    weft: Weft, run_path: Path, machine: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = ("train", run_path, *FIVE_ROUNDS, "--machine", machine, *LOCAL)
    with monkeypatch.context() as disk:
        third = "runs/*/*/checkpoint/private-3.safetensors"
        is_locked = lambda: any(home.glob(third)) and not any(home.glob(third.replace("3", "2")))  # noqa: E731
        fill_disk(disk, is_locked, errno.EACCES)
        ended(weft, 40, "the earlier one after round 2 is intact", *train)
    assert [event.round for event in said(home, RoundCommitted)] == [1, 2, 3, 4, 5]
    assert len(said(home, CheckpointFailed)) == 5
    assert weft(*train).code == 0


def test_a_disk_that_is_full_from_the_start_is_41_and_no_run_begins(
    weft: Weft, run_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill_disk(monkeypatch, lambda: True)
    refused(weft, 41, "Free some, then start again", "train", run_path, *LOCAL)
    assert not list(home.rglob("checkpoint.json"))


def test_a_secret_outlives_a_full_disk(weft: Weft, run_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = weft("train", run_path, *LOCAL)
    assert first.code == 0
    secret = the(home, "runs/*/*/secret")
    before = secret.read_text()
    assert not list(home.glob("runs/*/*/ticket")), "whoever has ended invites nobody"
    real_replace = os.replace

    def replace(source: str, target: Path) -> None:
        if Path(target).name in ("addresses", "secret", "ticket"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real_replace(source, target)

    monkeypatch.setattr(os, "replace", replace)
    longer = ("--set", "train.tokens=2880", "--go-on")
    answer = weft("train", run_path, *LOCAL, *longer)  # only what others can do without is not kept
    assert answer.code == 0, answer.err
    assert secret.read_text() == before
    assert read(answer.out.splitlines()[0]).secret == read(first.out.splitlines()[0]).secret
    assert secret.stat().st_mode & 0o077 == 0


def test_a_torn_secret_is_2_and_says_what_to_do(weft: Weft, run_path: Path, home: Path) -> None:
    assert weft("train", run_path, *LOCAL).code == 0
    secret = the(home, "runs/*/*/secret")
    secret.write_text(secret.read_text()[:9])
    refused(weft, 2, "secret is damaged", "train", run_path, *LOCAL)
    secret.unlink()
    assert weft("train", run_path, *LOCAL).code == 0


def breaks_after(home: Path, serial: int, break_: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    """Return the model's loss, put through `break_` once checkpoint number `serial` is there."""
    real = Transformer.loss

    def loss(model: Transformer, *given: Tensor | None) -> Tensor:
        found = real(model, *given)
        return break_(found) if any(home.glob(f"runs/*/*/checkpoint/private-{serial}.safetensors")) else found

    return loss


def test_a_loss_that_is_not_finite_is_43_and_leaves_the_last_checkpoint(
    weft: Weft, run_path: Path, machine: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as diverging:
        diverging.setattr(Transformer, "loss", breaks_after(home, 3, lambda loss: loss * float("nan")))
        last = ended(weft, 43, "at learning rate", "train", run_path, *FIVE_ROUNDS, "--machine", machine, *LOCAL)
    assert "the loss is nan" in last
    assert "Lower train.schedule's lr" in last
    kept = load(the(home, "runs/*/*/checkpoint"))
    assert kept.head is not None
    assert kept.head.round == 2
    assert all(bool(vector.isfinite().all()) for vector in (*kept.replicated.values(), *kept.private.values()))
    assert said(home, CheckpointSaved)[-1].digest == digest_of(state_index(kept.replicated))

    # What the message says to do can be done.
    assert weft("export", "last", run_path.parent / "start").code == 0
    start = ("model={type='folder', path='start'}", "tokenizer={type='json', path='start'}", "train.schedule.lr=1e-4")
    changes = [word for change in start for word in ("--set", change)]
    answer = weft("train", run_path, *FIVE_ROUNDS, *changes, *LOCAL)
    assert answer.code == 0, answer.err


def test_memory_that_runs_out_is_42_and_the_run_goes_on_from_its_checkpoint(
    weft: Weft, run_path: Path, machine: Path, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_out(loss: Tensor) -> Tensor:
        raise RuntimeError("[enforce fail at alloc_cpu.cpp] . DefaultCPUAllocator: can't allocate memory: 9 bytes")

    train = ("train", run_path, *FIVE_ROUNDS, "--machine", machine, *LOCAL)
    with monkeypatch.context() as memory:
        memory.setattr(Transformer, "loss", breaks_after(home, 3, run_out))
        assert "Close other programs" in ended(weft, 42, "one sample", *train)
    contents = read_contents(the(home, "runs/*/*/checkpoint"))
    assert contents.head is not None
    assert contents.head.round == 2
    answer = weft(*train, "--report", tmp_path / "report.json")
    assert answer.code == 0, answer.err
    assert msgspec.json.decode((tmp_path / "report.json").read_bytes(), type=Report).reason == "complete"


def test_going_on_from_a_corrupt_checkpoint_is_40_and_leaves_it_as_it_is(
    weft: Weft, run_path: Path, home: Path
) -> None:
    assert weft("train", run_path, *LOCAL).code == 0
    folder = the(home, "runs/*/*/checkpoint")
    vectors = the(folder, "private-*")
    data = bytearray(vectors.read_bytes())
    data[-3] ^= 1
    vectors.chmod(0o644)
    vectors.write_bytes(data)
    before = files_in(folder)
    assert "remove this one" in refused(weft, 40, "chunk 0 of 1 of tensor", "train", run_path, *LOCAL)
    assert files_in(folder) == before
