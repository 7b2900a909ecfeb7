"""A model's tensors as one vector: what is in it, and that nothing is lost on the way."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import distributed, nn

from weft import wire
from weft.errors import ConfigError, GenesisMismatch
from weft.launch.loop import _sealed
from weft.library.tensors import Tensors, require_same
from weft.run.config import LoopConfig, SyncConfig


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


def test_tensors_of_the_same_memory_are_one_however_many_objects_they_are() -> None:
    model = Tied()
    names = ["embed.weight", "norm.weight", "norm.bias", "norm.running_mean", "norm.running_var"]
    floats = {name: tensor for name, tensor in model.state_dict().items() if tensor.is_floating_point()}
    assert [each.name for each in Tensors(floats).configs] == names
    model.head.weight = nn.Parameter(model.embed.weight.data)
    assert [each.name for each in Tensors(model).configs] == names[:3]
    model.head.weight = nn.Parameter(model.embed.weight.data, requires_grad=False)
    assert Tensors(model).frozen == ()  # it is trained, whatever this name of it says


BASE = torch.zeros(6)


@pytest.mark.parametrize(
    "views",
    [
        {"a": BASE[:3], "b": BASE[2:]},
        {"a": BASE, "c": torch.zeros(2), "b": BASE[1:2]},
        {"a": BASE[::2], "b": BASE[2:]},
        {"a": BASE[:4], "b": BASE[2:].view(torch.bfloat16)},
        {"a": BASE.view(2, 3), "b": BASE.view(2, 3).T},
    ],
)
def test_tensors_that_share_part_of_their_memory_are_refused(views: dict[str, torch.Tensor]) -> None:
    with pytest.raises(ConfigError, match=r"tensors '[ab]' and '[ab]' share part of their memory"):
        Tensors(views)


def test_tensors_that_lie_between_one_another_and_share_nothing_are_taken() -> None:
    base = torch.zeros(6)
    tensors = Tensors({"even": base[::2], "odd": base[1::2], "empty": base[:0]})
    tensors.write(torch.arange(6.0))
    assert base.tolist() == [0, 3, 1, 4, 2, 5]
    parts = torch.zeros(2, 4)
    assert Tensors({"left": parts[:, :1], "right": parts[:, 1:]}).num == 8


def test_a_tensor_that_has_numbers_more_than_once_is_refused() -> None:
    with pytest.raises(ConfigError, match="tensor 'wide' holds some numbers more than once"):
        Tensors({"wide": torch.zeros(1).expand(4)})


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
    [
        torch.zeros(2, dtype=torch.int64),
        torch.zeros(2, dtype=torch.complex64),
        torch.zeros(2, device="meta"),
        torch.zeros(2).to_sparse(),
        torch.zeros([1] * 17),
        nn.LazyLinear(2).weight,
        None,
        [1.0],
    ],
    ids=["integer", "complex", "meta", "sparse", "deep", "lazy", "none", "list"],
)
def test_what_cannot_be_trained_is_refused_by_name(tensor: torch.Tensor) -> None:
    with pytest.raises(ConfigError, match="'odd'"):
        Tensors({"odd": tensor})


def test_a_model_with_nothing_to_train_is_refused() -> None:
    with pytest.raises(ConfigError, match="no tensor to train"):
        Tensors(nn.Linear(2, 2).requires_grad_(False))


@pytest.mark.parametrize("name", ["a" * 201, "", 7])
def test_a_name_that_no_run_could_have_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="a tensor's name"):
        Tensors({name: torch.zeros(2)})


@pytest.mark.parametrize("model", [[torch.zeros(2)], torch.zeros(2), None])
def test_what_is_no_model_is_refused(model: nn.Module) -> None:
    with pytest.raises(ConfigError, match=r"the model is a \w+\. Allowed: a torch\.nn\.Module, or tensors by name"):
        Tensors(model)


def test_names_that_meet_without_what_compiling_adds_are_refused() -> None:
    model = nn.Module()
    model._orig_mod = nn.Linear(2, 1)
    model.weight = nn.Parameter(torch.zeros(3))
    with pytest.raises(ConfigError, match="two tensors of the model are named 'weight'"):
        Tensors(model)


def test_a_tensor_that_is_cut_over_processes_is_refused_even_where_there_is_one(tmp_path: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    distributed.init_process_group("gloo", init_method=(tmp_path / "meet").as_uri(), rank=0, world_size=1)
    try:
        whole = distribute_tensor(torch.zeros(4), init_device_mesh("cpu", (1,)))
        with pytest.raises(ConfigError, match="tensor 'cut' is a DTensor"):
            Tensors({"cut": whole})
    finally:
        distributed.destroy_process_group()


def changed_by(change: Callable[[nn.Module], object]) -> Tensors:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    model[0].requires_grad_(False)
    tensors = Tensors(model)
    tensors.require_unchanged()
    change(model)
    return tensors


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda model: model[0].requires_grad_(True), "parameter '0.weight' is trained now, but was not"),
        (lambda model: model.append(nn.Linear(1, 1)), "parameter '2.weight' is trained now, but was not"),
        (
            lambda model: model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True),
            "parameter '1.weight' is trained now, but was not",
        ),
        (lambda model: model.half(), "'1.weight' .float32, 1 x 2. has become '1.weight' .float16"),
    ],
    ids=["unfrozen", "added", "assigned", "another dtype"],
)
def test_a_model_of_which_other_parameters_are_trained_later_is_refused(
    change: Callable[[nn.Module], object], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        changed_by(change).require_unchanged()


def test_a_parameter_may_be_frozen_for_a_while() -> None:
    changed_by(lambda model: model[1].requires_grad_(False)).require_unchanged()  # as loops of two networks do
