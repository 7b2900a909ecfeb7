"""What joining costs is said in figures that can be counted again, and one that is measured."""

from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec
import pytest
import torch

from unit.peer.tiny import MODEL, run_config
from unit.stages.pieces import CUT
from weft.codec.dense import Fp32
from weft.cost import training as cost
from weft.ids import Digest, PeerId, RunId
from weft.launch import terms
from weft.launch.terms import NOBODY, Pace
from weft.model.config import num_parameters
from weft.net.messages import Contact
from weft.net.ticket import Ticket
from weft.pipeline.config import PipelineConfig
from weft.run.machine import PeerConfig
from weft.run.staged import StagedConfig, held_of, staged
from weft.store.home import Home
from weft.sync.method.presets import DdpConfig, DiLoCoConfig
from weft.training.device import choose, needed_nbytes

HERE = PeerConfig(device="cpu", threads=1)
TICKET = Ticket(
    run=RunId("f" * 64),
    contacts=tuple(
        Contact(peer=PeerId(letter * 64), name=letter, addresses=("tls://127.0.0.1:1",)) for letter in "abc"
    ),
)


class SteppingClock:
    """A clock on which every look at it takes as long as it is told."""

    def __init__(self, *steps_s: float) -> None:
        self._steps_s = list(steps_s)
        self._now = 0.0
        self.num_threads = set[int]()  # that torch had, whenever it was looked at

    def now(self) -> float:
        self.num_threads.add(torch.get_num_threads())
        self._now += self._steps_s.pop(0) if len(self._steps_s) > 1 else self._steps_s[0]
        return self._now

    def advance(self, seconds: float) -> None:
        self._now += seconds

    def wall(self) -> float:
        raise AssertionError("no measure is taken by the wall clock")


def made(folder: Path, clock: Any = None, pace: Pace = NOBODY, **change: Any) -> terms.Terms:
    return terms.terms(run_config(**change), TICKET, Home(folder), HERE, clock or SteppingClock(0.5), pace)


def test_the_speed_is_that_of_products_of_the_models_shape() -> None:
    work = 2.0 * 64 * MODEL.width * MODEL.ffn_width
    assert terms.product_flops(MODEL, 64, choose(HERE), SteppingClock(0.5)) == pytest.approx(work / 0.5)
    # One product and four are too short to measure, in the best of three runs; sixteen are not.
    clock = SteppingClock(*(0.0, 0.0001) * 3, *(0.0, 0.0004) * 3, 0.0, 0.0032)
    assert terms.product_flops(MODEL, 64, choose(HERE), clock) == pytest.approx(16 * work / 0.0032)


def test_a_busy_program_beside_it_hides_the_speed_in_most_runs_only() -> None:
    work, long, short = 2.0 * 64 * MODEL.width * MODEL.ffn_width, (0.0, 0.5), (0.0, 0.004)
    clock = SteppingClock(*long * 3, *long * 20, *short, *long, 0.0, 0.5)
    assert terms.product_flops(MODEL, 64, choose(HERE), clock) == pytest.approx(work / 0.004)


def test_one_thread_is_measured_and_as_many_are_counted_as_will_train(tmp_path: Path) -> None:
    before = torch.get_num_threads()
    clock = SteppingClock(0.5)
    one = made(tmp_path, clock)
    three = terms.terms(run_config(), TICKET, Home(tmp_path), PeerConfig(device="cpu", threads=3), clock)
    assert clock.num_threads == {1}
    assert three.flops_per_s == pytest.approx(3 * one.flops_per_s)
    assert torch.get_num_threads() == before


def test_what_is_multiplied_is_small_however_large_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    large = msgspec.structs.replace(MODEL, width=16_384, ffn_width=65_536)
    asked = []
    real = torch.ones
    monkeypatch.setattr(torch, "ones", lambda shape, **given: asked.append(shape) or real(shape, **given))
    terms.product_flops(large, 1 << 24, choose(HERE), SteppingClock(0.5))
    assert asked == [(terms.MAX_ROWS, terms.MAX_WIDTH), (terms.MAX_WIDTH, terms.MAX_WIDTH)]


def test_bytes_a_day_follow_from_bytes_a_round_and_its_time(tmp_path: Path) -> None:
    found = made(tmp_path)
    num, run = num_parameters(MODEL), run_config()
    parts = [cost.part_size(num, 4, index) for index in range(4)]
    traffic = [
        cost.contribute_traffic(num, each, 4, Fp32()) + cost.result_traffic(num, each, 4, Fp32()) for each in parts
    ]
    assert found.num_peers == 4
    assert found.round_nbytes == fmean(each.sent_nbytes + each.received_nbytes for each in traffic)
    flops = cost.flops_per_token(terms.decoder(run.model), run.train.seq_len)
    work_s = run.method.every * run.tokens_per_step * flops / found.flops_per_s
    assert work_s > terms.LEAST_ROUND_S
    assert found.round_s == pytest.approx(work_s)
    assert found.day_nbytes == pytest.approx(found.round_nbytes * 86_400 / work_s)


def test_members_that_were_heard_are_counted_and_their_pace_is_that_of_rounds(tmp_path: Path) -> None:
    """A ticket names also who only read the terms, and this peer itself when it comes again."""
    clock, pace = SteppingClock(0.5), Pace(num_members=2, tokens_per_s=1000.0)
    found, run = made(tmp_path, clock, pace), run_config()
    assert found.num_peers == 3
    assert found.round_s == pytest.approx(run.method.every * run.tokens_per_step / 1000.0)
    assert (found.tokens_per_s, found.flops_per_s) == (1000.0, 0.0)
    assert clock.num_threads == set()  # nothing is measured
    waiting = made(tmp_path, pace=Pace(num_members=1, tokens_per_s=0.0))  # none has made a step yet
    assert waiting.num_peers == 2
    assert waiting.flops_per_s > 0


def test_of_a_model_that_is_cut_a_member_computes_and_merges_its_section_and_passes_activations_on(
    tmp_path: Path,
) -> None:
    whole = staged(run_config(DdpConfig(), CUT), (Digest("1" * 64),) * 3, PipelineConfig())

    def asked(num_linked: int, run: StagedConfig = whole) -> terms.Terms:
        pace = Pace(num_members=0, num_linked=num_linked, tokens_per_s=0.0)
        return terms.terms(held_of(run), TICKET, Home(tmp_path), HERE, SteppingClock(0.5), pace)

    three, seven = asked(2), asked(6)
    assert (three.num_peers, seven.num_peers) == (3, 7)
    passed = 2 * 2 * whole.train.batch_size * whole.train.seq_len * CUT.width * 2  # bf16, both ways at two sides
    assert passed < three.round_nbytes < 1.5 * passed + 10_000  # nobody to merge with; tokens and letters beside it
    merged = seven.round_nbytes - three.round_nbytes
    assert merged == pytest.approx(
        2 * 2 * (2 / 3) * 2 * three.run.num_parameters, rel=0.1
    )  # three in one stage, in bf16
    tied = staged(
        run_config(DdpConfig(), msgspec.structs.replace(CUT, is_tied=True)), (Digest("1" * 64),) * 4, PipelineConfig()
    )
    table = 2 * 2 * (1 / 2) * 2 * CUT.vocab_size * CUT.width  # that both ends merge
    assert asked(2, tied).round_nbytes > 0.9 * table + passed / 2  # an end passes at one side
    undivided = made(tmp_path, method=DdpConfig(), model=CUT)
    assert three.run.num_parameters < undivided.run.num_parameters
    assert three.round_s * three.flops_per_s < undivided.round_s * undivided.flops_per_s


def test_no_round_is_taken_for_shorter_than_its_messages(tmp_path: Path) -> None:
    clock = SteppingClock(*(0.0, 0.0001) * 18, 0.0, terms.LEAST_MEASURED_S)  # 4096 products
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


def test_the_memory_is_that_of_the_process_and_of_training(tmp_path: Path) -> None:
    found = made(tmp_path)
    assert found.process_nbytes > 100e6  # torch alone
    assert found.memory_nbytes == sum(needed_nbytes(found.run, HERE, choose(HERE), 1).values())


def moving(terms_of: terms.Terms, *moved: tuple[float, float]) -> list[float | None]:
    """Return what is told after each (hours later, days' worth moved)."""
    clock = SteppingClock(0.0)
    allowance = terms.Allowance(terms_of, clock)
    told = [allowance.count(terms_of.fetch_nbytes)]
    for hours, days in moved:
        clock.advance(3600 * hours)
        told.append(allowance.count(round(days * terms_of.day_nbytes)))
    return told


def test_as_much_as_was_agreed_to_is_moved_without_a_word(tmp_path: Path) -> None:
    """The state that is fetched is no day's traffic, and a burst of rounds is none that lasts."""
    found = made(tmp_path)
    assert moving(found, *[(1.0, 1 / 24)] * 60) == [None] * 61
    assert moving(found, (0.001, 1 / 24)) == [None, None]


def test_far_more_than_was_agreed_to_is_told_once_and_again_when_it_grows(tmp_path: Path) -> None:
    found = made(tmp_path)
    first, *told = moving(found, (1.0, 2 / 24), (1.0, 2 / 24), (1.0, 20 / 24))
    assert first is None
    assert told == [pytest.approx(2 * found.day_nbytes), None, pytest.approx(8 * found.day_nbytes)]


def test_every_day_is_reckoned_anew(tmp_path: Path) -> None:
    """A run that is slow for days and then fast is told within hours."""
    found = made(tmp_path)
    slow, fast = [(24.1, 0.1)] * 10, [(1.0, 3 / 24)] * 2
    assert [each is not None for each in moving(found, *slow, *fast)][-2:] == [True, False]
