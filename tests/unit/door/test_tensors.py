"""A model's tensors as one vector: what is in it, and that nothing is lost on the way."""

import pytest
import torch
from torch import nn

from weft import wire
from weft.door.tensors import Tensors, require_same
from weft.errors import ConfigError, GenesisMismatch
from weft.peer.config import LoopConfig, SyncConfig
from weft.peer.launch_loop import _sealed


def run_of(tensors: Tensors) -> LoopConfig:
    return _sealed(SyncConfig(samples=1), tensors.configs, tensors.frozen, wire.digest(b"any"))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 3)
        self.norm = nn.BatchNorm1d(3)
        self.head = nn.Linear(3, 4, bias=False)
        self.head.weight = self.embed.weight


def test_a_tied_tensor_is_one_and_buffers_are_none() -> None:
    tensors = Tensors(Tied())
    assert [each.name for each in tensors.configs] == ["embed.weight", "norm.weight", "norm.bias"]
    assert tensors.num == 12 + 3 + 3
    same = torch.zeros(2)
    assert [each.name for each in Tensors({"a": same, "b": same, "c": torch.zeros(2)}).configs] == ["a", "c"]


def test_what_is_written_is_in_the_tensors_and_is_read() -> None:
    model = nn.Linear(3, 2)
    tensors = Tensors(model)
    vector = torch.arange(8.0)
    tensors.write(vector)
    assert model.weight.equal(torch.tensor([[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]))
    assert model.bias.equal(torch.tensor([6.0, 7.0]))
    assert model.weight.requires_grad
    assert tensors.read().equal(vector)


def test_a_tensor_that_is_not_contiguous_is_read_and_written_in_its_own_order() -> None:
    base = torch.zeros(2, 3)
    tensors = Tensors({"turned": base.T})
    tensors.write(torch.arange(6.0))
    assert base.equal(torch.tensor([[0.0, 2.0, 4.0], [1.0, 3.0, 5.0]]))
    assert tensors.read().equal(torch.arange(6.0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_a_narrow_dtype_rounds_off_is_not_lost_and_is_not_taken_for_training(dtype: torch.dtype) -> None:
    tensor = torch.zeros(1000, dtype=dtype)
    tensors = Tensors({"narrow": tensor, "wide": torch.zeros(10)})
    vector = torch.randn(1010, generator=torch.Generator().manual_seed(1))
    tensors.write(vector)
    assert not tensor.float().equal(vector[:1000])
    assert tensors.read().equal(vector)
    before = tensor.float()
    tensor.mul_(2)  # exact: what training did is what is read
    assert torch.allclose(tensors.read()[:1000] - vector[:1000], before, rtol=0, atol=1e-6)


def test_double_precision_is_read_rounded() -> None:
    tensor = torch.full((3,), 1 / 3, dtype=torch.float64)
    tensors = Tensors({"double": tensor})
    assert tensors.read().equal(torch.full((3,), 1 / 3))
    tensors.write(tensors.read())
    assert tensor.equal(torch.full((3,), 1 / 3).double())


def test_frozen_parameters_are_not_sent_and_must_have_equal_values() -> None:
    def adapted(value: float) -> Tensors:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        model[0].requires_grad_(False)
        nn.init.constant_(model[0].weight, value)
        nn.init.zeros_(model[0].bias)
        return Tensors(model)

    mine = adapted(1.0)
    assert [each.name for each in mine.configs] == ["1.weight", "1.bias"]
    require_same(run_of(mine), adapted(1.0))
    with pytest.raises(GenesisMismatch, match=r"frozen tensor 0 of the run is '0\.weight'"):
        require_same(run_of(mine), adapted(2.0))


def test_names_orders_dtypes_and_numbers_of_tensors_are_compared() -> None:
    mine = Tensors({"a": torch.zeros(2), "b": torch.zeros(3)})
    for other, words in (
        ({"a": torch.zeros(2), "c": torch.zeros(3)}, "tensor 1 of the run is 'b' (float32, 3); here it is 'c'"),
        ({"b": torch.zeros(3), "a": torch.zeros(2)}, "tensor 0 of the run is 'a'"),
        ({"a": torch.zeros(2), "b": torch.zeros(3).half()}, "here it is 'b' (float16, 3)"),
        ({"a": torch.zeros(2)}, "the run has 2 trained tensors, the model here 1: 'b' (float32, 3) is in the run only"),
    ):
        with pytest.raises(GenesisMismatch) as caught:
            require_same(run_of(mine), Tensors(other))
        assert words in str(caught.value)


def test_a_compiled_model_is_the_same_model() -> None:
    model = nn.Sequential(nn.Linear(2, 1))
    compiled = nn.Sequential()
    compiled.add_module("_orig_mod", model)  # as torch.compile wraps it, which takes seconds
    require_same(run_of(Tensors(model)), Tensors(compiled))


@pytest.mark.parametrize(
    "tensor",
    [torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.complex64), torch.zeros(2, device="meta")],
    ids=["integer", "complex", "meta"],
)
def test_what_cannot_be_trained_is_refused_by_name(tensor: torch.Tensor) -> None:
    with pytest.raises(ConfigError, match="'odd'"):
        Tensors({"odd": tensor})


def test_a_model_with_nothing_to_train_is_refused() -> None:
    with pytest.raises(ConfigError, match="no tensor to train"):
        Tensors(nn.Linear(2, 2).requires_grad_(False))
