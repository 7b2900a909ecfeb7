"""Trainers of machines that do less than they claim, or something else, and of those that do not audit what they are
drawn for.

    own steps        made as `Way` says; what is named of a state is what came of it, and it comes of it again where an
                     auditor asks
    others' steps    made again as they are, or, where this machine looks away, not at all: it says nothing then, as
                     one that has no memory for them
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from msgspec import UNSET
from numpy.typing import NDArray

from weft import rng
from weft.errors import ConfigError
from weft.ids import Digest, Round
from weft.peer.audit.steps import Away
from weft.run.config import Genesis, RunConfig
from weft.run.staged import StagedConfig
from weft.run.trust import AuditedTrust
from weft.sim.cost import StepwiseCostTrainer
from weft.sim.scenario import OF_OPTIMIZERS, Audits, Cheat, Scenario, Way, audits_how
from weft.sim.world import Life, Member, World
from weft.sync.records.acts import Finding
from weft.sync.records.work import link
from weft.training.steps import Mean
from weft.training.trainer import Trainer
from weft.wire import seal

Ways = frozenset[Way]


class Cheating(Trainer):
    """Trains honestly until it is told otherwise.

    Attributes:
        ways: how its own step is made whose batch begins at a position.
        looks_away: whether it makes none of another's steps, whose batch begins at a position.
        made: how each step of its own was made, by that position.
    """

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.ways: Callable[[int], Ways] = lambda _first: frozenset()
        self.looks_away: Callable[[int], bool] = lambda _first: False
        self.made: dict[int, Ways] = {}
        self._is_lent = False
        self._now: Ways = frozenset()

    @contextmanager
    def lent(self) -> Iterator[None]:
        with super().lent():
            self._is_lent = True
            try:
                yield
            finally:
                self._is_lent = False

    def _fill(self, positions: NDArray[np.int64]) -> Mean:
        first = int(positions[0])
        if not self._is_lent:
            self.made[first] = self.ways(first)
        elif first not in self.made and self.looks_away(first):
            raise Away
        self._now = self.made.get(first, frozenset())
        if self._now & {"none", "noise"}:
            return Mean(loss=1.0, norm=1.0, num_samples=len(positions))
        return replace(super()._fill(self._read(positions)), num_samples=len(positions))

    def _read(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the samples that it trains on in the place of those that it says."""
        if "half a batch" in self._now:
            return positions[: max(1, len(positions) // 2)]
        if "one other sample" in self._now:
            return np.concatenate((positions[:-1], positions[-1:] + 1))
        if "other text" in self._now:
            return np.arange(len(positions))
        return positions

    def _descend(self, norm: float, rate: float) -> float:
        now = self._now
        if "noise" in now:  # about as far as training moves them
            steps = torch.arange(self._vector.numel(), dtype=torch.float64) + self._num_steps
            self._vector.add_(rate * torch.sin(12.9898 * steps).float())
        if now & {"none", "noise"} or ("half the steps" in now and self._num_steps % 2 == 0):
            return norm
        if "new optimizer" in now and self._num_steps % 2 == 0:
            self._scale_moments(0.0, self._num_steps)
        norm = super()._descend(norm, rate * (-1.0 if "upwards" in now else 0.99 if "slower" in now else 1.0))
        if "false moments" in now:
            self._scale_moments(1.5, self._num_steps + 1)
        return norm

    def _scale_moments(self, factor: float, num_steps: int) -> None:
        if self._optimizer is not None:
            state = {name: factor * value for name, value in self._optimizer.state().items()}
            self._optimizer.load(state, num_steps)


class CheatingCost(Cheating, StepwiseCostTrainer):
    """The same of machines that only take the time of training."""


def arrange_cheats(scenario: Scenario, world: World, *, has_model: bool) -> None:
    """Give machines that faults make cheats, or auditors that do not audit, trainers of that kind.

    Args:
        has_model: whether machines train, and do not only take the time of it.

    Raises:
        ConfigError: in this run they could not do that.
    """
    run = world.sealed.config
    for fault in scenario.fault:
        if isinstance(fault, Cheat | Audits):
            _require_possible(fault, run, has_model=has_model)
            make = Cheating if has_model else CheatingCost
            for name in scenario.called(fault.peer):
                member = world.member(name)
                member.make_trainer = partial(_made, make, member, scenario)


def _made(make: type[Cheating], member: Member, scenario: Scenario, *given: Any) -> Cheating:
    trainer = make(*given)
    trainer.made = member.made  # as on its disk: it comes to the same in its next life

    def ways(first: int) -> Ways:
        luck = float(rng.stream(member.world.seed, "cheat", member.name, first).random())
        return frozenset(fault.work for fault in member.in_force if isinstance(fault, Cheat) and luck < fault.share)

    def looks_away(first: int) -> bool:
        colluding = (fault for fault in member.in_force if isinstance(fault, Audits) and fault.how == "collude")
        friends = (member.world.member(name) for fault in colluding for name in scenario.called(fault.peer))
        return "lazy" in audits_how(member.in_force) or any(first in each.made for each in friends)

    trainer.ways, trainer.looks_away = ways, looks_away
    return trainer


def _require_possible(fault: Cheat | Audits, run: Genesis, *, has_model: bool) -> None:
    where = f"fault of {fault.peer}"
    if isinstance(run, StagedConfig) or not isinstance(run, RunConfig):
        raise ConfigError(f"{where}: peers of a run with stages neither cheat nor audit here. Leave the fault out.")
    if isinstance(fault, Audits) and not isinstance(run.trust, AuditedTrust):
        raise ConfigError(f'{where}: nobody audits in this run. Set trust.type to "audited", or leave the fault out.')
    if run.method.sends_gradient or run.reward is not UNSET:
        raise ConfigError(
            f"{where}: who cheats makes training steps of its own, on the run's text: neither gradients that are sent, "
            "nor answers that are rewarded. Choose another method, or leave the fault out."
        )
    if not has_model and isinstance(fault, Cheat) and fault.work in OF_OPTIMIZERS:
        raise ConfigError(
            f"{where}: machines that only take the time of training have no optimizer. Set compute to "
            '"real", or choose another work.'
        )


def accuse(life: Life, round: Round) -> None:
    """Say of all that a round counts that it is something else, signed by a member."""
    member, peer = life.member, life.peer
    if peer.rounds is None or peer.head is None or peer.head.round != round:
        return
    found = [
        Finding(
            run=peer.head.run,
            peer=each.peer,
            round=round,
            work=each.work,
            before=link(work.segments, 1, 0).before,
            outcome="differs",
            why="it says so",
        )
        for each in peer.head.contributions
        if each.peer != member.id and each.work is not UNSET and (work := peer.rounds.works.known(Digest(each.work)))
    ]
    for each in found:
        peer.rounds.acts.take(seal(member.identity, each))
