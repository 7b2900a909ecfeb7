"""How inner steps of a lease are dealt to calls of the device, on a virtual clock."""

import asyncio
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest

from weft.clock import VirtualClock
from weft.peer.loop.contribution import CALL_S, LeaseTraining
from weft.training.learner import Work

BATCH, SEQ_LEN = 4, 16
TOKENS = BATCH * SEQ_LEN  # of a step


class Device:
    """Makes inner steps that take `step_s` each, and notes how many each call made."""

    has_ended = False

    def __init__(self, step_s):
        self.step_s = step_s
        self.calls = []
        self.made = []

    async def train(self, work, num_tokens):
        await asyncio.sleep(num_tokens / TOKENS * self.step_s)
        return work()

    def steps(self, positions, tokens, pace, should_stop, num_done):
        num_steps = len(positions) // BATCH
        assert (tokens, pace, num_done) == (7 * TOKENS, Fraction(3, 2), sum(self.calls))
        self.calls.append(num_steps)
        self.made += list(positions)
        return Work(num_steps=num_steps, num_tokens=num_steps * TOKENS, mean_loss=1.0, duration_s=0.0)


class Done:
    """A carry that counts steps."""

    sends_gradient = False

    def __init__(self):
        self.num_done = 0

    def cover(self, num_steps, tokens_per_step):
        pass

    def make_empty_again(self):
        pass

    def add_steps(self, work):
        self.num_done += work.num_steps


def config(*, even=False, wait="all"):
    settings = SimpleNamespace(batch_size=BATCH, seq_len=SEQ_LEN, tokens_per_step=TOKENS)
    return SimpleNamespace(settings=settings, has_even_leases=even, method=SimpleNamespace(wait=wait))


def trained(step_s, num_steps, run, *, until_s=float("inf")):
    """Make the steps of a lease until it is hurried, and return the device that made them."""
    device, clock = Device(step_s), VirtualClock()
    training = LeaseTraining(
        SimpleNamespace(compute=device, clock=clock, companion=None),
        SimpleNamespace(has_ended=False, train=device.steps),
        Done(),
        lambda: False,
    )
    leased = np.arange(num_steps * BATCH)
    others = SimpleNamespace(num_windows=len(leased) // 2)
    head = SimpleNamespace(leases=[SimpleNamespace(num_windows=len(leased)), others], committed_tokens=7 * TOKENS)
    clock.run(training.make(head, leased, run, lambda: clock.now() >= until_s))
    return device


@pytest.mark.parametrize("step_s", [0.01, 0.1, 0.3])
def test_a_call_makes_as_many_steps_as_fit_a_quarter_of_a_second_and_at_least_one(step_s):
    device = trained(step_s, 60, config())
    most = max(1, int(CALL_S / step_s + 1e-6))
    assert device.calls[0] == 1  # nobody knows yet how long a step takes
    assert device.calls[1:-1] == [most] * len(device.calls[1:-1])
    assert device.made == list(range(60 * BATCH))


def test_who_is_hurried_stops_at_the_end_of_a_call():
    device = trained(0.01, 1000, config(), until_s=1.0)
    assert 1.0 <= 0.01 * sum(device.calls) <= 1.0 + CALL_S


@pytest.mark.parametrize(("even", "wait", "num"), [(True, "all", 1), (True, "ready", 3), (False, "all", 3)])
def test_where_all_are_leased_the_same_and_wait_for_each_other_a_lease_is_one_call(even, wait, num):
    assert len(trained(0.02, 20, config(even=even, wait=wait)).calls) == num
