"""Loops of somebody's own as peers: over real sockets, each in a thread of its own."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from example import example
from unit.library.loops import BATCH, EVERY, Runner, Yard, batches, ending, small, train
from weft.codec.config import Fp32Config
from weft.errors import CheckpointError, ConfigError, GenesisMismatch, NotFinite
from weft.events import MemberLeft, Notice, Paused, RoundCommitted, StateJoined
from weft.library import thread
from weft.library.extension import extend
from weft.library.sync import Sync
from weft.sync.method.choices import Choices
from weft.sync.method.presets import (
    AsyncDiLoCoConfig,
    AutoConfig,
    ChocoConfig,
    CocktailConfig,
    DPsgdConfig,
    FedAvgConfig,
    MethodConfig,
    NoLoCoConfig,
    SparseLoCoConfig,
    StreamingConfig,
)

ROUND = EVERY * BATCH  # samples that one member makes of it


@pytest.mark.full
def test_two_loops_end_with_the_same_parameters(tmp_path: Path) -> None:
    yard = Yard(tmp_path)
    with ending(yard):
        a = yard.found("a", wait_for=2)
        b = yard.join("b", a)
        outcomes = yard.done(a, b)
    assert [outcome.reason for outcome in outcomes] == ["complete"] * 2
    assert outcomes[0].committed_tokens == 240
    assert (a.num_steps, b.num_steps) == (30, 30)
    rounds = a.events(RoundCommitted)
    assert len(rounds) == 10
    assert all(set(event.contributors) == {outcome.peer for outcome in outcomes} for event in rounds)


@pytest.mark.full
def test_who_joins_is_told_what_it_costs_and_may_refuse(tmp_path: Path) -> None:
    yard, told = Yard(tmp_path), list[str]()

    def refuses(terms: str) -> None:
        raise MemoryError(terms)

    with ending(yard):
        a = yard.found("a", wait_for=2)
        c = yard.join("c", a, on_terms=refuses)
        c.join()
        b = yard.join("b", a, on_terms=told.append)
        yard.done(a, b)
    assert isinstance(c.error, MemoryError)
    assert not any((tmp_path / "c").glob("runs/*/*/checkpoint"))
    (terms,) = told
    assert re.fullmatch(
        r"joining run [0-9a-f]{8} \(loop\): 57 parameters; \S+ samples to train[^;]*; \S+ k?B to fetch, \S+ k?B of "
        r"disk, about \S+ [MG]B of memory; \S+ k?B a round among 2 peers with this one; bytes a day are not known: .+",
        terms,
    )
    assert terms in [event.text for event in b.events(Notice)]
    assert not any("joining run" in event.text for event in a.events(Notice))


@pytest.mark.parametrize(
    "method",
    [
        AsyncDiLoCoConfig(every=EVERY),
        pytest.param(AutoConfig(), marks=pytest.mark.slow),
        pytest.param(CocktailConfig(), marks=pytest.mark.slow),
        pytest.param(ChocoConfig(every=EVERY), marks=pytest.mark.slow),
        pytest.param(DPsgdConfig(every=EVERY), marks=pytest.mark.slow),
        pytest.param(NoLoCoConfig(every=EVERY), marks=pytest.mark.slow),
        SparseLoCoConfig(every=EVERY),
        pytest.param(StreamingConfig(every=EVERY, fragments=1, overlap=1), marks=pytest.mark.slow),
    ],
    ids=lambda method: method.__struct_config__.tag,
)
def test_methods_that_send_deltas_work_in_loops_as_anywhere(tmp_path: Path, method: MethodConfig) -> None:
    yard = Yard(tmp_path, method=method, samples=120)
    with ending(yard):
        a = yard.found("a", wait_for=2)
        b = yard.join("b", a)
        outcomes = yard.done(a, b)
    peers = {outcome.peer for outcome in outcomes}
    assert {peer for event in a.events(RoundCommitted) for peer in event.contributors} == peers


@pytest.mark.full
def test_a_codec_and_an_outer_step_from_outside_of_weft_are_those_of_all_members(tmp_path: Path) -> None:
    bits12, yogi = example("extension_codec").bits12, example("extension_method").yogi
    method = Choices(every=EVERY, send="delta", apply=yogi.outer(lr=0.05), codec=bits12.codec())
    yard = Yard(tmp_path, method=method, samples=600)
    with ending(yard):
        a = yard.found("a", model=small(1), is_held=True)
        a.may_step.release(4 * EVERY)
        a.until(RoundCommitted, lambda event: event.round >= 3)
        b = yard.join("b", a, config=None)  # fetches the state of both
        while b.thread.is_alive() and not b.has_started.wait(0.05):
            a.may_step.release()
        a.may_step.release(1 << 20)
        outcomes = yard.done(a, b)
    assert any(outcomes[1].peer in event.contributors for event in a.events(RoundCommitted))


@pytest.mark.full
def test_a_loop_that_comes_later_begins_where_the_others_are(tmp_path: Path) -> None:
    yard = Yard(tmp_path, samples=600)
    began: list[Tensor] = []

    def late(runner: Runner) -> None:
        began.append(runner.vector())
        train(runner, 9)

    with ending(yard):
        a = yard.found("a", model=small(1), is_held=True)
        a.may_step.release(10 * EVERY)
        a.until(RoundCommitted, lambda event: event.round >= 5)
        b = yard.join("b", a, model=small(2), work=late)
        while b.thread.is_alive() and not b.has_started.wait(0.05):
            a.may_step.release()  # it is counted in as rounds go by
        a.may_step.release(1 << 20)
        outcomes = yard.done(a, b)
    (joined,) = b.events(StateJoined)
    assert not began[0].equal(Runner("", small(2), late).vector())
    assert joined.round >= 5
    assert b.num_steps < a.num_steps
    assert any(outcomes[1].peer in event.contributors for event in a.events(RoundCommitted))


def test_a_round_is_the_mean_of_what_loops_arrive_at_weighed_by_samples(tmp_path: Path) -> None:
    """FedAvg, one step of 4 samples beside one of 1: outer = (4 a + b) / 5."""
    yard = Yard(tmp_path, method=FedAvgConfig(every=1, codec=Fp32Config()), samples=5)
    arrived: dict[str, Tensor] = {}

    def once(size: int) -> Callable[[Runner], None]:
        def work(runner: Runner) -> None:
            optimizer = torch.optim.SGD(runner.model.parameters(), lr=0.1)
            x, y = next(batches(size, size))
            mse_loss(runner.model(x), y).backward()
            optimizer.step()
            arrived[runner.name] = runner.vector()
            runner.sync.step(size)

        return work

    with ending(yard):
        a = yard.found("a", wait_for=2, work=once(4))
        b = yard.join("b", a, work=once(1))
        yard.done(a, b)
    assert not arrived["a"].equal(arrived["b"])
    assert torch.allclose(a.vector(), (4 * arrived["a"] + arrived["b"]) / 5, rtol=0, atol=1e-7)


def test_a_loop_alone_that_is_averaged_with_nobody_trains_as_without_weft(tmp_path: Path) -> None:
    yard = Yard(tmp_path, method=FedAvgConfig(every=EVERY, codec=Fp32Config()), samples=20 * BATCH)
    with ending(yard):
        a = yard.found("a", model=small(3), work=lambda runner: train(runner, 4))
        yard.done(a)
    model = small(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _, (x, y) in zip(range(a.num_steps), batches(4), strict=False):
        optimizer.zero_grad()
        mse_loss(model(x), y).backward()
        optimizer.step()
    alone = Runner("", model, lambda runner: None).vector()
    assert torch.allclose(a.vector(), alone, rtol=1e-5, atol=1e-7)


@pytest.mark.full
@pytest.mark.parametrize("error", [RuntimeError("the loader broke"), KeyboardInterrupt()], ids=["error", "ctrl-c"])
def test_a_loop_that_breaks_says_goodbye_and_the_others_go_on(tmp_path: Path, error: BaseException) -> None:
    yard = Yard(tmp_path)

    def breaks(runner: Runner) -> None:
        train_some(runner, 4)
        raise error

    with ending(yard):
        a = yard.found("a", wait_for=2)
        b = yard.join("b", a, work=breaks)
        yard.done(a)
        b.join()
    assert b.error is error
    assert [event.member for event in a.events(MemberLeft)]
    assert a.outcome is not None
    assert a.outcome.reason == "complete"


def test_what_breaks_in_the_peer_is_raised_in_the_loop(tmp_path: Path) -> None:
    yard = Yard(tmp_path)

    def diverges(runner: Runner) -> None:
        with torch.no_grad():
            next(runner.model.parameters()).fill_(torch.nan)
        train(runner, 0)

    with ending(yard):
        a = yard.found("a", work=diverges)
        a.join()
    assert isinstance(a.error, NotFinite)


def test_a_model_of_another_shape_is_refused_with_the_first_tensor_that_differs(tmp_path: Path) -> None:
    yard = Yard(tmp_path)
    other = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 2))
    with ending(yard):
        a = yard.found("a", wait_for=2)
        b = yard.join("b", a, model=other)
        b.join()
    assert isinstance(b.error, GenesisMismatch)
    assert "trained tensor 2 of the run is '2.weight' (float32, 1 x 8); here it is '2.weight' (float32, 2 x 8)" in str(
        b.error
    )


def test_a_config_that_is_not_the_runs_is_refused_beside_a_ticket(tmp_path: Path) -> None:
    yard = Yard(tmp_path)
    with ending(yard):
        a = yard.found("a", wait_for=2)
        b = yard.join("b", a, config=msgspec.structs.replace(yard.config, samples=241))
        b.join()
    assert isinstance(b.error, ConfigError)
    assert "samples = 240, and the config given here 241" in str(b.error)


def test_a_loop_that_ends_early_has_its_last_steps_counted(tmp_path: Path) -> None:
    yard = Yard(tmp_path)
    with ending(yard):
        a = yard.found("a", work=lambda runner: train_some(runner, EVERY + 1))
        yard.done(a)
    assert a.outcome is not None
    assert a.outcome.reason == "finished"
    assert a.outcome.committed_tokens == (EVERY + 1) * BATCH


@pytest.mark.full
def test_a_run_that_was_stopped_goes_on_from_its_checkpoint_whatever_the_model_is_built_with(tmp_path: Path) -> None:
    yard = Yard(tmp_path)
    began: list[Tensor] = []

    def again(runner: Runner) -> None:
        began.append(runner.vector())
        train(runner, 1)

    with ending(yard):
        a = yard.found("a", model=small(1), work=lambda runner: train_some(runner, 2 * EVERY))
        yard.done(a)
        b = yard.found("b", home="a", model=small(2), work=again)
        yard.done(b)
    assert a.outcome is not None
    assert b.outcome is not None
    assert (b.outcome.run, b.outcome.peer) == (a.outcome.run, a.outcome.peer)
    assert began[0].equal(a.vector())
    assert b.outcome.committed_tokens == 240
    assert b.num_steps == 60 - 2 * EVERY
    assert any("going on with run" in event.text for event in b.events(Notice))


def begun(yard: Yard) -> Runner:
    """Return a loop that has made two rounds in the home "a" and left."""
    a = yard.found("a", model=small(1), work=lambda runner: train_some(runner, 2 * EVERY))
    yard.done(a)
    return a


def refused(yard: Yard, **given: Any) -> str:
    """Return why a loop in the same home begins nothing."""
    runner = yard.found("b", home="a", **given)
    runner.join()
    assert isinstance(runner.error, ConfigError), runner.error
    assert not runner.entries
    return str(runner.error)


@pytest.mark.full
def test_a_config_that_was_changed_begins_nothing_anew_unasked(tmp_path: Path) -> None:
    yard = Yard(tmp_path)
    longer = msgspec.structs.replace(yard.config, samples=480)
    with ending(yard):
        a = begun(yard)
        assert a.outcome is not None
        said = refused(yard, config=longer)
        c = yard.found("c", home="a", config=longer, wish="go on", model=small(3))
        yard.done(c)
        again = yard.found("d", home="a", config=longer)  # what the run is by now: nothing is asked
        yard.done(again)
        other = yard.found(
            "e", home="a", config=longer, wish="new", model=small(9), work=lambda r: train_some(r, EVERY)
        )
        yard.done(other)
        newest = yard.found("f", home="a", config=longer, model=small(9), work=lambda r: train_some(r, EVERY))
        yard.done(newest)
    assert f"this home holds run {a.outcome.run.run[:8]} (loop) at round 2, and this is a different run" in said
    assert "samples 240 -> 480" in said
    assert 'wish="go on"' in said
    assert 'wish="new"' in said
    assert c.outcome is not None
    assert (c.outcome.run.run, c.outcome.committed_tokens) == (a.outcome.run.run, 480)
    assert c.num_steps == 120 - 2 * EVERY
    assert again.outcome is not None
    assert (again.outcome.run.run, again.outcome.round) == (a.outcome.run.run, c.outcome.round)
    assert other.outcome is not None
    assert newest.outcome is not None
    assert other.outcome.run.run == newest.outcome.run.run != a.outcome.run.run
    assert newest.outcome.round == 2


@pytest.mark.full
def test_what_cannot_go_on_says_why_and_what_can(tmp_path: Path) -> None:
    yard = Yard(tmp_path)
    with ending(yard):
        begun(yard)
        other = msgspec.structs.replace(yard.config, method=SparseLoCoConfig(every=EVERY))
        said = refused(yard, config=other, wish="go on")
        wider = refused(yard, model=nn.Sequential(nn.Linear(5, 9), nn.Linear(9, 1)))
        alike = refused(yard, model=small(1), wish="new")
        nothing = refused(yard, config=msgspec.structs.replace(yard.config, name="elsewhere"), wish="go on")
    assert "That run cannot go on with this change: only samples, batch_size, method.every" in said
    assert "start the loop with the config as it was" in said
    assert "the model's parameters differ" in wider
    assert "it is exactly this run" in alike
    assert "no run called elsewhere" in nothing


def test_a_run_whose_checkpoint_is_damaged_is_not_begun_anew(tmp_path: Path) -> None:
    yard = Yard(tmp_path)
    with ending(yard):
        begun(yard)
        (saved,) = (tmp_path / "a" / "runs").glob("*/*/checkpoint/checkpoint.json")
        saved.write_text(saved.read_text()[:-9])
        b = yard.found("b", home="a", model=small(2))
        b.join()
    assert isinstance(b.error, CheckpointError)


def test_a_run_is_not_begun_anew_by_another_key_unasked(tmp_path: Path) -> None:
    yard = Yard(tmp_path)
    with ending(yard):
        begun(yard)
        said = refused(yard, key=tmp_path / "other.pem")
    assert "is another peer's key" in said


@pytest.mark.full
def test_what_has_no_effect_on_a_loop_is_told(tmp_path: Path) -> None:
    yard = Yard(tmp_path, method=DPsgdConfig(every=EVERY, degree=3), samples=120)
    with ending(yard):
        a = yard.found("a", wait_for=2)
        b = yard.join("b", a, wait_for=3, wish="new")
        yard.done(a, b)
    told = [[event.text for event in each.events(Notice) if "have no effect here" in event.text] for each in (a, b)]
    of_machine = (
        "machine: settings: these have no effect here, since your own loop decides where and how it trains: device"
    )
    of_method = (
        "config: these have no effect here, since graph is ring, and only a random one has a degree: method.degree"
    )
    of_ticket = "these have no effect here, since a ticket joins its run: wait_for, wish"
    assert told == [[of_machine, of_method], [of_ticket, of_machine, of_method]]


def test_what_was_made_when_a_loop_broke_is_there_when_it_is_started_again(tmp_path: Path) -> None:
    """One step of a lease: no round counted it, and the checkpoint holds it."""
    yard = Yard(tmp_path)
    left: list[Tensor] = []

    def breaks(runner: Runner) -> None:
        train_some(runner, EVERY + 1)
        left.append(runner.vector())
        raise RuntimeError

    def looks(runner: Runner) -> None:
        left.append(runner.vector())
        train_some(runner, EVERY - 1)

    with ending(yard):
        yard.found("a", model=small(1), work=breaks).join()
        b = yard.found("b", home="a", model=small(2), work=looks)
        yard.done(b)
    assert torch.allclose(left[0], left[1], atol=1e-6)
    assert b.outcome is not None
    assert b.outcome.committed_tokens == 2 * ROUND


def test_what_no_round_counts_before_a_loop_has_to_leave_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(thread, "LEAST_S", 0.5)
    yard = Yard(tmp_path, samples=4_000)
    with ending(yard):
        a = yard.found("a", wait_for=2, work=lambda runner: train_some(runner, 1))
        b = yard.join("b", a, is_held=True)  # it makes no step: no round is decided
        a.join()
        assert b.num_steps == 0
        assert a.error is None
    (said,) = [event.text for event in a.events(Notice) if "no round has counted" in event.text]
    assert said.startswith(f"leaving with {BATCH} samples")


def test_calls_out_of_order_are_refused_and_break_nothing(tmp_path: Path) -> None:
    yard = Yard(tmp_path)
    said: list[str] = []

    def refused(call: Callable[[], object]) -> None:
        with pytest.raises(RuntimeError) as caught:
            call()
        said.append(str(caught.value))

    def twice(runner: Runner) -> None:
        refused(runner.sync.start)
        refused(runner.sync.__enter__)
        train(runner, 0)

    never = Sync(small(), yard.config)
    refused(never.finish)
    refused(never.step)
    assert never._thread.ident is None
    assert not never._lending.has_left
    with ending(yard):
        a = yard.found("a", work=twice)
        (outcome,) = yard.done(a)
    assert outcome.reason == "complete"
    refused(a.sync.start)
    assert a.sync.finish() is outcome
    closed = Sync(small(), yard.config)
    closed.close()
    refused(closed.start)
    assert [text.split(":")[0] for text in said] == [
        *["weft.Sync has not started"] * 2,
        *["weft.Sync has started already"] * 2,
        *["weft.Sync has ended"] * 2,
    ]


def test_a_parameter_that_is_unfrozen_in_the_middle_is_refused_by_the_next_read(tmp_path: Path) -> None:
    yard = Yard(tmp_path)
    model = small()
    next(model.parameters()).requires_grad_(False)

    def unfreezes(runner: Runner) -> None:
        train_some(runner, EVERY)
        next(model.parameters()).requires_grad_(True)
        train_some(runner, EVERY)

    with ending(yard):
        a = yard.found("a", model=model, work=unfreezes)
        a.join()
    assert isinstance(a.error, ConfigError)
    assert "parameter '0.weight' is trained now, but was not" in str(a.error)


def test_a_codec_that_cannot_read_what_it_makes_ends_the_loop_with_its_name(tmp_path: Path) -> None:
    method = FedAvgConfig(every=EVERY, codec=extend("test.unreadable", Unreadable).codec())
    yard = Yard(tmp_path, method=method)
    with ending(yard):
        a = yard.found("a")
        a.join()
    assert isinstance(a.error, ConfigError)
    assert "codec test.unreadable cannot decode what it has made itself" in str(a.error)


class Unreadable:
    def encode(self, vector: Tensor) -> bytes:
        return bytes(4 * vector.numel())

    def decode(self, data: bytes, num: int, out: Tensor | None = None) -> Tensor:
        raise KeyError("typo")

    def nbytes(self, num: int) -> int:
        return 4 * num


def test_more_samples_than_a_step_may_have_are_refused(tmp_path: Path) -> None:
    yard = Yard(tmp_path)
    with ending(yard):
        a = yard.found("a", work=lambda runner: train(runner, 0, size=BATCH + 1))
        a.join()
    assert isinstance(a.error, ConfigError)
    assert "num_samples is 5" in str(a.error)


def test_a_file_says_the_same_as_a_config(tmp_path: Path) -> None:
    path = tmp_path / "loop.toml"
    path.write_text('name = "mine"\nsamples = 12\nbatch_size = 4\n[method]\ntype = "fedavg"\nevery = 3\n')
    assert (
        Sync(small(), path)._config
        == Yard(tmp_path, name="mine", samples=12, method=FedAvgConfig(every=3), has_even_leases=False).config
    )


def test_a_sync_of_nothing_says_what_it_needs() -> None:
    with pytest.raises(ConfigError, match="needs a config"):
        Sync(small())


@pytest.mark.full
def test_weft_is_light_until_the_door_is_opened() -> None:
    program = (
        "import sys, weft\n"
        "assert 'torch' not in sys.modules and 'asyncio' not in sys.modules\n"
        "assert weft.Sync.__name__ == 'Sync' and weft.SyncConfig(samples=1).batch_size == 1 and weft.Machine()\n"
        "try:\n    weft.Nothing\nexcept AttributeError as error:\n    assert 'Nothing' in str(error)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def train_some(runner: Runner, num_steps: int) -> None:
    optimizer = torch.optim.SGD(runner.model.parameters(), lr=0.05)
    for _, (x, y) in zip(range(num_steps), batches(5), strict=False):
        optimizer.zero_grad()
        mse_loss(runner.model(x), y).backward()
        optimizer.step()
        runner.num_steps += 1
        assert runner.sync.step(len(x))


@pytest.mark.full
def test_a_loop_whose_peer_is_paused_stands_still_until_it_goes_on(tmp_path: Path) -> None:
    yard = Yard(tmp_path, samples=1_200)
    with ending(yard):
        a = yard.found("a")
        a.until(RoundCommitted, lambda event: event.round >= 2)
        peer, loop = a.sync._thread.peer, a.sync._thread.loop
        assert peer is not None
        assert loop is not None
        loop.call_soon_threadsafe(peer.pausing.want, "a test")
        a.until(Paused, lambda event: event.reason == "a test")
        a.waits()
        before = a.num_steps
        assert a.sync._lending._num_lent == 0
        loop.call_soon_threadsafe(peer.pausing.want_no_more, "a test")
        yard.done(a)
    assert before < a.num_steps
    assert a.num_steps in range(300, 304)  # the last round may go beyond
