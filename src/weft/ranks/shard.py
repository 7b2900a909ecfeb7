"""One rank's rows of the model: gradients under FSDP, inner steps, and the way between rows and strips.

    strip of a vector ──set──► rows of each tensor ──forward, backward, reduce-scatter──► rows of the gradient
                        ◄─get──                      ◄──────── inner optimizer ─────────

FSDP gathers a block's tensors while it computes with them, and frees what is not a rank's own afterwards (Zhao et al.,
2304.11277; torch's `fully_shard`). Between rows and strips numbers go tensor by tensor, through the CPU's memory.

All ranks call everything here, and at the same time.
"""

import math
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from typing import cast

import torch
from jaxtyping import Float32, Float64
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.nn import Module
from torch.nn.functional import cross_entropy
from torch.nn.utils import get_total_norm

from weft import rng
from weft.clock import SystemClock
from weft.data.rows import Batch
from weft.inference.sample import Sampling, generate
from weft.model.flat import layout
from weft.model.layers import Block, KVCache, RMSNorm
from weft.model.transformer import Transformer
from weft.ranks.line import Line, passed
from weft.ranks.strips import overlap, overlaps, rows, strips
from weft.run.config import RunConfig
from weft.run.machine import PeerConfig
from weft.sync.method.choices import AdamWConfig, InnerSgdConfig
from weft.training.device import Device, choose, limit_memory
from weft.training.optimizer import adamw_step, sgd_step

Rows = list[Tensor]  # of one rank: of each tensor, in the order of the layout


class Shard:
    def __init__(self, line: Line, run: RunConfig, settings: PeerConfig) -> None:
        self._line = line
        self._run = run
        self._device: Device = choose(settings)
        if settings.caps.vram_nbytes is not None:
            limit_memory(self._device, settings.caps.vram_nbytes)
        self._spans = layout(run.model)
        self._strips = strips(self._spans.num_parameters, line.num_ranks)
        self._module = _sharded(run, settings, self._device, line.num_ranks)
        parameters = dict(self._module.named_parameters())
        self._parameters = [parameters[span.name] for span in self._spans]
        with (
            torch.no_grad(),
            self._device.autocast(),
        ):  # FSDP allocates now what it must not allocate in inference alone
            self._module(torch.zeros(1, 1, dtype=torch.int64, device=self._device.torch))
            self._mine = [_local(parameter) for parameter in self._parameters]
        self._moments = {name: _blank(self._mine) for name in moments_of(run)}
        # fp32 on the device, one a tensor: what the fused kernel counts in. Exact up to 2^24 steps.
        self._counts = [torch.zeros((), device=rows.device) for rows in self._mine]
        self._center: Rows | None = None
        self._kept: Rows | None = None  # the parameters, while others are worn

    # --- one step ---

    def fill(self, batch: Batch, micro_batch: int) -> tuple[float, float]:
        """Compute the mean gradient over `batch`, of which each rank takes a share; return mean loss and norm."""
        total = torch.zeros((), device=self._device.torch)
        for part, share in self._micro_batches(batch, micro_batch):
            with self._device.autocast():
                loss = self._module.loss(*part)
            # FSDP takes the mean over ranks; what is wanted is the sum of their shares.
            (loss * (share * self._line.num_ranks)).backward()  # type: ignore[no-untyped-call]
            total += loss.detach() * share
        figures = torch.stack((total.double(), self._square_sum())).cpu()  # the step's one wait for a GPU
        self._line.add(figures)
        return float(figures[0]), math.sqrt(float(figures[1]))

    def pull(self, strength: float) -> float:
        """Add the gradient of mu / 2 |x - center|^2, and return the norm of the sum. FedProx: 1812.06127, eq. 2."""
        assert self._center is not None
        for gradient, x, center in zip(self._gradients, self._mine, self._center, strict=True):
            gradient.add_(x, alpha=strength).sub_(center, alpha=strength)
        figures = self._square_sum().cpu()
        self._line.add(figures)
        return math.sqrt(float(figures))

    @torch.no_grad()
    def move(self, shorten: float, learning_rate: float) -> None:
        """Multiply the gradient, make an inner step, and forget the gradient."""
        self._shorten(shorten)
        self._step(learning_rate)
        self.drop_gradient()

    def _step(self, learning_rate: float) -> None:
        config, mine, gradients, moments = self._run.train.optimizer, self._mine, self._gradients, self._moments
        assert isinstance(config, AdamWConfig | InnerSgdConfig)
        if isinstance(config, InnerSgdConfig):
            for number, (x, gradient) in enumerate(zip(mine, gradients, strict=True)):
                sgd_step(config, learning_rate, x, gradient, moments["momentum"][number] if moments else None)
            return
        found = zip(mine, gradients, moments["moment1"], moments["moment2"], self._counts, strict=True)
        numbers = list(zip(self._spans, found, strict=True))
        for decay in (True, False):
            these = [each for span, each in numbers if span.has_decay == decay and each[0].numel()]
            if these:
                adamw_step(config, config.weight_decay if decay else 0.0, learning_rate, these)

    def drop_gradient(self) -> None:
        """Forget the gradient, which has as many numbers as the parameters."""
        self._module.zero_grad(set_to_none=True)

    def _micro_batches(self, batch: Batch, micro_batch: int) -> list[tuple[Batch, float]]:
        """Return this rank's samples in as many pieces as every rank has; each with its share of the whole batch.

        A rank that has no samples left computes on a blank one, which counts nothing: gathering needs all ranks.
        """
        num, ranks = len(batch.tokens), self._line.num_ranks
        borders = [num * rank // ranks for rank in range(ranks + 1)]
        most = max(stop - start for start, stop in pairwise(borders))
        start, stop = borders[self._line.rank : self._line.rank + 2]
        found = []
        for offset in range(start, start + most, micro_batch):
            part = batch.part(offset, min(offset + micro_batch, stop))
            share = part.share_of(batch) if offset < stop else 0.0
            found.append(((part if offset < stop else batch.blank()).to(self._device.torch), share))
        return found

    def _shorten(self, factor: float) -> None:
        if factor != 1.0:
            for gradient in self._gradients:
                gradient.mul_(factor)

    def _square_sum(self) -> Float64[Tensor, ""]:
        return get_total_norm([each for each in self._gradients if each.numel()]).double().square()

    @property
    @torch.no_grad()
    def _gradients(self) -> Rows:
        found = []
        for parameter in self._parameters:
            assert parameter.grad is not None
            found.append(_local(parameter.grad))
        return found

    # --- other parameters ---

    @torch.no_grad()
    def wear(self, strip: Float32[Tensor, " num"]) -> None:
        """Compute with other parameters, until `unwear`."""
        self._kept = [each.clone() for each in self._mine]
        self.set_local(strip)

    @torch.no_grad()
    def unwear(self) -> None:
        if self._kept is not None:
            for x, kept in zip(self._mine, self._kept, strict=True):
                x.copy_(kept)
            self._regather()
        self._kept = None

    @torch.no_grad()
    def summed_loss(self, batch: Batch, micro_batch: int) -> float:
        """Return the sum of the losses of `batch`, nats."""
        total = 0.0
        for part, share in self._micro_batches(batch, micro_batch):
            with self._device.autocast():
                logits = self._module(part.tokens, positions=part.positions)
            losses = cross_entropy(logits.float().flatten(0, 1), part.targets.flatten(), reduction="none")
            total += float(losses.cpu().double().sum()) if share else 0.0
        figures = torch.tensor([total], dtype=torch.float64)
        self._line.add(figures)
        return float(figures)

    def generate(self, prompt: tuple[int, ...], sampling: Sampling, seed: int, within_s: float) -> list[int]:
        """Return what the model writes after `prompt`, as long as rank 0 has time: the same on all ranks."""
        agreed = cast(Transformer, _Agreed(self._module, self._line, self._device, within_s))
        return list(_until_over(generate(agreed, prompt, sampling, rng.stream(seed, "sample"))))

    # --- rows and strips ---

    def local(self) -> Float32[Tensor, " num"]:
        """Return the strip of the parameters: of those that are trained."""
        return self._get(self._kept or self._mine)

    def set_local(self, strip: Float32[Tensor, " num"]) -> None:
        self._set(self._mine, strip)
        self._regather()

    def _regather(self) -> None:
        """Have parameters gathered anew: those in no block stay gathered, as they were, after a pass forward alone."""
        assert isinstance(self._module, FSDPModule)
        self._module.reshard()

    def set_center(self, strip: Float32[Tensor, " num"]) -> None:
        if self._center is None:
            self._center = _blank(self._mine)
        self._set(self._center, strip)

    def gradient(self, shorten: float) -> Float32[Tensor, " num"]:
        """Return the strip of the gradient, multiplied, and forget it."""
        self._shorten(shorten)
        strip = self._get(self._gradients)
        self.drop_gradient()
        return strip

    def moments(self) -> dict[str, Float32[Tensor, " num"]]:
        """Return the strips of the inner optimizer's vectors."""
        return {name: self._get(found) for name, found in self._moments.items()}

    def read_moment(self, name: str, piece: range, into: Float32[Tensor, " piece"] | None = None) -> None:
        """Collect a piece of one of the inner optimizer's vectors on rank 0, `into` memory there."""
        line, works = self._line, []
        for span, held in zip(self._spans, self._moments[name], strict=True):
            if overlap(range(span.offset, span.stop), piece):
                dealt = [rows(span, rank, line.num_ranks) for rank in range(line.num_ranks)]
                works += passed(line, dealt, held.reshape(-1), piece, into, is_read=True)
        line.wait(works)

    def set_moments(self, found: dict[str, Float32[Tensor, " num"]], num_steps: int) -> None:
        for name, strip in found.items():
            self._set(self._moments[name], strip)
        for count in self._counts:
            count.fill_(num_steps)

    def _get(self, mine: Rows) -> Float32[Tensor, " num"]:
        strip = torch.empty(len(self._strips[self._line.rank]))
        self._exchange(mine, strip, is_out=True)
        return strip

    def _set(self, mine: Rows, strip: Float32[Tensor, " num"]) -> None:
        self._exchange(mine, strip, is_out=False)

    @torch.no_grad()
    def _exchange(self, mine: Rows, strip: Tensor, *, is_out: bool) -> None:
        """Bring numbers from rows to strips, or back, tensor by tensor."""
        line, offset = self._line, self._strips[self._line.rank].start
        for number, span in enumerate(self._spans):
            held = mine[number]
            room = held.reshape(-1).cpu() if is_out or held.device.type != "cpu" else held.view(-1)
            works = []
            for rank in range(line.num_ranks):
                there = rows(span, rank, line.num_ranks)
                for holder, common in overlaps(self._strips, there):
                    in_rows = slice(common.start - there.start, common.stop - there.start)
                    in_strip = slice(common.start - offset, common.stop - offset)
                    if rank == holder == line.rank:
                        to, of = (strip[in_strip], room[in_rows]) if is_out else (room[in_rows], strip[in_strip])
                        to.copy_(of)
                    elif rank == line.rank:
                        works.append((line.send if is_out else line.receive)(room[in_rows], holder))
                    elif holder == line.rank:
                        works.append((line.receive if is_out else line.send)(strip[in_strip], rank))
            line.wait(works)
            if not is_out and room.data_ptr() != held.data_ptr():
                held.copy_(room.view_as(held))


class _Over(Exception):
    """Rank 0 has no more time."""


def _until_over(tokens: Iterator[int]) -> Iterator[int]:
    with suppress(_Over):
        yield from tokens


class _Agreed:
    """What generation asks of a model, with rank 0's logits and clock on all ranks: who chose another token, or stopped
    after another, would part.

    Args:
        within_s: seconds after which no other token is begun.
    """

    def __init__(self, module: Transformer, line: Line, device: Device, within_s: float) -> None:
        self.config, self.embed = module.config, module.embed
        self._module, self._line, self._device = module, line, device
        self._clock = SystemClock()
        self._until = self._clock.now() + within_s

    def next_logits(self, tokens: Tensor, cache: KVCache) -> Tensor:
        is_over = torch.tensor([self._clock.now() >= self._until])
        self._line.share(is_over)
        if is_over:
            raise _Over
        with self._device.autocast():
            logits = self._module.next_logits(tokens, cache).cpu().clone()
        self._line.share(logits)
        return logits


def moments_of(run: RunConfig) -> tuple[str, ...]:
    """Return the names of the inner optimizer's vectors."""
    if run.method.sends_gradient:
        return ()
    match run.train.optimizer:
        case AdamWConfig():
            return "moment1", "moment2"
        case InnerSgdConfig(momentum=momentum) if momentum:
            return ("momentum",)
    return ()


def _sharded(run: RunConfig, settings: PeerConfig, device: Device, num_ranks: int) -> Transformer:
    """Return the run's model with memory for this rank's rows, holding anything."""
    with torch.device("meta"):
        module = Transformer(run.model, has_recompute=settings.has_recompute)
    angles, mesh = module.angle_bits, init_device_mesh(device.torch.type, (num_ranks,))
    # A block's matrices are gathered in the precision that they are computed in. Cast as they are used, autograd would
    # keep all casts until the backward pass. Norms are computed in fp32.
    policy = MixedPrecisionPolicy(
        param_dtype=device.autocast_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    for block in module.layers.values():
        assert isinstance(block, Block)
        norms: list[Module] = [each for each in block.attention.modules() if isinstance(each, RMSNorm)]
        if norms:
            fully_shard(norms, mesh=mesh)
        fully_shard([block.attention, block.ffn], mesh=mesh, mp_policy=policy)
    fully_shard(module, mesh=mesh)
    register_fsdp_forward_method(module, "next_logits")
    module.to_empty(device=device.torch)
    module.angle_bits = angles.to(device.torch)
    return module


def _local(tensor: Tensor) -> Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.to_local()


def _blank(like: Rows) -> Rows:
    return [torch.zeros_like(each) for each in like]
