"""Early stopping: each path's best parameters on its own validation set, whatever becomes of the modules."""

import math

import numpy as np
import pytest
import torch

from unit.compose.paths.tiny import MODEL, begun, texts
from weft.compose.paths.features import token_losses
from weft.compose.paths.stopping import EarlyStopping, heldout_loss
from weft.errors import NotFinite
from weft.model.flat import assemble


def test_each_path_keeps_the_parameters_of_its_own_best_round() -> None:
    stopping, vector = EarlyStopping(), torch.zeros(2)
    losses = {(0,): [3.0, 2.0, 2.0, 2.5], (1,): [1.0, 1.5, 0.5, 0.7]}
    kept = {path: list[bool]() for path in losses}
    for number in range(4):
        vector.fill_(number)  # the modules go on
        for path, each in losses.items():
            kept[path].append(stopping.hear(path, each[number], number, vector))
    assert kept == {(0,): [True, True, False, False], (1,): [True, False, True, False]}
    assert [(best.loss, best.round, best.vector.tolist()) for best in stopping.best.values()] == [
        (2.0, 1, [1.0, 1.0]),
        (0.5, 2, [2.0, 2.0]),
    ]


def test_the_loss_of_a_validation_set_is_that_of_its_tokens() -> None:
    model, windows = assemble(MODEL, begun()), texts(2, 12)
    one, other = windows[0], windows[1, :5]
    expected = np.concatenate([token_losses(model, one[None])[0], token_losses(model, other[None])[0]]).mean()
    assert heldout_loss(model, [one, other]) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_path_that_has_diverged_is_not_kept_and_not_passed_over(loss: float) -> None:
    stopping = EarlyStopping()
    stopping.hear((0,), 1.0, 0, torch.zeros(2))
    with pytest.raises(NotFinite, match="round 1: a path's validation loss is"):
        stopping.hear((0,), loss, 1, torch.ones(2))
    assert stopping.best[(0,)].round == 0
