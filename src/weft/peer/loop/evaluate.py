"""Held-out loss and samples of the outer parameters, made by one member for all.

The leader of a round evaluates after its outer step and tells the others; replicas are equal, so one figure holds for
all.
"""

import asyncio
import math
from collections.abc import Callable
from contextlib import suppress

from msgspec import UNSET, UnsetType
from torch import Tensor

from weft.events import Diverged, Evaluated, Event, Sampled
from weft.ids import PeerId, Round, Tokens
from weft.peer.companion import Parameters, Unmeasured
from weft.peer.context import Context
from weft.peer.messages import Evaluation
from weft.peer.state.replica import Replica
from weft.progress import Meter
from weft.run.config import DpoConfig, OrpoConfig, PreferenceConfig, RunConfig
from weft.sync.records.messages import Manifest
from weft.training.learner import Learner, Measure, Measured

SAMPLE_TOKENS, SAMPLE_S = 300, 30.0  # at most; no step is made meanwhile
FAR_ABOVE = 1.5  # times the loss of who knows nothing: first weights are a little above it, and so are first rounds
WAIT_S = 10.0  # for the last leader's evaluation, before another makes it


class _Stopped(Exception):
    """This peer is to end."""


class Evaluator(Unmeasured):
    """Evaluates and samples for one peer, and keeps the newest figures it made or heard.

    Args:
        is_stopping: says, from any thread, that this peer is to end or to pause: what goes on breaks off.
    """

    def __init__(
        self, run: RunConfig, context: Context, trainer: Measure, replica: Parameters, is_stopping: Callable[[], bool]
    ) -> None:
        assert context.data is not None
        self._run = run
        self._context = context
        self._data = context.data
        self._trainer = trainer
        self._replica = replica
        self._is_stopping = is_stopping
        # As long as they were at first, whatever was amended since: figures of all rounds can be compared.
        self._heldout = self._data.batches(run, "heldout")
        self._first: Evaluation | None = None  # of what the run began with, where this peer has measured that
        self._has_diverged = False
        self._news = asyncio.Event()
        self._on_heard: list[Callable[[Evaluation], object]] = []
        context.node.on_note(Evaluation, self._on_evaluation)

    def on_heard(self, callback: Callable[[Evaluation], object]) -> None:
        self._on_heard.append(callback)

    async def begin(self) -> None:
        """Evaluate the weights that a run begins with, where they have learnt something before: what training makes of
        them is told by that.

        Not where the model is cut: others hold the rest of it, and are not here yet.
        """
        if not self._run.is_seeded and self._context.companion is None:
            with suppress(_Stopped):
                self._first = await self._evaluation(Round(0), Tokens(0))
                self._take(self._first)

    def tell_begun(self) -> None:
        if self._first is not None:
            self._post(self._first)

    async def maybe(self, manifest: Manifest) -> None:
        """Evaluate and sample where the run asks for it after this round; break off when this peer is to end.

        Where members exchange with neighbours, whenever they have made the mean.
        """
        train, is_at_means = self._run.train, self._run.method.graph is not None
        if manifest.is_gossip:
            return  # nobody holds the mean
        with suppress(_Stopped):
            if train.evaluate_every and (is_at_means or manifest.round % train.evaluate_every == 0):
                await self._evaluate(manifest)
            if train.sample_every and (is_at_means or manifest.round % train.sample_every == 0):
                await self._sample(manifest.round)

    async def finish(self) -> None:
        """Make sure that the final state is evaluated, and sample it."""
        head = self._replica.head
        if head is None:
            return
        if head.leader != self._context.node.peer:
            with suppress(TimeoutError):
                async with asyncio.timeout(WAIT_S):
                    while self.evaluated_at != head.round:
                        self._news.clear()
                        await self._news.wait()
        with suppress(_Stopped):
            if self.evaluated_at != head.round:
                await self._evaluate(head)
            await self._sample(head.round)

    def _between(self) -> None:
        if self._is_stopping():
            raise _Stopped

    async def _evaluate(self, head: Manifest) -> None:
        evaluation = await self._evaluation(head.round, head.committed_tokens)
        self._take(evaluation)
        self._post(evaluation)

    def _post(self, evaluation: Evaluation) -> None:
        for peer in self._context.node.peers:
            self._context.node.post(peer, evaluation)

    async def _evaluation(self, round: Round, committed_tokens: Tokens) -> Evaluation:
        self._between()
        outer, train = self._replica.outer, self._run.train
        windows = min(train.evaluate_windows, self._heldout.num_windows)

        def between() -> None:
            meter.add(train.batch_size)
            self._between()

        loop = asyncio.get_running_loop()

        def emit(event: Event) -> None:  # from the thread that computes
            loop.call_soon_threadsafe(self._context.emit, event)

        with Meter("evaluating", "windows", emit, self._context.clock, windows) as meter:
            found = await self._measured(outer, windows, between)
        return Evaluation(
            round=round,
            loss=found.loss,
            nats_per_byte=self._data.index.nats_per_byte(found.loss),
            num_tokens=found.num,
            committed_tokens=committed_tokens,
            preferred=UNSET if found.preferred is None else found.preferred,
            reward=UNSET if found.reward is None else found.reward,
        )

    async def _measured(self, outer: Tensor, windows: int, between: Callable[[], None]) -> Measured:
        return await self._context.compute.train(
            lambda: self._trainer.evaluate(outer, self._heldout, windows, between),
            windows * self._run.train.seq_len // 3,  # forward only: backward is twice as much
        )

    async def _sample(self, round: Round) -> None:
        self._between()
        outer, tokenizer = self._replica.outer, self._data.tokenizer
        prompt, seed = self._run.train.sample_prompt, self._run.seed
        self.text = await self._context.compute.train(
            lambda: self._trainer.sample(outer, tokenizer, prompt, SAMPLE_TOKENS, seed, self._between, SAMPLE_S)
        )
        self._context.emit(Sampled(round=round, prompt=prompt, text=self.text))

    async def _on_evaluation(self, _peer: PeerId, evaluation: Evaluation) -> None:
        head = self._replica.head
        is_of_pairs, is_of_tasks = self._run.train.loss is not UNSET, self._run.reward is not UNSET
        if (evaluation.preferred is not UNSET) > is_of_pairs or (evaluation.reward is not UNSET) > is_of_tasks:
            return  # of another run's kind
        if evaluation.round <= (0 if head is None else head.round + 1):
            self._take(evaluation)
            for callback in self._on_heard:
                callback(evaluation)

    def _take(self, evaluation: Evaluation) -> None:
        known, head = self.evaluated_at, self._replica.head
        is_elsewhere = known is not None and head is not None and known > head.round + 1  # of a branch that was left
        if known is None or evaluation.round >= known or is_elsewhere:  # else it comes late: of a round before
            self.evaluated_at = Round(evaluation.round)
            self.loss, self.nats_per_byte = evaluation.loss, evaluation.nats_per_byte
            self.preferred = None if evaluation.preferred is UNSET else evaluation.preferred
            self.reward = None if evaluation.reward is UNSET else evaluation.reward
            self._news.set()
        self._context.emit(
            Evaluated(
                round=evaluation.round,
                loss=evaluation.loss,
                nats_per_byte=evaluation.nats_per_byte,
                num_tokens=evaluation.num_tokens,
                committed_tokens=Tokens(evaluation.committed_tokens),
                preferred=evaluation.preferred,
                reward=evaluation.reward,
            )
        )
        self._tell_if_diverged(evaluation)

    def _tell_if_diverged(self, evaluation: Evaluation) -> None:
        """Say at once, and once, that the model is far worse than one that gives every token the same chance."""
        nothing = _of_nothing(self._run.train.loss, self._data.index.vocab_size)
        was_diverged, self._has_diverged = self._has_diverged, not evaluation.loss <= FAR_ABOVE * nothing
        if evaluation.round and self._has_diverged and not was_diverged:
            self._context.emit(
                Diverged(
                    round=evaluation.round,
                    committed_tokens=Tokens(evaluation.committed_tokens),
                    loss=evaluation.loss,
                    nothing=nothing,
                )
            )


def make_evaluator(context: Context, trainer: Learner, replica: Replica, is_stopping: Callable[[], bool]) -> Unmeasured:
    """Return what measures the outer parameters of a replica's run."""
    run = replica.run
    if not isinstance(run, RunConfig):
        return Unmeasured()
    if context.companion is not None:
        return context.companion.evaluator(replica, is_stopping)
    assert isinstance(trainer, Measure)
    return Evaluator(run, context, trainer, replica, is_stopping)


def evaluator_of(manifest: Manifest) -> PeerId:
    """Return who evaluates after a round: its leader, or where that trains nothing, who is the first to."""
    trains = [contribution.peer for contribution in manifest.contributions]
    return manifest.leader if manifest.leader in trains or not trains else min(trains)


def _of_nothing(loss: PreferenceConfig | UnsetType, vocab_size: int) -> float:
    """Return the loss of a model that gives every token the same chance, and so prefers no answer."""
    match loss:
        case DpoConfig():
            return math.log(2)
        case OrpoConfig(weight=weight):
            return math.log(vocab_size) + weight * math.log(2)
    return math.log(vocab_size)
