"""Members on other processors, some of which are killed, stopped, frozen, slow or late: nobody honest is found false,
and a machine that comes to something else is."""

from typing import Any

import pytest
from benchmarks.honest import NUM_MACHINES, Numerics, Text, run
from benchmarks.rig.elsewhere import KINDS, Descend, Machine, machines

ROUNDS = 16
pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("numerics", "text"), [("exact", "python"), ("fp32", "python"), ("fp32", "digits")])
def test_nobody_honest_is_found_false(numerics: Numerics, text: Text) -> None:
    with machines() as elsewhere:
        found = run((numerics, text), 0, elsewhere, ROUNDS)
    assert found.num_audits > 50
    assert (found.differs, found.struck_out) == (0, 0)
    assert found.share < 1.0
    assert (found.num_unequal > 0) == (numerics == "fp32"), "machines round differently, but in exact numbers"
    assert found.num_lives > NUM_MACHINES


class Broken(Machine):
    """Ends each step a little elsewhere, and always at the same place."""

    def ask(self, asked: object) -> Any:
        answer = super().ask(asked)
        if isinstance(asked, Descend):
            answer.vector[7] += 1e-3
        return answer


def test_a_machine_that_comes_to_something_else_is_found() -> None:
    with machines() as elsewhere:
        name = "AVX2, one thread"
        broken = Broken(*KINDS[name])
        try:
            found = run(("exact", "python"), 0, {**elsewhere, name: broken}, ROUNDS)
        finally:
            broken.end()
    assert found.differs > 0
    assert found.struck_out == 1
