"""Evaluation: it tells how far it has come on the loop's thread, whichever thread computes."""

import threading
from collections.abc import Awaitable, Callable, Iterable
from contextlib import aclosing
from types import SimpleNamespace
from typing import Any

from msgspec import UNSET

from charters import charter
from unit.hands import Hands
from unit.peer.test_chain import MEMBERS, RUN
from weft.events import Diverged, Evaluated, Event, Preferred, Working
from weft.ids import BranchId
from weft.peer.chain import genesis, open_branch
from weft.peer.loop.evaluate import Evaluator
from weft.peer.messages import Evaluation
from weft.progress import EVERY_S
from weft.run.config import DpoConfig, OrpoConfig
from weft.tasks import Threads
from weft.training.learner import Measured

ME = MEMBERS[0].peer
NUM_WINDOWS, BATCH = 8, 2
TRAIN: dict[str, Any] = {"evaluate_windows": 100, "sample_every": 0, "batch_size": BATCH, "seq_len": 64, "loss": UNSET}


class Place:
    """What an evaluator needs of a peer."""

    def __init__(self, compute: Threads) -> None:
        self.told: list[tuple[Event, int]] = []
        self.clock, self.compute, self.companion = Hands(), compute, None
        self.sent: list[Evaluation] = []
        post = lambda _peer, evaluation: self.sent.append(evaluation)  # noqa: E731
        self.node = SimpleNamespace(peer=ME, peers=(MEMBERS[1].peer,), on_note=lambda _kind, _take: None, post=post)
        self.data = SimpleNamespace(
            batches=lambda _run, _split: SimpleNamespace(num_windows=NUM_WINDOWS),
            index=SimpleNamespace(nats_per_byte=lambda loss: loss / 2, vocab_size=257),
        )

    def emit(self, event: Event) -> None:
        self.told.append((event, threading.get_ident()))


class Trainer:
    """Takes a while for each batch, on the thread that calls."""

    def __init__(self, clock: Hands) -> None:
        self.clock, self.thread = clock, 0

    def evaluate(self, _outer: Any, _heldout: Any, windows: int, between: Callable[[], None]) -> Measured:
        self.thread = threading.get_ident()
        for _ in range(windows // BATCH):
            self.clock.at += EVERY_S
            between()
        return Measured(3.0, windows * 64)


async def test_how_far_it_has_come_is_told_on_the_thread_of_the_loop() -> None:
    train = SimpleNamespace(**TRAIN, evaluate_every=1)
    run: Any = SimpleNamespace(train=train, method=SimpleNamespace(graph=None), reward=UNSET)
    head = open_branch(genesis(RUN, ME, charter(1)), [ME], ME, BranchId(RUN))
    async with aclosing(Threads()) as compute:
        place: Any = Place(compute)
        trainer: Any = Trainer(place.clock)
        replica: Any = SimpleNamespace(outer=None, head=head)
        await Evaluator(run, place, trainer, replica, lambda: False).maybe(head)
    assert trainer.thread != threading.get_ident()
    works = [event.done for event, _ in place.told if isinstance(event, Working)]
    assert works == [2, 4, 6, 8, 8]
    assert sum(isinstance(event, Evaluated) for event, _ in place.told) == 1
    assert {thread for _, thread in place.told} == {threading.get_ident()}


async def hear(
    losses: Iterable[tuple[int, float]], loss_of: Any = UNSET, preferred: Any = UNSET
) -> tuple[Evaluator, Place]:
    """Return an evaluator that stands in round 10 once another has told it of these rounds, and its place."""
    run: Any = SimpleNamespace(train=SimpleNamespace(loss=loss_of), method=SimpleNamespace(graph=None), reward=UNSET)
    async with aclosing(Threads()) as compute:
        place: Any = Place(compute)
        takes: list[Callable[[Any, Evaluation], Awaitable[None]]] = []
        place.node.on_note = lambda _kind, take: takes.append(take)
        replica: Any = SimpleNamespace(outer=None, head=SimpleNamespace(round=10))
        trainer: Any = None
        evaluator = Evaluator(run, place, trainer, replica, lambda: False)
        for round, loss in losses:
            made = Evaluation(
                round=round,
                loss=loss,
                nats_per_byte=loss,
                num_tokens=9,
                committed_tokens=100 * round,
                preferred=preferred,
            )
            await takes[0](ME, made)
    return evaluator, place


async def test_an_evaluation_that_comes_late_does_not_take_the_place_of_a_newer_one() -> None:
    evaluator, place = await hear(((10, 2.0), (5, 3.0)))
    assert (evaluator.evaluated_at, evaluator.loss) == (10, 2.0)
    told = [event.round for event, _ in place.told if isinstance(event, Evaluated)]
    assert told == [10, 5]  # the curve has both


async def test_what_a_run_begins_with_is_measured_before_others_come_and_told_once_it_begins() -> None:
    train = SimpleNamespace(**TRAIN, evaluate_every=0)
    async with aclosing(Threads()) as compute:
        for is_seeded, wanted in ((True, []), (False, [(0, 3.0)])):
            place: Any = Place(compute)
            run: Any = SimpleNamespace(
                train=train, method=SimpleNamespace(graph=None), reward=UNSET, is_seeded=is_seeded
            )
            replica: Any = SimpleNamespace(outer=None, head=None)
            trainer: Any = Trainer(place.clock)
            evaluator = Evaluator(run, place, trainer, replica, lambda: False)
            await evaluator.begin()
            assert place.sent == []
            evaluator.tell_begun()
            assert [(each.round, each.loss) for each in place.sent] == wanted
            assert [(each.round, each.loss) for each, _ in place.told if isinstance(each, Evaluated)] == wanted


async def test_a_loss_far_above_knowing_nothing_is_said_at_once_and_once() -> None:
    _, place = await hear(enumerate((9.0, 5.7, 239.0, 240.0, 5.0, float("nan"))))
    told = [(event.round, round_to(event.nothing)) for event, _ in place.told if isinstance(event, Diverged)]
    assert told == [(2, 5.55), (5, 5.55)]  # what it began with is nobody's rate


async def test_knowing_nothing_of_pairs_is_preferring_none() -> None:
    for loss, nothing in ((DpoConfig(), 0.69), (OrpoConfig(weight=0.5), 5.90)):
        _, place = await hear(enumerate((0.6, 0.9, 12.0)), loss)
        told = [(event.round, round_to(event.nothing)) for event, _ in place.told if isinstance(event, Diverged)]
        assert told == [(2, nothing)]


async def test_what_is_said_of_pairs_is_not_heard_in_a_run_without() -> None:
    pairs = Preferred(accuracy=0.5, margin=0.0)
    for loss, wanted in ((UNSET, []), (DpoConfig(), [pairs])):
        _, place = await hear([(1, 0.6)], loss, pairs)
        assert [event.preferred for event, _ in place.told if isinstance(event, Evaluated)] == wanted


def round_to(number: float) -> float:
    return round(number, 2)
