"""Training steps made again: the same bits, from wherever in a lease."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from unit.peer.tiny import batches, run_config
from weft.clock import VirtualClock
from weft.data.assign import Lease
from weft.errors import DataError
from weft.ids import PeerId, Round
from weft.model.initial import initial_vector
from weft.peer.audit.heads import Head
from weft.peer.audit.steps import (
    LOCAL,
    NOT_MADE,
    Away,
    Compared,
    by_moments,
    distance,
    farthest,
    followed,
    followed_adamw,
    held_of,
    is_told_by_moments,
    led_apart,
    repeat,
    some_roundings_off,
    state_of,
    why_beyond,
)
from weft.peer.chain import genesis, open_branch
from weft.run.amend import first_charter
from weft.run.machine import PeerConfig
from weft.sync.method.choices import AdamWConfig
from weft.sync.records.index import VectorIndex
from weft.sync.records.work import Segment
from weft.training.optimizer import adamw_direction
from weft.training.trainer import Trainer
from weft.verify import judge
from weft.verify.judge import ROUNDING, threshold
from weft.wire import digest_of

ME, OTHER = PeerId("aa" * 32), PeerId("bb" * 32)
RUN = run_config(batch_size=2)
NUM = 6
State = dict[str, Tensor]


def trainer(path: Path) -> Trainer:
    torch.set_num_threads(1)
    made = Trainer(RUN, PeerConfig(device="cpu", threads=1), batches(path), lambda _event: None, VirtualClock())
    made.start(initial_vector(RUN.model, RUN.seed))
    return made


def head() -> Head:
    charter = first_charter(RUN)
    start = genesis(RUN.run, ME, charter)
    manifest = open_branch(start, [ME, OTHER], ME, start.branch)
    lease = Lease(peer=ME, start=4, stop=4 + 2 * NUM)
    leases = (lease, Lease(peer=OTHER, start=40, stop=40 + 2 * NUM))
    return Head(
        manifest=replace(manifest, leases=leases), charter=charter, outer=VectorIndex(name="outer", num=0, chunks=())
    )


def segment(holder: PeerId = ME, num: int = NUM) -> Segment:
    return Segment(head=digest_of(head().manifest), round=Round(0), holder=holder, num_steps=num)


def copied(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: vector.clone() for name, vector in state.items()}


def test_steps_are_the_same_bits_again_from_any_state_in_between(tmp_path: Path) -> None:
    one, other, states = trainer(tmp_path), trainer(tmp_path), list[dict[str, Tensor]]()
    states.append(copied(state_of(one)))
    given: dict[str, Any] = {"head": head(), "segment": segment(), "outer": None, "num_before": 0}

    def note(_num: int) -> None:
        states.append(copied(state_of(one)))

    end = repeat(one, RUN, state=states[0], first=0, num_steps=NUM, on_step=note, **given)
    assert len(states) == NUM + 1
    assert all(torch.equal(end[name], states[-1][name]) for name in end)
    other.train(torch.arange(8).numpy(), 0, 1)  # the other is in the middle of its own
    before = copied(state_of(other))
    for first, num in ((0, 1), (2, 3), (NUM - 1, 1)):
        again = repeat(other, RUN, state=states[first], first=first, num_steps=num, **given)
        assert again.keys() == states[0].keys()
        assert all(torch.equal(again[name], states[first + num][name]) for name in again)
    assert all(torch.equal(value, before[name]) for name, value in state_of(other).items())
    assert not torch.equal(states[0][LOCAL], states[1][LOCAL])


@pytest.mark.parametrize(("first", "num", "holder"), [(NUM, 1, ME), (0, NUM + 1, ME), (0, 1, PeerId("cc" * 32))])
def test_steps_that_a_lease_does_not_have_are_refused(tmp_path: Path, first: int, num: int, holder: PeerId) -> None:
    one = trainer(tmp_path)
    with pytest.raises(DataError, match="has no"):
        repeat(one, RUN, head(), segment(holder), copied(state_of(one)), None, 0, first, num)


def steps_of(path: Path, num_before: int, change: Callable[[Tensor], object]) -> tuple[State, State, State]:
    """Return the state before a step, and those after it: of an honest machine, and of one whose gradient is changed.

    Args:
        num_before: steps that the optimizer has made before it.
    """
    one = trainer(path)
    one.train(torch.arange(2 * num_before).numpy(), 0, 1)
    before = copied(state_of(one))
    given: dict[str, Any] = {"state": before, "outer": None, "num_before": num_before, "first": 0, "num_steps": 1}
    mine = repeat(one, RUN, head(), segment(), **given)
    theirs = repeat(one, RUN, head(), segment(), on_gradient=lambda slope, _norm: change(slope), **given)
    return before, mine, theirs


def compared(before: State, mine: State, theirs: State) -> Compared:
    return Compared(before, mine, theirs, {name: distance(before[name], mine[name], theirs[name]) for name in mine})


def turn_smallest(slope: Tensor) -> None:
    """Turn the signs of numbers that are next to nothing, as rounding does."""
    smallest = slope.abs().argsort()[:4]
    assert 0 < slope[smallest].abs().max() < 1e-4 * slope.square().mean().sqrt()
    slope[smallest] *= -1


def test_signs_that_rounding_turned_are_told_by_the_moments(tmp_path: Path) -> None:
    before, mine, theirs = steps_of(tmp_path, 0, turn_smallest)
    found = followed(RUN, head(), segment(), 0, 0, compared(before, mine, theirs))
    assert found is not None
    assert found.of_parameters > threshold("fp32", 1), "that alone would be something else"
    assert found.of_memory < 1e-6
    assert found.distance < 1e-6
    assert found.is_honest
    why, far = by_moments("fp32", found, "far apart", None)
    assert why is None
    assert far.share < 0.1


def add_noise(slope: Tensor) -> None:
    noise = torch.randn(len(slope), generator=torch.Generator().manual_seed(0))
    slope += 1e-4 * slope.norm() / noise.norm() * noise


def turn_many(slope: Tensor) -> None:
    """Of a tenth of all numbers, which is more than rounding turns."""
    slope[slope.abs().argsort()[: len(slope) // 10]] *= -1


@pytest.mark.parametrize("change", [add_noise, turn_many, torch.neg_])
def test_what_is_no_rounding_of_a_gradient_is_something_else(
    tmp_path: Path, change: Callable[[Tensor], object]
) -> None:
    before, mine, theirs = steps_of(tmp_path, 1, change)
    found = followed(RUN, head(), segment(), 0, 1, compared(before, mine, theirs))
    assert found is not None
    assert not found.is_honest
    assert found.distance < 1e-5, "its parameters are those of its moments"


@pytest.mark.parametrize("share", [0.0, 0.99, 1.01])
def test_parameters_that_do_not_follow_their_moments_are_something_else(tmp_path: Path, share: float) -> None:
    before, mine, theirs = steps_of(tmp_path, 1, lambda _slope: None)
    theirs[LOCAL] = before[LOCAL] + share * (mine[LOCAL] - before[LOCAL])
    found = followed(RUN, head(), segment(), 0, 1, compared(before, mine, theirs))
    assert found is not None
    assert found.of_memory == 0.0
    assert not found.is_honest
    assert by_moments("fp32", found, "far apart", None)[0] == "far apart"
    why, far = by_moments("bf16", found, None, None)
    assert why == NOT_MADE
    assert far.share > 1


def round_to_bf16(slope: Tensor) -> None:
    """As another machine adds up in bf16: each number is off by some of its last eight bits."""
    slope *= 1 + 2.0**-8 * torch.randn(len(slope), generator=torch.Generator().manual_seed(0))


def looked_at(both: Compared, num_before: int, rate: float) -> str | None:
    """Return what an auditor says of one step in bf16."""
    apart, is_new = both.apart, not num_before
    held = held_of("bf16", 1, apart, is_new=is_new)
    far = farthest(apart, held)
    assert is_told_by_moments("bf16", far)
    assert isinstance(RUN.train.optimizer, AdamWConfig)
    found = followed_adamw(RUN.train.optimizer, rate, num_before + 1, both)
    return by_moments("bf16", found, why_beyond(apart, held), far)[0]


@pytest.mark.parametrize("num_before", [0, 3])
def test_in_bf16_gradients_may_be_off_and_what_adamw_makes_of_them_may_not(tmp_path: Path, num_before: int) -> None:
    before, mine, theirs = steps_of(tmp_path, num_before, round_to_bf16)
    honest, rate = compared(before, mine, theirs), RUN.train.schedule.lr
    assert 1e-4 < honest.apart["moment1"] < judge.MOMENTS["bf16"]
    assert looked_at(honest, num_before, rate) is None
    step = theirs[LOCAL] - before[LOCAL]
    noise = torch.randn(len(step), generator=torch.Generator().manual_seed(1))
    for by in (-0.01 * step, 0.01 * step, 0.01 * step.norm() / noise.norm() * noise, 1e-3 * step):
        other = compared(before, mine, {**theirs, LOCAL: theirs[LOCAL] + by})
        assert other.apart[LOCAL] < threshold("bf16", 1, is_new=not num_before), "not seen by that alone"
        assert looked_at(other, num_before, rate) == NOT_MADE


def test_a_step_that_moves_nothing_is_nobodys_lie_in_bf16(tmp_path: Path) -> None:
    """As the first of a warm-up, at a rate of 0."""
    before, mine, theirs = steps_of(tmp_path, 1, round_to_bf16)
    still = compared(before, {**mine, LOCAL: before[LOCAL]}, {**theirs, LOCAL: before[LOCAL]})
    assert looked_at(still, 1, 0.0) is None
    assert looked_at(still, 1, 1e-3) is not None


def test_at_a_low_rate_what_fp32_cannot_keep_of_a_step_is_nobodys_lie() -> None:
    """A parameter near 1 has steps of 1.2e-7, where training wants to move it by 1e-6."""
    luck = torch.Generator().manual_seed(0)
    start, rate, num = torch.randn(20_000, generator=luck), 1e-6, 5
    gradient = torch.randn(20_000, generator=luck)
    memory = {"moment1": 0.1 * gradient, "moment2": 0.05 * gradient.square()}
    off = {name: (each * (1 + 2.0**-8 * torch.randn(20_000, generator=luck))) for name, each in memory.items()}
    assert isinstance(RUN.train.optimizer, AdamWConfig)
    ends = list[State]()
    for moments in (memory, off):
        along = adamw_direction(RUN.train.optimizer, moments["moment1"], moments["moment2"], num)
        ends.append({LOCAL: (start - rate * along).float(), **moments})
    zeros = {name: torch.zeros(20_000) for name in memory}
    both = compared({LOCAL: start, **zeros}, *ends)
    found = followed_adamw(RUN.train.optimizer, rate, num, both)
    assert found.distance < 1e-6
    longer = {**ends[1], LOCAL: ends[1][LOCAL] + 0.3 * (ends[1][LOCAL] - start)}
    assert (
        followed_adamw(RUN.train.optimizer, rate, num, compared({LOCAL: start, **zeros}, ends[0], longer)).distance
        > 0.1
    )


def test_parameters_that_are_some_roundings_off_are_so_by_chance_and_the_same_each_time(tmp_path: Path) -> None:
    state = copied(state_of(trainer(tmp_path)))
    first, again, other = (some_roundings_off(state, number)[LOCAL] for number in (0, 0, 1))
    assert torch.equal(first, again)
    for each in (first, other):
        by = (each - state[LOCAL]).double().norm() / state[LOCAL].double().norm()
        assert float(by) == pytest.approx(ROUNDING, rel=0.05)
    assert not torch.allclose(first, other, rtol=ROUNDING / 100, atol=0.0)


def test_what_fp32_cannot_keep_of_parameters_is_no_rounding_of_steps() -> None:
    """As at a low learning rate: who begins some roundings off keeps other bits, by as much as a step is long."""
    luck = torch.Generator().manual_seed(0)
    before = {LOCAL: torch.randn(10_000, generator=luck), "moment1": torch.zeros(10_000)}
    step = torch.randn(10_000, generator=luck)
    for rate in (1e-6, 1e-3):
        ways = [(at, {**at, LOCAL: at[LOCAL] + rate * step}) for at in (before, some_roundings_off(before, 0))]
        assert led_apart(1, *ways)[LOCAL] < 1e-6
        (off, away), more = ways[1], 0.01 * rate * step
        led = led_apart(1, ways[0], (off, {**away, LOCAL: away[LOCAL] + more}))[LOCAL]
        assert 0.0 <= led < 0.011
        assert rate == 1e-6 or led > 0.009


def test_a_trainer_that_has_not_started_makes_no_steps_of_others_yet(tmp_path: Path) -> None:
    """A peer that was just started again may be asked at once."""
    made = Trainer(RUN, PeerConfig(device="cpu", threads=1), batches(tmp_path), lambda _event: None, VirtualClock())
    state = {LOCAL: initial_vector(RUN.model, RUN.seed)}
    with pytest.raises(Away):
        repeat(made, RUN, head(), segment(), state, state[LOCAL], 0, 0, 1)
