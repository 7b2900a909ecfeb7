"""Somebody's model as tensors by name, and as one flat vector: what is trained, in order, fp32 on the CPU.

    module     parameters that require gradients are trained; others are frozen
    mapping    all its tensors are trained
    vector     | tensor 0 | tensor 1 | ... |    read() gathers it, write() scatters it; the tensors stay where they are

Two names of the same memory are one tensor, under the first of them, whether they are one object or two, as in
`model.state_dict()`. Tensors that share their memory in part are refused: writing one would change the other. Buffers
of a module are in no vector: they stay each member's own.

A dtype narrower than fp32 holds a rounded value; what rounding left is kept beside it, so that `read` right after
`write` returns the same bits, and a difference of two reads is what training did.
"""

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float32
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from weft.errors import ConfigError, GenesisMismatch
from weft.ids import Digest
from weft.run.config import MAX_DIMS, MAX_TENSOR_NAME, MAX_TENSORS, FrozenConfig, LoopConfig, TensorConfig
from weft.wire import digest, printable

Named = dict[str, Tensor]

_COMPILED = "_orig_mod."  # what torch.compile puts into names: a member may compile, and another not


def sorted_out(model: nn.Module | Mapping[str, Tensor]) -> tuple[Named, Named]:
    """Return what is trained and what is frozen, each tensor once, under its first name.

    Raises:
        ConfigError: it is no model, or a tensor in it none that members could keep alike.
    """
    if isinstance(model, nn.Module):
        named = _named(model.named_parameters())
        trained = _once({name: tensor for name, tensor in named.items() if tensor.requires_grad})
        shared = {_memory(tensor) for tensor in trained.values()}
        frozen = _once({name: each for name, each in named.items() if not each.requires_grad})
        frozen = {name: tensor for name, tensor in frozen.items() if _memory(tensor) not in shared}
    elif isinstance(model, Mapping):
        trained, frozen = _once(_named(model.items())), {}
    else:
        raise ConfigError(
            f"the model is a {type(model).__name__}. Allowed: a torch.nn.Module, or tensors by name, such "
            "as dict(model.named_parameters())."
        )
    for kind, tensors in (("trained", trained), ("frozen", frozen)):
        if len(tensors) > MAX_TENSORS:
            raise ConfigError(f"the model has {len(tensors)} {kind} tensors. Allowed: {MAX_TENSORS} at most.")
    _require_apart(trained, frozen)
    return trained, frozen


def _named(pairs: Iterable[tuple[Any, Any]]) -> Named:
    named: Named = {}
    for name, tensor in pairs:
        _require_name(name)
        _require_values(name, tensor)
        plain = name.replace(_COMPILED, "")
        if plain in named:
            raise ConfigError(
                f"two tensors of the model are named {plain!r} once {_COMPILED!r}, which torch.compile adds, is left "
                "out. Rename one of them."
            )
        named[plain] = tensor
    return named


def _require_name(name: Any) -> None:
    if not isinstance(name, str):
        raise ConfigError(f"a tensor's name is {name!r:.80}, of type {type(name).__name__}. Allowed: a str.")
    if not 0 < len(name) <= MAX_TENSOR_NAME:
        raise ConfigError(
            f"a tensor's name has {len(name)} characters: {name[:40]!r}. Allowed: 1 to {MAX_TENSOR_NAME}. Give "
            "weft.Sync the tensors by shorter names, as a mapping."
        )


def _require_values(name: str, tensor: Any) -> None:
    if not isinstance(tensor, Tensor):
        raise ConfigError(f"{name!r} in the model is a {type(tensor).__name__}. Allowed: a torch.Tensor.")
    what = None
    if is_lazy(tensor):
        what = "has no shape yet: it is lazy. Run the model once before weft.Sync."
    elif any(kind.__name__ == "DTensor" for kind in type(tensor).__mro__):  # by name: its module is slow to load
        what = "is a DTensor, cut over several processes (FSDP, tensor parallelism). Give weft.Sync whole tensors."
    elif tensor.is_meta:
        what = "has no values yet. Load the model before weft.Sync."
    elif tensor.layout != torch.strided:
        what = f"is laid out as {tensor.layout}: members can share only dense tensors. Make it dense."
    elif tensor.dim() > MAX_DIMS:
        what = f"has {tensor.dim()} dimensions. Allowed: {MAX_DIMS} at most."
    if what is not None:
        raise ConfigError(f"tensor {name!r} {what}")


# --- memory ---


def _once(named: Named) -> Named:
    first: dict[Hashable, str] = {}
    for name, tensor in named.items():
        first.setdefault(_memory(tensor), name)
    return {name: tensor for name, tensor in named.items() if first[_memory(tensor)] == name}


def _memory(tensor: Tensor) -> Hashable:
    """Return what is equal for two tensors that are the same numbers in the same memory."""
    if (begin := _begin(tensor)) == 0:
        return id(tensor)
    return tensor.device, begin, tensor.dtype, tuple(tensor.shape), tuple(tensor.stride())


def _require_apart(trained: Named, frozen: Named) -> None:
    """Refuse a trained tensor whose memory is in part another's, or its own once more."""
    for name, tensor in trained.items():
        if _span(tensor) < tensor.numel():
            raise ConfigError(f"tensor {name!r} holds some numbers more than once, as after expand. Give its clone.")
    for cluster in _clusters({**trained, **frozen}):
        begin = min(map(_begin, cluster.values()))
        end = max(map(_end, cluster.values()))
        size = min(tensor.itemsize for tensor in cluster.values())
        owners = torch.zeros(-(-(end - begin) // size), dtype=torch.int32)  # of each number: who writes it, from 1
        names = sorted(cluster, key=lambda name: name in frozen)
        for place, name in enumerate(names, 1):
            tensor, start = cluster[name], _begin(cluster[name]) - begin
            if tensor.itemsize != size or start % size:
                raise ConfigError(_overlap(name, next(other for other in names if other != name)))
            mine = owners.as_strided(tensor.shape, tensor.stride(), start // size)
            if (other := int(mine.max())) > 0:
                raise ConfigError(_overlap(names[other - 1], name))
            if name in trained:
                mine.fill_(place)


def _clusters(named: Named) -> Iterator[Named]:
    """Yield tensors that lie between one another in memory, two or more at a time: most models have none."""
    inorder = sorted((str(tensor.device), begin, name) for name, tensor in named.items() if (begin := _begin(tensor)))
    cluster: Named = {}
    for _, begin, name in inorder:
        tensor = named[name]
        if not any(each.device == tensor.device and begin < _end(each) for each in cluster.values()):
            if len(cluster) > 1:
                yield cluster
            cluster = {}
        cluster[name] = tensor
    if len(cluster) > 1:
        yield cluster


def _begin(tensor: Tensor) -> int:
    """Return where in memory it begins; 0: in none that could be looked at."""
    try:
        return tensor.data_ptr() if tensor.numel() else 0
    except RuntimeError:  # some subclasses are made of several tensors
        return 0


def _span(tensor: Tensor) -> int:
    """Return how many numbers lie from the first to the last in memory."""
    if tensor.numel() == 0:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))


def _end(tensor: Tensor) -> int:
    return _begin(tensor) + _span(tensor) * tensor.itemsize


def _overlap(one: str, other: str) -> str:
    return (
        f"tensors {one!r} and {other!r} share part of their memory: writing one would change the other. Give weft.Sync "
        "one of them, or the tensor that both are of."
    )


_DTYPES = {torch.float64: "float64", torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


class Tensors:
    """
    Args:
        model: a module, or tensors by name, of any device and float dtype. In a mapping, in the order of the vector.

    Raises:
        ConfigError: nothing in it is trained, or a tensor cannot be: complex, an integer, sparse, or without values; or
            two share part of their memory, or a name.
    """

    def __init__(self, model: nn.Module | Mapping[str, Tensor]) -> None:
        trained, frozen = sorted_out(model)
        if not any(tensor.numel() for tensor in trained.values()):
            raise ConfigError(
                "the model has no tensor to train: every parameter has requires_grad = False, or there is none."
            )
        self._tensors = tuple(trained.values())
        self.configs = tuple(_config(name, tensor) for name, tensor in trained.items())
        self.frozen = tuple(_frozen(name, tensor) for name, tensor in frozen.items())
        self.num = sum(tensor.numel() for tensor in self._tensors)
        self._model = model if isinstance(model, nn.Module) else None
        self._known = {id(each): each for _, each in self._trained_now()}  # kept, so that no other has the id
        self._left: dict[int, Tensor] = {}  # by place: what a narrow dtype could not hold when it was written

    @torch.no_grad()
    def read(self) -> Float32[Tensor, " num"]:
        """Return the vector, in new memory."""
        self._wait()
        vector = torch.empty(self.num)
        for place, (tensor, here) in enumerate(self._pairs()):
            part = vector[here].view(tensor.shape)
            part.copy_(tensor)
            if place in self._left:
                part.add_(self._left[place])
        return vector

    @torch.no_grad()
    def write(self, vector: Float32[Tensor, " num"]) -> None:
        """Set every tensor from the vector."""
        for place, (tensor, here) in enumerate(self._pairs()):
            part = vector[here].view(tensor.shape)
            tensor.copy_(part)
            if tensor.itemsize < vector.itemsize:
                self._left[place] = part - tensor.to("cpu", torch.float32)
        self._wait()

    def require_unchanged(self) -> None:
        """Refuse a module in which other parameters are trained by now than those that were when this was made.

        Raises:
            ConfigError: names one.
        """
        if self._model is None:
            return  # what became of a mapping's tensors elsewhere, nobody can see
        for name, tensor in self._trained_now():
            if id(tensor) not in self._known:
                raise ConfigError(
                    f"parameter {name!r} is trained now, but was not in the model, or was frozen, when weft.Sync was "
                    "made. Members share only what was trained then. Unfreeze, add and load with assign=True before "
                    "that; with these tensors it is another run."
                )
        for config, tensor in zip(self.configs, self._tensors, strict=True):
            if config != (now := _config(config.name, tensor)):
                raise ConfigError(f"{_described(config)} has become {_described(now)} since weft.Sync was made.")

    def _trained_now(self) -> Iterator[tuple[str, Tensor]]:
        named = () if self._model is None else self._model.named_parameters()
        return ((name, tensor) for name, tensor in named if tensor.requires_grad)

    def _pairs(self) -> Iterator[tuple[Tensor, slice]]:
        start = 0
        for tensor in self._tensors:
            yield tensor, slice(start, start + tensor.numel())
            start += tensor.numel()

    def _wait(self) -> None:
        """Let what a GPU was told, on whatever stream, be done."""
        for device in {tensor.device for tensor in self._tensors if tensor.is_cuda}:
            torch.cuda.synchronize(device)


def require_same(run: LoopConfig, mine: Tensors) -> None:
    """Refuse a model that is not the run's.

    Raises:
        GenesisMismatch: names the first tensor that differs, and how.
    """
    _require_same("trained", run.tensors, mine.configs)
    _require_same("frozen", run.frozen, mine.frozen)


Configs = Sequence[TensorConfig] | Sequence[FrozenConfig]


def _require_same(kind: str, theirs: Configs, mine: Configs) -> None:
    for number in range(min(len(theirs), len(mine))):
        one, other = theirs[number], mine[number]
        if one != other:
            raise GenesisMismatch(
                f"{kind} tensor {number} of the run is {_described(one)}; here it is {_described(other)}. Build the "
                f"model as the run's maker did."
            )
    if len(theirs) != len(mine):
        longer, where = (theirs, "the run") if len(theirs) > len(mine) else (mine, "the model here")
        first = longer[min(len(theirs), len(mine))]
        raise GenesisMismatch(
            f"the run has {len(theirs)} {kind} tensors, the model here {len(mine)}: {_described(first)} is in {where} "
            f"only. Build the model as the run's maker did."
        )


def _described(config: TensorConfig | FrozenConfig) -> str:
    shape = " x ".join(map(str, config.shape)) or "one number"
    values = f", values {config.digest[:8]}" if isinstance(config, FrozenConfig) else ""
    return f"{printable(config.name)!r} ({config.dtype}, {shape}{values})"


def _config(name: str, tensor: Tensor) -> TensorConfig:
    if tensor.dtype not in _DTYPES:
        allowed = ", ".join(_DTYPES.values())
        raise ConfigError(f"tensor {name!r} has dtype {_name(tensor)}, which is not trained. Allowed: {allowed}.")
    return TensorConfig(name=name, dtype=_DTYPES[tensor.dtype], shape=tuple(tensor.shape))  # type: ignore[arg-type]


def _frozen(name: str, tensor: Tensor) -> FrozenConfig:
    values = tensor.detach().to("cpu").reshape(-1).contiguous().view(torch.uint8)
    return FrozenConfig(
        name=name, dtype=_name(tensor), shape=tuple(tensor.shape), digest=Digest(digest(values.numpy().data))
    )


def _name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
