"""What each process of torch's DistributedDataParallel does in `slow_links` and `hook`, the peer that weft is beside.

    python -m benchmarks._slow_ddp fp32|fp16 RANK FOLDER SECONDS

Weights, data, windows, optimizer and learning rate are those of the run in FOLDER/run.bin; gloo averages gradients over
the interface that GLOO_SOCKET_IFNAME names. First all make steps side by side without a word: what a step takes longer
with communication is waiting. Rank 0 evaluates while the clock stands still, and writes FOLDER/found.json.
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from jaxtyping import Int64
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from weft import wire
from weft.data.batch import Batches
from weft.model.flat import attach
from weft.model.initial import initial_vector
from weft.model.transformer import Transformer
from weft.run.config import RunConfig
from weft.store.home import Home
from weft.sync.method.choices import AdamWConfig
from weft.sync.method.schedule import lr

GROUP = 4
ALONE_STEPS = 60  # without communication
LOOK_EVERY, EVALUATE_EVERY = 4, 20  # steps


class Ddp(msgspec.Struct, frozen=True, kw_only=True):
    """What rank 0 tells."""

    alone_s: float  # of a step without communication, the others making theirs
    step_s: float  # of a step with it, mean
    num_steps: int
    losses: tuple[tuple[int, float], ...]  # held out, after so many steps

    @property
    def utilisation(self) -> float:
        return min(self.alone_s / self.step_s, 1.0)


class Loss(nn.Module):
    """The loss as a module, which is what DistributedDataParallel wraps."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Int64[Tensor, "batch seq"], targets: Int64[Tensor, "batch seq"]) -> Tensor:
        return self.model.loss(tokens, targets)


class Member:
    """One process, at the start of the run."""

    def __init__(self, rank: int, folder: Path) -> None:
        self._rank = rank
        self._run = run = wire.decode((folder / "run.bin").read_bytes(), RunConfig)
        shards = Home(folder / "home").shards
        self._train, self._heldout = (
            Batches(shards, run.data, split, run.train.seq_len, run.seed) for split in ("train", "heldout")
        )
        self._module = Transformer(run.model)
        attach(self._module, initial_vector(run.model, run.seed))
        self._loss: nn.Module = Loss(self._module)
        config = run.train.optimizer
        assert isinstance(config, AdamWConfig)
        parameters = list(self._module.parameters())
        decayed = {"params": [each for each in parameters if each.dim() > 1], "weight_decay": config.weight_decay}
        rest = {"params": [each for each in parameters if each.dim() == 1], "weight_decay": 0.0}
        betas = (config.beta1, config.beta2)
        self._optimizer = torch.optim.AdamW([decayed, rest], betas=betas, eps=config.eps, fused=True)
        self.num_steps = 0

    def link(self, hook: Callable[..., Any] | None = None, state: object = None) -> None:
        """Average gradients with the others from now on, by one of torch's hooks if one is given."""
        # A hook that waits for one collective before it starts another has one bucket: gloo has no order between two.
        cap_mb = None if state is None else 64
        wrapped = DistributedDataParallel(self._loss, gradient_as_bucket_view=True, bucket_cap_mb=cap_mb)
        if hook is not None:
            wrapped.register_comm_hook(state, hook)
        self._loss = wrapped

    def step(self) -> None:
        train, size = self._run.train, self._run.train.batch_size
        start = (self.num_steps * GROUP + self._rank) * size
        self.num_steps += 1
        rate = lr(train.schedule, self.num_steps * GROUP * self._run.tokens_per_step)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.zero_grad()
        self._loss(*self._train.at(np.arange(start, start + size, dtype=np.int64))).backward()
        nn.utils.clip_grad_norm_(self._module.parameters(), train.clip)
        self._optimizer.step()

    def evaluate(self) -> float:
        total, num = 0.0, 0
        with torch.inference_mode():
            for tokens, targets, _ in self._heldout.heldout_batches(
                self._run.train.evaluate_windows, self._run.train.batch_size
            ):
                total += float(self._module.loss(tokens, targets)) * tokens.numel()
                num += tokens.numel()
        return total / num


def alone_s(rank: int, folder: Path) -> float:
    """Return what a step takes without communication, while the others make theirs."""
    member = Member(rank, folder)
    for number in range(ALONE_STEPS):
        if number == ALONE_STEPS // 4:
            dist.barrier()
            began = time.monotonic()
        member.step()
    return (time.monotonic() - began) / (ALONE_STEPS - ALONE_STEPS // 4)


def main() -> None:
    kind, rank, folder, seconds = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), float(sys.argv[4])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/gloo", rank=rank, world_size=GROUP)
    alone = alone_s(rank, folder)
    member, losses, stood_s = Member(rank, folder), list[tuple[int, float]](), 0.0
    member.link(fp16_compress_hook if kind == "fp16" else None)
    member.step()  # torch lays its buckets anew after the first
    dist.barrier()
    began = time.monotonic()
    is_over = torch.zeros(1)
    while not is_over:
        member.step()
        if member.num_steps % LOOK_EVERY == 0:
            looks = time.monotonic()
            is_over[0] = looks - began - stood_s > seconds
            if rank == 0 and (is_over or member.num_steps % EVALUATE_EVERY == 0):
                losses.append((member.num_steps, member.evaluate()))
            dist.broadcast(is_over, 0)
            stood_s += time.monotonic() - looks
    step_s = (time.monotonic() - began - stood_s) / (member.num_steps - 1)
    if rank == 0:
        found = Ddp(alone_s=alone, step_s=step_s, num_steps=member.num_steps, losses=tuple(losses))
        (folder / "found.json").write_bytes(msgspec.json.encode(found))
    dist.barrier()  # who goes first would take the others' connections along
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
