"""The tensors of somebody's model as one flat vector: what is trained, in order, fp32 on the CPU.

    vector   | tensor 0 | tensor 1 | ... |      read() gathers it, write() scatters it; the tensors stay where they are

Which are in it, `model` says. Buffers of a module are not: they stay each member's own. A dtype narrower than fp32
holds a rounded value; what rounding left is kept beside it, so that `read` right after `write` returns the same bits,
and a difference of two reads is what training did.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch
from jaxtyping import Float32
from torch import Tensor, nn

from weft.errors import ConfigError, GenesisMismatch
from weft.ids import Digest
from weft.library.model import sorted_out
from weft.run.config import FrozenConfig, LoopConfig, TensorConfig
from weft.wire import digest, printable

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
                    f"parameter {name!r} is trained, and was not in the model, or was frozen, when weft.Sync was made, "
                    "which is when it is settled what members share. Unfreeze, add and load with assign=True before "
                    "that; what is trained from here on is another run."
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
