"""A flat vector that lies on the ranks of a site, as rank 0 sees it: a tensor, on no device.

    v - w, v.lerp(w, t), v.add_(w, alpha=a) ──► an order: each rank computes on its strip ──► a vector like it

torch asks the class of a tensor what an operation does (`__torch_dispatch__`), so what computes with vectors need not
know where they lie. Operations that are no plain arithmetic are refused. A plain vector that meets a spread one is
spread first.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch
from jaxtyping import Float32
from torch import Tensor
from torch._ops import OpOverload

from weft.codec.pieces import ranges
from weft.ids import Digest
from weft.ranks.orders import Compute, Digests, Fresh, OuterStep, Read, SquareSums, Write
from weft.ranks.site import Number, Site
from weft.ranks.worker import OPERATIONS
from weft.sync.merge.outer import State, StepContext, root_of, shortening
from weft.sync.merge.sharded import Readable, SpreadVector
from weft.sync.method import choices

V = TypeVar("V", bound=Readable)


def _nowhere(cls: type[V], site: Site) -> V:
    """Return a tensor of a class of ours, which holds nothing."""
    made: V = Tensor._make_wrapper_subclass(cls, (site.num,), dtype=torch.float32, device=torch.device("meta"))
    return made


class SiteVector(SpreadVector):
    site: Site
    held: Number

    @staticmethod
    def __new__(cls, site: Site, held: Number) -> "SiteVector":
        vector = _nowhere(cls, site)
        vector.site, vector.held = site, held
        return vector

    @property
    def number(self) -> int:
        return self.held.number

    def like(self, vector: Float32[Tensor, " num"]) -> "SiteVector":
        return spread(self.site, vector)

    def read(self, where: range, into: Float32[Tensor, " piece"] | None = None) -> Float32[Tensor, " piece"]:
        piece = torch.empty(len(where)) if into is None else into
        self.site.order(Read(vector=self.number, start=where.start, stop=where.stop), piece)
        return piece

    def write(self, where: range, piece: Float32[Tensor, " piece"]) -> None:
        self.site.order(Write(vector=self.number, start=where.start, stop=where.stop), piece)

    def room(self, nbytes: int) -> memoryview:
        return self.site.pool.block(nbytes)

    def chunk_digests(self) -> tuple[Digest, ...]:
        return tuple(cast(list[Digest], self.site.order(Digests(vector=self.number))))

    def step(self, config: choices.OuterConfig, state: State, merged: Tensor, context: StepContext) -> None:
        assert isinstance(merged, SiteVector)
        shorten = 1.0
        if context.max_norm is not None:
            sums = cast(list[float], self.site.order(SquareSums(vector=merged.number)))
            shorten = shortening(root_of(sums), context.max_norm)
        self.site.order(
            OuterStep(
                by=config
                if isinstance(config, choices.SgdConfig | choices.NesterovConfig | choices.DelayedNesterovConfig)
                else None,
                by_inner=config if isinstance(config, choices.AdamWConfig | choices.InnerSgdConfig) else None,
                outer=self.number,
                state={name: cast(SiteVector, vector).number for name, vector in state.items()},
                merged=merged.number,
                shorten=shorten,
                number=context.number,
                round=context.round,
                lr=context.lr,
                num_decayed=context.num_decayed,
            )
        )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's own stub has another
        cls, func: OpOverload, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return _dispatch(str(func.overloadpacket.__name__), args, dict(kwargs or {}))


class Moment(Readable):
    """A vector of the inner optimizer, as the ranks hold it: to be read, as long as nothing changes it."""

    reader: Callable[[range], Tensor]

    @staticmethod
    def __new__(cls, site: Site, reader: Callable[[range], Tensor]) -> "Moment":
        vector = _nowhere(cls, site)
        vector.reader = reader
        return vector

    def read(self, where: range, into: Float32[Tensor, " piece"] | None = None) -> Float32[Tensor, " piece"]:
        assert into is None
        return self.reader(where)


def spread(site: Site, vector: Float32[Tensor, " num"]) -> SiteVector:
    """Return a copy of `vector` on the ranks of `site`."""
    copy = _zeros(site)
    for here in ranges(site.num):
        copy.write(here, vector[here.start : here.stop].contiguous())
    return copy


def _zeros(site: Site) -> SiteVector:
    held = site.number()
    site.order(Fresh(vector=held.number))
    return SiteVector(site, held)


def _dispatch(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    first = next(each for each in (*args, *kwargs.values()) if isinstance(each, SiteVector))
    site = first.site
    if name == "detach":
        return SiteVector(site, first.held)
    if name in ("empty_like", "zeros_like"):
        return _zeros(site)
    out = kwargs.pop("out", None)
    alpha = kwargs.pop("alpha", None)
    if (
        name not in OPERATIONS
        or set(kwargs) - {"memory_format"}
        or (out is not None and not isinstance(out, SiteVector))
    ):
        raise first.refused(name)
    if name.endswith("_") and not isinstance(args[0], SiteVector):
        raise first.refused(f"{name} of a plain vector with one")
    vectors, numbers = list[SiteVector](), list[float]()
    for each in args:
        if isinstance(each, Tensor) and each.dim():
            if numbers:  # an order holds the vectors first
                raise first.refused(f"{name} of a number with one")
            vectors.append(each if isinstance(each, SiteVector) else spread(site, each))
        elif each is not False:  # of copy_: whether it may end later
            numbers.append(float(each))
    if name.endswith("_"):
        out = vectors[0]
    held = site.number() if out is None else out.held
    site.order(
        Compute(
            operation=name,
            vectors=tuple(vector.number for vector in vectors),
            numbers=tuple(numbers),
            alpha=None if alpha is None else float(alpha),
            into=held.number,
        )
    )
    return SiteVector(site, held) if out is None else out
