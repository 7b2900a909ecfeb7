"""What is timed is a step as a run makes it."""

import platform
from collections.abc import Callable
from typing import Any

import pytest
import torch

from weft.cli.plan import speed_here
from weft.cost import training as cost
from weft.model.config import ModelConfig
from weft.model.initial import initial_vector
from weft.run.config import TrainConfig
from weft.run.host import process_nbytes, release_heap
from weft.run.machine import PeerConfig
from weft.sync.method.schedule import ConstantConfig
from weft.training import optimizer as inner
from weft.training.backward import Backward
from weft.training.device import choose, decoder
from weft.training.numerics.arithmetic import Exact


def test_a_step_begins_with_the_parameters_that_a_run_begins_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of PyTorch saturate attention, and what is left is too small for a CPU to compute with quickly."""
    model = ModelConfig(
        vocab_size=257, num_layers=1, num_heads=2, num_kv_heads=2, width=16, ffn_width=32, max_seq_len=8
    )
    made: list[Any] = []

    def backward(flat: Any, *rest: Any, **named: Any) -> Backward:
        made.append(flat.vector.clone())
        return Backward(flat, *rest, **named)

    monkeypatch.setattr(speed_here, "Backward", backward)
    train = TrainConfig(seq_len=8, batch_size=2, tokens=64, schedule=ConstantConfig(lr=1e-3))
    speed_here._step(model, train, choose(PeerConfig(device="cpu")), 2, has_rows=False)()
    assert torch.equal(made[0], initial_vector(model, 0))


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc keeps blocks that are freed")
def test_what_steps_took_of_the_machine_is_given_back() -> None:
    model = ModelConfig(
        vocab_size=257, num_layers=4, num_heads=4, num_kv_heads=4, width=256, ffn_width=768, max_seq_len=128
    )
    train = TrainConfig(seq_len=128, batch_size=8, tokens=1024, schedule=ConstantConfig(lr=1e-3))
    needed = cost.activation_nbytes(decoder(model), train.batch_size, train.seq_len)
    release_heap()  # what tests before this one have freed would be taken again
    before, during = process_nbytes(), list[int]()

    def timed(step: Callable[[], None]) -> float:
        for _ in range(2):
            step()
        during.append(process_nbytes())
        return 1.0

    speed_here.measure(model, train, 1, timed, on="cpu", num_threads=1)
    assert during[0] - before > needed / 2  # or glibc has none to keep, and this test nothing to see
    assert process_nbytes() - before < needed / 4


@pytest.mark.parametrize(
    ("all_s", "computed_s", "waited_s", "found"),
    [
        ((0.1, 0.1, 0.12), 0.5, 0.01, False),  # two cores
        ((0.3, 0.1, 0.1, 0.1), 0.7, 0.0, False),  # the first allocates
        ((9.0, 0.1), 18.0, 0.0, False),  # too few to compare
        ((9.0,), 2.0, 0.0, True),
        ((), 0.0, 0.0, False),
        ((0.1, 0.1, 0.12), 0.2, 0.0, True),  # less than one core
        ((0.1, 3.0, 2.0, 0.9), 8.0, 0.0, True),  # threads wait for one another, and compute nothing meanwhile
        ((0.3, 0.3, 0.32), 1.2, 0.4, True),  # all steps as long, by one who computes all the time
    ],
)
def test_steps_tell_whether_other_programs_have_the_cores(
    all_s: tuple[float, ...], computed_s: float, waited_s: float, found: bool
) -> None:
    assert speed_here.is_disturbed(all_s, computed_s, waited_s) is found


SMALL = ModelConfig(vocab_size=257, num_layers=1, num_heads=2, num_kv_heads=2, width=16, ffn_width=32, max_seq_len=8)
TRAIN = TrainConfig(seq_len=8, batch_size=2, tokens=64, schedule=ConstantConfig(lr=1e-3))


@pytest.mark.parametrize(("is_busy", "step_s"), [(True, 1e-9), (False, 60.0)])
def test_on_a_busy_machine_a_step_takes_what_one_core_computes(
    is_busy: bool, step_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the minute that it took."""
    monkeypatch.setattr(speed_here, "is_disturbed", lambda *_: is_busy)
    monkeypatch.setattr(speed_here, "core_s", lambda *_: 1e-9)

    def a_minute(step: Callable[[], None]) -> float:
        step()
        return 60.0

    before = torch.get_num_threads()
    here = speed_here.measure(SMALL, TRAIN, 1, a_minute, on="cpu", num_threads=2)
    assert here.tokens_per_s == pytest.approx(TRAIN.batch_size * TRAIN.seq_len / step_s)
    assert ("others use the cores now" in here.name) is is_busy
    assert torch.get_num_threads() == before


def test_what_one_core_computes_is_told_by_its_own_time() -> None:
    """However long others had the core meanwhile."""
    before, computed = torch.get_num_threads(), iter([0.0, 0.3, 5.0, 5.2, 6.0, 6.25])
    threads: list[int] = []
    try:
        assert speed_here.core_s(lambda: threads.append(torch.get_num_threads()), lambda: next(computed), 1.0) == (
            pytest.approx(0.2)
        )
    finally:
        torch.set_num_threads(before)
    assert threads == [1, 1, 1]


def test_a_step_that_would_be_long_on_one_core_is_not_made_there() -> None:
    assert speed_here.core_s(lambda: pytest.fail("it was made"), lambda: 0.0, 60.0) == float("inf")


def test_steps_in_exact_numbers_are_what_is_timed_of_a_run_that_makes_such(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU, whatever device there is; an optimizer and a loss that fp32 does not have."""
    made = list[str]()

    def counted(self: Exact, config: Any, model: Any) -> Any:
        made.append("exact")
        return inner.Exact(config, model)

    monkeypatch.setattr(Exact, "optimizer", counted)

    def once(step: Callable[[], None]) -> float:
        step()
        return 1.0

    here = speed_here.measure(SMALL, TRAIN, 1, once, num_threads=1, is_exact=True)
    assert (made, here.is_gpu, here.is_half) == (["exact"], False, False)
    speed_here.measure(SMALL, TRAIN, 1, once, on="cpu", num_threads=1)
    assert made == ["exact"]
