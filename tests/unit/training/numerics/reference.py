"""Exact numbers from their definition (`weft.training.numerics`), one number at a time: what the fast ones are compared
with. Sums are of Python's fractions, which round nothing.
"""

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float32]
Matrix = NDArray[np.float32]
LOG2_E = np.float32(1.4426950408889634)
POWERS = [
    np.float32(float.fromhex(each))
    for each in ("0x1.62e42ap-1", "0x1.ebf9bcp-3", "0x1.c6b752p-5", "0x1.3cea88p-7", "0x1.5bba14p-10")
]


def bits(num: int) -> int:
    return min(22, (53 - math.ceil(math.log2(num))) // 2)


def step(row: Sequence[np.float32], num: int) -> Fraction:
    _, exponent = math.frexp(max(abs(float(x)) for x in row))  # below 2^exponent
    return max(Fraction(2) ** (exponent - bits(num)), Fraction(2) ** -126)


def grid(row: Sequence[np.float32], num: int) -> list[Fraction]:
    return [round(Fraction(float(x)) / step(row, num)) * step(row, num) for x in row]


def dot(a: Sequence[Fraction], b: Sequence[Fraction]) -> Fraction:
    return sum((x * y for x, y in zip(a, b, strict=True)), Fraction(0))


def product(a: Matrix, b: Matrix) -> Matrix:
    num = a.shape[1]
    rows, columns = [grid(row, num) for row in a], [grid(column, num) for column in b.T]
    return np.array([[np.float32(float(dot(row, column))) for column in columns] for row in rows])


def total(row: Sequence[np.float32]) -> float:
    if not any(row):
        return 0.0
    _, exponent = math.frexp(max(abs(float(x)) for x in row))
    unit = Fraction(2) ** (exponent - min(30, 53 - math.ceil(math.log2(len(row)))))
    return float(sum(round(Fraction(float(x)) / unit) * unit for x in row))


def exp2(x: np.float32) -> np.float32:
    if x <= -126:
        return np.float32(0)
    n = np.round(x)
    f, p = x - n, POWERS[-1]
    for each in reversed([np.float32(1), *POWERS[:-1]]):
        p = p * f + each  # two operations, each rounded to fp32
    return np.float32(math.ldexp(float(p), int(n)))


def log(x: float) -> float:
    f, exponent = math.frexp(x)
    if f < 0.7071067811865476:
        f, exponent = f * 2, exponent - 1
    t = (f - 1) / (f + 1)
    found = 1 / 21
    for odd in range(19, 0, -2):
        found = found * (t * t) + 1 / odd
    return found * t * 2 + exponent * 0.6931471805599453


def norm(x: Vector, weight: Vector, eps: float) -> Vector:
    mean = total(x * x) / len(x) + eps
    return np.array(x * np.float32(1 / math.sqrt(mean)) * weight)


def silu(g: np.float32) -> np.float32:
    return g * (np.float32(1) / (exp2(min(g * -LOG2_E, np.float32(126))) + np.float32(1)))


def cross_entropy(logits: Matrix, targets: Sequence[int]) -> np.float32:
    losses = []
    for row, target in zip(logits, targets, strict=True):
        below = row - row.max()
        losses.append(np.float32(log(total([exp2(x * LOG2_E) for x in below])) - float(below[target])))
    return np.float32(total(losses) / len(losses))


def attention(q: Matrix, k: Matrix, v: Matrix) -> Matrix:
    """Of one head, each row of which sees itself and those before."""
    num, width = q.shape
    found, scores = np.empty_like(q), product(q * np.float32(1 / math.sqrt(width)), k.T)
    columns = [grid(column, num) for column in v.T]
    for i in range(num):
        below = scores[i, : i + 1] - scores[i, : i + 1].max()
        powers = [exp2(x * LOG2_E) for x in below]
        e = [round(Fraction(float(x)) * 2 ** bits(num)) / Fraction(2) ** bits(num) for x in powers]
        for j, column in enumerate(columns):
            found[i, j] = np.float32(float(dot(e, column[: i + 1])) / float(sum(e)))
    return found
