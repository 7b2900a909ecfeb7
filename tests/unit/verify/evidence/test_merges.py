"""One block of a part, merged again by numpy, against what members merge."""

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import UNSET

from unit.verify.evidence.forge import CODECS, Mixed, mixed, rules
from weft.codec.config import Bf16Config, CodecConfig, Fp32Config, Int4Config, TopKConfig
from weft.ids import Digest
from weft.ledger.opening import CHUNK_NBYTES, num_chunks
from weft.sync.records.messages import Pass
from weft.verify.evidence.blocks import Known, nbytes, place, spans
from weft.verify.evidence.merges import check_merge, prove_merge
from weft.verify.evidence.records import FalseMerge
from weft.verify.evidence.shown import Unproven, window
from weft.wire import digest, digest_of, encode


def flipped(data: Any, at: int) -> bytes:
    found = bytearray(data)
    found[at] ^= 1
    return bytes(found)


def proven(part: Mixed, result: bytes, right: bytes | None = None, **fields: Any) -> Any:
    note = part.note(result, **fields)
    return prove_merge(note, part.ground, part.plan, part.num, result, right or part.right, part.brought)


@settings(max_examples=25)
@given(
    seed=st.integers(0, 1 << 30),
    num=st.integers(1, 3000),
    num_peers=st.integers(1, 5),
    codec=st.sampled_from(CODECS),
    has_late=st.booleans(),
    at=st.floats(0, 0.999),
)
def test_no_honest_part_is_proven_false_and_any_byte_of_another_is(
    seed: int, num: int, num_peers: int, codec: CodecConfig, has_late: bool, at: float
) -> None:
    part = mixed(seed, num, num_peers, rules(codec), has_late)
    with pytest.raises(Unproven, match="is the mean"):
        proven(part, part.right)
    other = flipped(part.right, int(at * len(part.right)))
    with pytest.raises(Unproven, match="is the mean"):  # who merges wrongly itself shows nothing
        proven(part, part.right, other)
    found = proven(part, other)
    assert check_merge(part.note(other), found) == "it has merged something else than what was brought"


def test_what_thirty_two_have_brought_fits() -> None:
    part = mixed(num_peers=5, num=200_000)
    assert len(encode(proven(part, flipped(part.right, 100_000)))) < 384 << 10


def test_another_plan_or_round_or_part_proves_nothing() -> None:
    part = mixed()
    other = flipped(part.right, 4000)
    found = proven(part, other)
    for note in (
        part.note(other, plan=digest(b"another")),
        part.note(other, head=digest(b"another")),
        part.note(other, plan=UNSET),
        part.note(other, head=UNSET),
        part.note(other, part=0),
        part.note(part.right),
        msgspec.structs.replace(part.note(other), round=9),
        msgspec.structs.replace(part.note(other), branch="00" * 32),
        msgspec.structs.replace(part.note(other), message=Pass()),
    ):
        with pytest.raises(Unproven):
            check_merge(note, found)


def test_a_shorter_part_has_another_end() -> None:
    """Were the length not bound, what is at other places could be shown as a block."""
    part = mixed(num=5000)
    found = proven(part, flipped(part.right, 4000))
    with pytest.raises(Unproven):
        check_merge(part.note(flipped(part.right, 4000)), msgspec.structs.replace(found, num=4999))


def shown_as(part: Mixed, codec: Known, num: int, block: int) -> FalseMerge:
    """Return an honest part as one of so many numbers."""
    total = nbytes(codec, num)
    asked = spans(codec, num, place(codec, num, block))
    payloads = [part.brought[Digest(each.parts[1])] for each in part.plan.contributions]
    return FalseMerge(
        ground=part.ground,
        plan=part.plan,
        num=num,
        block=block,
        end=window(part.right, range(CHUNK_NBYTES * (num_chunks(total) - 1), total)),
        merged=tuple(window(part.right, span) for span in asked),
        brought=tuple(tuple(window(each, span) for span in asked) for each in payloads),
    )


@pytest.mark.parametrize(("num", "claimed"), [(4096, 4095), (4095, 4096)])
def test_an_honest_part_in_half_bytes_is_not_proven_false_by_one_number_more_or_less(num: int, claimed: int) -> None:
    """Both lengths make as many bytes."""
    codec = Int4Config(block=256)
    part = mixed(num=num, rules=rules(codec))
    if claimed > num:  # who brings it may have written anything where nobody reads
        last = part.plan.contributions[-1]
        data = bytearray(part.brought.pop(Digest(last.parts[1])))
        data[-1] |= 0x70
        other = msgspec.structs.replace(last, parts=(last.parts[0], digest(data)))
        part.plan = msgspec.structs.replace(part.plan, contributions=(*part.plan.contributions[:-1], other))
        part.brought[digest(data)] = bytes(data)
    with pytest.raises(Unproven, match="is the mean"):
        check_merge(part.note(part.right), shown_as(part, codec, claimed, 15))


def test_a_plan_of_fewer_parts_proves_nothing() -> None:
    part = mixed()
    shown = proven(part, flipped(part.right, 4000))
    bare = [msgspec.structs.replace(each, parts=()) for each in part.plan.contributions]
    plan = msgspec.structs.replace(part.plan, contributions=tuple(bare))
    with pytest.raises(Unproven, match="no such part"):
        check_merge(part.note(part.right, plan=digest_of(plan)), msgspec.structs.replace(shown, plan=plan))


@pytest.mark.parametrize(
    "choices",
    [
        {"codec": TopKConfig(), "feedback": 0.9, "reply_codec": Fp32Config()},
        {"merge": "median"},
        {"merge": "senders_mean"},
        {"reply_codec": Bf16Config()},
    ],
)
def test_what_takes_more_than_a_block_is_not_shown(choices: dict[str, Any]) -> None:
    part = mixed()
    ground = msgspec.structs.replace(part.ground, charter=rules(**choices))
    with pytest.raises(Unproven):
        prove_merge(part.note(b""), ground, part.plan, part.num, part.right, part.right, part.brought)


def test_a_plan_that_takes_out_false_work_is_not_shown() -> None:
    part = mixed()
    plan = msgspec.structs.replace(part.plan, counters=(part.plan.owners[0],))
    note = part.note(part.right, plan=digest_of(plan))
    with pytest.raises(Unproven, match="more than a block"):
        prove_merge(note, part.ground, plan, part.num, part.right, flipped(part.right, 9), part.brought)
