"""Training steps that somebody has made, made again on this machine: by who made them, and by who audits them."""

from collections.abc import Callable, Collection, Iterable, Mapping
from fractions import Fraction
from math import inf, isfinite, sqrt
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float32, Int64
from numpy.typing import NDArray
from torch import Tensor

from weft import rng
from weft.data.rows import Batch
from weft.errors import DataError
from weft.ids import Digest, PeerId, Round
from weft.peer.audit.heads import Head
from weft.peer.audit.reach import rates
from weft.peer.group.records import lease_of
from weft.run.amend import amended
from weft.run.config import Genesis, RunConfig
from weft.store.chunks import state_index
from weft.sync.merge.method import OUTER, Method, Scope
from weft.sync.merge.reduce import encode_payload
from weft.sync.method.choices import AdamWConfig
from weft.sync.records.parts import cut
from weft.sync.records.work import Segment
from weft.training.optimizer import adamw_direction
from weft.training.trainer import Trainer
from weft.verify.calibration import NEAR, Apart
from weft.verify.judge import OF_FOLLOWED, ROUNDING, Followed, Numerics, threshold, threshold_of_moments, widened
from weft.wire import Buffer, digest_of

LOCAL, ERROR = "local", "error"
MOMENTS = ("moment1", "moment2")  # of AdamW
_PIECE = 1 << 20  # parameters that are compared at a time, in fp64
_GRID = 2.0**-23  # of a parameter: as far apart are numbers of fp32 near it

NOT_MADE = "its parameters are not those that its optimizer makes of its own numbers"

State = Mapping[str, Tensor]


class Away(Exception):
    """The trainer is paused, or has not started yet."""


def repeat(
    trainer: Trainer,
    run: Genesis,
    head: Head,
    segment: Segment,
    state: State,
    outer: Float32[Tensor, " num"],
    num_before: int,
    first: int,
    num_steps: int,
    on_step: Callable[[int], None] = lambda _num: None,
    on_gradient: Callable[[Tensor, float], None] = lambda _gradient, _norm: None,
    on_batch: Callable[[Batch], None] = lambda _batch: None,
) -> dict[str, Tensor]:
    """Return the state after `num_steps` training steps of a segment. The trainer is as before.

    Args:
        head: that the segment begins at.
        state: before the steps: the parameters, and the optimizer's vectors.
        outer: parameters that the segment began at, which steps may be pulled to.
        num_before: steps that the optimizer has made before the segment.
        first: steps of the segment that are made already.
        on_step: told after each how many of the segment are made, while the trainer is there.
        on_gradient, on_batch: as of the trainer.

    Raises:
        DataError: the segment has no such steps.
        NotFinite, OutOfMemory: as `Trainer.train`.
        Away: the trainer has left its device, for a pause, or has not come to it yet.
    """
    if trainer.is_parked or not trainer.has_started:
        raise Away
    config, leased = amended(run, head.charter), lease_of(head.manifest.leases, PeerId(segment.holder))
    positions = _positions(config, leased, first, num_steps)
    pace = Fraction(sum(lease.num_windows for lease in head.manifest.leases), len(leased))
    counter = torch.tensor([num_before + first], dtype=torch.int64)
    with trainer.lent():
        trainer.apply_settings(config)
        trainer.load_private_state({**state, "num_steps": counter})
        trainer.set_local(state[LOCAL])
        trainer.set_center(outer)
        trainer.on_step, trainer.on_gradient, trainer.on_batch = on_step, on_gradient, on_batch
        trainer.train(positions, head.manifest.committed_tokens, pace, num_done=first)
        return {name: vector.clone() for name, vector in state_of(trainer).items()}


def words_of(trainer: Trainer, run: Genesis, head: Head, segment: Segment, first: int) -> Int64[Tensor, "batch words"]:
    """Return the words of the samples that a step of a segment is of.

    Raises:
        DataError: the segment has no such step, or the samples cannot be read.
    """
    config, leased = amended(run, head.charter), lease_of(head.manifest.leases, PeerId(segment.holder))
    return trainer.words(_positions(config, leased, first, 1), config.settings.seq_len)


class Compared(NamedTuple):
    """
    Args:
        before: the state before steps; mine, theirs: what this machine and another came to by them.
        apart: how far both lie apart, by vector, where one differs.
    """

    before: State
    mine: State
    theirs: State
    apart: Mapping[str, float]


def followed(
    run: Genesis, head: Head, segment: Segment, first: int, num_before: int, both: Compared
) -> Followed | None:
    """Return how the parameters of one step lie to the optimizer's numbers of who made it; None: it is not AdamW's.

    Args:
        first, num_before: as of `repeat`.
    """
    assert isinstance(run, RunConfig)
    optimizer = run.train.optimizer
    if not isinstance(optimizer, AdamWConfig) or both.mine.keys() != {LOCAL, *MOMENTS}:
        return None  # machines that only take the time of training have no optimizer
    *_, rate = rates(head.manifest, head.charter, PeerId(segment.holder), first + 1)
    return followed_adamw(optimizer, rate, num_before + first + 1, both)


def followed_adamw(optimizer: AdamWConfig, rate: float, num_steps: int, both: Compared) -> Followed:
    """As `followed`. Both began with the same parameters, so their decay is the same, and what is between them is

        theirs - mine = -rate (direction of their moments - direction of mine)

    and what fp32 cannot keep of it: each machine rounds a parameter twice, once for its decay.

    Args:
        rate: of learning.
        num_steps: that the optimizer has made with this one.
    """
    before, mine, theirs, apart = both
    off = 0.0
    for start in range(0, len(mine[LOCAL]), _PIECE):
        here = slice(start, start + _PIECE)
        of_theirs, of_mine = (
            adamw_direction(optimizer, state[MOMENTS[0]][here], state[MOMENTS[1]][here], num_steps)
            for state in (theirs, mine)
        )
        made, found = mine[LOCAL][here] - rate * (of_theirs - of_mine), theirs[LOCAL][here]
        off += float((found - made).abs_().sub_(2 * _GRID * found.abs()).clamp_min_(0.0).square_().sum())
    moved = float((mine[LOCAL] - before[LOCAL]).double().norm())
    return Followed(
        distance=_share_of(sqrt(off) if isfinite(off) else inf, moved),
        of_memory=max(apart.get(name, 0.0) for name in MOMENTS),
        of_parameters=apart.get(LOCAL, 0.0),
    )


def _positions(config: Genesis, leased: NDArray[np.int64], first: int, num_steps: int) -> NDArray[np.int64]:
    """
    Raises:
        DataError: the lease has no such steps.
    """
    size = config.settings.batch_size
    positions = leased[first * size : (first + num_steps) * size]
    if len(positions) != num_steps * size:
        raise DataError(f"a lease of {len(leased)} samples has no {first + num_steps} training steps of {size}")
    return positions


def method_at(run: Genesis, head: Head) -> Method:
    """Return the method by which the round after a head is computed."""
    config = amended(run, head.charter)
    return Method(config.method, config.optimizer, run.vector.tensors)


def payload_of_end(
    run: Genesis,
    head: Head,
    scope: Scope,
    round: Round,
    outer: Float32[Tensor, " num"],
    local: Float32[Tensor, " num"],
    error: Float32[Tensor, " num_kept"] | None,
) -> tuple[tuple[Buffer, ...], Float32[Tensor, " num_kept"] | None]:
    """Return the parts of the payload that is made of a work's last parameters, and what codecs leave.

    Args:
        head: that the last segment begins at, with these outer parameters.
        round: for which the work was announced first.
        error: that codecs had left before.

    Raises:
        NotFinite, RuntimeError, ValueError: of its numbers, or of how many there are.
    """
    method, ranges = method_at(run, head), cut(scope.num_sent(round), head.manifest.uplinks)
    return encode_payload(method, scope, {OUTER: outer}, method.delta(outer, local), error, ranges, round)


def state_of(trainer: Trainer) -> dict[str, Tensor]:
    """Return what a work names of a moment: the parameters, and the optimizer's vectors. Views, until the next step."""
    return {LOCAL: trainer.local(), **memory_of(trainer)}


def named_error(error: Float32[Tensor, " num_kept"] | None) -> Digest | None:
    """Return what a work calls what codecs have left; None: nothing."""
    return None if error is None else digest_of(state_index({ERROR: error}))


def shape_of(trainer: Trainer) -> dict[str, int]:
    """Return how many numbers each vector of a state has."""
    return {name: vector.numel() for name, vector in state_of(trainer).items()}


def memory_of(trainer: Trainer) -> dict[str, Tensor]:
    """Return the optimizer's vectors."""
    return {name: value for name, value in trainer.private_state().items() if value.is_floating_point()}


def distance(before: Tensor, mine: Tensor, theirs: Tensor) -> float:
    """Return how far two states lie apart, relative to what the steps changed: infinite where one is no number."""
    return _relative(theirs - mine, mine - before)


def _relative(apart: Tensor, moved: Tensor) -> float:
    return _share_of(float(apart.double().norm()), float(moved.double().norm()))


def _share_of(far: float, by: float) -> float:
    if not isfinite(far):
        return inf
    return far / by if by else inf if far else 0.0


def lean(before: Tensor, mine: Tensor, theirs: Tensor) -> float:
    """Return by how much their steps are longer than this machine's, along both (`weft.verify.steering`)."""
    apart, along = (theirs - mine).double(), (mine - before).double().add_(theirs - before).div_(2)
    found = float(apart.dot(along) / along.dot(along))
    return found if isfinite(found) else 0.0


def farthest(apart: Mapping[str, float], held: Mapping[str, float]) -> Apart:
    """Return how far a state lies from what this machine comes to, by the vector that lies farthest.

    Args:
        apart: by vector, where one differs.
        held: how far each may, the parameters among them.
    """
    measured = [Apart(far, held[name]) for name, far in apart.items()]
    return max(measured, key=_share, default=Apart(0.0, held[LOCAL]))


def is_told_by_moments(numerics: Numerics, far: Apart | None) -> bool:
    """Return whether an auditor looks at what AdamW makes of a peer's own moments (`by_moments`).

    Args:
        far: as of `farthest`; None: equal bits alone are honest.
    """
    return far is not None and (numerics == "bf16" or far.share > NEAR)


def by_moments(numerics: Numerics, found: Followed, why: str | None, far: Apart | None) -> tuple[str | None, Apart]:
    """Return what an honest machine does not come to, and how far a step lies from what is held for honest, once it is
    known how the parameters lie to their own moments: in fp32 they may lie farther apart that follow them, in bf16 none
    may that do not.

    Args:
        why, far: the same by distances alone.
    """
    made, usual = Apart(found.distance, threshold("fp32", 1)), far or Apart(0.0, threshold(numerics, 1))
    if numerics == "fp32":
        of_memory = Apart(found.of_memory, OF_FOLLOWED)
        return (None, max(made, of_memory, key=_share)) if found.is_honest else (why, usual)
    return why or (NOT_MADE if made.share > 1 else None), max(made, usual, key=_share)


def _share(apart: Apart) -> float:
    return apart.share


def held_of(numerics: Numerics, num_steps: int, names: Iterable[str], *, is_new: bool = False) -> dict[str, float]:
    """Return how far vectors of a state may lie apart after so many steps, by name.

    Args:
        is_new: the first of the steps is the first of an optimizer.
    """
    parameters, memory = threshold(numerics, num_steps, is_new=is_new), threshold_of_moments(numerics, num_steps)
    return {name: parameters if name == LOCAL else memory for name in names}


def some_roundings_off(state: State, number: int) -> dict[str, Tensor]:
    """Return a state whose parameters are off by `ROUNDING`, by chance, the same of a number each time. So all that is
    summed in a step from it is off as on another machine, also where it nearly cancels."""
    start = state[LOCAL]
    noise = torch.from_numpy(rng.stream(number, "rounding").standard_normal(len(start), dtype=np.float32))
    return {**state, LOCAL: noise.mul_(start).mul_(ROUNDING).add_(start)}


def led_apart(
    num_steps: int, made: tuple[State, State], rounded: tuple[State, State], end: State | None = None
) -> dict[str, float]:
    """Return how far rounding alone leads by steps, by vector, relative to what they change.

    Parameters that were off stay off by as much, which does not count. Nor does that fp32 then keeps others of their
    bits: with a low learning rate that is more than all else.

    Args:
        made: a state before steps, and what this machine comes to by them.
        rounded: the same from `some_roundings_off`.
        end: what it came to where it is compared; None: there.
    """
    (before, after), (off, away), found = made, rounded, dict[str, float]()
    for name, at in before.items():
        apart = (away[name] - off[name]).sub_(after[name] - at)
        if name == LOCAL:
            apart = apart.abs_().sub_(num_steps * _GRID * at.abs()).clamp_min_(0.0)
        found[name] = _relative(apart, (after if end is None else end)[name] - at)
    return found


def widened_by(held: Mapping[str, float], num_steps: int, rounded: Collection[Mapping[str, float]]) -> dict[str, float]:
    """Return how far vectors may lie apart after steps that rounding leads so far apart, each time (`led_apart`)."""
    return {
        name: widened(num_steps, usual, max((each.get(name, 0.0) for each in rounded), default=0.0))
        for name, usual in held.items()
    }


def why_beyond(apart: Mapping[str, float], held: Mapping[str, float]) -> str | None:
    """Return what an honest machine does not come to; None: nothing.

    Args:
        apart: by vector of a state, the distance from what this machine comes to.
        held: how far each may lie apart.
    """
    wrong = [name for name, far in apart.items() if not far <= held[name]]
    if not wrong:
        return None
    what = "parameters" if wrong == [LOCAL] else f"numbers ({', '.join(wrong)})"
    return f"it came to other {what} by these training steps"
