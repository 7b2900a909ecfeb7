"""How fast this machine trains a run's model: whole inner steps of the model itself, timed.

The median of many steps is what the machine keeps up. The fastest is up to a fifth faster even where nothing disturbs
it. Where another program wants all cores, threads wait for one another, and single steps take up to a hundred times as
long: the median leaves them out while most are well. Where most are not (`is_disturbed`), it says what other programs
leave at the moment, and nothing of a run of hours: a step on a single core then counts, by the time that it computes.

Where several peers share the machine, each has its share of the cores as threads. Cores share caches and often units,
so as many processes as have room make the same steps meanwhile; what one of them does is shared out among the peers.
"""

import math
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

import msgspec
import torch
from msgspec import UNSET
from torch import Tensor

from weft.cli.terminal import WorkLine
from weft.clock import Clock, SystemClock, cpu_s, kept_waiting
from weft.cost import training as cost
from weft.data.rows import blank
from weft.errors import TooLarge
from weft.model.config import ModelConfig, has_base, num_base_parameters, num_parameters
from weft.model.flat import assemble, over
from weft.model.initial import initial_base, initial_vector
from weft.model.transformer import Transformer
from weft.progress import Meter
from weft.run.config import DpoConfig, RunFile, TrainConfig
from weft.run.host import host_free_nbytes, num_cores, release_heap
from weft.run.machine import PeerConfig
from weft.store.chunks import state_index
from weft.training.backward import Backward
from weft.training.device import Device, choose, decoder, device_free_nbytes
from weft.training.numerics.arithmetic import Arithmetic, Exact, Fast
from weft.training.preference import Preference
from weft.wire import digest_of

_NUM_WARM = 3  # the first steps allocate, and wake threads
_LEAST_STEPS, _MEASURED_S = 8, 3.0  # timed: so many at least, and then until so much time has passed
_PATIENCE_S = 10.0  # of warm steps and of timed ones: the last of either begins before that
_START_S = 120.0  # of a process that works beside: it imports torch. One that has not begun by then is not waited for
_UNSTEADY = 2.0  # times the fastest step, that the usual one takes where something disturbs it
_LEAST_COMPARED = 3  # steps: the first may take longer by itself
_KEPT_WAITING = 0.1  # of the time that steps take, their thread could have computed and another program did
_WHOLE = 0.8  # of a core, or more, is what steps compute where nothing disturbs them
_CORE_STEPS, _CORE_S = 3, 5.0  # made on a single core: so many, and none more once so much was computed
_MOST_HASHED, _HASHED_S = 1 << 24, 0.3  # numbers, more than caches hold, and seconds of hashing them
_SHARE = 0.6  # of the time goes into inner steps, in the demo on two cores; the rest: exchange, outer steps, evaluation

Timed = Callable[[Callable[[], None]], float]


def tokens_in(run_file: RunFile, seconds: float, tokens_per_s: float) -> int:
    """Return about how many tokens all peers commit in `seconds`, a whole number of rounds.

    Args:
        tokens_per_s: of each peer's inner steps, with all of them at work.
    """
    train = run_file.train
    every = getattr(run_file.method, "every", 1)
    per_round = every * run_file.peers * train.batch_size * train.seq_len
    wanted = _SHARE * seconds * tokens_per_s * run_file.peers
    return max(1, round(wanted / per_round)) * per_round


def usual_s(
    step: Callable[[], None],
    clock: Clock | None = None,
    measured_s: float = _MEASURED_S,
    least_steps: int = _LEAST_STEPS,
) -> float:
    """Return the seconds of the median of many steps. Takes about three; of long steps as many as begin in ten seconds
    of warming up, and in ten of timing, one each at least.

    Args:
        measured_s: in place of the three; least_steps: that are timed, however long they take.
    """
    clock = clock or SystemClock()

    def took_s() -> float:
        began = clock.now()
        step()
        return clock.now() - began

    warm_s = 0.0
    for _ in range(_NUM_WARM):
        if warm_s < _PATIENCE_S:
            warm_s += took_s()
    all_s = [took_s()]
    while (len(all_s) < least_steps or sum(all_s) < measured_s) and sum(all_s) < _PATIENCE_S:
        all_s.append(took_s())
    return median(all_s)


@dataclass(frozen=True, kw_only=True)
class Here:
    """What was measured.

    Args:
        tokens_per_s: of each peer, with all of them at work.
        crowding: peers per core; 1 where a peer has the machine for itself.
        memory_nbytes: that is free.
    """

    name: str
    tokens_per_s: float
    crowding: float
    is_gpu: bool
    is_half: bool
    memory_nbytes: float


def threads_of(num_sharing: int) -> int:
    """Return how many threads each of so many peers on this machine has."""
    return max(1, num_cores() // num_sharing)


def measure(
    model: ModelConfig,
    train: TrainConfig,
    num_sharing: int,
    timed: Timed | None = None,
    *,
    on: str = "auto",
    num_threads: int = 0,
    has_rows: bool = False,
    is_exact: bool = False,
) -> Here:
    """Return the pace of a device of this machine; takes about three seconds, longer where a step does: it is told.

    Args:
        num_sharing: peers on this machine.
        timed: makes a step often enough and returns its seconds; None: those of the median of many.
        on: the device, as `PeerConfig.device` names it; auto: the best one.
        num_threads: of each peer; 0: its share of the cores.
        has_rows: whether it trains on rows of whole texts.
        is_exact: whether steps are computed in exact numbers, which are of the CPU.

    Raises:
        TooLarge: the model and one sample do not fit; says the figures.
    """
    cores = num_cores()
    threads = num_threads or threads_of(num_sharing)
    device = choose(PeerConfig(device="cpu" if is_exact else on, threads=threads))
    activations = cost.exact_activation_nbytes if is_exact else cost.activation_nbytes
    free = float(host_free_nbytes() if device.is_cpu else device_free_nbytes(device))
    num_vectors = 5 if isinstance(train.loss, DpoConfig) else 4
    held = cost.vector_nbytes(num_base_parameters(model)) + num_vectors * cost.vector_nbytes(num_parameters(model))
    micro_batch = train.batch_size
    while (
        needed := held + activations(decoder(model), micro_batch, train.seq_len)
    ) > cost.SPARE * free and micro_batch > 1:
        micro_batch //= 2
    if needed > cost.SPARE * free:
        raise TooLarge(
            f"--device here: {num_parameters(model):,} parameters and one sample need {needed / 1e9:.1f} GB on "
            f"{device.name}, where {free / 1e9:.1f} GB are free, so nothing can be timed. Name a device of the "
            "kind that will train, or give --tokens-per-s."
        )
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    at_once = max(1.0, cores / threads) if device.is_cpu else 1.0
    try:
        with _others(min(num_sharing, int(at_once)) - 1, model, train, threads, is_exact):
            step = _step(model, train, device, micro_batch, has_rows=has_rows, is_exact=is_exact)
            step_s, is_disturbed = _pace(step, timed, is_alone=device.is_cpu and num_sharing == 1)
    finally:
        torch.set_num_threads(before)
    del step
    device.release_cache()
    release_heap()  # the thread that trains next would take as much beside it
    alone = train.batch_size * train.seq_len / step_s
    name = f"cpu, threads: {threads}" if device.is_cpu else device.name
    return Here(
        name="cpu, as if no other program ran here; others use the cores now" if is_disturbed else name,
        tokens_per_s=alone * min(1.0, at_once / num_sharing),
        crowding=max(1.0, num_sharing / cores),
        is_gpu=not device.is_cpu,
        is_half=device.precision != "fp32",
        memory_nbytes=free / num_sharing,
    )


def _pace(step: Callable[[], None], timed: Timed | None, *, is_alone: bool) -> tuple[float, bool]:
    """Return the seconds of a step, and whether other programs disturbed it.

    Args:
        timed: as of `measure`.
        is_alone: nobody but other programs can have disturbed it.
    """
    watched = Watched(step)
    with Meter("timing this machine", "steps", WorkLine(), SystemClock()) as meter:
        step_s = (timed or usual_s)(_counted(watched, meter))
    if not (is_alone and watched.is_disturbed):
        return step_s, False
    return min(step_s, watched.fastest_s, core_s(step, cpu_s, watched.least_computed_s)), True


def measure_cut(
    model: ModelConfig, train: TrainConfig, stages: int, micro_batch: int, num_sharing: int, **how: Any
) -> Here:
    """Return the same of a model in `stages` sections, by what is timed of one: tokens that one peer alone would train.

    Args:
        micro_batch: samples that pass at a time.
        how: as of `measure`.
    """
    part = msgspec.structs.replace(model, num_layers=-(-model.num_layers // stages))
    if stages > 1:
        train = msgspec.structs.replace(train, batch_size=min(micro_batch, train.batch_size))
    here = measure(part, train, num_sharing, **how)
    whole, timed = (cost.flops_per_token(decoder(each), train.seq_len) for each in (model, part))
    return replace(here, tokens_per_s=here.tokens_per_s * timed / whole)


def hash_s(num: int, timed: Timed | None = None) -> float:
    """Return the seconds in which this machine hashes a byte of a state, as members that audit each other do.

    Args:
        num: parameters. Of many, some millions tell as much.
        timed: as of `measure`.
    """
    vector = torch.zeros(min(num, _MOST_HASHED))
    timed = timed or (lambda step: usual_s(step, measured_s=_HASHED_S))
    return timed(lambda: _hash(vector)) / (vector.element_size() * vector.numel())


def _hash(vector: Tensor) -> None:
    digest_of(state_index({"local": vector}))


def _step(
    model: ModelConfig, train: TrainConfig, device: Device, micro_batch: int, *, has_rows: bool, is_exact: bool = False
) -> Callable[[], None]:
    """Return one inner step of the model, on tokens that are all zero.

    It has the parameters that a run begins with. PyTorch's own are so large that attention has one weight of 1 and
    others too small for a normal number, with which a CPU takes twenty times as long.
    """
    with torch.device("meta"):
        module = Transformer(model)
    base = initial_base(model, 0).to(device.torch) if has_base(model) else None
    first = initial_vector(model, 0).to(device.torch)
    flat = over(module, first.clone(), base)
    arithmetic: Arithmetic = Exact() if is_exact else Fast()
    has_loss = train.loss is not UNSET
    optimizer = arithmetic.optimizer(train.optimizer, flat)
    preference = Preference(train.loss, assemble(model, first, base)) if train.loss else None
    backward = Backward(
        flat,
        device,
        micro_batch,
        is_compiled=False,
        emit=lambda _event: None,
        objective=preference or arithmetic.objective,
        norm=arithmetic.norm,
    )
    batch = blank(train.batch_size, train.seq_len, has_rows=has_rows or has_loss, is_paired=has_loss)

    def step() -> None:
        backward.fill(batch)
        optimizer.step(1e-6)
        float(flat.vector[0])  # waits for a GPU

    return step


class Watched:
    """Steps, and how they went."""

    def __init__(self, step: Callable[[], None]) -> None:
        self._step = step
        self._all_s: list[float] = []
        self._all_computed_s: list[float] = []
        self._waited_s = 0.0
        self._tell_waited_s = kept_waiting(SystemClock())

    def __call__(self) -> None:
        clock = SystemClock()
        began, computed_s, waited_s = clock.now(), cpu_s(), self._tell_waited_s()
        self._step()
        self._all_s.append(clock.now() - began)
        self._all_computed_s.append(cpu_s() - computed_s)
        self._waited_s += self._tell_waited_s() - waited_s

    @property
    def fastest_s(self) -> float:
        return min(self._all_s)

    @property
    def least_computed_s(self) -> float:
        return min(self._all_computed_s)

    @property
    def is_disturbed(self) -> bool:
        return is_disturbed(self._all_s, sum(self._all_computed_s), self._waited_s)


def is_disturbed(all_s: Sequence[float], computed_s: float, waited_s: float) -> bool:
    """Return whether other programs had the cores in steps that took `all_s`: this one had less than one of them, was
    kept waiting for one, or the steps differ as they never do by themselves.

    Args:
        computed_s: by all threads of this process meanwhile. Threads that wait for one another compute, too.
        waited_s: in which the thread that makes the steps could have computed, while others did.
    """
    if not all_s:
        return False
    is_uneven = len(all_s) >= _LEAST_COMPARED and median(all_s) > _UNSTEADY * min(all_s)
    return is_uneven or computed_s < _WHOLE * sum(all_s) or waited_s > _KEPT_WAITING * sum(all_s)


def core_s(step: Callable[[], None], computed_s: Callable[[], float], expected_s: float) -> float:
    """Return the seconds that a step computes on one core, whoever else has it meanwhile; inf where it would be long.

    Args:
        computed_s: returns what this process has computed so far.
        expected_s: that all threads computed in a step: they wait for one another by computing, so it is no less.
    """
    if expected_s > _PATIENCE_S:
        return math.inf
    torch.set_num_threads(1)
    all_s: list[float] = []
    while len(all_s) < _CORE_STEPS and sum(all_s) < _CORE_S:
        before = computed_s()
        step()
        all_s.append(computed_s() - before)
    return min(all_s) or math.inf  # a clock may be too coarse for a step


def _counted(step: Callable[[], None], meter: Meter) -> Callable[[], None]:
    def counted() -> None:
        meter.add(0)  # before the first, too: of a large model it takes long
        step()
        meter.add()

    return counted


@contextmanager
def _others(num: int, model: ModelConfig, train: TrainConfig, threads: int, is_exact: bool) -> Iterator[None]:
    """Let so many processes make the same steps on the CPU meanwhile."""
    context = multiprocessing.get_context("spawn")
    here, at_work = context.Pipe(duplex=False)  # a semaphore would be told as leaked where a signal ends this process
    args = (model, train, threads, is_exact, at_work, os.getpid())
    others = [context.Process(target=_work, args=args, daemon=True) for _ in range(num)]
    try:
        for other in others:
            other.start()
        for _ in others:
            if here.poll(_START_S):
                here.recv_bytes()
        yield
    finally:
        for other in others:
            other.kill()
            other.join()


def _work(
    model: ModelConfig, train: TrainConfig, threads: int, is_exact: bool, at_work: Connection, parent: int
) -> None:
    torch.set_num_threads(threads)
    device = choose(PeerConfig(device="cpu", threads=threads))
    step = _step(model, train, device, train.batch_size, has_rows=False, is_exact=is_exact)
    step()
    at_work.send_bytes(b"\0")
    while os.getppid() == parent:
        step()
