"""A layer cut by segments is the layer: softmax online and its way back are exact, and places are global."""

from math import exp

import pytest
import torch
from torch import Tensor

from unit.pipeline.split.layer import FAMILIES, Case, case
from unit.pipeline.split.reference import attention, contiguous, distance, online
from weft.model.layers import rotation
from weft.pipeline.split.cut import Segment, zigzag
from weft.pipeline.split.ring_attention import TILE, KeyValues, Queries, SegmentPass, put, segment_rotation, select

CLOSE = 2e-6
CUTS = {"contiguous": contiguous, "zigzag": zigzag}


def through(given: Case, segments: tuple[Segment, ...]) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    num = len(segments)
    passes = [SegmentPass(given.layer, each, segment_rotation(given.inverse, each)) for each in segments]
    blocks = [each.begin(select(given.x, segment)) for each, segment in zip(passes, segments, strict=True)]
    y, dx = torch.zeros_like(given.x), torch.zeros_like(given.x)
    for i, each in enumerate(passes):
        for step in range(num):
            each.fold(blocks[(i - step) % num], segments[(i - step) % num])
        put(each.end(), segments[i], y)
    found = [KeyValues(torch.zeros_like(block.k), torch.zeros_like(block.v)) for block in blocks]
    for i, each in enumerate(passes):
        each.begin_back(select(given.dy, segments[i]))
        for step in range(num):
            owner = (i - step) % num
            dk, dv = each.back(blocks[owner], segments[owner])
            found[owner].k.add_(dk)
            found[owner].v.add_(dv)
    gradients = given.zeros()
    for i, each in enumerate(passes):
        put(each.end_back(found[i]), segments[i], dx)
        for name, gradient in each.gradients.items():
            gradients[name] += gradient
    return y, dx, gradients


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("speeds", [(1.0, 1.0), (1.0, 3.0), (2.0, 1.0, 1.0, 3.0)], ids=str)
def test_segments_together_are_the_layer(family: str, cut: str, speeds: tuple[float, ...]) -> None:
    given = case(family)
    y, dx, gradients = through(given, CUTS[cut](given.x.shape[1], speeds))
    assert distance(y, given.y) < CLOSE
    assert distance(dx, given.dx) < CLOSE
    assert max(distance(each, given.gradients[name]) for name, each in gradients.items()) < CLOSE


def test_segments_of_many_tiles_are_the_layer() -> None:
    given = case("gqa", num_tokens=5 * TILE + 7)
    for cut in CUTS.values():
        y, dx, gradients = through(given, cut(given.x.shape[1], (1.0, 2.0)))
        assert distance(y, given.y) < CLOSE
        assert distance(dx, given.dx) < CLOSE
        assert max(distance(each, given.gradients[name]) for name, each in gradients.items()) < CLOSE


def folded(scores: list[float], values: list[float], cuts: list[range]) -> float:
    """Return what one query finds whose scores with keys are these, the keys in blocks in the order of `cuts`."""
    place = len(scores)
    queries = Queries(torch.ones(1, 1, 1, 1), (range(place, place + 1),), 1)
    k, v = (torch.tensor(each).view(1, 1, -1, 1) for each in (scores, values))
    for run in cuts:
        queries.fold(KeyValues(k[:, :, run.start : run.stop], v[:, :, run.start : run.stop]), (run,))
    return float(queries.end())


def test_softmax_over_blocks_is_softmax_one_score_after_the_other() -> None:
    scores, values = [1.0, -2.0, 30.0, 4.0, 29.5, -80.0], [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    expected, _ = online(scores, values)
    weights = [exp(score - 30) for score in scores]
    assert expected == pytest.approx(sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights))
    for cuts in ([range(6)], [range(3), range(3, 6)], [range(3, 6), range(3)], [range(i, i + 1) for i in range(6)]):
        assert folded(scores, values, cuts) == pytest.approx(expected, rel=1e-6)


def test_scores_that_would_overflow_do_not() -> None:
    assert folded([300.0, -300.0, 299.0], [1.0, 2.0, 3.0], [range(1), range(1, 3)]) == pytest.approx(
        (1 + 3 * exp(-1)) / (1 + exp(-1)), rel=1e-6
    )


def test_the_way_back_is_that_of_the_whole_matrix() -> None:
    torch.manual_seed(1)
    num, segments = 50, zigzag(50, (1.0, 2.0, 1.0))
    q, k, v = torch.randn(1, 4, num, 6), torch.randn(1, 2, num, 6), torch.randn(1, 2, num, 6)
    do = torch.randn_like(q)
    leaves = [each.clone().requires_grad_() for each in (q, k, v)]
    expected = torch.autograd.grad(attention(*leaves), leaves, do.double())

    def cut(x: Tensor, segment: Segment) -> Tensor:
        return torch.cat([x[:, :, run.start : run.stop] for run in segment], 2)

    found = [torch.zeros_like(each) for each in (q, k, v)]
    for segment in segments:
        queries = Queries(cut(q, segment), segment, 2)
        others = [segment, *(each for each in segments if each is not segment)]
        for other in others:
            queries.fold(KeyValues(cut(k, other), cut(v, other)), other)
        queries.end()
        queries.begin_back(cut(do, segment))
        for other in others:
            for into, gradient in zip(
                found[1:], queries.back(KeyValues(cut(k, other), cut(v, other)), other), strict=True
            ):
                for run, piece in zip(other, gradient.split([len(run) for run in other], 2), strict=True):
                    into[:, :, run.start : run.stop] += piece
        for run, piece in zip(segment, queries.end_back().split([len(run) for run in segment], 2), strict=True):
            found[0][:, :, run.start : run.stop] = piece
    for each, known in zip(found, expected, strict=True):
        assert distance(each, known) < CLOSE


def test_places_are_those_in_the_whole_sequence() -> None:
    given = case("gqa")
    segment = (range(2, 5), range(20, 22))
    cos, sin = segment_rotation(given.inverse, segment)
    whole_cos, whole_sin = rotation(given.inverse, 0, 33)
    places = [2, 3, 4, 20, 21]
    assert torch.equal(cos, whole_cos[places])
    assert torch.equal(sin, whole_sin[places])
    wrong = SegmentPass(given.layer, segment, rotation(given.inverse, 0, 5)).begin(select(given.x, segment))
    right = SegmentPass(given.layer, segment, (cos, sin)).begin(select(given.x, segment))
    assert distance(wrong.k, right.k) > 0.01
