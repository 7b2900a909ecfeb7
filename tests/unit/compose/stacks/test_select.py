"""Selection: every pair at its best scale, and a search that finds what trying all would find."""

from itertools import permutations

import pytest
import torch

from unit.compose.stacks.small import CONFIG, SEQ_LEN, draw, member, space, text
from weft.compose.descent import DescentConfig, windows
from weft.compose.stacks.align import ContinueConfig, begin
from weft.compose.stacks.body import body, identity
from weft.compose.stacks.select import ALPHAS, matrix, scaled, search
from weft.compose.stacks.stack import Stack
from weft.errors import ConfigError
from weft.model.transformer import SectionModule

DEV, TEST = windows(text(), SEQ_LEN, 6, 21)(0), windows(text(), SEQ_LEN, 8, 22)(0)


def members() -> dict[str, SectionModule]:
    """Return one that was trained a little, one that was not, and one that changes nothing."""
    training = DescentConfig(steps=10, lr=1e-2, warmup_steps=2)
    learnt = begin(ContinueConfig(training=training), Stack(space(), (member(1),)), draw())
    learnt.run()
    return {"learnt": learnt.stack.bodies[0], "raw": member(2), "none": body(CONFIG, identity(CONFIG, 3))}


def test_every_pair_is_told_at_its_best_scale_beside_the_lower_alone() -> None:
    found, held = matrix(space(), members(), DEV, (1.0, 16.0)), members()
    assert set(found.alone) == set(held)
    assert set(found.pairs) == {(lower, upper) for lower in held for upper in held}
    for (lower, upper), pair in found.pairs.items():
        losses = {
            alpha: float(scaled(space(), held, (lower, upper), (alpha,)).losses(DEV).mean()) for alpha in (1.0, 16.0)
        }
        assert pair.loss == pytest.approx(min(losses.values()), abs=1e-5)
        assert losses[pair.alpha] == pytest.approx(pair.loss, abs=1e-5)
        assert pair.contribution == pytest.approx(pair.loss - found.alone[lower], abs=1e-5)
    for lower in held:  # the column of the identity
        assert found.pairs[lower, "none"].loss == pytest.approx(found.alone[lower], abs=1e-3)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_wide_search_finds_the_best_of_all(depth: int) -> None:
    """Scales are found seam after seam, so all are tried as the search does."""
    held, alphas = members(), (1.0, 4.0)
    found = search(space(), held, (DEV, TEST), depth, width=6, alphas=alphas)
    best = {}
    for num in range(1, depth + 1):
        for order in permutations(held, num):
            chosen = tuple[float, ...]()
            for seam in range(1, num):
                part = order[: seam + 1]
                chosen += (
                    min(alphas, key=lambda a: float(scaled(space(), held, part, (*chosen, a)).losses(DEV).mean())),
                )
            best[order] = float(scaled(space(), held, order, chosen).losses(DEV).mean())
    assert len(found) == depth
    assert found[0].dev == pytest.approx(min(best.values()), abs=1e-4)
    assert [each.dev for each in found] == sorted(each.dev for each in found)
    assert {len(each.order) for each in found} == set(range(1, depth + 1))


def test_what_was_chosen_on_dev_is_told_on_test() -> None:
    held = members()
    for each in search(space(), held, (DEV, TEST), 2):
        assert each.test.shape == (8,)
        assert torch.equal(each.test, scaled(space(), held, each.order, each.alphas).losses(TEST))
        assert all(alpha in ALPHAS for alpha in each.alphas)
        assert len(set(each.order)) == len(each.order)


def test_a_narrow_search_tries_less() -> None:
    held = members()
    narrow, wide = (search(space(), held, (DEV, TEST), 3, width=width) for width in (1, 6))
    assert min(each.dev for each in narrow) >= min(each.dev for each in wide) - 1e-6


def test_nothing_to_choose_from_is_refused() -> None:
    with pytest.raises(ConfigError, match="no members"):
        search(space(), {}, (DEV, TEST), 2)
