"""Nothing is lost in a thousand rounds of a carry that some count, some miss, and some never hear of."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from unit.peer import tiny
from weft.codec.build import build
from weft.codec.config import CodecConfig, Fp32Config, Int4Config, RandomKConfig, TopKConfig
from weft.ids import Round
from weft.peer.state.carry import Carry
from weft.peer.state.replica import Replica
from weft.rng import integers64, stream
from weft.sync.merge.reduce import decode_parts
from weft.sync.method.choices import Choices, SgdConfig
from weft.sync.round.machine import Fate
from weft.training.learner import Learner, Work

pytestmark = pytest.mark.usefixtures("shapes_unchecked")

NUM, ROUNDS = 300, 1000
STEP = Work(num_steps=1, num_tokens=10, mean_loss=1.0, duration_s=1.0)
FATES: tuple[Fate | None, ...] = (None, None, None, "late", "travelling", "lost")  # None: it is counted
WAYS: dict[str, dict[str, Any]] = {
    "top_k": {"codec": TopKConfig(kept=27, values="bf16")},
    "random_k": {"codec": RandomKConfig(kept=410, largest=82, values="int4")},
    "int4": {"codec": Int4Config()},
    "fragments": {"codec": TopKConfig(kept=27, values="bf16"), "fragments": 3},
    "what is left stays local": {"codec": TopKConfig(kept=27, values="bf16"), "error": "local"},
}
FAST = ("top_k", "int4")


class Walker(Learner):
    """Stands for what trains: its parameters are moved by hand."""

    def __init__(self, vector: Tensor) -> None:
        self.vector = vector.clone()

    def local(self) -> Tensor:
        return self.vector

    def set_local(self, vector: Tensor) -> None:
        self.vector = vector.clone()

    def set_center(self, outer: Tensor) -> None:
        pass


def move(replica: Replica, number: int, is_anew: bool) -> None:
    """Bring the outer parameters to wherever a round does, or another state; they stay small: little is rounded."""
    there = torch.randn(NUM, generator=torch.Generator().manual_seed(number))
    if is_anew:
        replica.outer.copy_(there)
    else:
        replica.scope.put(replica.outer, number, replica.scope.take(there, number))


@pytest.mark.full
@pytest.mark.parametrize(
    "choices",
    [pytest.param(way, id=name, marks=[] if name in FAST else pytest.mark.slow) for name, way in WAYS.items()],
)
def test_with_decay_1_a_carry_conserves_mass_over_a_thousand_rounds(choices: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    method = Choices(every=1, send="delta", apply=SgdConfig(lr=1.0), feedback=1.0, reply_codec=Fp32Config(), **choices)
    replica = Replica(tiny.run_config(method), torch.zeros(NUM))
    walker = Walker(replica.outer)
    carry, codec = Carry(walker, replica), method.codec
    put_in, counted = torch.zeros(NUM, dtype=torch.float64), torch.zeros(NUM, dtype=torch.float64)
    luck, words = torch.Generator().manual_seed(5), integers64(stream(1, "fails"), ROUNDS)
    largest, seen = 1.0, set[object]()
    for number, word in enumerate(map(int, words), 1):
        if not carry.is_overdue:
            step = torch.randn(NUM, generator=luck)
            put_in += step
            walker.vector = walker.vector - step
            carry.add_steps(STEP)
        is_absent, is_anew = word % 7 == 0, word % 31 == 0
        fate = FATES[word // 1024 % len(FATES)]
        is_counted = fate is None and not (is_absent or is_anew)
        if not is_absent:
            sent = offered(carry, replica, codec, number)
            counted += sent if is_counted else 0.0
        settle = partial(carry.settle, partial(move, replica, number, is_anew), is_counted, fate or "late")
        settle(None if is_anew else Round(number))
        largest = max(largest, float((replica.outer - walker.vector).abs().max()))
        seen.add("absent" if is_absent else "anew" if is_anew else fate)
    assert seen == {"absent", "anew", *FATES}
    error = carry.vectors().get("error", torch.zeros(NUM))
    here = (replica.outer - walker.vector) + error
    assert float(here.abs().max()) > 0.01  # something is left to be lost
    gap = (counted + here - put_in).abs().max()
    assert float(gap) <= 2.0**-24 * largest * ROUNDS**0.5 * 4  # roundings of either sign


def offered(carry: Carry, replica: Replica, codec: CodecConfig, number: int) -> Tensor:
    """Offer a payload to a round; return what all decode of it, where it belongs."""
    parts = (range(replica.scope.num_sent(number)),)
    encoded = carry.encode(parts, number)
    carry.offered = tuple(part.digest for part in encoded)
    whole = torch.zeros(NUM)
    replica.scope.put(whole, number, decode_parts(build(codec, number), [part.encoded for part in encoded], parts))
    return whole
