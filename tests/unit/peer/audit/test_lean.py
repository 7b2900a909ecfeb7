"""On which side of each other the training steps of honest machines end, and those of who steers."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from unit.peer.audit.lean_program import NUM, State, step, trainer
from weft.ids import PeerId
from weft.peer.audit.steps import LOCAL, distance, farthest, held_of, lean, state_of
from weft.verify.calibration import NEAR
from weft.verify.judge import Numerics, threshold
from weft.verify.steering import Steered, Steering

TESTS = Path(__file__).parents[3]
AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
SSE = {"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE", "ONEDNN_MAX_CPU_ISA": "SSE41"}
PEER = PeerId("ab" * 32)


def test_a_step_that_is_longer_leans_by_as_much() -> None:
    luck = torch.Generator().manual_seed(1)
    before, move = (torch.randn(10_000, generator=luck) for _ in range(2))
    for by in (1e-2, -1e-2, 1e-3):
        found = lean(before, before + move, before + (1 + by) * move)
        assert found == pytest.approx(by / (1 + by / 2), rel=1e-3)
        assert lean(before, before + (1 + by) * move, before + move) == pytest.approx(-found, rel=1e-3)
    aside = torch.randn(10_000, generator=luck)
    assert abs(lean(before, before + move + 1e-3 * aside, before + move - 1e-3 * aside)) < 1e-4
    assert lean(before, before, before) == 0.0
    assert lean(before, before + move, before + float("nan")) == 0.0


def test_the_vector_counts_that_lies_farthest_of_what_it_may() -> None:
    far = farthest({LOCAL: 1e-2, "moment1": 5e-2}, held_of("bf16", 4, (LOCAL, "moment1")))
    assert (far.distance, far.share) == (5e-2, pytest.approx(5e-2 / 6e-2))
    assert farthest({}, held_of("fp32", 1, (LOCAL,))).distance == 0.0


def suspicions(numerics: Numerics, states: list[State], mine: list[Tensor], theirs: list[Tensor]) -> list[Steered]:
    """Return what an auditor says of a peer's steps."""
    steering, found = Steering(), list[Steered]()
    for before, one, other in zip(states, mine, theirs, strict=False):
        steered = steering.note(PEER, lean(before[LOCAL], one, other), threshold(numerics, 1))
        found += [steered] if steered is not None else []
    return found


@pytest.mark.full
@pytest.mark.parametrize("numerics", ["fp32", pytest.param("bf16", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("num_threads", "setting"),
    [pytest.param(1, SSE, id="SSE4.1"), pytest.param(2, AVX2, id="AVX2, two threads", marks=pytest.mark.slow)],
)
def test_steps_of_another_honest_machine_are_not_on_one_side_and_those_of_who_steers_are(
    tmp_path: Path, numerics: Numerics, num_threads: int, setting: dict[str, str]
) -> None:
    """64 steps, made again with other instruction sets and threads."""
    honest, states = trainer(tmp_path / "own", 1, numerics), list[State]()
    states.append({name: vector.clone() for name, vector in state_of(honest).items()})
    for number in range(NUM):
        states.append(step(honest, states[-1], number))
    torch.save(states, tmp_path / "states.pt")
    environment = os.environ | setting | {"OMP_WAIT_POLICY": "passive", "PYTHONPATH": f"{TESTS.parent / 'src'}:{TESTS}"}
    command = [sys.executable, "-P", str(Path(__file__).with_name("lean_program.py"))]
    subprocess.run([*command, str(tmp_path), str(num_threads), numerics], env=environment, check=True, timeout=120)
    mine, theirs = [each[LOCAL] for each in states[1:]], [each[LOCAL] for each in torch.load(tmp_path / "made.pt")]
    far = [distance(before[LOCAL], one, other) for before, one, other in zip(states, mine, theirs, strict=False)]
    assert 0.0 < max(far[1:]) < (NEAR if numerics == "fp32" else 1.0) * threshold(numerics, 1)
    assert far[0] < threshold(numerics, 1, is_new=True) / 2.5, "the first step follows signs"
    assert suspicions(numerics, states, mine, theirs) == []
    by = 5e-5 if numerics == "fp32" else 1e-2
    steered = [before[LOCAL] + (1 + by) * (each - before[LOCAL]) for before, each in zip(states, theirs, strict=False)]
    far = [distance(before[LOCAL], one, other) for before, one, other in zip(states, mine, steered, strict=False)]
    assert max(far[1:]) < threshold(numerics, 1)
    (found,) = suspicions(numerics, states, mine, steered)
    assert found.mean == pytest.approx(by, rel=0.5)
