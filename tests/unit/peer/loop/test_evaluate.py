"""Evaluation: it tells how far it has come on the loop's thread, whichever thread computes."""

import threading
from collections.abc import Callable
from contextlib import aclosing
from types import SimpleNamespace
from typing import Any

from charters import charter
from unit.hands import Hands
from unit.peer.test_chain import MEMBERS, RUN
from weft.events import Evaluated, Event, Working
from weft.ids import BranchId
from weft.peer.chain import genesis, open_branch
from weft.peer.loop.evaluate import Evaluator
from weft.progress import EVERY_S
from weft.tasks import Threads

ME = MEMBERS[0].peer
NUM_WINDOWS, BATCH = 8, 2


class Place:
    """What an evaluator needs of a peer."""

    def __init__(self, compute: Threads) -> None:
        self.told: list[tuple[Event, int]] = []
        self.clock, self.compute = Hands(), compute
        self.node = SimpleNamespace(peer=ME, peers=(), on_note=lambda _kind, _take: None)
        self.data = SimpleNamespace(
            batches=lambda _run, _split: SimpleNamespace(num_windows=NUM_WINDOWS),
            index=SimpleNamespace(nats_per_byte=lambda loss: loss / 2),
        )

    def emit(self, event: Event) -> None:
        self.told.append((event, threading.get_ident()))


class Trainer:
    """Takes a while for each batch, on the thread that calls."""

    def __init__(self, clock: Hands) -> None:
        self.clock, self.thread = clock, 0

    def evaluate(self, _outer: Any, _heldout: Any, windows: int, between: Callable[[], None]) -> tuple[float, int]:
        self.thread = threading.get_ident()
        for _ in range(windows // BATCH):
            self.clock.at += EVERY_S
            between()
        return 3.0, windows * 64


async def test_how_far_it_has_come_is_told_on_the_thread_of_the_loop() -> None:
    train = SimpleNamespace(evaluate_windows=100, evaluate_every=1, sample_every=0, batch_size=BATCH, seq_len=64)
    run: Any = SimpleNamespace(train=train, method=SimpleNamespace(graph=None))
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
