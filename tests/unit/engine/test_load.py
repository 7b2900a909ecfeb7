import pytest
import torch

from unit.engine.test_step import CONFIG, CPU, vector_of
from weft.engine.load import FULL_TEXTS, plan, weights_nbytes
from weft.engine.numbers import Kind
from weft.engine.pages import PAGE
from weft.engine.step import KeysAndValues, Weights, page_nbytes
from weft.errors import ConfigError, TooLarge


@pytest.mark.parametrize("kind", ["fp32", "bf16", "int8", "exact"])
def test_what_is_planned_is_what_is_held(kind: Kind) -> None:
    weights = Weights(CONFIG, vector_of(CONFIG), kind)
    assert weights.nbytes == pytest.approx(weights_nbytes(CONFIG, kind), rel=0.05)
    kept = KeysAndValues(CONFIG, 3, CPU, kind)
    tensors = [each for layer in kept.layers for each in vars(layer).values() if isinstance(each, torch.Tensor)]
    assert sum(each.nbytes for each in tensors) == 3 * page_nbytes(CONFIG, kind)


def test_there_is_room_for_one_text_at_least_and_no_more_than_is_of_use() -> None:
    page, weights = page_nbytes(CONFIG, "int8"), weights_nbytes(CONFIG, "int8")
    with pytest.raises(TooLarge, match="Close other programs"):
        plan(CONFIG, CPU, "int8", 512, None, weights + 8 * page - 1)
    assert plan(CONFIG, CPU, "int8", 512, None, weights + 8 * page).num_pages == 8
    assert plan(CONFIG, CPU, "int8", 512, None, weights + 80 * page).num_pages == 20
    assert plan(CONFIG, CPU, "int8", 512, None, 1 << 40).num_pages == 8 * FULL_TEXTS
    assert plan(CONFIG, CPU, "int8", 512, 30 * page, 1 << 40).num_tokens == 30 * PAGE
    with pytest.raises(ConfigError, match="hold 448 tokens"):
        plan(CONFIG, CPU, "int8", 512, 7 * page, 1 << 40)
