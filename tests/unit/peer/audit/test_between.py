"""States inside a lease: when one is kept, and what it is good for."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from unit.peer.audit.test_steps import ME, NUM, RUN, copied, head, trainer
from weft.clock import VirtualClock
from weft.errors import DiskFull
from weft.events import Event, Notice
from weft.ids import Digest, Round, Tokens
from weft.keys import Identity
from weft.peer.audit import between, trace
from weft.peer.audit.between import Spacing
from weft.peer.audit.steps import state_of
from weft.peer.audit.trace import Told, Trace
from weft.peer.audit.worker import Worker
from weft.run.amend import first_charter
from weft.sync.records.charter import AuditTerms
from weft.sync.records.messages import Counted, Manifest
from weft.sync.records.work import link
from weft.training.trainer import Trainer
from weft.wire import digest, digest_of

TERMS = AuditTerms(rate=0.1, trace_every=1)


class Peer:
    """One that trains on a lease of `NUM` steps, and writes down how."""

    def __init__(self, path: Path) -> None:
        self.clock, self.events = VirtualClock(), list[Event]()
        self.trainer: Trainer = trainer(path)
        self.charter = replace(first_charter(RUN), audits=TERMS)
        self.carry: Any = SimpleNamespace(
            tokens=Tokens(0), error=None, left=None, start_over=self.over, forget_error=lambda: None
        )
        self.replica: Any = SimpleNamespace(
            run=RUN, config=RUN, charter=self.charter, outer=self.trainer.local().clone(), head=head().manifest
        )
        self.context: Any = SimpleNamespace(
            folder=SimpleNamespace(traces=path / "traces"),
            clock=self.clock,
            identity=Identity.from_seed(bytes(32)),
            node=SimpleNamespace(peer=ME, serve=lambda *_: None, serve_blobs=lambda *_, **__: None),
            emit=self.events.append,
        )
        self.heads: Any = SimpleNamespace(known=lambda _name: head())
        self.trace = Trace(self.context, self.trainer, self.replica, self.carry, self.events.append)

    def over(self) -> None:
        self.carry.tokens = Tokens(0)

    def trains(self, num: int = NUM) -> list[dict[str, torch.Tensor]]:
        """Return the states that it comes to, from the lease's first on."""
        manifest = head().manifest
        self.trace.begin(manifest, ME)
        states, on_step = [copied(state_of(self.trainer))], self.trainer.on_step

        def note(num_steps: int) -> None:
            states.append(copied(state_of(self.trainer)))
            on_step(num_steps)

        self.trainer.on_step = note
        positions = torch.arange(4, 4 + 2 * num).numpy()
        self.trainer.train(positions, manifest.committed_tokens, 2)
        self.carry.tokens = Tokens(num * RUN.tokens_per_step)
        self.trainer.on_step = on_step
        return states

    def told(self) -> Told:
        signed = self.trace.work(head().manifest, digest(b"payload"))
        assert signed is not None
        found = self.trace.known(digest_of(signed))
        assert found is not None
        return found

    def counts(self, told: Told, after: int = 1) -> None:
        """Let a round count what it has told, or one so many rounds later count nothing of it."""
        manifest: Manifest = replace(head().manifest, round=Round(after))
        mine = Counted(peer=ME, tokens=Tokens(8), payload=digest(b"payload"), work=told.name)
        self.trace.settle(manifest, mine if after == 1 else None, True)

    def files(self) -> set[str]:
        return {path.name.partition("-")[0] for path in self.trace.folder.glob("*-*.safetensors")}

    def worker(self) -> Worker:
        none: Any = None  # nothing is sealed, and nobody asks
        return Worker(self.context, self.trainer, self.replica, self.trace, self.heads, none, none)


def test_a_lease_with_states_inside_is_made_again_from_the_last_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer, made = Peer(tmp_path), list[int]()
    states, told, worker = peer.trains(), peer.told(), peer.worker()
    assert [each.num_steps for each in told.pieces[0].between] == list(range(1, NUM))
    assert [told.state(number) for number in range(NUM + 1)] == [digest_of(trace.state_index(each)) for each in states]
    train = Trainer.train

    def counted(self: Trainer, positions: Any, *given: Any, **named: Any) -> Any:
        made.append(len(positions) // 2)
        return train(self, positions, *given, **named)

    monkeypatch.setattr(Trainer, "train", counted)
    for first in range(NUM):
        passed = worker._passed(told, 0, first, first + 1)
        before, after = passed.before, passed.after
        assert all(torch.equal(before[name], value) for name, value in states[first].items())
        assert all(torch.equal(after[name], value) for name, value in states[first + 1].items())
    assert made == NUM * [1]
    assert worker._is_mine(told, worker._found(told, link(told.work.segments, 1, 3)))


def test_without_them_the_same_is_made_again_from_the_beginning(tmp_path: Path) -> None:
    peer = Peer(tmp_path)
    states, told, worker = peer.trains(), peer.told(), peer.worker()
    kept = [tmp_path / "traces" / each.kept.file for each in told.pieces[0].between]
    kept[-1].unlink()
    kept[-2].chmod(0o600)
    kept[-2].write_bytes(b"x" * kept[-2].stat().st_size)
    assert told.pieces[0].nearest(tmp_path / "traces", NUM - 1)[0] == NUM - 3
    for path in kept:
        path.unlink(missing_ok=True)
    assert told.pieces[0].nearest(tmp_path / "traces", NUM - 1)[0] == 0
    passed = worker._passed(told, 0, NUM - 1, NUM)
    assert all(torch.equal(passed.before[name], value) for name, value in states[NUM - 1].items())
    assert all(torch.equal(passed.after[name], value) for name, value in states[NUM].items())


def test_they_are_kept_for_some_rounds_and_some_time_and_a_start_for_longer(tmp_path: Path) -> None:
    peer = Peer(tmp_path)
    peer.trains()
    told = peer.told()
    peer.counts(told)
    assert peer.files() == {"segment", "between", "end"}
    peer.clock.advance(between.KEPT_S + 1)
    peer.counts(told, 1 + between.KEPT_ROUNDS)
    assert peer.files() == {"segment", "between", "end"}
    peer.counts(told, 2 + between.KEPT_ROUNDS)
    assert peer.files() == {"segment", "end"}
    assert trace.KEPT_ROUNDS > between.KEPT_ROUNDS


def test_a_disk_that_takes_no_state_inside_a_lease_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer, write = Peer(tmp_path), trace.write_vectors

    def full(path: Path, *given: Any, **named: Any) -> Any:
        if path.name.startswith("between"):
            raise DiskFull("no room")
        return write(path, *given, **named)

    monkeypatch.setattr(trace, "write_vectors", full)
    states, told = peer.trains(), peer.told()
    assert told.pieces[0].between == ()
    assert [told.state(number) for number in range(NUM + 1)] == [digest_of(trace.state_index(each)) for each in states]
    assert [event.text for event in peer.events if isinstance(event, Notice)] == [
        "audited, this peer will make up to a whole lease again: no room"
    ]


def test_who_was_killed_in_a_lease_goes_on_with_what_it_had_kept(tmp_path: Path) -> None:
    peer = Peer(tmp_path)
    peer.trains()
    peer.trace.save()
    again = Trace(peer.context, peer.trainer, peer.replica, peer.carry, peer.events.append)
    again.begin(head().manifest, ME)
    signed = again.work(head().manifest, digest(b"payload"))
    assert signed is not None
    told = again.known(Digest(digest_of(signed)))
    assert told is not None
    assert [each.num_steps for each in told.pieces[0].between] == list(range(1, NUM))


@pytest.mark.parametrize(
    ("step_s", "written_s", "every", "due"),
    [
        (1.0, 0.1, 1, [10, 20, 30, 40, 50, 60, 70, 80, 90]),
        (1.0, 0.4, 1, [20, 40, 60, 80]),
        (1.0, 0.4, 30, [30, 60, 90]),
        (0.01, 1.0, 1, []),  # as on a GPU
    ],
)
def test_one_is_kept_where_what_it_saves_is_more_than_what_it_takes(
    step_s: float, written_s: float, every: int, due: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weft.cost.audits.MAX_BETWEEN", 9)
    clock = VirtualClock()
    spacing, found = Spacing(clock), [0]
    spacing.wrote(written_s)
    for number in range(1, 100):
        spacing.begin()
        clock.advance(step_s)
        spacing.end()
        if spacing.is_due(number - found[-1], 100, 0.1, every) and number % every == 0:
            found.append(number)
    assert found[1:] == due


def test_nothing_is_kept_before_it_is_known_what_a_step_takes() -> None:
    spacing = Spacing(VirtualClock())
    spacing.end()  # of a step that nobody has seen begin
    assert not spacing.is_due(1, 100, 1.0, 1)


def test_a_step_that_was_held_up_is_not_what_a_step_takes() -> None:
    clock = VirtualClock()
    spacing = Spacing(clock)
    spacing.wrote(1.0)
    for held_s in (0.001, 1000.0):
        spacing.begin()
        clock.advance(held_s)
        spacing.end()
    assert not spacing.is_due(100, 100, 1.0, 1)
