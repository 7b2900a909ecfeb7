"""What joining costs is said in figures that can be counted again, and one that is measured."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from unit.peer.tiny import MODEL, run_config
from weft import cost
from weft.cli.join import describe
from weft.ids import PeerId, RunId
from weft.model import num_parameters
from weft.net.messages import Contact
from weft.net.ticket import Ticket
from weft.peer import terms
from weft.peer.config import PeerConfig
from weft.peer.device import choose
from weft.peer.home import Home
from weft.sync.method import DdpConfig, DiLoCoConfig

HERE = PeerConfig(device="cpu", threads=1)
TICKET = Ticket(
    run=RunId("f" * 64),
    issuer=PeerId("a" * 64),
    contacts=tuple(
        Contact(peer=PeerId(letter * 64), name=letter, addresses=("tls://127.0.0.1:1",)) for letter in "abc"
    ),
)


class SteppingClock:
    """A clock on which every look at it takes as long as it is told."""

    def __init__(self, *steps_s: float) -> None:
        self._steps_s = list(steps_s)
        self._now = 0.0

    def now(self) -> float:
        self._now += self._steps_s.pop(0) if len(self._steps_s) > 1 else self._steps_s[0]
        return self._now

    def wall(self) -> float:
        raise AssertionError("no measure is taken by the wall clock")


def made(folder: Path, clock: Any = None, **change: Any) -> terms.Terms:
    return terms.terms(run_config(**change), TICKET, Home(folder), HERE, clock or SteppingClock(0.5))


def test_the_speed_is_that_of_products_of_the_models_shape() -> None:
    work = 2.0 * 64 * MODEL.width * MODEL.ffn_width
    assert terms.product_flops(MODEL, 64, choose(HERE), SteppingClock(0.5)) == pytest.approx(work / 0.5)
    # One product and four are too short to measure; sixteen are not.
    clock = SteppingClock(0.0, 0.001, 0.0, 0.004, 0.0, 0.032)
    assert terms.product_flops(MODEL, 64, choose(HERE), clock) == pytest.approx(16 * work / 0.032)


def test_what_is_multiplied_is_small_however_large_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    large = msgspec.structs.replace(MODEL, width=16_384, ffn_width=65_536)
    asked = []
    real = torch.ones
    monkeypatch.setattr(torch, "ones", lambda shape, **given: asked.append(shape) or real(shape, **given))
    terms.product_flops(large, 1 << 24, choose(HERE), SteppingClock(0.5))
    assert asked == [(terms.MAX_ROWS, terms.MAX_WIDTH), (terms.MAX_WIDTH, terms.MAX_WIDTH)]


def test_bytes_a_day_follow_from_bytes_a_round_and_its_least_time(tmp_path: Path) -> None:
    found = made(tmp_path)
    num, run = num_parameters(MODEL), run_config()
    traffic = cost.reduce_traffic(num, cost.part_size(num, 4), 4, cost.FP32, cost.FP32)
    assert (found.num_peers, found.round_nbytes) == (4, traffic.sent_nbytes + traffic.received_nbytes)
    flops = cost.flops_per_token(terms.decoder(run.model), run.train.seq_len)
    work_s = run.method.every * run.tokens_per_step * flops / found.flops_per_s
    assert work_s > terms.LEAST_ROUND_S
    assert found.round_s == pytest.approx(work_s)
    assert found.gigabytes_per_day == pytest.approx(found.round_nbytes * 86_400 / work_s / 1e9)


def test_no_round_is_taken_for_shorter_than_its_messages(tmp_path: Path) -> None:
    clock = SteppingClock(*(0.0, 0.001) * 6, 0.0, terms.LEAST_MEASURED_S)  # 4096 products
    fast = made(tmp_path, clock, method=DdpConfig())
    assert fast.round_s == terms.LEAST_ROUND_S


@pytest.mark.parametrize(("method", "num_vectors"), [(None, 1), (DiLoCoConfig(), 2), (DdpConfig(), 3)])
def test_the_state_that_is_fetched_has_the_outer_optimizers_vectors(
    tmp_path: Path, method: Any, num_vectors: int
) -> None:
    """FedAvg averages parameters, DiLoCo keeps a momentum, DDP both moments of AdamW."""
    found = made(tmp_path) if method is None else made(tmp_path, method=method)
    (shard,) = {*found.run.data.train, *found.run.data.heldout}
    assert found.fetch_nbytes == shard.nbytes + 4 * num_vectors * num_parameters(MODEL)


def test_a_person_reads_what_the_day_is_reckoned_from(tmp_path: Path) -> None:
    found = made(tmp_path)
    *_, bytes_line, speed_line = describe(found).splitlines()
    assert "a round among 4 peers, at most" in bytes_line
    assert f"at least {found.round_s:.2g} s: 4 inner steps at" in speed_line
