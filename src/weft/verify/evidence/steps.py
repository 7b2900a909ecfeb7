"""A training step that is not the optimizer's: a few numbers of it, made again from those before and the gradient.

    signed     the Work, which names the states before and after the step; the MadeStep, which names the gradient
    ground     the manifest that gave the lease, and the charter after it: the learning rate, and the optimizer's own
    block      256 numbers of each vector of both states, and of the gradient

What AdamW and SGD make of numbers is in `weft.sync.merge.outer`; this is the same by numpy, operation by operation. It
says nothing of the gradient: whether that is the batch's is for who makes the step again.
"""

from fractions import Fraction
from math import isfinite, sqrt

import numpy as np
from msgspec import UNSET
from numpy.typing import NDArray

from weft.ids import Digest
from weft.sync.method.choices import AdamWConfig, InnerSgdConfig
from weft.sync.method.schedule import lr
from weft.sync.records.charter import Charter, ExactTerms
from weft.sync.records.messages import Manifest
from weft.sync.records.work import Link, MadeStep, Work, link_from
from weft.verify.evidence.records import FalseStep, Ground, ShownState
from weft.verify.evidence.shown import Book, Unproven, numbers_window
from weft.verify.evidence.works import LOCAL, index_in, listed, stands_on
from weft.wire import digest

GRADIENT = "gradient"  # the one vector of what a MadeStep names
WIDTH = 256  # numbers of a block: one piece of each vector

Vectors = dict[str, NDArray[np.float32]]  # of a state, by name


def check_step(work: Work, made: MadeStep, shown: FalseStep) -> str:
    """Return that numbers after a step are not what the optimizer makes of those before.

    Args:
        made: of this very work.

    Raises:
        Unproven: they are, or they may be.
    """
    link = link_of(work, made, shown.ground)
    manifest, charter = stands_on(shown.ground, Digest(work.segments[link.segment].head))
    before, after = listed(work, shown.before, link.before), listed(work, shown.after, link.before + 1)
    gradient, terms = index_in(shown.gradient), _terms(charter)
    names = _names(terms)
    num = before.shape.get(LOCAL, 0)
    if before.shape != dict.fromkeys(names, num) or after.shape != before.shape or gradient.shape != {GRADIENT: num}:
        raise Unproven("the states are none of this optimizer")
    if digest(shown.gradient) != made.gradient or not isfinite(made.norm):
        raise Unproven("the gradient is another than was signed")
    here, book = range(shown.block * WIDTH, min((shown.block + 1) * WIDTH, num)), Book()
    if not len(names) == len(shown.numbers_before) == len(shown.numbers_after):
        raise Unproven("numbers of all vectors are to be shown")
    old = {
        each.name: book.numbers(each, here, one) for each, one in zip(before.vectors, shown.numbers_before, strict=True)
    }
    new = {
        each.name: book.numbers(each, here, one) for each, one in zip(after.vectors, shown.numbers_after, strict=True)
    }
    slope = book.numbers(gradient.vectors[0], here, shown.slope)
    book.close()
    right = stepped(
        terms, _rate(work, link, manifest, charter), _number(work, link), old, shortened(terms, made, slope), here
    )
    if not all(np.isfinite(each).all() for each in right.values()) or not _differ(right, new):
        raise Unproven("the numbers are the optimizer's")
    return "its optimizer did not make this training step"


def prove_step(
    work: Work,
    made: MadeStep,
    ground: Ground,
    states: tuple[ShownState, ShownState],
    gradient: bytes,
    vectors: tuple[Vectors, Vectors],
    slope: NDArray[np.float32],
) -> FalseStep:
    """Return what shows that the optimizer did not make a step.

    Args:
        states: before it and after it, and the `vectors` of both.
        gradient: the list of its chunks, and its numbers, `slope`.
    """
    link = link_of(work, made, ground)
    terms, manifest = _terms(ground.charter), ground.manifest
    old, new = vectors
    whole = range(len(slope))
    rate, number = _rate(work, link, manifest, ground.charter), _number(work, link)
    right = stepped(terms, rate, number, old, shortened(terms, made, slope), whole)
    first = _first(right, new)
    if first is None:
        raise Unproven("the numbers are the optimizer's")
    block = first // WIDTH
    here = range(block * WIDTH, min((block + 1) * WIDTH, len(slope)))
    shown = FalseStep(
        ground=ground,
        before=states[0],
        after=states[1],
        gradient=gradient,
        block=block,
        numbers_before=tuple(numbers_window(old[name], here) for name in sorted(old)),
        numbers_after=tuple(numbers_window(new[name], here) for name in sorted(new)),
        slope=numbers_window(slope, here),
    )
    check_step(work, made, shown)
    return shown


# --- the optimizer ---


def stepped(
    terms: ExactTerms, rate: float, number: int, vectors: Vectors, slope: NDArray[np.float32], here: range
) -> Vectors:
    """Return what the optimizer makes of some numbers of a state.

    Args:
        rate: the learning rate.
        number: of the step, of all that this optimizer has made, from 1.
        vectors: before it.
        slope: the gradient, shortened.
        here: which numbers of the state they are.
    """
    num_decayed = min(max(terms.num_decayed - here.start, 0), len(slope))
    match terms.optimizer:
        case AdamWConfig():
            return _adamw(terms.optimizer, rate, number, vectors, slope, num_decayed)
        case InnerSgdConfig():
            return _sgd(terms.optimizer, rate, vectors, slope)


def _adamw(
    config: AdamWConfig, lr: float, number: int, vectors: Vectors, g: NDArray[np.float32], num_decayed: int
) -> Vectors:
    x, m, v = vectors[LOCAL].copy(), vectors["moment1"], vectors["moment2"]
    b1, b2, eps = np.float32(config.beta1), np.float32(config.beta2), np.float32(config.eps)
    c1, c2 = np.float32(1 - config.beta1), np.float32(1 - config.beta2)
    decay = np.float32(lr * config.weight_decay)
    rate = np.float32(lr / (1 - _power(config.beta1, number)))
    widen = np.float32(1 / sqrt(1 - _power(config.beta2, number)))
    if decay:
        x[:num_decayed] -= x[:num_decayed] * decay
    m = m * b1 + g * c1
    v = v * b2 + g * g * c2
    x -= m / (np.sqrt(v) * widen + eps) * rate
    return {LOCAL: x, "moment1": m, "moment2": v}


def _sgd(config: InnerSgdConfig, lr: float, vectors: Vectors, g: NDArray[np.float32]) -> Vectors:
    rate, mu = np.float32(lr), np.float32(config.momentum)
    if not mu:
        return {LOCAL: vectors[LOCAL] - g * rate}
    m = vectors["momentum"] * mu + g
    return {LOCAL: vectors[LOCAL] - m * rate, "momentum": m}


def shortened(terms: ExactTerms, made: MadeStep, slope: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return a gradient as the optimizer takes it: no longer than is allowed."""
    return slope * np.float32(terms.clip / made.norm) if made.norm > terms.clip else slope


def _power(base: float, exponent: int) -> float:
    """As `outer.power`: by repeated squaring, the same double on every machine."""
    result = 1.0
    while exponent > 0:
        if exponent & 1:
            result *= base
        base *= base
        exponent >>= 1
    return result


# --- where a step stands ---


def link_of(work: Work, made: MadeStep, ground: Ground) -> Link:
    """
    Raises:
        Unproven: what was signed is no single step of the work.
    """
    audits = ground.charter.audits
    found = None if audits is UNSET else link_from(work.segments, audits.trace_every, made.before)
    if found is None or found.num_steps != 1:
        raise Unproven("what was signed is no single training step of the work")
    return found


def _terms(charter: Charter) -> ExactTerms:
    if charter.audits is UNSET or charter.audits.exact is UNSET:
        raise Unproven("machines round otherwise in this run, so a number proves nothing")
    return charter.audits.exact


def _names(terms: ExactTerms) -> tuple[str, ...]:
    """Return the vectors of a state."""
    match terms.optimizer:
        case AdamWConfig():
            return (LOCAL, "moment1", "moment2")
        case InnerSgdConfig(momentum=momentum):
            return (LOCAL, "momentum") if momentum else (LOCAL,)


def _number(work: Work, link: Link) -> int:
    return work.num_before + sum(each.num_steps for each in work.segments[: link.segment]) + link.first + 1


def _rate(work: Work, link: Link, manifest: Manifest, charter: Charter) -> float:
    """Return the learning rate of the step, as `weft.training.steps` has it."""
    segment, settings = work.segments[link.segment], charter.settings
    leased = sum(lease.num_windows for lease in manifest.leases if lease.peer == segment.holder)
    if not leased:
        raise Unproven("the lease is empty")
    pace = Fraction(sum(lease.num_windows for lease in manifest.leases), leased)
    made = int((link.first + 1) * settings.tokens_per_step * pace)
    return lr(settings.schedule, manifest.committed_tokens + made)


def _differ(right: Vectors, new: Vectors) -> bool:
    return any(right[name].tobytes() != new[name].tobytes() for name in right)


def _first(right: Vectors, new: Vectors) -> int | None:
    """Return the first number at which a vector is another."""
    found = [
        int(differs.argmax())
        for name in right
        if (differs := right[name].view(np.uint32) != new[name].view(np.uint32)).any()
    ]
    return min(found, default=None)
