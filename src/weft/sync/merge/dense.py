"""Means of dense payloads, a few numbers of all of them at a time.

`reduce.Merger` takes one contribution after the other, so that its sums, in float64, go to memory and come back for
each. Here they stay in the processor's cache: each contribution is read once, and the mean is written once. What is
computed of each element is the same, in the same order, so the bits are the same. All contributions have to be there at
once, each encoded so that any of its numbers are some of its bytes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float32
from torch import Tensor

from weft.codec import bounds
from weft.codec.bounds import Empty
from weft.codec.codec import Codec
from weft.codec.dense import Bf16, Fp32
from weft.errors import PayloadError
from weft.sync.merge.mean import MAX_WEIGHT, accumulate, divide
from weft.sync.method.choices import Rule
from weft.wire import Buffer

Seen = Callable[[int, Tensor], None]

DENSE_STEP = 1 << 17  # numbers at a time: sums of 1 MiB, and the calls take little beside the arithmetic


@dataclass(frozen=True)
class Dense:
    """A contribution to a part: what it weighs, its bytes, and how they encode it."""

    weight: int
    data: Buffer
    codec: Codec


def is_dense(rule: Rule, brought: Sequence[Dense]) -> bool:
    """Return whether `add_up` can merge these."""
    return rule == "peers_mean" and all(isinstance(each.codec, Fp32 | Bf16) for each in brought)


def add_up(
    brought: Sequence[Dense], num: int, awaited: int, empty: Empty, seen: Seen
) -> tuple[Float32[Tensor, " num"], list[PayloadError | None]]:
    """Return the mean of what was brought, peers ascending, and of each why it is no contribution, or None.

    Where one is none, the mean means nothing.

    Args:
        awaited: what the late weigh.
        empty: gives memory for so many values of a type.
        seen: told of each few values of each contribution, by its number.

    Raises:
        PayloadError: nobody contributed a token, so there is no mean.
    """
    faults, total = list[PayloadError | None](), 0
    for each in brought:
        faults.append(_fault(each, num, MAX_WEIGHT - awaited - total))
        total += each.weight
    if not total:
        raise PayloadError("no contribution with tokens: there is nothing to merge")
    mean, step = empty(num, torch.float32), min(DENSE_STEP, num)
    sums, scratch = empty(step, torch.float64), empty(step, torch.float32)
    for start in range(0, num, DENSE_STEP):
        here = range(start, min(start + DENSE_STEP, num))
        part, values = sums[: len(here)], scratch[: len(here)]
        for number, each in enumerate(brought):
            if faults[number] is not None:
                continue
            try:
                each.codec.decode(_bytes_of(each, here), len(here), values)
            except PayloadError as error:
                faults[number] = error
                continue
            seen(number, values)
            accumulate(part, each.weight, values, is_first=number == 0)
        divide(part, total + awaited, mean[here.start : here.stop])
    return mean, faults


def _fault(each: Dense, num: int, most: int) -> PayloadError | None:
    if not 0 <= each.weight <= most:
        return PayloadError(f"a contribution of {each.weight} tokens: allowed are 0 to {most}")
    try:
        bounds.require_nbytes(each.data, each.codec.nbytes(num))
    except PayloadError as error:
        return error
    return None


def _bytes_of(each: Dense, here: range) -> memoryview:
    begin, end = each.codec.nbytes(here.start), each.codec.nbytes(here.stop)
    return memoryview(each.data).cast("B")[begin:end]


def check_encoded(codec: Codec, data: Buffer, num: int, empty: Empty) -> None:
    """Check that bytes encode a vector of `num` values.

    Raises:
        PayloadError: they do not.
    """
    if not isinstance(codec, Fp32 | Bf16):
        codec.decode(data, num, empty(num, torch.float32))
        return
    whole = Dense(0, bounds.require_nbytes(data, codec.nbytes(num)), codec)
    scratch = empty(min(DENSE_STEP, num), torch.float32)
    for start in range(0, num, DENSE_STEP):
        here = range(start, min(start + DENSE_STEP, num))
        codec.decode(_bytes_of(whole, here), len(here), scratch[: len(here)])
