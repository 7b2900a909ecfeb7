"""The low-rank basis of `powersgd` and torch's hook, each in one process on the same gradient, step by step."""

import contextlib
import math
import tempfile
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks._against_copy import error, speeds
from weft.sync.merge.low_rank import LowRank
from weft.sync.method.choices import LowRankConfig

RANK = 4  # what `powersgd` has where nothing is said


class Bucket:
    """What torch's hook asks of a bucket, all matrices one after the other."""

    def __init__(self, vector: Tensor, shapes: tuple[tuple[int, ...], ...]) -> None:
        self._vector = vector
        sizes = [math.prod(shape) for shape in shapes]
        self._tensors = [part.view(shape) for part, shape in zip(torch.split(vector, sizes), shapes, strict=True)]

    def buffer(self) -> Tensor:
        return self._vector

    def gradients(self) -> list[Tensor]:
        return self._tensors

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True


class Theirs:
    """One process of torch's hook: each call is a step on the same gradient."""

    def __init__(self, vector: Tensor, shapes: tuple[tuple[int, ...], ...], *, feedback: bool, batched: bool) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

        self._hook = powerSGD_hook.powerSGD_hook
        self._state = powerSGD_hook.PowerSGDState(
            None, RANK, 2, use_error_feedback=feedback, batch_tensors_with_same_shape=batched
        )
        self._vector, self._work = vector, vector.clone()
        self._bucket = Bucket(self._work, shapes)
        for _ in range(2):  # which it sends whole
            self()

    def __call__(self) -> Tensor:
        self._work.copy_(self._vector)
        self._hook(self._state, self._bucket).wait()
        return self._work

    @property
    def num_sent(self) -> int:
        """Return how many numbers a step sends, both ways of the matrices counted."""
        return sum(memory[0].numel() for memory in (self._state.p_memory_dict, self._state.q_memory_dict))


class Ours:
    """One peer of `powersgd`: each call is a round on the same gradient."""

    def __init__(self, vector: Tensor, shapes: tuple[tuple[int, ...], ...], *, feedback: bool) -> None:
        self._basis = LowRank(LowRankConfig(rank=RANK), shapes)
        self._state, self._round, self._vector = self._basis.init(), 0, vector
        self._left = torch.zeros_like(vector) if feedback else None

    def __call__(self) -> Tensor:
        self._round += 1
        work = self._vector if self._left is None else self._vector + self._left
        sent = self._basis.forward(work, self._state, self._round)
        found = self._basis.inverse(sent, self._state, self._round)
        if self._left is not None:
            self._left = work - found
        self._basis.advance(sent, self._state, self._round)
        return found

    @property
    def num_sent(self) -> int:
        return self._basis.num_sent(self._vector.numel())


def low_rank_rows(vector: Tensor, shapes: tuple[tuple[int, ...], ...], turns: int) -> list[list[object]]:
    """Return a row each: numbers sent, errors as steps go by on one gradient, and speed."""
    makes: dict[str, Callable[[bool], Ours | Theirs]] = {
        "weft, a round": lambda feedback: Ours(vector, shapes, feedback=feedback),
        "torch, a step": lambda feedback: Theirs(vector, shapes, feedback=feedback, batched=False),
        "torch, a step, batched": lambda feedback: Theirs(vector, shapes, feedback=feedback, batched=True),
    }
    acts = {name: make(True) for name, make in makes.items()}
    fractions, _ = speeds(vector, dict(acts), turns)
    rows: list[list[object]] = []
    for name, make in makes.items():
        plain, fed = make(False), make(True)
        errors, total = [], torch.zeros_like(vector)
        for step in range(1, 17):
            found = plain()
            total += fed()
            if step in (1, 4, 16):
                errors.append(error(found, vector))
        mean = total / 16
        rows.append([name, 32 * acts[name].num_sent / vector.numel(), *errors, error(mean, vector), fractions[name]])
    return rows


def best_error(vector: Tensor, shapes: tuple[tuple[int, ...], ...]) -> float:
    """Return what the best matrices of that rank leave."""
    left, start = 0.0, 0
    for shape in shapes:
        stop = start + math.prod(shape)
        if len(shape) == 2 and 2 * RANK * max(shape) <= math.prod(shape):
            values = torch.linalg.svdvals(vector[start:stop].view(shape).double())
            left += float(values[RANK:].square().sum())
        start = stop
    return math.sqrt(left) / float(vector.double().norm())


def matrices(num: int, side: int) -> tuple[Tensor, tuple[tuple[int, ...], ...]]:
    """Return square matrices whose directions fall off as 1 / k, as those of gradients do, and some noise."""
    generator = torch.Generator().manual_seed(3)
    shapes = ((side, side),) * num
    parts = []
    for _ in range(num):
        left, right = (torch.randn(side, 64, generator=generator) for _ in range(2))
        fall = torch.arange(1, 65).float().reciprocal()
        parts.append(left * fall @ right.T + 0.1 * torch.randn(side, side, generator=generator))
    return torch.cat([part.reshape(-1) for part in parts]) * 1e-3, shapes


@contextlib.contextmanager
def one_process() -> Iterator[None]:
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()
