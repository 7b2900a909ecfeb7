"""What each process of `scheduling` does: `python -m benchmarks._stage_members weft|1f1b`.

Each is asked in lines of JSON: to start (it tells where it is), to meet the others, and to go on for some seconds; it
tells how many micro-batches it finished, weights' gradients included, in the part of the time that counts.

Sections are not computed: a device waits as long as its script says. What is sent are real bytes on real sockets.
"""

import asyncio
import json
import os
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from weft.clock import SystemClock
from weft.ids import PeerId, RunId
from weft.keys import Identity
from weft.net.admission import ByTicket
from weft.net.handshake import Passport
from weft.net.node import Node
from weft.net.tls import TlsConfig, TlsTransport
from weft.peer.compute import Threads
from weft.pipeline.desk import Desk
from weft.pipeline.device import Given
from weft.pipeline.lane import Lane
from weft.pipeline.origin import Origin
from weft.pipeline.route import Near, Route
from weft.pipeline.sender import Sender
from weft.pipeline.worker import Worker
from weft.wire import Buffer

RUN = RunId("5c" * 32)
TOKENS = bytes(4 * 257)


class TimedPassed:
    def __init__(self, device: "TimedDevice") -> None:
        self._device = device
        self.output = None if device.is_last else device.numbers()
        self.loss = 1.0 if device.is_last else None

    def backward(self, _gradient: Buffer | None) -> Buffer | None:
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


async def weft() -> None:
    identity, clock, compute = Identity.generate(), SystemClock(), Threads()
    passport = Passport(identity=identity, run=RUN, name="member", admission=ByTicket(secret=bytes(16)))
    node = Node(passport, [TlsTransport(identity, TlsConfig(host="127.0.0.1"))], clock, lambda _event: None)
    lane, closing = Lane(node), list[Any]()
    desk, origin, device = Desk(lane), None, None

    def sender(stages: list[list[PeerId]], stage: int) -> Sender:
        route = Route(node.peer)
        route.seen({peer: Near(rtt_s=0.001, began=1) for peer in stages[stage]})
        made = desk.senders[stage] = Sender(lane, stage, route, clock)
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
                    device = TimedDevice(question["part_s"], question["nbytes"], stage == 0, stage == last)
                    onward = None if stage == last else sender(stages, stage + 1)
                    worker = Worker(lane, stage, device, onward, compute.train, clock, lambda _event: None)
                    desk.workers[stage] = worker
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
                    _tell(counted=await _begun(origin, device, question))
    finally:
        for each in closing:
            await each.aclose()
        await node.aclose()
        await compute.aclose()


async def _begun(origin: Origin | None, device: TimedDevice, question: dict[str, Any]) -> int:
    """Return how many micro-batches the device finished after `warm_s`, until `for_s`."""
    began = time.monotonic()
    stop = began + question["for_s"]

    async def one_after_the_other(origin: Origin) -> None:
        while time.monotonic() < stop:
            await origin.begin(Given(1, TOKENS, None))

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
        return _Waits.apply(x * self.scale, self._part_s)


def one_f_one_b() -> None:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    while question := _ask():
        match question["do"]:
            case "start":
                _tell()
            case "meet":
                num, stage, num_micro = question["num_stages"], question["stage"], question["num_micro"]
                dist.init_process_group("gloo", init_method=f"file://{question['file']}", rank=stage, world_size=num)
                x = torch.zeros(num_micro, question["nbytes"] // 4)
                made = PipelineStage(_Timed(question["part_s"]), stage, num, torch.device("cpu"))
                schedule = Schedule1F1B(made, num_micro, loss_fn=lambda y, _target: y.mean())
                _tell()
            case "go":
                # All ranks make the same number of steps: one for the meeting, then as many as fill the time.
                given = (x,) if stage == 0 else ()
                target = {"target": x[:, :1]} if stage == num - 1 else {}
                schedule.step(*given, **target)
                dist.barrier()
                began = time.monotonic()
                for _ in range(question["steps"]):
                    schedule.step(*given, **target)
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
    if sys.argv[1] == "weft":
        asyncio.run(weft())
    else:
        one_f_one_b()
