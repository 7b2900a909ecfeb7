"""One point from its plan to its line: whole peers with a real model, on a virtual clock."""

from pathlib import Path

import msgspec
import pytest

from unit.sim.plans import PLAN, read, write
from weft.bench.log import BenchLine
from weft.bench.plan import config_of, names_of
from weft.bench.point import Task, measure, outcome_of
from weft.ids import PeerId, Round, Tokens
from weft.run.genesis import seal
from weft.sim.play import Machine, Played
from weft.store.home import Home

# SGD at a rate that throws every model out: each step of the peers' own is larger than the one before.
THROWN = '[[row]]\nname = "thrown"\nmethod = { type = "fedavg", every = 2 }\nset = { "train.clip" = 1e15, '
THROWN += '"train.schedule.lr" = 10.0, "train.optimizer" = { type = "sgd", momentum = 0.9 } }\n'


def tasks(path: Path) -> list[Task]:
    bench, points = read(path)
    runs = {
        point.seed: seal(point.run_file, path.parent, Home(path.parent / "home"), lambda _event: None).config
        for point in points
    }
    named = names_of(points, bench, runs)
    return [
        Task(name, point, config_of(point, runs[point.seed]), bench.kind, path.parent) for name, point in named.items()
    ]


def without_time(line: BenchLine) -> BenchLine:
    return msgspec.structs.replace(line, cpu_s=0.0)


def test_a_point_comes_to_a_line_and_the_same_point_to_the_same_line(tmp_path: Path) -> None:
    ddp, diloco, _ = tasks(write(tmp_path))
    lines = [measure(ddp), measure(diloco)]
    for line in lines:
        assert line.outcome == "complete"
        assert (line.steps, line.committed_tokens, line.trained_tokens) == (4.0, 256, 256)
        assert line.heldout_loss is not None
        assert line.heldout_loss == line.nats_per_byte  # a token is a byte
        assert line.train_loss == pytest.approx(5.5, abs=0.2)  # ln 256, and hardly learnt
        assert line.sent_max >= line.sent_mean > 0
    # Two peers in a ring send the whole gradient once: 16 bits of each parameter and step.
    by_ddp, by_diloco = lines
    assert by_ddp.payload_bits == pytest.approx(16.0)
    assert by_diloco.payload_bits == pytest.approx(8.1 / 2, abs=0.2)  # int8 with a scale a block, every second step
    for line in lines:
        assert line.bits is not None
        assert line.ratio_bf16 is not None
        assert line.bits == pytest.approx(8 * line.sent_mean / (line.parameters * 4))
        assert line.ratio_bf16 == pytest.approx(line.bits / 16)
        assert line.ratio_fp32 == pytest.approx(line.bits / 32)
    assert by_ddp.sent_mean > 2 * by_diloco.sent_mean
    assert (by_ddp.rounds, by_diloco.rounds) == (4, 2)
    assert by_ddp.virtual_s > by_diloco.virtual_s > 0
    assert without_time(measure(diloco)) == without_time(by_diloco)


def test_a_point_that_diverges_is_a_line_that_says_so(tmp_path: Path) -> None:
    *_, thrown = tasks(write(tmp_path, PLAN.replace("steps = [4]", "steps = [40]") + THROWN))
    line = measure(thrown)
    assert line.outcome == "diverged"
    assert (line.heldout_loss, line.nats_per_byte, line.train_loss) == (None, None, None)
    assert line.steps < 40


@pytest.mark.parametrize(
    ("end", "has_diverged", "broken", "outcome"),
    [
        ("complete", False, (), "complete"),
        ("the loss is NaN", True, (), "diverged"),
        ("still running", False, (), "failed: still running"),
        ("complete", False, ("a fault",), "broken: a fault"),
    ],
)
def test_an_outcome_is_a_word_or_a_reason(end: str, has_diverged: bool, broken: tuple[str, ...], outcome: str) -> None:
    none = Tokens(0)
    machines = tuple(
        Machine("m", PeerId("ab" * 32), none, none, None, 0, 1, each, None, has_diverged) for each in ("complete", end)
    )
    assert outcome_of(Played(machines, 0.0, Round(0), none, None, (), broken, ())) == outcome
