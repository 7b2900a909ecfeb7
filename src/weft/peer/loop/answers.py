"""Answers that a peer which only draws makes for those that train, before they are needed.

    who draws   ──DrawsAnswers(head)──►         all: it has the parameters after that manifest
    who trains  ──DrawAnswers(head, places)──►  who draws, one batch of tasks after the other
                ◄──AnswersDrawn(tokens)──

A lease's batches are given out from the last one on, to whoever has brought its one before; the peer itself goes from
the first one on, and draws what nobody has taken. So who draws fast draws most.

Failure:
- who draws is gone, late, or has the parameters of another round or branch: this peer draws that batch itself, after
  `PATIENCE_S` at most. That one is asked for no more in this round, and after some such rounds never.
- what it brought is none of these parameters' (`training.answers`): nothing is asked of it any more.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from weft.errors import CallFailed, NetError, PayloadError, PeerError, Refused, WireError
from weft.events import Notice
from weft.ids import Digest, PeerId, short
from weft.peer.context import Context
from weft.peer.messages import MAX_ANSWERS_NBYTES, MAX_PLACES, AnswersDrawn, DrawAnswers, DrawsAnswers
from weft.peer.state.replica import Replica
from weft.run.config import RunConfig
from weft.sync.records.messages import Manifest
from weft.tasks import Tasks
from weft.training.answers import Outdated, Tokens
from weft.training.rewarded import Brought, RewardedTrainer
from weft.wire import digest_of

CALL_S = 120.0  # that a peer may draw at one batch
PATIENCE_S = 30.0  # that this peer waits for one that it needs now
LOOK_S = 0.25
MAX_FAILED = 3  # rounds in which a peer brought nothing that was asked of it
WHY_PAUSED = "it draws answers for others, and trains nothing"


def num_at_once(run: RunConfig) -> int:
    """Return how many tasks' answers fit into one message; 0: not even one's do."""
    assert run.reward
    return min(MAX_PLACES, MAX_ANSWERS_NBYTES // (4 * run.reward.samples * run.reward.max_tokens))


def packed(groups: Sequence[tuple[Tokens, ...]]) -> AnswersDrawn:
    """Return answers as they are sent."""
    answers = [tokens for group in groups for tokens in group]
    flat = np.array([token for tokens in answers for token in tokens], "<u4")
    return AnswersDrawn(lengths=tuple(map(len, answers)), tokens=flat.tobytes())


def unpacked(drawn: AnswersDrawn, num_tasks: int, samples: int) -> list[tuple[Tokens, ...]]:
    """Return the answers to each of some tasks.

    Raises:
        PayloadError: they are not as many.
    """
    if len(drawn.lengths) != num_tasks * samples or 4 * sum(drawn.lengths) != len(drawn.tokens):
        raise PayloadError(f"{len(drawn.lengths)} answers came, and {num_tasks * samples} are due")
    flat, at, answers = np.frombuffer(drawn.tokens, "<u4").tolist(), 0, list[Tokens]()
    for length in drawn.lengths:
        answers.append(tuple(flat[at : at + length]))
        at += length
    return [tuple(answers[start : start + samples]) for start in range(0, len(answers), samples)]


class Draws:
    """Of a peer that draws for others.

    Args:
        rests: returns whether it is to draw nothing now.
    """

    def __init__(self, context: Context, trainer: RewardedTrainer, replica: Replica, rests: Callable[[], bool]) -> None:
        self._context, self._trainer, self._replica, self._rests = context, trainer, replica, rests
        self._turns = asyncio.Lock()
        self._asking: set[PeerId] = set()
        self._told: tuple[Digest, int] | None = None  # after which manifest it is, and which edition that is
        context.node.serve(DrawAnswers, self._draw)

    def tell(self) -> None:
        """Let all know that this peer has the parameters of another round, if it has."""
        head = self._replica.head
        if head is None or self._rests():
            return
        now = digest_of(head), self._trainer.edition
        if now != self._told:
            self._told = now
            for peer in self._context.node.peers:
                self._context.node.post(peer, DrawsAnswers(head=now[0]))

    async def _draw(self, peer: PeerId, asked: DrawAnswers) -> AnswersDrawn:
        run = self._replica.run
        assert isinstance(run, RunConfig)
        if peer in self._asking or len(set(asked.places)) != len(asked.places) > 0:
            raise CallFailed("one batch of tasks at a time, each once")
        if not 0 < len(asked.places) <= num_at_once(run):
            raise CallFailed(f"answers to 1 to {num_at_once(run)} tasks fit into a message")
        self._asking.add(peer)
        try:
            async with self._turns:
                if self._rests():
                    await self._context.compute.train(self._trainer.rest)
                    raise CallFailed("this peer rests")
                told = self._told
                if told is None or told[0] != asked.head:
                    raise CallFailed("this peer has the parameters of another round")
                places = np.array(asked.places, np.int64)
                try:
                    return packed(await self._context.compute.train(lambda: self._trainer.answers(places, told[1])))
                except Outdated as error:
                    raise CallFailed(str(error)) from None
        finally:
            self._asking.discard(peer)


class Helpers:
    """Those that draw, as a peer that trains has them.

    Args:
        is_over: returns whether this peer was told to stop, or to pause.
    """

    def __init__(
        self, context: Context, trainer: RewardedTrainer, replica: Replica, tasks: Tasks, is_over: Callable[[], bool]
    ) -> None:
        self._context, self._trainer, self._tasks = context, trainer, tasks
        self._is_over = is_over
        run = replica.run
        assert isinstance(run, RunConfig)
        assert run.reward
        self._samples, self._num_at_once = run.reward.samples, num_at_once(run)
        self._at: dict[PeerId, str] = {}  # after which manifest each is
        self._failed: Counter[PeerId] = Counter()
        self._busy: set[PeerId] = set()
        self._left: deque[tuple[int, ...]] = deque()  # batches that nobody has taken
        self._coming: dict[int, asyncio.Future[None]] = {}  # by place, those that somebody draws
        self._head: Digest | None = None  # of the lease
        self._edition = 0  # of this peer's parameters then
        context.node.on_note(DrawsAnswers, self._on_note)
        context.node.on_link(self._on_link)

    def begin(self, head: Manifest, leased: NDArray[np.int64], size: int) -> None:
        """Let the answers to what is left of a lease be drawn, as far as others are there to."""
        now = digest_of(head)
        if self._head == now:
            return
        self._head, self._edition = now, self._trainer.edition
        self._coming.clear()
        self._left.clear()
        if self._num_at_once:
            size = min(size, self._num_at_once)
            self._left.extend(tuple(leased[start : start + size].tolist()) for start in range(0, len(leased), size))
        self._ask()

    def end(self) -> None:
        """Ask for nothing more: no more of the lease is trained."""
        self._left.clear()

    async def ready(self, positions: NDArray[np.int64]) -> None:
        """Wait for what others are drawing of these; what nobody has begun this peer draws itself."""
        here = set(positions.tolist())
        self._left = deque(batch for batch in self._left if not here & set(batch))
        waited = {coming for place, coming in self._coming.items() if place in here and not coming.done()}
        until = self._context.clock.now() + PATIENCE_S
        while waited and not self._is_over() and self._context.clock.now() < until:
            _, waited = await asyncio.wait(waited, timeout=LOOK_S)

    def _ask(self) -> None:
        for peer, at in self._at.items():
            is_right = at == self._head and peer not in self._trainer.forgers and self._failed[peer] < MAX_FAILED
            if self._left and is_right and peer not in self._busy and self._context.node.is_linked(peer):
                batch, coming = self._left.pop(), asyncio.get_running_loop().create_future()
                self._coming |= dict.fromkeys(batch, coming)
                self._busy.add(peer)
                self._tasks.spawn(self._fetch(peer, batch, coming))

    async def _fetch(self, peer: PeerId, batch: tuple[int, ...], coming: "asyncio.Future[None]") -> None:
        head, edition = self._head, self._edition
        assert head is not None
        try:
            asked = DrawAnswers(head=head, places=batch)
            drawn = await self._context.node.call(peer, asked, AnswersDrawn, deadline_s=CALL_S)
            answers = unpacked(drawn, len(batch), self._samples)
            of_each = zip(batch, answers, strict=True)
            self._trainer.bring({place: Brought(peer, edition, each) for place, each in of_each})
            self._failed[peer] = 0
        except (PeerError, NetError, Refused, PayloadError, WireError) as error:
            self._at.pop(peer, None)  # until it has the parameters of another round
            self._failed[peer] += 1
            self._context.emit(Notice(text=f"{short(peer)} did not bring answers, so they are drawn here: {error}"))
        finally:
            self._busy.discard(peer)
            if not coming.done():
                coming.set_result(None)
        self._ask()

    async def _on_note(self, peer: PeerId, note: DrawsAnswers) -> None:
        self._at[peer] = note.head
        self._ask()

    def _on_link(self, peer: PeerId, is_up: bool, _reason: str) -> None:
        if not is_up:
            self._at.pop(peer, None)
