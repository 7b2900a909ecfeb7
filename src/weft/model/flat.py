"""One vector holds the whole model: parameters and gradients are views into two flat fp32 vectors.

Codecs, merges, outer steps and checkpoints work on the vectors and know no tensor names; the module computes with the
views. A `Layout` says which part of the vector is which tensor. It is a function of the config alone, so equal configs
mean equal vectors on all peers. Tensors that weight decay applies to (matrices) come first, then the rest (norms,
biases), each in the order of the forward pass: one optimizer group is one range.

    vector    embed | layer 0 qkv out gate_up down | layer 1 ... | head || norms and biases
              <------------------ decayed ----------------------------->||<-- not decayed ->

A section of a model has a vector of its own, laid out alike: what of the whole's it has, in the same order. Of a model
with an adapter the vector holds the adapter, and the base, a vector of the plain model, is written by nobody. Of one
whose ends are a space's it holds the layers, and the base holds the ends (`base_layout`).
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from math import prod

import torch
from jaxtyping import Float
from msgspec import UNSET
from torch import Tensor, nn

from weft.errors import ConfigError
from weft.model.adapter import adapted, with_held
from weft.model.config import AdapterConfig, ModelConfig, has_base, plain
from weft.model.held import Matrix, Numbers, held, matrix_nbytes
from weft.model.sections import Section, whole
from weft.model.transformer import SectionModule, Transformer


@dataclass(frozen=True)
class Span:
    """The place of one tensor in the flat vector."""

    name: str
    shape: tuple[int, ...]
    offset: int
    has_decay: bool

    @property
    def num(self) -> int:
        return prod(self.shape)

    @property
    def stop(self) -> int:
        return self.offset + self.num


@dataclass(frozen=True)
class Layout:
    """The tensors of a model in the order of the flat vector, without gaps."""

    spans: tuple[Span, ...]
    num_parameters: int
    num_decayed: int
    """Parameters 0..num_decayed take weight decay, the rest does not."""

    def __iter__(self) -> Iterator[Span]:
        return iter(self.spans)

    def view(self, vector: Tensor, span: Span) -> Tensor:
        """Return the tensor at `span` as a view into `vector`."""
        return vector[span.offset : span.stop].view(span.shape)


def layout(config: ModelConfig, section: Section | None = None) -> Layout:
    """Return where each tensor of the model, or of a section, lies. Equal on all peers: it depends on nothing else."""
    return _laid_out(_shapes(config, section or whole(config)))


def base_layout(config: ModelConfig, section: Section | None = None) -> Layout:
    """Return where each tensor lies in the vector of what is frozen: what an adapter goes beside, or a space's ends."""
    shapes = _shapes(plain(config), section or whole(config))
    return _laid_out(each for each in shapes if not (config.has_frozen_ends and _is_of_layer(each[0])))


def _laid_out(given: Iterable[tuple[str, tuple[int, ...]]]) -> Layout:
    shapes = list(given)
    spans: list[Span] = []
    offset = 0
    for has_decay in (True, False):
        for name, shape in shapes:
            if (len(shape) == 2) == has_decay:
                spans.append(Span(name, shape, offset, has_decay))
                offset += prod(shape)
    return Layout(tuple(spans), offset, sum(span.num for span in spans if span.has_decay))


def layer_matrices(config: ModelConfig, section: Section | None = None) -> tuple[Span, ...]:
    """Return the matrices of the layers, of a model or a section; apart those that one tensor stacks."""
    stacked = {
        "qkv": (config.q_width, config.kv_width, config.kv_width),
        "gate_up": (config.ffn_width, config.ffn_width),
    }
    found = []
    for span in layout(config, section):
        if span.name.startswith("layers.") and span.has_decay:
            offset, (height, width) = span.offset, span.shape
            for rows in stacked.get(span.name.split(".")[-2], (height,)):
                found.append(Span(span.name, (rows, width), offset, has_decay=True))
                offset += rows * width
    return tuple(found)


def _shapes(config: ModelConfig, section: Section) -> Iterator[tuple[str, tuple[int, ...]]]:
    if config.adapter is not UNSET:
        for matrix in (each for layer in section.layers for each in adapted(config, layer)):
            yield f"{matrix.path}.a", (config.adapter.rank, matrix.num_in)
            yield f"{matrix.path}.b", (len(matrix.rows), config.adapter.rank)
        return
    if config.has_frozen_ends:
        yield from (each for each in _shapes(plain(config), section) if _is_of_layer(each[0]))
        return
    qkv_width = config.q_width + 2 * config.kv_width
    if section.has_table:
        yield "embed.weight", (config.vocab_size, config.width)
    for i in section.layers:
        yield f"layers.{i}.attention_norm.weight", (config.width,)
        yield f"layers.{i}.attention.qkv.weight", (qkv_width, config.width)
        if config.has_qkv_bias:
            yield f"layers.{i}.attention.qkv.bias", (qkv_width,)
        if config.has_qk_norm:
            yield f"layers.{i}.attention.q_norm.weight", (config.channels_per_head,)
            yield f"layers.{i}.attention.k_norm.weight", (config.channels_per_head,)
        yield f"layers.{i}.attention.out.weight", (config.width, config.q_width)
        if config.has_out_bias:
            yield f"layers.{i}.attention.out.bias", (config.width,)
        yield f"layers.{i}.ffn_norm.weight", (config.width,)
        yield f"layers.{i}.ffn.gate_up.weight", (2 * config.ffn_width, config.width)
        yield f"layers.{i}.ffn.down.weight", (config.width, config.ffn_width)
    if section.is_last:
        yield "norm.weight", (config.width,)
        if not config.is_tied:
            yield "head.weight", (config.vocab_size, config.width)


def _is_of_layer(name: str) -> bool:
    return name.startswith("layers.")


class FlatModel:
    """A module whose parameters are views into `vector` and whose gradients are views into `gradient`.

    Writing the vector changes the model, and the backward pass adds into the gradient. Clear it with
    `zero_gradient`, never with `optimizer.zero_grad()` or by setting `p.grad`, which would cut the views off.
    """

    def __init__(self, module: SectionModule, vector: Tensor, gradient: Tensor) -> None:
        self.module = module
        self.layout = layout_of(module)
        self.vector = vector
        self.gradient = gradient
        self.table: FlatModel | None = None  # of a section whose tied matrix lies apart: that

    def use(self, table: "FlatModel") -> None:
        """Compute with a tied matrix that lies apart, and add its gradient to that one's."""
        self.table = table
        self.module.embed = table.module.embed

    @property
    def config(self) -> ModelConfig:
        return self.module.config

    @property
    def section(self) -> Section:
        return self.module.section

    @property
    def num_written(self) -> int:
        """How often parameters have been written, in one place or in all at once."""
        return self.vector._version + (0 if self.table is None else self.table.vector._version)

    def gradient_of(self, weight: Tensor) -> Tensor:
        """Return where the gradient of a parameter, or of rows of one, is added up."""
        for model in (self, self.table):
            start = (weight.data_ptr() - model.vector.data_ptr()) // weight.element_size() if model is not None else -1
            if model is not None and 0 <= start < model.vector.numel():
                return model.gradient[start : start + weight.numel()].view(weight.shape)
        raise AssertionError("only parameters have gradients here")

    def zero_gradient(self) -> None:
        self.gradient.zero_()


def flatten(model: SectionModule, device: torch.device | str) -> FlatModel:
    """Move `model` into two flat fp32 vectors on `device` and return them with it.

    Args:
        model: built as usual, whose values are kept; or under `torch.device("meta")`, whose values start as zero.
            Nothing is ever allocated twice for a model on meta.
        device: where vector and gradient shall lie.
    """
    assert not has_base(model.config), "what is trained and what is frozen each have a vector of their own"
    vector = torch.zeros(layout_of(model).num_parameters, dtype=torch.float32, device=device)
    if not any(parameter.is_meta for parameter in model.parameters()):
        with torch.no_grad():
            for span, parameter in _pairs(model):
                vector[span.offset : span.stop].copy_(parameter.flatten())
    return over(model, vector)


@dataclass(frozen=True)
class Held:
    """A base in fewer bytes: the matrices of its layers, and all else in fp32, by name."""

    matrices: dict[str, Matrix]
    others: dict[str, Tensor]

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in self.matrices.values()) + sum(each.nbytes for each in self.others.values())


Base = Float[Tensor, " all"] | Held


def hold(
    config: ModelConfig, vector: Float[Tensor, " all"], section: Section | None, numbers: Numbers, device: torch.device
) -> Base:
    """Return what of a model is frozen, on a device.

    Args:
        vector: of that, or of what a section has of it, on the CPU.
    """
    if numbers == "fp32":
        return vector.to(device)
    spans, matrices, others = base_layout(config, section), dict[str, Matrix](), dict[str, Tensor]()
    for span in spans:
        weight = spans.view(vector, span).to(device)
        if _is_held(span):
            matrices[span.name] = held(weight, numbers)
        else:
            others[span.name] = weight.clone()
    return Held(matrices, others)


def held_nbytes(config: ModelConfig, section: Section | None, numbers: Numbers) -> int:
    """Return the bytes that `hold` takes, in closed form."""
    spans = base_layout(config, section)
    return sum(matrix_nbytes(span.shape, numbers if _is_held(span) else "fp32") for span in spans)


def _is_held(span: Span) -> bool:
    return _is_of_layer(span.name) and span.has_decay


def over(model: SectionModule, vector: Float[Tensor, " num"], base: Base | None = None) -> FlatModel:
    """Make every parameter of `model` a view into `vector`, and return both with a gradient of zeros.

    Args:
        base: as of `attach`.

    Raises:
        ConfigError: the vector is not as long as the model.
    """
    attach(model, vector, base)
    gradient = torch.zeros_like(vector)
    for span, parameter in _pairs(model):
        parameter.grad = gradient[span.offset : span.stop].view(span.shape)
    return FlatModel(model, vector, gradient)


def attach(model: SectionModule, vector: Float[Tensor, " num"], base: Base | None = None) -> None:
    """Make every parameter of `model` a view into `vector` (any float dtype), on the vector's device.

    Args:
        base: of a model of which a part is frozen: the vector of that, into which the rest of it becomes views; or
            what `hold` has made of it.

    Raises:
        ConfigError: a vector is not as long as the model.
    """
    _view(model, layout_of(model), vector)
    if has_base(model.config):
        assert base is not None, "what is trained is nothing without what is frozen"
        if isinstance(base, Held):
            _take(model, base, model.config.adapter or AdapterConfig())
        else:
            _view(model, base_layout(model.config, model.section), base)
    model.angle_bits = model.angle_bits.to(vector.device)


def _take(model: SectionModule, base: Held, adapter: AdapterConfig) -> None:
    for name, weight in base.others.items():
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, nn.Parameter(weight, requires_grad=False))
    for name, matrix in base.matrices.items():
        with_held(model, name.removesuffix(".weight"), matrix, adapter)


def _view(model: SectionModule, spans: Layout, vector: Tensor) -> None:
    if vector.numel() != spans.num_parameters:
        raise ConfigError(
            f"the model has {spans.num_parameters:,} parameters, the vector {vector.numel():,} numbers. They belong to "
            "different configs."
        )
    parameters = dict(model.named_parameters())
    for span in spans:
        requires_grad = parameters[span.name].requires_grad
        view = nn.Parameter(vector[span.offset : span.stop].view(span.shape), requires_grad=requires_grad)
        owner, _, leaf = span.name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, view)


LayoutOf = Callable[[ModelConfig, Section | None], Layout]


def assemble(config: ModelConfig, vector: Float[Tensor, " num"], base: Base | None = None) -> Transformer:
    """Return a model over `vector` for inference: no gradients, no second copy.

    Args:
        base: as of `attach`.

    Raises:
        ConfigError: the vector is not as long as the model.
    """
    with torch.device("meta"):
        model = Transformer(config)
    attach(model, vector, base)
    return model.requires_grad_(False).eval()


def plain_vector(
    config: ModelConfig, base: Float[Tensor, " ends"], vector: Float[Tensor, " num"]
) -> Float[Tensor, " all"]:
    """Return the vector of the plain model, of the layers and the ends of a space."""
    assert config.has_frozen_ends is True
    whole_of = layout(plain(config))
    parts = {span.name: (span, vector) for span in layout(config)}
    parts |= {span.name: (span, base) for span in base_layout(config)}
    found = vector.new_empty(whole_of.num_parameters)
    for span in whole_of:
        source, of = parts[span.name]
        found[span.offset : span.stop] = of[source.offset : source.stop]
    return found


def layers_within(config: ModelConfig, whole: Float[Tensor, " all"]) -> Float[Tensor, " num"]:
    """Return the layers of a plain model's vector: what a model between the ends of a space trains. A copy.

    Args:
        config: of the model between the ends.
    """
    assert config.has_frozen_ends is True
    return _picked(plain(config), whole, layout(config))


def ends_within(config: ModelConfig, whole: Float[Tensor, " all"]) -> Float[Tensor, " ends"]:
    """Return the ends of a plain model's vector: what of it a space has. A copy.

    Args:
        config: as of `layers_within`.
    """
    assert config.has_frozen_ends is True
    return _picked(plain(config), whole, base_layout(config))


def _picked(config: ModelConfig, whole: Float[Tensor, " all"], wanted: Layout) -> Float[Tensor, " part"]:
    at = {span.name: span for span in layout(config)}
    return torch.cat([whole[at[span.name].offset : at[span.name].stop] for span in wanted])


def layout_of(model: SectionModule) -> Layout:
    return layout(model.config, model.section)


def cut(
    config: ModelConfig, vector: Float[Tensor, " num"], section: Section, of: LayoutOf = layout
) -> Float[Tensor, " part"]:
    """Return a section's vector, a copy of what it has of the whole's.

    Args:
        of: `layout`, or `base_layout` for what is frozen.
    """
    at = {span.name: span for span in of(config, None)}
    there = of(config, section)
    part = vector.new_empty(there.num_parameters)
    for span in there:
        part[span.offset : span.stop] = vector[at[span.name].offset : at[span.name].stop]
    return part


def paste(
    config: ModelConfig,
    vector: Float[Tensor, " num"],
    section: Section,
    part: Float[Tensor, " part"],
    of: LayoutOf = layout,
) -> None:
    """Put a section's vector into the whole's; `of` as in `cut`."""
    at = {span.name: span for span in of(config, None)}
    for span in of(config, section):
        vector[at[span.name].offset : at[span.name].stop] = part[span.offset : span.stop]


def _pairs(model: SectionModule) -> Iterator[tuple[Span, nn.Parameter]]:
    parameters = dict(model.named_parameters())
    for span in layout_of(model):
        yield span, parameters[span.name]
