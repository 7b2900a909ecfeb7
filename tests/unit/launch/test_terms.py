"""What joining costs is said in figures that can be counted again, or that members have measured; or left out."""

from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec
import pytest

from unit.peer.tiny import MODEL, run_config
from unit.run.test_genesis_loops import config as loop_config
from unit.stages.pieces import CUT
from weft.codec.dense import Fp32
from weft.cost import training as cost
from weft.ids import Digest, PeerId, RunId
from weft.launch import terms
from weft.launch.terms import NOBODY, Heard
from weft.model.config import num_parameters
from weft.net.messages import Contact
from weft.net.ticket import Ticket
from weft.observe.pace import Rounds
from weft.pipeline.config import PipelineConfig
from weft.run.machine import PeerConfig
from weft.run.staged import StagedConfig, staged
from weft.stages.messages import Held, StageNews
from weft.store.home import Home
from weft.sync.method.presets import DdpConfig, DiLoCoConfig
from weft.training import section_memory
from weft.training.device import beside_loop_nbytes, choose, needed_nbytes

HERE = PeerConfig(device="cpu", threads=1)
A_DAY = 1e9  # bytes, of a run whose terms could not say
TICKET = Ticket(
    run=RunId("f" * 64),
    contacts=tuple(
        Contact(peer=PeerId(letter * 64), name=letter, addresses=("tls://127.0.0.1:1",)) for letter in "abc"
    ),
)


class SteppingClock:
    """A clock on which every look at it takes as long as it is told."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._now = 0.0

    def now(self) -> float:
        self._now += self._step_s
        return self._now

    def advance(self, seconds: float) -> None:
        self._now += seconds

    def wall(self) -> float:
        raise AssertionError("no measure is taken by the wall clock")


def made(folder: Path, heard: Heard = NOBODY, **change: Any) -> terms.Terms:
    return terms.terms(run_config(**change), TICKET, Home(folder), HERE, heard)


def told(among: int, round_s: float = 2.0, round_nbytes: int = 100_000, **heard: Any) -> Heard:
    """Return what is heard where members have measured rounds among so many."""
    rounds = Rounds(num_told=1, num_members=among, round_s=round_s, round_nbytes=round_nbytes)
    return Heard(**({"num_members": among, "num_linked": among, "rounds": rounds} | heard))


def test_bytes_of_a_day_are_what_members_measured(tmp_path: Path) -> None:
    """Two measured them; with a third a member moves 2 (n - 1) / n, a third more, and a few messages."""
    found = made(tmp_path, told(2))
    assert found.num_peers == 3
    assert found.round_nbytes == pytest.approx(100_000 * 4 / 3, rel=0.1)
    assert found.day_nbytes == pytest.approx(found.round_nbytes * 86_400 / 2.0)
    assert found.why_no_day == ""


@pytest.mark.parametrize(
    ("heard", "why"), [(NOBODY, "no member has said"), (Heard(num_members=2), "no member has"), (told(1), "alone")]
)
def test_what_nobody_has_measured_is_left_out_with_the_reason(tmp_path: Path, heard: Heard, why: str) -> None:
    """A lone member's rounds come ten times as often as those of two, where a round has little to train."""
    found = made(tmp_path, heard)
    assert found.day_nbytes is None
    assert why in found.why_no_day


def test_what_no_round_was_measured_of_is_said_in_closed_form(tmp_path: Path) -> None:
    found, num = made(tmp_path), num_parameters(MODEL)
    parts = [cost.part_size(num, 4, index) for index in range(4)]
    traffic = [
        cost.contribute_traffic(num, each, 4, Fp32()) + cost.result_traffic(num, each, 4, Fp32()) for each in parts
    ]
    letters = cost.control_traffic(4)
    assert found.num_peers == 4
    bulk = fmean(each.sent_nbytes + each.received_nbytes for each in traffic)
    assert found.round_nbytes == bulk + letters.sent_nbytes + letters.received_nbytes


def test_members_that_were_heard_are_counted(tmp_path: Path) -> None:
    """A ticket names also who only read the terms, and this peer itself when it comes again."""
    assert made(tmp_path, told(2)).num_peers == 3
    assert made(tmp_path, Heard(num_members=1)).num_peers == 2  # none has made a step yet


def test_a_member_that_was_not_heard_counts_where_rounds_are_among_more(tmp_path: Path) -> None:
    """Peers and bytes of a round are of the same company: two measured, one of them was heard, and this one comes."""
    found = made(tmp_path, told(2, num_members=1, num_linked=1))
    assert found.num_peers == 3
    assert found.round_nbytes == pytest.approx(100_000 * 4 / 3, rel=0.1)
    more = made(tmp_path, told(2, num_members=3))  # one has come since it was measured
    assert more.num_peers == 4
    assert more.round_nbytes == pytest.approx(100_000 * 6 / 4, rel=0.1)


def test_what_all_rounds_that_are_left_move_is_known_before_any_was_measured(tmp_path: Path) -> None:
    run = run_config()
    found = made(tmp_path, Heard(num_members=2, num_linked=2, committed_tokens=run.settings.quota_tokens))
    num_rounds = -(-(run.train.tokens - run.settings.quota_tokens) // (3 * run.settings.quota_tokens))
    assert found.day_nbytes is None
    assert found.rest == (num_rounds, num_rounds * found.round_nbytes)
    assert made(tmp_path, Heard(num_members=2, committed_tokens=run.train.tokens)).rest is None


def test_the_rest_of_the_run_is_said_in_tokens_time_and_bytes(tmp_path: Path) -> None:
    run = run_config()
    total = run.train.tokens
    found = made(tmp_path, told(2, round_s=2.0, committed_tokens=total // 2))
    num_rounds = (total - total // 2) / (2 * run.settings.quota_tokens)
    assert found.left_s == pytest.approx(2.0 * num_rounds)
    assert found.left_nbytes == pytest.approx(found.round_nbytes * num_rounds)
    assert f"{found.length}; " in str(found)
    assert "50 % done" in found.length
    assert " until the run is complete" in str(found)
    assert " a day" not in str(found)
    by_steps = made(tmp_path, Heard(num_members=1, speeds=(total / 10, total / 10)))
    assert by_steps.left_s == pytest.approx(5.0)


def test_a_complete_run_is_told_first(tmp_path: Path) -> None:
    found = made(tmp_path, Heard(num_members=1, committed_tokens=run_config().train.tokens))
    assert found.is_complete
    assert "): it is complete, and nothing is left to train; " in str(found)


def test_of_a_loop_only_the_state_is_fetched_and_memory_is_what_the_peer_takes(tmp_path: Path) -> None:
    """The loop holds the model, on a device that it chooses: what the settings say of one is not looked at."""
    run, elsewhere = loop_config(), PeerConfig(device="cuda:99")
    found = terms.terms(run, TICKET, Home(tmp_path), elsewhere, told(2, round_s=10.0))
    assert found.num_parameters == 6
    assert found.fetch_nbytes == 2 * cost.vector_nbytes(6)  # parameters, and those that the run began with
    assert found.memory_nbytes == beside_loop_nbytes(run)
    assert found.day_nbytes == pytest.approx(found.round_nbytes * 86_400 / 10.0)


def test_in_one_line_the_terms_have_the_figures_that_a_person_is_asked_with(tmp_path: Path) -> None:
    line = str(made(tmp_path, told(2, round_s=83, round_nbytes=1_100_000)))
    assert "\n" not in line
    assert "1.5 MB a round among 3 peers with this one; about 1.56 GB a day, as members measured" in line
    assert "bytes a day are not known: no member has said" in str(made(tmp_path))


def news(*stages: int, rate: float = 1.0) -> StageNews:
    held = tuple(Held(stage=stage, since=1, state="ready", round=1, rate=rate, num_waiting=0) for stage in stages)
    return StageNews(held=held, kept=(), is_trainer=True)


def cut(**change: Any) -> StagedConfig:
    return staged(
        run_config(DdpConfig(), msgspec.structs.replace(CUT, **change)), (Digest("1" * 64),) * 3, PipelineConfig()
    )


def test_of_a_model_that_is_cut_the_stage_counts_that_this_machine_would_hold(tmp_path: Path) -> None:
    """The weakest of those that are held; before the run begins as many as fall to each, of the largest."""
    run, me = cut(), PeerId("e" * 64)
    everyone = {PeerId(letter * 64): news(stage) for letter, stage in zip("abcd", (0, 1, 2, 2), strict=True)}
    weak = {**everyone, PeerId("b" * 64): news(1, rate=0.1)}
    assert terms.stages_of(run, weak, 5, me) == (1,)
    begun = terms.terms(run, TICKET, Home(tmp_path), HERE, Heard(num_members=4, num_linked=4, news=weak), me)
    assert begun.stages == (1,)
    assert begun.num_parameters == run.of_stage(1).num_parameters < run.num_parameters
    waiting = {PeerId("a" * 64): news()}
    two = terms.terms(run, TICKET, Home(tmp_path), HERE, Heard(num_members=1, num_linked=1, news=waiting), me)
    assert len(two.stages) == 2  # of three, between two
    assert two.num_parameters == sum(run.of_stage(stage).num_parameters for stage in two.stages)
    assert begun.memory_nbytes < two.memory_nbytes
    assert begun.memory_nbytes == held_nbytes(run, 1)
    assert begun.fetch_nbytes < two.fetch_nbytes


def held_nbytes(run: StagedConfig, stage: int) -> int:
    holding, section = section_memory.of_run(run), run.cuts[stage]
    taken = section_memory.usual_taken(run.stages)
    return sum(section_memory.needed_nbytes(holding, section, choose(HERE), num_taken=taken).values())


def test_a_stage_of_one_member_exchanges_with_the_others(tmp_path: Path) -> None:
    both = {PeerId("a" * 64): news(0, 1), PeerId("b" * 64): news(2)}
    found = terms.terms(cut(), TICKET, Home(tmp_path), HERE, told(1, num_members=2, num_linked=2, news=both))
    assert found.day_nbytes == pytest.approx(100_000 * 86_400 / 2.0)
    alone = {PeerId("a" * 64): news(0, 1, 2)}
    found = terms.terms(cut(), TICKET, Home(tmp_path), HERE, told(1, num_linked=1, news=alone))
    assert found.day_nbytes is None


def test_of_a_model_that_is_cut_a_member_merges_its_section_and_passes_activations_on(tmp_path: Path) -> None:
    whole = cut()

    def asked(num_linked: int, run: StagedConfig = whole) -> terms.Terms:
        others = {PeerId(f"{number:064x}"): news(number % 3) for number in range(num_linked)}
        heard = Heard(num_members=num_linked, num_linked=num_linked, news=others)
        return terms.terms(run, TICKET, Home(tmp_path), HERE, heard)

    def middle(num_peers: int) -> int:
        return terms._stage(whole, 1, num_peers, HERE, choose(HERE)).round_nbytes

    assert (asked(2).num_peers, asked(6).num_peers) == (3, 7)
    passed = 2 * 2 * whole.train.batch_size * whole.train.seq_len * CUT.width * 2  # bf16, both ways at two sides
    assert passed < middle(3) < 1.5 * passed + 10_000  # nobody to merge with; tokens and letters beside it
    letters = cost.control_traffic(3)
    merged = middle(7) - middle(3) - letters.sent_nbytes - letters.received_nbytes
    num = whole.of_stage(1).num_parameters
    assert merged == pytest.approx(2 * 2 * (2 / 3) * 2 * num, rel=0.1)  # three in one stage, in bf16
    tied = staged(
        run_config(DdpConfig(), msgspec.structs.replace(CUT, is_tied=True)), (Digest("1" * 64),) * 4, PipelineConfig()
    )
    table = 2 * 2 * (1 / 2) * 2 * CUT.vocab_size * CUT.width  # that both ends merge
    end = terms._stage(tied, 0, 3, HERE, choose(HERE)).round_nbytes
    assert end > 0.9 * table + passed / 2  # an end passes at one side


@pytest.mark.parametrize(("method", "num_vectors"), [(None, 1), (DiLoCoConfig(), 2), (DdpConfig(), 3)])
def test_the_state_that_is_fetched_has_the_outer_optimizers_vectors(
    tmp_path: Path, method: Any, num_vectors: int
) -> None:
    """FedAvg averages parameters, DiLoCo keeps a momentum, DDP both moments of AdamW."""
    found = made(tmp_path) if method is None else made(tmp_path, method=method)
    (shard,) = {*found.run.data.train, *found.run.data.heldout}
    assert found.fetch_nbytes == shard.nbytes + 4 * num_vectors * num_parameters(MODEL)


def test_the_memory_is_that_of_the_process_and_of_training_as_it_will(tmp_path: Path) -> None:
    """As many samples at a time as fit: of a batch of 64 not what a single one takes."""
    found = made(tmp_path, batch_size=64)
    assert found.process_nbytes > 100e6  # torch alone
    assert found.micro_batch == 64
    needed = {num: sum(needed_nbytes(found.run, HERE, choose(HERE), num).values()) for num in (1, 64)}
    assert found.memory_nbytes == needed[64] > needed[1] + 5e6


def moving(terms_of: terms.Terms, *moved: tuple[float, float]) -> list[float | None]:
    """Return what is told after each (hours later, days' worth moved)."""
    clock, day_nbytes = SteppingClock(0.0), terms_of.day_nbytes or A_DAY
    allowance = terms.Allowance(terms_of, clock)
    told = [allowance.count(terms_of.fetch_nbytes)]
    for hours, days in moved:
        clock.advance(3600 * hours)
        told.append(allowance.count(round(days * day_nbytes)))
    return told


def test_as_much_as_was_agreed_to_is_moved_without_a_word(tmp_path: Path) -> None:
    """The state that is fetched is no day's traffic, and a burst of rounds is none that lasts."""
    found = made(tmp_path, told(2))
    assert moving(found, *[(1.0, 1 / 24)] * 60) == [None] * 61
    assert moving(found, (0.001, 1 / 24)) == [None, None]


def test_far_more_than_was_agreed_to_is_told_once_and_again_when_it_grows(tmp_path: Path) -> None:
    found = made(tmp_path, told(2))
    first, *later = moving(found, (1.0, 2 / 24), (1.0, 2 / 24), (1.0, 20 / 24))
    assert first is None
    assert later == [pytest.approx(2 * found.day_nbytes), None, pytest.approx(8 * found.day_nbytes)]


def test_what_the_terms_could_not_say_is_told_once_it_is_known_and_holds_then(tmp_path: Path) -> None:
    first, *later = moving(made(tmp_path), (0.1, 0.1 / 24), (0.1, 0.1 / 24), (1.0, 1 / 24), (1.0, 5 / 24))
    assert first is None
    assert later == [None, pytest.approx(A_DAY), None, pytest.approx(A_DAY * 6.2 / 2.2)]


def test_every_day_is_reckoned_anew(tmp_path: Path) -> None:
    """A run that is slow for days and then fast is told within hours."""
    found = made(tmp_path, told(2))
    slow, fast = [(24.1, 0.1)] * 10, [(1.0, 3 / 24)] * 2
    assert [each is not None for each in moving(found, *slow, *fast)][-2:] == [True, False]
