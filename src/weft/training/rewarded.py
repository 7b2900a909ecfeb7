"""A learner that draws answers to tasks, and learns which of them were better.

    positions --Batches--> tasks --Drawer--> answers, each judged --Policy--> mean gradient --as ever--> parameters

Answers are drawn from the outer parameters of the last round: so training steps of one round learn from answers that
are at most a round old. Others may have drawn them (`bring`); they are checked before anything is learnt from them.

Held-out tasks are answered as `weft eval --tasks` answers: by the likeliest token.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import isfinite

import numpy as np
from jaxtyping import Float32
from msgspec import UNSET
from numpy.typing import NDArray
from torch import Tensor

from weft.clock import Clock
from weft.data.batch import Batches
from weft.events import AnswersForged, Emit, Rewarded
from weft.ids import PeerId
from weft.model.flat import Base
from weft.run.config import RunConfig
from weft.run.frozen import Frozen, LoadFrozen
from weft.run.machine import PeerConfig
from weft.run.reward import RewardConfig
from weft.training.answers import Drawer, Forged, Tokens
from weft.training.backward import Objective
from weft.training.judging import judge_of
from weft.training.learner import Measured, nothing
from weft.training.policy import Group, Policy, answers_of, blank
from weft.training.steps import Mean
from weft.training.trainer import Trainer


@dataclass(frozen=True)
class Brought:
    """What somebody else has drawn to one task.

    Args:
        edition: `RewardedTrainer.edition` of the parameters that it was drawn from.
    """

    by: PeerId
    edition: int
    answers: tuple[Tokens, ...]


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
        self._drawer: Drawer | None = None  # None: it has no device yet
        self._teaches = False  # whether the last answers do
        self._brought: dict[int, Brought] = {}
        self.forgers: dict[PeerId, str] = {}  # of whom nothing is taken any more, and why

    def _objective(self, reference: Tensor | None, base: Base | None) -> Objective:  # noqa: ARG002  # it needs none
        return Policy(self._reward.clip)

    def _rehearse(self) -> None:
        self._backward.rehearse(partial(blank, seq_len=self._run.train.seq_len), self._run.train.batch_size)

    def set_center(self, outer: Float32[Tensor, " num"]) -> None:
        super().set_center(outer)
        if self._drawer is None:
            judge = None if self._peer.is_drawing_only else judge_of(self._reward)
            frozen, base = self._load_frozen(), self._base_here
            if isinstance(base, Tensor) and base.device.type == "cpu":
                frozen = replace(frozen, base=base)  # once in memory
            self._drawer = Drawer(self._run, self.device, frozen, judge)
        self._drawer.renew(outer)
        self._brought.clear()

    @property
    def edition(self) -> int:
        """How often the parameters that answers are drawn from have changed."""
        return 0 if self._drawer is None else self._drawer.edition

    def park(self) -> None:
        self.rest()
        super().park()

    def bring(self, brought: Mapping[int, Brought]) -> None:
        """Take answers that others have drawn from the same parameters, by the places of their tasks."""
        self._brought.update(brought)

    def answers(self, places: NDArray[np.int64], edition: int) -> list[tuple[Tokens, ...]]:
        """Return answers to the tasks at `places`, for somebody else to learn from.

        Raises:
            Outdated: the parameters are not those of this edition any more.
        """
        drawer = self._drawer_here
        return drawer.for_others(drawer.asked(self._batches.at(places)), places.tolist(), edition)

    def rest(self) -> None:
        """Take no memory of the device until answers are drawn again."""
        if self._drawer is not None:
            self._drawer.let_go()

    def groups(self, places: NDArray[np.int64]) -> tuple[list[Group], int]:
        """Return answers to the tasks at `places`, judged, and to how many of them others have drawn them."""
        drawer, found = self._drawer_here, dict[int, Group]()
        asked = dict(zip(map(int, places), drawer.asked(self._batches.at(places)), strict=True))
        for place in asked:
            brought = self._brought.pop(place, None)
            if brought is None or brought.edition != self.edition or brought.by in self.forgers:
                continue
            try:
                found[place] = drawer.checked(asked[place], place, brought.answers)
            except Forged as error:
                self.forgers[brought.by] = str(error)
                self._emit(AnswersForged(member=brought.by, place=place, reason=str(error)))
        left, num_brought = [place for place in asked if place not in found], len(found)
        found |= zip(left, drawer.drawn([asked[place] for place in left], left), strict=True)
        return [found[place] for place in asked], num_brought

    @property
    def _reward(self) -> RewardConfig:
        assert self._run.reward is not UNSET
        return self._run.reward

    @property
    def _drawer_here(self) -> Drawer:
        assert self._drawer is not None, "it has no parameters to draw from"
        return self._drawer

    def _fill(self, positions: NDArray[np.int64]) -> Mean:
        groups, num_brought = self.groups(positions)
        told = _told(groups, num_brought)
        self._emit(told)
        batch, loss, norm = answers_of(groups, self._run.train.seq_len), 0.0, 0.0
        self._teaches = batch is not None
        if batch is None:
            self._model.zero_gradient()
        else:
            loss, norm = self._backward.fill(batch)
        # What lacks to the best reward falls as the model learns; the policy's loss says only that it can be computed.
        return Mean(loss=1.0 - told.reward if isfinite(loss) else loss, norm=norm, num_samples=len(positions))

    def _descend(self, norm: float, rate: float) -> float:
        return super()._descend(norm, rate) if self._teaches else 0.0  # moments and decay move nothing by themselves

    def evaluate(
        self, vector: Float32[Tensor, " num"], batches: Batches, num_windows: int, between: Callable[[], None] = nothing
    ) -> Measured:
        """Return what the mean reward of answers to held-out tasks, by the outer parameters `vector`, lacks to 1; as
        `Measure.evaluate`."""
        rewards, drawer = list[float](), self._drawer_here
        asked = map(drawer.asked, batches.spread(num_windows, self._run.train.batch_size))
        for answers in drawer.likeliest(vector, asked):
            rewards += [answer.reward for answer in answers]
            between()
        reward = float(np.mean(rewards))
        return Measured(1.0 - reward, len(rewards), reward=reward)


def _told(groups: Sequence[Group], num_brought: int) -> Rewarded:
    answers = [answer for group in groups for answer in group.answers]
    return Rewarded(
        reward=float(np.mean([answer.reward for answer in answers])),
        num_answers=len(answers),
        num_tasks=len(groups),
        num_teaching=sum(group.teaches for group in groups),
        num_brought=num_brought,
        mean_length=float(np.mean([len(answer.tokens) for answer in answers])),
    )
