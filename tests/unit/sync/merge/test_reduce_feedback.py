"""Nothing that a codec leaves is lost: what was decoded and what is kept sum up to all that was put in.

Over a thousand rounds, and through a peer's carry: unit/peer/state/test_carry_feedback.py.
"""

import pytest
import torch

from weft.codec.build import build
from weft.codec.config import CodecConfig, E3m0Config, Int2Config, Int4Config, RandomKConfig, SignConfig, TopKConfig
from weft.rng import integers64, stream
from weft.sync.merge.reduce import decode_parts, encode_with_feedback
from weft.sync.records.parts import cut

pytestmark = pytest.mark.usefixtures("shapes_unchecked")

NUM = 4096 + 500
NUM_ROUNDS = 100
PARTS = cut(NUM, [3, 1])
CODECS: list[CodecConfig] = [
    TopKConfig(),
    TopKConfig(kept=64, values="int8"),
    RandomKConfig(kept=410, largest=82, values="int4"),
    SignConfig(),
    Int2Config(),
    Int4Config(),
    E3m0Config(),
]


@pytest.mark.full
@pytest.mark.parametrize("config", CODECS, ids=repr)
def test_with_decay_1_mass_is_conserved_through_rounds_that_fail_too(config: CodecConfig) -> None:
    luck, words = torch.Generator().manual_seed(4), integers64(stream(1, "fails"), NUM_ROUNDS)
    put_in, counted = torch.zeros(NUM, dtype=torch.float64), torch.zeros(NUM, dtype=torch.float64)
    kept, carry, num_failed = None, torch.zeros(NUM), 0
    for number in range(NUM_ROUNDS):
        new = torch.randn(NUM, generator=luck)
        put_in += new
        carry = carry + new
        codec = build(config, number)
        payload, left = encode_with_feedback(codec, carry, PARTS, kept, 1.0)
        if words[number] % 3 == 0:  # nobody counts it: it goes into the next
            num_failed += 1
            continue
        counted += decode_parts(codec, payload, PARTS)
        kept, carry = left, torch.zeros(NUM)
    assert kept is not None
    assert num_failed > NUM_ROUNDS / 5
    gap = (counted + kept + carry - put_in).abs().max()
    largest = max(float(kept.abs().max()), float(put_in.abs().max()))
    assert float(gap) <= 2.0**-24 * largest * NUM_ROUNDS**0.5 * 4  # roundings of either sign


def test_encoding_changes_nothing() -> None:
    vector, kept = torch.randn(NUM), torch.randn(NUM)
    before = vector.clone(), kept.clone()
    codec = build(TopKConfig())
    first, left = encode_with_feedback(codec, vector, PARTS, kept, 0.95)
    again, same = encode_with_feedback(codec, vector, PARTS, kept, 0.95)
    assert (vector.equal(before[0]), kept.equal(before[1]), left.equal(same)) == (True, True, True)
    assert [bytes(each) for each in first] == [bytes(each) for each in again]


def test_what_decays_is_kept_times_decay() -> None:
    codec, vector = build(TopKConfig(kept=1, values="fp32")), torch.zeros(4096)
    vector[:2] = torch.tensor([4.0, 2.0])
    _, left = encode_with_feedback(codec, vector, [range(4096)], None, 0.5)
    assert left[:2].tolist() == [0.0, 2.0]
    payload, left = encode_with_feedback(codec, torch.zeros(4096), [range(4096)], left, 0.5)
    assert codec.decode(payload[0], 4096)[:2].tolist() == [0.0, 1.0]
    assert not left.any()
