"""Number by number: of matrices of one shape, of heads side by side, and moved from place to place."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from weft.verify.evidence.program.grids import LOG2_E, MOST_POWER, Array, exp2, turns, whole
from weft.verify.evidence.program.operation import Kind, Read

Role = Literal["cell", "row", "col", "batch"]  # of an operand: a number for each, or one of its row, column, matrix
What = Literal["copied", "whole", "scaled", "divided", "weighed", "normed", "norm_back", "added", "slope"]

_WHAT: Mapping[What, tuple[tuple[Role, ...], Callable[..., Array]]] = {
    "copied": (("cell",), lambda x: x),
    "whole": (("cell", "row"), whole),
    "scaled": (("cell", "row", "batch"), lambda x, step, most: x * (step / most)),
    "divided": (("cell", "row"), lambda x, by: x / by),
    "weighed": (("cell", "cell", "row"), lambda grad, x, inverse: grad * (x * inverse)),
    "normed": (("cell", "row", "col"), lambda x, inverse, weight: x * inverse * weight),
    "norm_back": (
        ("cell", "cell", "row", "col", "row"),
        lambda grad, x, inverse, weight, mean: (grad * weight - x * inverse * mean) * inverse,
    ),
    "added": (("cell", "cell"), lambda a, b: a + b),
    "slope": (("cell", "row", "cell", "row"), lambda dot, less, weight, by: (dot - less) * (weight / by)),
}


@dataclass(frozen=True)
class Cells(Kind):
    """What each number of some matrices [rows, cols] comes to.

    Args:
        is_turned: what comes out is [cols, rows].
    """

    batch: int
    rows: int
    cols: int
    what: What
    is_turned: bool = False

    @property
    def num(self) -> int:
        return self.batch * self.rows * self.cols

    def whole(self, operands: Sequence[Array]) -> Array:
        roles, made = _WHAT[self.what]
        shapes: dict[Role, tuple[int, int, int]] = {
            "cell": (self.batch, self.rows, self.cols),
            "row": (self.batch, self.rows, 1),
            "col": (1, 1, self.cols),
            "batch": (self.batch, 1, 1),
        }
        found = made(*(each.reshape(shapes[role]) for role, each in zip(roles, operands, strict=True)))
        return np.ascontiguousarray(found.transpose(0, 2, 1) if self.is_turned else found).reshape(-1)

    def one(self, at: int, read: Read) -> Array:
        roles, made = _WHAT[self.what]
        if self.is_turned:
            rest, row = divmod(at, self.rows)
            batch, col = divmod(rest, self.cols)
        else:
            rest, col = divmod(at, self.cols)
            batch, row = divmod(rest, self.rows)
        places: dict[Role, int] = {
            "cell": (batch * self.rows + row) * self.cols + col,
            "row": batch * self.rows + row,
            "col": col,
            "batch": batch,
        }
        return made(*(read(number, places[role], 1) for number, role in enumerate(roles)))


# --- gates ---


@dataclass(frozen=True)
class Gate(Kind):
    """silu(g) u of rows that have g and then u."""

    rows: int
    width: int

    @property
    def num(self) -> int:
        return self.rows * self.width

    def whole(self, operands: Sequence[Array]) -> Array:
        x = operands[0].reshape(self.rows, -1)
        return _gated(x[:, : self.width], x[:, self.width :]).reshape(-1)

    def one(self, at: int, read: Read) -> Array:
        row, col = divmod(at, self.width)
        start = 2 * row * self.width + col
        return _gated(read(0, start, 1), read(0, start + self.width, 1))


@dataclass(frozen=True)
class GateBack(Kind):
    """The gradients of g and then of u; operands: that of silu(g) u; g and u."""

    rows: int
    width: int

    @property
    def num(self) -> int:
        return 2 * self.rows * self.width

    def whole(self, operands: Sequence[Array]) -> Array:
        grad, x = operands[0].reshape(self.rows, -1), operands[1].reshape(self.rows, -1)
        gate, up = x[:, : self.width], x[:, self.width :]
        return np.concatenate((_of_gate(grad, gate, up), _of_up(grad, gate)), 1).reshape(-1)

    def one(self, at: int, read: Read) -> Array:
        row, col = divmod(at, 2 * self.width)
        cell = col % self.width
        grad, gate = read(0, row * self.width + cell, 1), read(1, 2 * row * self.width + cell, 1)
        if col >= self.width:
            return _of_up(grad, gate)
        return _of_gate(grad, gate, read(1, (2 * row + 1) * self.width + cell, 1))


def _share(gate: Array) -> Array:
    return np.float32(1) / (exp2(np.minimum(gate * np.float32(-LOG2_E), np.float32(MOST_POWER))) + np.float32(1))


def _gated(gate: Array, up: Array) -> Array:
    return gate * _share(gate) * up


def _of_gate(grad: Array, gate: Array, up: Array) -> Array:
    s = _share(gate)
    return ((np.float32(1) - s) * gate + np.float32(1)) * s * up * grad


def _of_up(grad: Array, gate: Array) -> Array:
    return gate * _share(gate) * grad


# --- places ---


@dataclass(frozen=True)
class Cut(Kind):
    """Some columns of each row."""

    rows: int
    width: int
    start: int
    stop: int

    @property
    def num(self) -> int:
        return self.rows * (self.stop - self.start)

    def whole(self, operands: Sequence[Array]) -> Array:
        return operands[0].reshape(self.rows, self.width)[:, self.start : self.stop].reshape(-1)

    def one(self, at: int, read: Read) -> Array:
        row, col = divmod(at, self.stop - self.start)
        return read(0, row * self.width + self.start + col, 1)


@dataclass(frozen=True)
class Joined(Kind):
    """Rows of several matrices, one behind the other."""

    rows: int
    widths: tuple[int, ...]

    @property
    def num(self) -> int:
        return self.rows * sum(self.widths)

    def whole(self, operands: Sequence[Array]) -> Array:
        return np.concatenate([each.reshape(self.rows, -1) for each in operands], 1).reshape(-1)

    def one(self, at: int, read: Read) -> Array:
        row, col = divmod(at, sum(self.widths))
        number = 0
        while col >= self.widths[number]:
            col, number = col - self.widths[number], number + 1
        return read(number, row * self.widths[number] + col, 1)


@dataclass(frozen=True)
class Rotary:
    """How far a step of one token turns each pair of channels (i, i + half), in fp32."""

    wavelengths: tuple[float, ...]

    def at(self, token: Array, channel: Array) -> tuple[Array, Array]:
        """Return the cosine, and the sine with the sign that it has for a channel."""
        half = len(self.wavelengths)
        angle = token.astype(np.float32) * np.array(self.wavelengths, np.float32)[channel % half]
        cos, sin = turns(angle)
        return cos, np.where(channel < half, -sin, sin)


@dataclass(frozen=True)
class _Heads(Kind):
    """
    Args:
        turn: by which they are turned; None: they are not.
        factors: by which they are multiplied then, one after the other.
    """

    batch: int
    tokens: int
    kv_heads: int
    groups: int
    channels: int
    turn: Rotary | None = None
    factors: tuple[float, ...] = ()

    @property
    def num(self) -> int:
        return self.batch * self.tokens * self.kv_heads * self.groups * self.channels


@dataclass(frozen=True)
class Paired(_Heads):
    """Heads [batch, tokens, heads, channels] as [batch, key heads, heads of each, tokens, channels]."""

    def whole(self, operands: Sequence[Array]) -> Array:
        x = operands[0].reshape(self.batch, self.tokens, self.kv_heads, self.groups, self.channels)
        if self.turn is not None:
            cos, sin = _table(self.turn, self.tokens, self.channels)
            x = x * cos + np.roll(x, self.channels // 2, -1) * sin
        for factor in self.factors:
            x = x * np.float32(factor)
        return np.ascontiguousarray(x.transpose(0, 2, 3, 1, 4)).reshape(-1)

    def one(self, at: int, read: Read) -> Array:
        rest, channel = divmod(at, self.channels)
        rest, token = divmod(rest, self.tokens)
        batch, head = divmod(rest, self.kv_heads * self.groups)
        start = ((batch * self.tokens + token) * self.kv_heads * self.groups + head) * self.channels
        x = read(0, start + channel, 1)
        if self.turn is not None:
            cos, sin = self.turn.at(np.array([token]), np.array([channel]))
            x = x * cos + read(0, start + (channel - self.channels // 2) % self.channels, 1) * sin
        for factor in self.factors:
            x = x * np.float32(factor)
        return x


@dataclass(frozen=True)
class PairedBack(_Heads):
    """The way back of `Paired`: what was multiplied and turned is so again, as gradients are."""

    def whole(self, operands: Sequence[Array]) -> Array:
        x = operands[0].reshape(self.batch, self.kv_heads, self.groups, self.tokens, self.channels)
        x = x.transpose(0, 3, 1, 2, 4)
        for factor in self.factors:
            x = x * np.float32(factor)
        if self.turn is not None:
            cos, sin = _table(self.turn, self.tokens, self.channels)
            x = x * cos + np.roll(x * sin, -(self.channels // 2), -1)
        return np.ascontiguousarray(x).reshape(-1)

    def one(self, at: int, read: Read) -> Array:
        rest, channel = divmod(at, self.channels)
        rest, head = divmod(rest, self.kv_heads * self.groups)
        batch, token = divmod(rest, self.tokens)
        start = ((batch * self.kv_heads * self.groups + head) * self.tokens + token) * self.channels

        def given(channel: int) -> Array:
            x = read(0, start + channel, 1)
            for factor in self.factors:
                x = x * np.float32(factor)
            return x

        x = given(channel)
        if self.turn is None:
            return x
        other = (channel + self.channels // 2) % self.channels
        cos, _ = self.turn.at(np.array([token]), np.array([channel]))
        _, sin = self.turn.at(np.array([token]), np.array([other]))
        found: Array = x * cos + given(other) * sin
        return found


def _table(turn: Rotary, tokens: int, channels: int) -> tuple[Array, Array]:
    """Return cosines and sines [tokens, 1, 1, channels]."""
    cos, sin = turn.at(np.arange(tokens)[:, None], np.arange(channels)[None])
    return cos[:, None, None], sin[:, None, None]
