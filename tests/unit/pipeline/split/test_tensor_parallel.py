"""A layer cut by heads is the layer: outputs, gradients of the input and of every weight, whatever the parts' sizes."""

import pytest
import torch

from unit.pipeline.split.layer import FAMILIES, Case, case
from unit.pipeline.split.reference import distance, heads_by_hand
from weft.pipeline.split.cut import heads_parts
from weft.pipeline.split.tensor_parallel import HeadsPass, add_gradients, added, cut_layer

CLOSE = 1e-6


def through(given: Case, speeds: tuple[float, ...]) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    parts = heads_parts(given.config, speeds)
    passes = [HeadsPass(cut_layer(given.layer, given.config, part), given.turn) for part in parts]
    h = given.x + added([each.attention(given.x) for each in passes])
    y = h + added([each.ffn(h) for each in passes])
    dh = given.dy + added([each.back(given.dy) for each in passes])
    dx = dh + added([each.back(dh) for each in passes])
    gradients = given.zeros()
    for part, each in zip(parts, passes, strict=True):
        add_gradients(given.config, part, each.gradients, gradients)
    return y, dx, gradients


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("speeds", [(1.0, 1.0), (3.0, 1.0), (1.0, 2.0, 1.0), (4.0, 1.0, 2.0, 1.0)], ids=str)
def test_parts_together_are_the_layer(family: str, speeds: tuple[float, ...]) -> None:
    given = case(family)
    y, dx, gradients = through(given, speeds)
    assert distance(y, given.y) < CLOSE
    assert distance(dx, given.dx) < CLOSE
    assert gradients.keys() == given.gradients.keys()
    assert max(distance(each, given.gradients[name]) for name, each in gradients.items()) < CLOSE


def test_five_heads_of_eight_and_three_are_the_layer_as_by_hand() -> None:
    given = case("mha")
    assert [len(part.groups) for part in heads_parts(given.config, (5.0, 3.0))] == [5, 3]
    y, _, _ = through(given, (5.0, 3.0))
    assert distance(y, heads_by_hand(given.layer, given.turn, given.x, 5).detach()) < CLOSE


def test_a_part_left_out_is_missed() -> None:
    given = case("gqa")
    part, _ = heads_parts(given.config, (1.0, 1.0))
    alone = HeadsPass(cut_layer(given.layer, given.config, part), given.turn)
    assert distance(given.x + alone.attention(given.x), given.y) > 0.01


def test_the_order_of_a_sum_is_its_result() -> None:
    torch.manual_seed(0)
    partials = list(torch.randn(3, 1000) * torch.tensor([[1e4], [1.0], [1e-3]]))
    by_hand = (partials[0] + partials[1]) + partials[2]
    assert torch.equal(added(partials), by_hand)
    assert not torch.equal(added(partials[::-1]), by_hand)


def test_a_cut_layer_has_weights_of_its_own() -> None:
    given = case("gqa")
    part = cut_layer(given.layer, given.config, heads_parts(given.config, (1.0, 1.0))[0])
    before = given.layer.attention.qkv.weight.detach().clone()
    with torch.no_grad():
        for weight in part.parameters():
            weight.zero_()
    assert torch.equal(given.layer.attention.qkv.weight, before)
