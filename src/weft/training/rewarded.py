"""A learner that draws answers to tasks, and learns which of them were better.

    positions --Batches--> tasks --Drawing--> answers, each judged --Policy--> mean gradient --as ever--> parameters

Answers are drawn from the outer parameters of the last round, by noise that follows from the run, the task's place in
it and the answer's number: whoever has the same parameters draws the same, but for what two machines round otherwise.
So training steps of one round learn from answers that are at most a round old.

Held-out tasks are answered as `weft eval --tasks` answers: by the likeliest token.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial

import numpy as np
import torch
from jaxtyping import Float32
from msgspec import UNSET
from numpy.typing import NDArray
from torch import Tensor

from weft import rng
from weft.chat.speech import Speech
from weft.chat.task_rows import Asked, asked_in
from weft.clock import Clock
from weft.data.batch import Batches
from weft.data.rows import Batch, written
from weft.engine.draw import SEED_NBYTES, Drawing, Drawn
from weft.engine.engine import Engine, Wanted
from weft.engine.load import engine_of, free_nbytes, plan
from weft.engine.numbers import Kind
from weft.errors import NotFinite
from weft.events import Emit, Rewarded
from weft.model.config import plain
from weft.model.peft import merged
from weft.run.config import RunConfig
from weft.run.frozen import Frozen, LoadFrozen
from weft.run.machine import PeerConfig
from weft.run.reward import RewardConfig
from weft.training.backward import Objective
from weft.training.device import allocating
from weft.training.learner import Measured, nothing
from weft.training.policy import Answer, Group, Policy, answers_of, blank
from weft.training.steps import Mean
from weft.training.trainer import Trainer

AT_ONCE = 64  # texts that are drawn together


def noise_of(run: str, place: int, number: int) -> bytes:
    """Return the seed that an answer to the task at a place of the run's order is drawn by."""
    found = rng.integers64(rng.stream(0, "answer", run, place, number), SEED_NBYTES // 8)
    return found.astype("<u8").tobytes()


def _kind(device: torch.device) -> Kind:
    """Return the numbers that are as trained on a CPU, and fast on a GPU."""
    return "fp32" if device.type == "cpu" else "bf16"


def trainer_of(
    run: RunConfig, peer: PeerConfig, batches: Batches, emit: Emit, clock: Clock, frozen: LoadFrozen = Frozen
) -> Trainer:
    """Return the learner of a run, on this machine's device."""
    kind = Trainer if run.reward is UNSET else RewardedTrainer
    return kind(run, peer, batches, emit, clock, frozen)


class RewardedTrainer(Trainer):
    def __init__(
        self, run: RunConfig, peer: PeerConfig, batches: Batches, emit: Emit, clock: Clock, frozen: LoadFrozen
    ) -> None:
        super().__init__(run, peer, batches, emit, clock, frozen)
        self._outer: Float32[Tensor, " num"] | None = None  # that answers are drawn from, on the CPU
        self._engine: Engine | None = None  # of them; None: they have changed since

    @cached_property
    def _speech(self) -> Speech:
        speech = self._load_frozen().speech
        assert speech is not None
        return speech

    @property
    def _reward(self) -> RewardConfig:
        assert self._run.reward is not UNSET
        return self._run.reward

    def _objective(self, reference: Tensor | None, base: Tensor | None) -> Objective:  # noqa: ARG002  # it needs none
        return Policy(self._reward.clip)

    def _rehearse(self) -> None:
        train = self._run.train
        self._backward.rehearse(partial(blank, seq_len=train.seq_len), train.batch_size)

    def set_center(self, outer: Float32[Tensor, " num"]) -> None:
        super().set_center(outer)
        self._outer = outer
        self._let_go()

    def park(self) -> None:
        self._let_go()
        super().park()

    def _let_go(self) -> None:
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def _fill(self, positions: NDArray[np.int64]) -> Mean:
        groups = self.groups(positions)
        rewards = [answer.reward for group in groups for answer in group.answers]
        lengths = [len(answer.tokens) for group in groups for answer in group.answers]
        self._emit(
            Rewarded(
                reward=float(np.mean(rewards)),
                num_answers=len(rewards),
                num_teaching=sum(group.teaches for group in groups),
                num_tasks=len(groups),
                mean_length=float(np.mean(lengths)),
            )
        )
        batch = answers_of(groups, self._run.train.seq_len)
        if batch is None:
            self._model.zero_gradient()
            return Mean(loss=0.0, norm=0.0, num_samples=len(positions))
        loss, norm = self._backward.fill(batch)
        return Mean(loss=loss, norm=norm, num_samples=len(positions))

    def groups(self, positions: NDArray[np.int64]) -> list[Group]:
        """Return answers to the tasks at `positions`, drawn from the outer parameters of the last round, and judged."""
        if self._engine is None:
            assert self._outer is not None
            self._engine = self._engine_of(self._outer)
        samples = self._reward.samples
        asked = self._asked(self._batches.at(positions))
        drawings = [
            (task, Drawing(seed=noise_of(self._run.run, int(place), number), num_likeliest=0))
            for task, place in zip(asked, positions, strict=True)
            for number in range(samples)
        ]
        drawn = self._drawn(self._engine, drawings)
        return [
            Group(task.prompt, tuple(drawn[start : start + samples]))
            for task, start in zip(asked, range(0, len(drawn), samples), strict=True)
        ]

    def evaluate(
        self, vector: Float32[Tensor, " num"], batches: Batches, num_windows: int, between: Callable[[], None] = nothing
    ) -> Measured:
        """Return which share of held-out tasks the outer parameters `vector` answer wrongly, as `Measure.evaluate`."""
        engine, rewards = self._engine_of(vector), list[float]()
        try:
            for batch in batches.spread(num_windows, self._run.train.batch_size):
                asked = self._asked(batch)
                drawn = self._drawn(engine, [(task, Drawing(temperature=0.0, num_likeliest=0)) for task in asked])
                rewards += [answer.reward for answer in drawn]
                between()
        finally:
            engine.close()
        reward = float(np.mean(rewards))
        return Measured(1.0 - reward, len(rewards), reward=reward)

    # --- answers ---

    def _asked(self, batch: Batch) -> list[Asked]:
        rows = written(batch)[:, :-1].numpy()  # the last word is of the row behind
        return [asked_in(row, self._speech.tokenizer) for row in rows]

    def _engine_of(self, vector: Float32[Tensor, " num"]) -> Engine:
        run, device = self._run, self.device.torch
        config, kind = plain(run.model), _kind(device)
        with allocating("the model that answers are drawn from", self.device):
            if self._base_here is not None:
                vector = merged(run.model, self._base_here.cpu(), vector)
            planned = plan(config, device, kind, run.train.seq_len, None, free_nbytes(device))
            return engine_of(config, vector, device, planned, run.train.seq_len)

    def _drawn(self, engine: Engine, wanted: Sequence[tuple[Asked, Drawing]]) -> list[Answer]:
        """Return an answer to each."""
        with ThreadPoolExecutor(1) as pool:  # an event loop of its own, whatever this thread has
            return pool.submit(asyncio.run, self._all(engine, wanted)).result()

    async def _all(self, engine: Engine, wanted: Sequence[tuple[Asked, Drawing]]) -> list[Answer]:
        turns = asyncio.Semaphore(AT_ONCE)

        async def one(task: Asked, drawing: Drawing) -> Answer:
            async with turns:
                drawn = list[Drawn]()
                text = engine.begin(Wanted("rewards", task.prompt, self._reward.max_tokens, drawing))
                async for each in text:
                    drawn.append(each)
                    if each.token in self._speech.ends:  # which is learnt, too: an engine does not tell it
                        text.cancel()
                        break
            tokens = tuple(each.token for each in drawn)
            logprobs = tuple(each.logprob or 0.0 for each in drawn)
            if not np.isfinite(logprobs).all():
                raise NotFinite("a probability is NaN: the weights are broken. Resume from an earlier checkpoint.")
            return Answer(tokens, logprobs, float(task.check.is_right(self._speech.said(tokens))))

        return await asyncio.gather(*(one(*each) for each in wanted))
