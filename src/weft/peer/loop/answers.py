"""Answers that a peer which only draws makes for those that train, before they are needed.

    who draws   ──DrawsAnswers(round)──►         all: it has the parameters of that round
    who trains  ──DrawAnswers(round, places)──►  who draws, one batch of tasks after the other
                ◄──AnswersDrawn(tokens)──

A batch belongs to who takes it first: a peer that draws, as soon as it has brought its last one, or this peer itself,
where it has come to it. So who draws fast draws most, and nobody waits for who does not draw.

Failure:
- who draws is gone, late, or at another round: this peer draws that batch itself.
- what it brought is none of these parameters' (`training.answers`): nothing is asked of it any more.
"""

import asyncio
from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from weft.errors import CallFailed, NetError, PayloadError, PeerError, Refused, WireError
from weft.events import Notice
from weft.ids import PeerId, Round, short
from weft.peer.context import Context
from weft.peer.messages import MAX_ANSWERS_NBYTES, MAX_PLACES, AnswersDrawn, DrawAnswers, DrawsAnswers
from weft.peer.state.replica import Replica
from weft.run.config import RunConfig
from weft.sync.records.messages import Manifest
from weft.tasks import Tasks
from weft.training.answers import Tokens
from weft.training.rewarded import Brought, RewardedTrainer

CALL_S = 120.0  # until a batch has come
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
    """Of a peer that draws for others."""

    def __init__(self, context: Context, trainer: RewardedTrainer, replica: Replica) -> None:
        self._context, self._trainer, self._replica = context, trainer, replica
        self._turns = asyncio.Lock()
        self._told: Round | None = None
        context.node.serve(DrawAnswers, self._draw)

    def tell(self) -> None:
        """Let all know that this peer has the parameters of another round, if it has."""
        head = self._replica.head
        if head is not None and head.round != self._told:
            self._told = head.round
            for peer in self._context.node.peers:
                self._context.node.post(peer, DrawsAnswers(round=head.round))

    async def _draw(self, _peer: PeerId, asked: DrawAnswers) -> AnswersDrawn:
        async with self._turns:
            head = self._replica.head
            if head is None or head.round != asked.round:
                raise CallFailed(f"this peer is at round {None if head is None else head.round}")
            places = np.array(asked.places, np.int64)
            return packed(await self._context.compute.train(lambda: self._trainer.answers(places)))


class Helpers:
    """Those that draw, as a peer that trains has them."""

    def __init__(self, context: Context, trainer: RewardedTrainer, replica: Replica, tasks: Tasks) -> None:
        self._context, self._trainer, self._replica, self._tasks = context, trainer, replica, tasks
        self._at: dict[PeerId, int] = {}  # at which round each is
        self._busy: set[PeerId] = set()
        self._left: deque[tuple[int, ...]] = deque()  # batches that nobody has taken
        self._coming: dict[int, asyncio.Future[None]] = {}  # by place, those that somebody draws
        self._round = -1  # of which the lease is
        self._edition = 0  # of this peer's parameters of that round
        context.node.on_note(DrawsAnswers, self._on_note)

    def begin(self, head: Manifest, leased: NDArray[np.int64], size: int) -> None:
        """Let the answers to a lease's tasks be drawn, as far as others are there to."""
        if self._round == head.round:
            return
        self._round, self._edition = head.round, self._trainer.edition
        self._coming.clear()
        self._left.clear()
        run = self._replica.config
        assert isinstance(run, RunConfig)
        if at_once := num_at_once(run):
            size = min(size, at_once)
            self._left.extend(tuple(leased[start : start + size].tolist()) for start in range(0, len(leased), size))
        self._ask()

    async def ready(self, positions: NDArray[np.int64]) -> None:
        """Wait for what others are drawing of these; what nobody has begun this peer draws itself."""
        here = set(positions.tolist())
        self._left = deque(batch for batch in self._left if not here & set(batch))
        waited = [coming for place, coming in self._coming.items() if place in here]
        if waited:
            await asyncio.wait(waited)

    def _ask(self) -> None:
        for peer, round in self._at.items():
            is_right = round == self._round and peer not in self._trainer.forgers
            if self._left and is_right and peer not in self._busy and self._context.node.is_linked(peer):
                batch, coming = self._left.popleft(), asyncio.get_running_loop().create_future()
                self._coming |= dict.fromkeys(batch, coming)
                self._busy.add(peer)
                self._tasks.spawn(self._fetch(peer, Round(round), batch, coming))

    async def _fetch(self, peer: PeerId, round: Round, batch: tuple[int, ...], coming: "asyncio.Future[None]") -> None:
        edition = self._edition
        try:
            asked = DrawAnswers(round=round, places=batch)
            drawn = await self._context.node.call(peer, asked, AnswersDrawn, deadline_s=CALL_S)
            run = self._replica.config
            assert isinstance(run, RunConfig)
            assert run.reward
            answers = unpacked(drawn, len(batch), run.reward.samples)
            of_each = zip(batch, answers, strict=True)
            self._trainer.bring({place: Brought(peer, edition, each) for place, each in of_each})
        except (PeerError, NetError, Refused, PayloadError, WireError) as error:
            self._at.pop(peer, None)  # until it says again that it draws
            self._context.emit(Notice(text=f"{short(peer)} did not bring answers, so they are drawn here: {error}"))
        finally:
            self._busy.discard(peer)
            if not coming.done():
                coming.set_result(None)
            self._ask()

    async def _on_note(self, peer: PeerId, note: DrawsAnswers) -> None:
        self._at[peer] = note.round
        self._ask()
