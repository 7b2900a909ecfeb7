"""What each process of `scheduling` does: `python -m benchmarks._stage_members weft|1f1b|alone`.

Each is asked in lines of JSON: to start (it tells where it is), to meet the others, and to go on for some seconds; it
tells how many micro-batches it finished, weights' gradients included, in the part of the time that counts.

Sections are not computed: a device waits as long as its script says. Or they are, where it is asked with a model. What
is sent are real bytes on real sockets.
"""

import asyncio
import json
import os
import sys
import time
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn

from weft.clock import SystemClock
from weft.codec.config import Fp32Config
from weft.ids import PeerId, RunId
from weft.keys import Identity
from weft.model.config import ModelConfig
from weft.model.flat import FlatModel, flatten
from weft.model.initial import initial_vector
from weft.model.sections import sections
from weft.model.transformer import SectionModule, mean_loss
from weft.net.admission import ByTicket
from weft.net.link.handshake import Passport
from weft.net.node import Node
from weft.net.transport.tls import TlsConfig, TlsTransport
from weft.pipeline.codec.build import Boundaries
from weft.pipeline.device import Given, Passed
from weft.pipeline.link import StageLink
from weft.pipeline.routing import Router
from weft.pipeline.sender import Origin, Sender
from weft.pipeline.torch_device import TorchDevice
from weft.pipeline.worker import CurrentStep, Worker
from weft.tasks import Threads
from weft.wire import Buffer

RUN = RunId("5c" * 32)
TOKENS = bytes(4 * 257)
SAMPLES, SEQ_LEN = 4, 128  # of a micro-batch that is computed


class TimedPassed:
    def __init__(self, device: "TimedDevice") -> None:
        self._device = device
        self.output = None if device.is_last else device.numbers()
        self.loss = 1.0 if device.is_last else None

    def backward(self, _gradient: Buffer | None, _member: PeerId | None = None) -> Buffer | None:
        time.sleep(self._device.part_s)
        return None if self._device.is_first else self._device.numbers()

    def count(self) -> None:
        time.sleep(self._device.part_s)
        self._device.counted_at.append(time.monotonic())


class TimedDevice:
    """Waits `part_s` for each of forward pass, input gradient and weights' gradients."""

    tokens_nbytes = len(TOKENS)

    def __init__(self, part_s: float, nbytes: int, is_first: bool, is_last: bool) -> None:
        self.part_s, self.is_first, self.is_last = part_s, is_first, is_last
        self._nbytes = nbytes
        self.counted_at: list[float] = []

    def numbers(self) -> Buffer:
        """Return as many bytes as activations have, which no micro-batch had before."""
        return os.urandom(16) + bytes(self._nbytes - 16)

    def input_nbytes(self, _num_samples: int) -> int:
        return self._nbytes

    def gradient_nbytes(self, _num_samples: int) -> int:
        return self._nbytes

    def forward(self, _given: Given) -> TimedPassed:
        time.sleep(self.part_s)
        return TimedPassed(self)


class ComputingDevice:
    """Computes a section of a model, and notes when weights' gradients are there.

    Args:
        model: the config's fields.
    """

    def __init__(self, model: dict[str, Any], stage: int, num_stages: int) -> None:
        flat = _section(model, stage, num_stages)
        self._device = TorchDevice(flat, Boundaries(Fp32Config()), SEQ_LEN, SAMPLES)
        self.tokens_nbytes = self._device.tokens_nbytes
        self.input_nbytes, self.gradient_nbytes = self._device.input_nbytes, self._device.gradient_nbytes
        self.counted_at: list[float] = []

    def forward(self, given: Given) -> "_Computed":
        return _Computed(self._device.forward(given), self.counted_at)


class _Computed:
    def __init__(self, passed: Passed, counted_at: list[float]) -> None:
        self._passed, self._counted_at = passed, counted_at
        self.output, self.loss, self.backward = passed.output, passed.loss, passed.backward

    def count(self) -> None:
        self._passed.count()
        self._counted_at.append(time.monotonic())


def _section(model: dict[str, Any], stage: int, num_stages: int) -> FlatModel:
    config = msgspec.convert(model, ModelConfig)
    section = sections(config, num_stages)[stage]
    flat = flatten(SectionModule(config, section), "cpu")
    flat.vector.copy_(initial_vector(config, 1, section))
    return flat


def _given(model: dict[str, Any] | None) -> Given:
    """Return a micro-batch that nobody had before."""
    if model is None:
        return Given(1, TOKENS, None)
    ids = torch.randint(0, model["vocab_size"], (SAMPLES, SEQ_LEN + 1), dtype=torch.int32)
    return Given(SAMPLES, ids.numpy().tobytes(), None)


async def weft() -> None:
    identity, clock, compute = Identity.generate(), SystemClock(), Threads()
    passport = Passport(identity=identity, run=RUN, name="member", admission=ByTicket(secret=bytes(16)))
    node = Node(passport, [TlsTransport(identity, TlsConfig(host="127.0.0.1"))], clock, lambda _event: None)
    link, closing = StageLink(node), list[Any]()
    origin, model = None, None
    device: TimedDevice | ComputingDevice | None = None

    def sender(stages: list[list[PeerId]], stage: int) -> Sender:
        router = Router(node.peer)
        router.seen(dict.fromkeys(stages[stage], 1))
        made = Sender(link, stage, router, clock)
        closing.append(made)
        return made

    try:
        while question := await asyncio.to_thread(_ask):
            match question["do"]:
                case "start":
                    _tell(peer=node.peer, addresses=await node.start())
                case "meet":
                    stages, stage = question["stages"], question["stage"]
                    last = len(stages) - 1
                    model = question.get("model")
                    if model is None:
                        device = TimedDevice(question["part_s"], question["nbytes"], stage == 0, stage == last)
                    else:
                        device = ComputingDevice(model, stage, len(stages))
                    onward = None if stage == last else sender(stages, stage + 1)
                    current = CurrentStep(stage, clock)
                    worker = Worker(link, stage, device, onward, compute.train, current, lambda _event: None)
                    worker.start()
                    closing.append(worker)
                    if stage == 0:
                        origin = Origin(node.peer, sender(stages, 0), len(stages), first=0)
                    for peer, addresses in question["addresses"].items():
                        if peer < node.peer:
                            node.remember(peer, addresses)
                            await node.connect(peer)
                    _tell()
                case "go":
                    assert device is not None
                    _tell(counted=await _begun(origin, device, model, question))
    finally:
        for each in closing:
            await each.aclose()
        await node.aclose()
        await compute.aclose()


async def _begun(
    origin: Origin | None, device: TimedDevice | ComputingDevice, model: dict[str, Any] | None, question: dict[str, Any]
) -> int:
    """Return how many micro-batches the device finished after `warm_s`, until `for_s`."""
    began = time.monotonic()
    stop = began + question["for_s"]

    async def one_after_the_other(origin: Origin) -> None:
        while time.monotonic() < stop:
            await origin.begin(_given(model))

    await asyncio.gather(
        asyncio.sleep(question["for_s"]), *(one_after_the_other(origin) for _ in range(64) if origin is not None)
    )
    return sum(question["warm_s"] <= at - began < question["for_s"] for at in device.counted_at)


class _Waits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, part_s: float) -> Tensor:
        ctx.part_s = part_s
        time.sleep(part_s)
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        time.sleep(2 * ctx.part_s)
        return dy * 1.0, None


class _Timed(nn.Module):
    def __init__(self, part_s: float) -> None:
        super().__init__()
        self._part_s = part_s
        self.scale = nn.Parameter(torch.ones(()))  # something to learn, without which torch does not go back

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _Waits.apply(x * self.scale, self._part_s)  # type: ignore[no-untyped-call]
        return y


def alone() -> None:
    """Compute a section, forward and back, with nobody to wait for."""
    while question := _ask():
        match question["do"]:
            case "start":
                _tell()
            case "meet":
                model, stage = question["model"], question["stage"]
                module = _section(model, stage, question["num_stages"]).module
                ids = torch.randint(0, model["vocab_size"], (SAMPLES, SEQ_LEN))
                is_last = stage == question["num_stages"] - 1
                _tell()
            case "go":
                began, num = time.monotonic(), 0
                while (took_s := time.monotonic() - began) < question["for_s"]:
                    x = torch.randn(SAMPLES, SEQ_LEN, model["width"], requires_grad=True) if stage else ids
                    if is_last:
                        torch.autograd.backward(module.loss(x, ids))
                    else:
                        y = module(x)
                        torch.autograd.backward(y, torch.ones_like(y))
                    num += 1
                _tell(rate=num / took_s)


def one_f_one_b() -> None:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    while question := _ask():
        match question["do"]:
            case "start":
                _tell()
            case "meet":
                num, stage, num_micro = question["num_stages"], question["stage"], question["num_micro"]
                dist.init_process_group("gloo", init_method=f"file://{question['file']}", rank=stage, world_size=num)
                if (model := question.get("model")) is None:
                    x = target = torch.zeros(num_micro, question["nbytes"] // 4)
                    module: nn.Module = _Timed(question["part_s"])
                    loss = lambda y, _target: y.mean()  # noqa: E731
                else:
                    ids = torch.randint(0, model["vocab_size"], (SAMPLES * num_micro, SEQ_LEN + 1))
                    x, target = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
                    module, loss = _section(model, stage, num).module, mean_loss
                made = PipelineStage(module, stage, num, torch.device("cpu"))
                schedule = Schedule1F1B(made, num_micro, loss_fn=loss)
                _tell()
            case "go":
                # All ranks make the same number of steps: one for the meeting, then as many as fill the time.
                given = (x,) if stage == 0 else ()
                wanted = target if stage == num - 1 else None
                schedule.step(*given, target=wanted)
                dist.barrier()
                began = time.monotonic()
                for _ in range(question["steps"]):
                    schedule.step(*given, target=wanted)
                dist.barrier()
                _tell(counted=question["steps"] * num_micro, took_s=time.monotonic() - began)
    dist.destroy_process_group()


def _ask() -> dict[str, Any]:
    """Return the next question; an empty one at the end."""
    line = sys.stdin.readline()
    return json.loads(line) if line else {}


def _tell(**answer: Any) -> None:
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    match sys.argv[1]:
        case "weft":
            asyncio.run(weft())
        case "alone":
            alone()
        case _:
            one_f_one_b()
