"""How fast this machine serves a model's shape: one layer and the head, timed by the code that serves.

Of a model so many layers are made, of random numbers, as memory has to be read for: weights that a processor keeps in
its cache would be too fast. Nothing is loaded, so a run that nobody has trained yet can be planned as well.

    layer    so many layers in one section, by rows
    head     norm and head; and drawing at temperature 1, the API's own
    memory   what a sum reads;  products   of square matrices with many rows

Where other programs have the cores (`speed_here.is_disturbed`), all is timed anew on a single one, by the time that it
computes: that is what this machine takes, and not what others leave of it at the moment.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import rms_norm

from weft import rng
from weft.cli.plan.speed_here import Watched, core_s, usual_s
from weft.cli.terminal import WorkLine
from weft.clock import SystemClock, cpu_s
from weft.cost.training import SPARE
from weft.engine.batch import Piece
from weft.engine.draw import Drawing, draw
from weft.engine.load import NUMBER_NBYTES, free_nbytes
from weft.engine.numbers import MATRICES, Kind, can_multiply
from weft.engine.scheduling.pages import PAGE, num_pages
from weft.engine.step import KeysAndValues, Stepper, Weights, page_nbytes
from weft.errors import TooLarge
from weft.ids import several
from weft.model.config import ModelConfig, num_layer_parameters
from weft.model.sections import Section, num_section_parameters
from weft.plan.serve import PIECE, Points, Timed
from weft.progress import Meter

ROWS = (1, 8, 32)  # texts that draw
SEVERAL = 8  # of them, looking far
FAR = 16 * PAGE  # tokens that texts look at where that is timed
PROBED_NBYTES = 128_000_000  # of layers: more than caches hold
MOST_PROBED = 64_000_000  # parameters of a head; of a larger one a part
MEMORY_NBYTES = {"cpu": 256_000_000, "cuda": 1_000_000_000}
SQUARE = {"cpu": (1024, 256), "cuda": (8192, 8192)}  # width of a matrix, and rows
MEASURED_S, LEAST_STEPS = 0.3, 5
KINDS: tuple[Kind, ...] = ("fp32", "bf16", "w8a16", "int8")

Clocked = Callable[[Callable[[], None]], float]


def usual(step: Callable[[], None]) -> float:
    return usual_s(step, measured_s=MEASURED_S, least_steps=LEAST_STEPS)


def of_one_core(step: Callable[[], None]) -> float:
    """Return what a step computes on one core; from then on this process has one thread."""
    step()  # what is made once
    return core_s(step, cpu_s, 0.0)


@dataclass(frozen=True)
class Found:
    """What was timed, and of which machine."""

    timed: Timed
    name: str


class _Disturbed(Exception):
    """Other programs have the cores."""


def measure(config: ModelConfig, kind: Kind, device: torch.device, clocked: Clocked | None = None) -> Found:
    """Return what this machine takes; that takes some ten seconds, longer where a layer does.

    Args:
        clocked: makes a step often enough, and returns its seconds; None: the median of many, and on a CPU that others
            use what one core computes.

    Raises:
        TooLarge: there is no memory for a layer.
    """
    threads, is_cpu = torch.get_num_threads(), device.type == "cpu"
    layers, head, cores = _Layers(config, kind, device), _Head(config, kind, device), f"threads: {threads}"
    try:
        with Meter("timing this machine", "figures", WorkLine(), SystemClock()) as meter:
            try:
                timed = _timed(layers, head, _Watch(clocked or usual, meter, is_wary=is_cpu and clocked is None))
            except _Disturbed:
                torch.set_num_threads(1)
                cores = "with a core to itself: other programs use the cores now"
                timed = _timed(layers, head, _Watch(of_one_core, meter, is_wary=False))
    finally:
        torch.set_num_threads(threads)
    if is_cpu:
        return Found(timed, f"cpu, {cores}")
    return Found(timed, torch.cuda.get_device_name(device) if device.type == "cuda" else str(device))


def _timed(layers: "_Layers", head: "_Head", watch: "_Watch") -> Timed:
    layer_s = tuple((num, watch.took_s(layers.draws(num, PAGE)) / layers.num) for num in ROWS)
    far_s = watch.took_s(layers.draws(SEVERAL, FAR)) / layers.num
    piece_s = watch.took_s(layers.reads(0)) / layers.num
    late_s = watch.took_s(layers.reads(FAR - PIECE)) / layers.num
    return Timed(
        kind=layers.kind,
        layer_s=_growing((*layer_s, (PIECE, piece_s))),
        head_s=_growing(tuple((num, head.times * watch.took_s(head.finds(num))) for num in ROWS)),
        draw_s=head.times * watch.took_s(head.draws()),
        look_s=max(0.0, (far_s - dict(layer_s)[SEVERAL]) / (SEVERAL * (FAR - PAGE))),
        read_look_s=max(0.0, (late_s - piece_s) / (PIECE * (FAR - PIECE))),
        bandwidth=_bandwidth(layers.device, watch),
        rates=_rates(layers.device, watch),
    )


def _num_layers(config: ModelConfig, kind: Kind, device: torch.device) -> int:
    """Return of how many layers memory is filled."""
    one = num_layer_parameters(config)
    found = max(1, min(config.num_layers, ceil(PROBED_NBYTES / (one * NUMBER_NBYTES[kind]))))
    needed = found * (4 + NUMBER_NBYTES[kind]) * one + found * _num_pages() * page_nbytes(config, kind, 1)
    free = free_nbytes(device)
    if needed > SPARE * free:
        raise TooLarge(
            f"to time {several(found, 'layer')} takes {needed / 1e9:.2f} GB, and of {device} {free / 1e9:.2f} GB are "
            "free. Close other programs."
        )
    return found


def _num_pages() -> int:
    return max(*ROWS, SEVERAL * num_pages(FAR))


def _growing(points: Points) -> Points:
    """Return points of which none is faster than one of fewer rows: chance would have it so."""
    found, least_s = list[tuple[int, float]](), 0.0
    for num, took_s in points:
        least_s = max(least_s, took_s)
        found.append((num, least_s))
    return tuple(found)


class _Watch:
    """
    Args:
        is_wary: it stops where other programs have the cores.
    """

    def __init__(self, clocked: Clocked, meter: Meter, *, is_wary: bool) -> None:
        self._clocked, self._meter, self._is_wary = clocked, meter, is_wary

    def took_s(self, step: Callable[[], None]) -> float:
        self._meter.add(0)
        watched = Watched(step)
        found = self._clocked(watched)
        if self._is_wary and watched.is_disturbed:
            raise _Disturbed
        self._meter.add()
        return found


class _Layers:
    """`num` layers of a model, as a section between others."""

    def __init__(self, config: ModelConfig, kind: Kind, device: torch.device) -> None:
        self.kind, self.device = kind, device
        self.num = _num_layers(config, kind, device)
        self._width = config.width
        config = msgspec.structs.replace(config, num_layers=self.num + 2)
        section = Section(1, 3, range(1, 1 + self.num))
        vector = _numbers(num_section_parameters(config, section))
        weights = Weights(config, vector.to(device), kind, section)
        self._stepper = Stepper(weights, KeysAndValues(config, _num_pages(), device, kind, self.num))

    def draws(self, num: int, context: int) -> Callable[[], None]:
        """Return a step in which so many texts go on, looking at `context` tokens each."""
        each, row = num_pages(context), _rows(1, self._width, self.device)
        pieces = [Piece(row, context - 1, range(at * each, (at + 1) * each), num_draws=0) for at in range(num)]
        return lambda: self._step(pieces)

    def reads(self, start: int) -> Callable[[], None]:
        """Return a step that reads a piece of a prompt."""
        rows = _rows(PIECE, self._width, self.device)
        return lambda: self._step([Piece(rows, start, range(num_pages(start + PIECE)), num_draws=0)])

    def _step(self, pieces: list[Piece]) -> None:
        float(self._stepper.pass_on(pieces)[-1][0, 0])  # waits for a GPU


class _Head:
    """Norm, head and drawing; of a large vocabulary a part, which takes one of `times` parts of the time."""

    def __init__(self, config: ModelConfig, kind: Kind, device: torch.device) -> None:
        num = min(config.vocab_size, max(1, MOST_PROBED // config.width))
        self.times = config.vocab_size / num
        self._width, self._device = config.width, device
        self._matrix = MATRICES[kind](_rows(num, config.width, device))

    def finds(self, num: int) -> Callable[[], None]:
        """Return what finds so many texts' logits."""
        x = _rows(num, self._width, self._device)

        def find() -> None:
            self._logits(x)

        return find

    def draws(self) -> Callable[[], None]:
        """Return what draws a text's token."""
        (logits,) = self._logits(_rows(1, self._width, self._device))
        drawing = Drawing()

        def draws() -> None:
            draw(logits.astype(np.float64), drawing, 0)

        return draws

    @torch.inference_mode()
    def _logits(self, x: Tensor) -> NDArray[np.float32]:
        found: NDArray[np.float32] = self._matrix(rms_norm(x, (self._width,))).cpu().numpy()
        return found


def _bandwidth(device: torch.device, watch: _Watch) -> float:
    x = torch.ones(MEMORY_NBYTES[_type(device)] // 4, device=device)

    def read() -> None:
        float(x.sum())

    return x.nbytes / watch.took_s(read)


def _rates(device: torch.device, watch: _Watch) -> dict[Kind, float]:
    """Return operations a second; of integers only where the device multiplies them rightly."""
    width, num_rows = SQUARE[_type(device)]
    x, weight = _rows(num_rows, width, device), _rows(width, width, device)

    def rate(kind: Kind) -> float:
        matrix = MATRICES[kind](weight)

        @torch.inference_mode()
        def multiply() -> None:
            float(matrix(x)[0, 0])

        return 2 * num_rows * width * width / watch.took_s(multiply)

    found: dict[Kind, float] = {kind: rate(kind) for kind in KINDS if can_multiply(kind, device)}
    if "int8" in found:
        found["exact"] = found["int8"]
    return found


def _type(device: torch.device) -> str:
    return device.type if device.type in SQUARE else "cpu"


def _rows(num: int, width: int, device: torch.device) -> Tensor:
    return _numbers(num * width).view(num, width).to(device)


def _numbers(num: int) -> Tensor:
    """Return numbers like those of weights: a few drawn, again and again."""
    drawn = rng.stream(0, "weights").standard_normal(min(num, 1 << 20), np.float32)
    return torch.from_numpy(np.resize(drawn, num)) * 0.02
