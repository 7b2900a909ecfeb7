"""A part of a round that its owner has not merged as it says: one block of it, merged again.

    signed     a RoundNote of `Merged`: the result, the plan that it was merged by, and the manifest before the round
    plan       what each has brought to the part, and what it is worth
    manifest   and the charter after it: by which codec, and what the late weigh
    block      of the result, and of what each has brought; its mean, encoded, is not what the result has

The last piece of the result says how long that is, and so how many numbers the part has: an owner that merges has seen
that all that was brought is as long. Two codes of int4 are one byte, so the part may have one number less or one more:
what is false has to be so of both.
"""

from collections.abc import Mapping

import numpy as np
from msgspec import UNSET
from numpy.typing import NDArray

from weft.ids import Digest
from weft.ledger.opening import CHUNK_NBYTES, num_chunks
from weft.sync.method.choices import Choices
from weft.sync.records.charter import Charter
from weft.sync.records.messages import Collect, Manifest, Merged, RoundNote
from weft.sync.records.weights import awaited_weight, weight_of
from weft.verify.evidence.blocks import Known, decoded, encoded, first_other, known, lengths, nbytes, place, spans
from weft.verify.evidence.records import FalseMerge, Ground
from weft.verify.evidence.shown import Book, Unproven, Window, window
from weft.verify.evidence.works import stands_on
from weft.wire import Buffer, digest_of


def check_merge(note: RoundNote, shown: FalseMerge) -> str:
    """Return that a block of what an owner has merged is not the mean of what was brought to it.

    Raises:
        Unproven: it is, or it may be.
    """
    merged, plan = note.message, shown.plan
    if not isinstance(merged, Merged) or merged.plan is UNSET or merged.head is UNSET:
        raise Unproven("it does not say by which plan it was merged")
    if digest_of(plan) != merged.plan:
        raise Unproven("it was merged by another plan than the one that is shown")
    manifest, charter = stands_on(shown.ground, Digest(merged.head))
    if note.round != manifest.round + 1 or note.branch != manifest.branch:
        raise Unproven("the manifest is not the one before the round")
    codec, reply = _codecs(charter.settings.method, plan)
    if len(shown.brought) != len(plan.contributions):
        raise Unproven("what each has brought is to be shown")
    if any(len(each.parts) <= merged.part for each in plan.contributions):
        raise Unproven("what each has brought has no such part")
    here, book = place(reply, shown.num, shown.block), Book()
    result, total = Digest(merged.result), nbytes(reply, shown.num)
    start = CHUNK_NBYTES * (num_chunks(total) - 1)
    book.read(result, total, range(start, total), shown.end)
    has = _read(book, result, reply, shown.num, here, shown.merged)
    brought = [
        _read(book, Digest(each.parts[merged.part]), codec, shown.num, here, one)
        for each, one in zip(plan.contributions, shown.brought, strict=True)
    ]
    book.close()
    for num in lengths(reply, shown.num):
        there = place(reply, num, shown.block)
        mean = _mean(manifest, charter, plan, [decoded(codec, each, len(there)) for each in brought])
        if not np.isfinite(mean).all() or encoded(reply, mean) == has:
            raise Unproven("the block is the mean of what was brought")
    return "it has merged something else than what was brought"


def prove_merge(
    note: RoundNote,
    ground: Ground,
    plan: Collect,
    num: int,
    result: Buffer,
    right: Buffer,
    brought: Mapping[Digest, Buffer],
) -> FalseMerge:
    """Return what shows that a part is not the mean of what was brought to it.

    Args:
        num: elements of the part.
        right: what it should be.
        brought: to the part, by digest.
    """
    merged = note.message
    codec, reply = _codecs(ground.charter.settings.method, plan)
    block = first_other(reply, num, result, right)
    if not isinstance(merged, Merged) or block is None:
        raise Unproven("the part is the mean of what was brought")
    here, total = place(reply, num, block), nbytes(reply, num)
    asked = spans(codec, num, here)
    payloads = [brought[Digest(each.parts[merged.part])] for each in plan.contributions]
    shown = FalseMerge(
        ground=ground,
        plan=plan,
        num=num,
        block=block,
        end=window(result, range(CHUNK_NBYTES * (num_chunks(total) - 1), total)),
        merged=tuple(window(result, span) for span in spans(reply, num, here)),
        brought=tuple(tuple(window(each, span) for span in asked) for each in payloads),
    )
    check_merge(note, shown)
    return shown


def _codecs(method: Choices, plan: Collect) -> tuple[Known, Known]:
    """Return how what was brought is encoded, and the result, of which one block of each is enough.

    Raises:
        Unproven: it takes more to tell what the result should be.
    """
    is_apart = all(each.legacy is None and each.group is None for each in plan.contributions)
    is_simple = method.merge == "peers_mean" and method.graph is None and method.wait == "all"
    if not (is_apart and is_simple) or plan.counters is not UNSET or method.reply_feedback is not None:
        raise Unproven("the mean follows from more than a block of what was brought")
    codec, reply = known(method.codec), known(method.reply)
    if codec != reply:
        raise Unproven("what is brought and the result have other blocks")
    return codec, reply


def _read(
    book: Book, digest: Digest, codec: Known, num: int, here: range, shown: tuple[Window, ...]
) -> tuple[bytes, ...]:
    asked = spans(codec, num, here)
    if len(asked) != len(shown):
        raise Unproven("a block is not shown as its codec has it")
    return tuple(book.read(digest, nbytes(codec, num), span, each) for span, each in zip(asked, shown, strict=True))


def _mean(
    manifest: Manifest, charter: Charter, plan: Collect, vectors: list[NDArray[np.float32]]
) -> NDArray[np.float32]:
    """Return sum(v x) / (sum(v) + a), as `weft.sync.merge.mean` adds it up."""
    weights = [weight_of(charter, each) for each in plan.contributions]
    late = awaited_weight(charter, plan.awaited, manifest.leases, ())
    if not sum(weights):
        raise Unproven("nobody has brought anything")
    products = [vector.astype(np.float64) * float(weight) for vector, weight in zip(vectors, weights, strict=True)]
    added = products[0]
    for each in products[1:]:
        added = added + each
    return (added / np.float64(sum(weights) + late)).astype(np.float32)
