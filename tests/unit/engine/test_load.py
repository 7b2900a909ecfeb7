import pytest
import torch

from unit.engine.test_step import CONFIG, CPU, vector_of
from weft.engine import load
from weft.engine.load import FULL_TEXTS, kind_alone, needs, plan, plan_together, required, weights_nbytes
from weft.engine.numbers import Kind
from weft.engine.scheduling.pages import PAGE
from weft.engine.step import KeysAndValues, Weights, page_nbytes
from weft.errors import ConfigError, TooLarge


@pytest.mark.parametrize("kind", ["fp32", "bf16", "w8a16", "int8", "exact"])
def test_what_is_planned_is_what_is_held(kind: Kind) -> None:
    weights = Weights(CONFIG, vector_of(CONFIG), kind)
    assert weights.nbytes == pytest.approx(weights_nbytes(CONFIG, kind), rel=0.05)
    kept = KeysAndValues(CONFIG, 3, CPU, kind)
    tensors = [each for layer in kept.layers for each in vars(layer).values() if isinstance(each, torch.Tensor)]
    assert sum(each.nbytes for each in tensors) == 3 * page_nbytes(CONFIG, kind)


@pytest.mark.parametrize(
    ("int8_s", "is_right", "has_halves", "kind"),
    [
        (1.0, True, True, "int8"),
        (2.9, True, True, "int8"),
        (3.1, True, True, "w8a16"),
        (3.1, True, False, "int8"),
        (0.5, False, True, "w8a16"),
        (0.5, False, False, "bf16"),
    ],
)
def test_a_cpu_without_instructions_for_products_of_eight_bits_multiplies_by_halves(
    int8_s: float, is_right: bool, has_halves: bool, kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load, "probe", lambda _device: is_right)
    monkeypatch.setattr(load, "can_multiply", lambda _kind, _device: has_halves)
    monkeypatch.setattr(load, "product_s", lambda kind: int8_s if kind == "int8" else 1.0)
    assert kind_alone(CPU) == kind


def test_what_is_asked_for_and_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert required("w8a16", CPU) == "w8a16"
    monkeypatch.setattr(load, "can_multiply", lambda _kind, _device: False)
    with pytest.raises(ConfigError, match="w8a16 is for CPUs"):
        required("w8a16", CPU)


def test_there_is_room_for_one_text_at_least_and_no_more_than_is_of_use() -> None:
    page, weights = page_nbytes(CONFIG, "int8"), weights_nbytes(CONFIG, "int8")
    with pytest.raises(TooLarge, match="Close other programs"):
        plan(CONFIG, CPU, "int8", 512, None, weights + 8 * page - 1)
    assert plan(CONFIG, CPU, "int8", 512, None, weights + 8 * page).num_pages == 8
    assert plan(CONFIG, CPU, "int8", 512, None, weights + 80 * page).num_pages == 20
    assert plan(CONFIG, CPU, "int8", 512, None, 1 << 40).num_pages == 8 * FULL_TEXTS
    assert plan(CONFIG, CPU, "int8", 512, 30 * page, 1 << 40).num_tokens == 30 * PAGE
    told = r"^172\.03 kB for keys and values hold 448 tokens; .* takes 196\.61 kB\."
    with pytest.raises(ConfigError, match=told):
        plan(CONFIG, CPU, "int8", 512, 7 * page, 1 << 40)


def test_several_models_have_room_for_as_many_texts_each_or_are_refused_together() -> None:
    both = [needs(CONFIG, "int8", 512), needs(CONFIG, "fp32", 128)]
    weights, least = sum(each.weights_nbytes for each in both), sum(each.text_nbytes for each in both)
    assert least == 8 * page_nbytes(CONFIG, "int8") + 2 * page_nbytes(CONFIG, "fp32")
    assert [each.num_pages for each in plan_together(both, CPU, None, weights + least)] == [8, 2]
    assert [each.num_pages for each in plan_together(both, CPU, 3 * least, 1 << 40)] == [24, 6]
    assert [each.num_pages for each in plan_together(both, CPU, None, 1 << 40)] == [8 * FULL_TEXTS, 2 * FULL_TEXTS]
    found = plan_together(both, CPU, 7 * least // 2, 1 << 40)
    assert sum(each.kv_nbytes for each in found) <= 7 * least // 2
    assert [each.weights_nbytes for each in found] == [each.weights_nbytes for each in both]
    with pytest.raises(TooLarge, match=r"2 models take .* a text of the context of each .* serve fewer models"):
        plan_together(both, CPU, None, weights + least - 1)
    with pytest.raises(ConfigError, match="do not hold a text of the context of each of 2 models"):
        plan_together(both, CPU, least - 1, 1 << 40)
