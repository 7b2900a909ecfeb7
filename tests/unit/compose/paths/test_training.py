"""Steps of a path, handed in to several runs at once: in step with them, and out of step, where paths could wait for
each other in a circle."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from weft.clock import SystemClock
from weft.compose.paths.levels import Module
from weft.compose.paths.training import HandingIn, Part
from weft.errors import PeerError

A, B = Module(0, 0), Module(1, 0)
EVERY, ROUNDS = 4, 3
ENDS_S = 30.0


@dataclass(eq=False)
class Member:
    """One of the members of a run, a round of which ends once all of them have made their steps.

    Args:
        left: steps that it makes until then.
    """

    company: "Company"
    given: list[Tensor]
    left: int = EVERY
    num_steps: int = 0
    seen: list[float] = field(default_factory=list)  # what it had at the end of each round
    reason: str = "complete"

    @property
    def round(self) -> int:
        return self.company.round

    @property
    def progress(self) -> float:
        return self.round / ROUNDS

    @property
    def outcome(self) -> "Member | None":
        return self if self.company.is_over else None

    def start(self) -> None:
        pass

    def step(self, num_samples: int | None = None, loss: float | Tensor | None = None) -> bool:
        assert num_samples == 2
        assert loss == 0.5
        self.num_steps += 1
        return self.company.meet(self)

    def close(self, error: BaseException | None = None) -> None:
        assert error is not None
        self.company.leave()


class Company:
    def __init__(self, slowness_s: float = 0.0) -> None:
        self.members = list[Member]()
        self.round = 0
        self.is_over = False
        self._slowness_s = slowness_s
        self._changed = threading.Condition()

    def join(self, left: int = EVERY) -> Part:
        member = Member(self, [torch.zeros(1)], left)
        self.members.append(member)
        return Part(member, [torch.zeros(1)], member.given)

    def meet(self, member: Member) -> bool:
        with self._changed:
            now = self.round
            member.left -= 1
            if member.left > 0:
                return True
            member.seen.append(float(member.given[0]))
            if all(each.left <= 0 for each in self.members):
                self._changed.wait(self._slowness_s)
                for each in self.members:
                    each.left = EVERY
                    each.given[0].fill_(100.0 * (now + 1))
                self.round += 1
                self.is_over = self.is_over or self.round == ROUNDS
                self._changed.notify_all()
            while self.round == now and not self.is_over:
                assert self._changed.wait(ENDS_S)
            return not self.is_over

    def leave(self) -> None:
        with self._changed:
            self.is_over = True
            self._changed.notify_all()


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as found:
        yield found


def trained(parts: dict[Module, Part], threads: ThreadPoolExecutor, patience_s: float) -> int:
    """Train a path, each step of which adds 1 to every number; return how many it has made."""
    runs, num_steps = HandingIn(parts, threads, SystemClock(), lambda _: patience_s), 0
    try:
        runs.start()
        while not runs.is_over:
            with runs.step():
                for part in parts.values():
                    part.mine[0].add_(1)
            num_steps += 1
            runs.hand_in(2, 0.5)
    except BaseException as error:
        runs.close(error)
        raise
    return num_steps


def both(one: dict[Module, Part], other: dict[Module, Part], threads: ThreadPoolExecutor, patience_s: float) -> None:
    for done in [threads.submit(trained, each, threads, patience_s) for each in (one, other)]:
        done.result(ENDS_S)


def test_a_path_in_step_with_its_runs_waits_for_the_slowest(threads: ThreadPoolExecutor) -> None:
    quick, slow = Company(), Company(slowness_s=0.05)
    parts = {A: quick.join(), B: slow.join()}
    assert trained(parts, threads, ENDS_S) == EVERY * ROUNDS
    assert [each.members[0].num_steps for each in (quick, slow)] == [EVERY * ROUNDS] * 2
    for part in parts.values():
        assert part.run.seen == [EVERY, 100 + EVERY, 200 + EVERY]  # type: ignore[attr-defined]
        assert float(part.mine[0]) == 300  # what the run said last


def test_paths_that_are_out_of_step_do_not_wait_for_each_other_for_ever(threads: ThreadPoolExecutor) -> None:
    """One is at the end of a round of A and in the middle of one of B, the other the other way round."""
    a, b = Company(), Company()
    one, other = {A: a.join(1), B: b.join(3)}, {A: a.join(3), B: b.join(1)}
    both(one, other, threads, 0.02)
    assert (a.round, b.round) == (ROUNDS, ROUNDS)
    for company in (a, b):
        ahead, behind = sorted(company.members, key=lambda each: each.seen[0])
        assert (ahead.seen[0], behind.seen[0]) == (1, 3)  # as it was at the end of the round, not as it went on
    assert {float(part.mine[0]) for part in (*one.values(), *other.values())} == {300}


def test_one_run_alone_gets_steps_while_another_is_late(threads: ThreadPoolExecutor) -> None:
    quick, slow = Company(), Company(slowness_s=0.3)
    parts = {A: quick.join(), B: slow.join()}
    trained(parts, threads, 0.0)
    assert quick.members[0].num_steps == slow.members[0].num_steps == EVERY * ROUNDS
    assert slow.members[0].seen == [EVERY, 100 + EVERY, 200 + EVERY]  # steps for A alone have not changed B
    assert float(parts[A].mine[0]) == 300


def test_a_run_that_ended_before_it_was_complete_is_an_error_and_the_others_are_left(
    threads: ThreadPoolExecutor,
) -> None:
    a, b = Company(), Company()
    parts = {A: a.join(), B: b.join()}
    a.members[0].reason, a.is_over = "removed", True
    with pytest.raises(PeerError, match=r"module 0.0: .* \(removed\)"):
        trained(parts, threads, ENDS_S)
    assert b.is_over
