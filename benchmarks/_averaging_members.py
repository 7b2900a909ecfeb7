"""What each of the processes of `averaging` does: `python -m benchmarks._averaging_members weft|gloo|hivemind`.

Each is asked in lines of JSON: to start (it tells where it is), to meet the others, to prepare a round (fill the
vector, and whatever the library does beforehand), to do the round, and to check it. Only the round itself is timed.

The vector of member r in round k is (r + 1) x + k, so the mean is known to everybody.

This file imports weft only where weft is asked for: hivemind lives in an environment of its own.
"""

import asyncio
import hashlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


class Vector:
    """The member's vector, the mean, and how far a result is from it."""

    def __init__(self, rank: int, num: int, group: int) -> None:
        self._group = group
        self.rank = rank
        self.values = torch.empty(num)
        self._x = torch.rand(num, generator=torch.Generator().manual_seed(7))
        self._number = 0

    def fill(self, into: Tensor) -> None:
        self._number += 1
        torch.mul(self._x, self.rank + 1, out=into)
        into.add_(self._number)

    def check(self, result: Tensor) -> dict[str, Any]:
        error = self._x.mul((self._group + 1) / 2).add_(self._number).sub_(result).abs_().max()
        return {"error": float(error), "digest": hashlib.sha256(result.numpy().tobytes()).hexdigest()[:16]}


async def weft(rank: int, num: int, folder: Path, group: int) -> None:
    from benchmarks._member import Member, averaging
    from weft.codec.config import Fp32Config
    from weft.keys import Identity
    from weft.net.transport.tls import TlsConfig, TlsTransport

    identity = Identity.generate()
    transport = TlsTransport(identity, TlsConfig(host="127.0.0.1"))
    member = Member(identity, [transport], num, averaging(Fp32Config()), folder)
    vector, result = Vector(rank, num, group), torch.zeros(num)
    try:
        while question := await asyncio.to_thread(_ask):
            match question["do"]:
                case "start":
                    _tell(peer=member.peer, addresses=await member.start())
                case "meet":
                    await member.meet({p: a for p, a in question["addresses"].items() if p != member.peer})
                    _tell()
                case "prepare":
                    vector.fill(vector.values)
                    _tell()
                case "round":
                    manifest = await member.average(vector.values, result)
                    _tell(at=time.monotonic(), counted=len(manifest.contributions), attempt=manifest.attempt)
                case "check":
                    _tell(**vector.check(result))
    finally:
        await member.aclose()


def gloo(rank: int, num: int, folder: Path, group: int) -> None:
    import torch.distributed as dist

    vector = Vector(rank, num, group)
    while question := _ask():
        match question["do"]:
            case "start":
                _tell()
            case "meet":
                dist.init_process_group("gloo", init_method=f"file://{folder.parent}/gloo", rank=rank, world_size=group)
                _tell()
            case "prepare":
                vector.fill(vector.values)
                _tell()
            case "round":
                dist.all_reduce(vector.values)
                vector.values.div_(group)
                _tell(at=time.monotonic(), counted=group)
            case "check":
                _tell(**vector.check(vector.values))
    dist.destroy_process_group()


def hivemind(rank: int, num: int, _folder: Path, group: int) -> None:
    from hivemind import DHT
    from hivemind.averaging import DecentralizedAverager
    from hivemind.averaging.control import AveragingStage

    vector = Vector(rank, num, group)
    step: Any = None
    averager: Any = None
    quiet: dict[str, Any] = {
        "host_maddrs": ["/ip4/127.0.0.1/tcp/0"],
        "use_ipfs": False,
        "use_relay": False,
        "use_auto_relay": False,
        "auto_nat": False,
        "nat_port_map": False,
    }
    dht: Any = None
    while question := _ask():
        match question["do"]:
            case "start":  # the first is asked alone, the others are told where it is
                dht = DHT(initial_peers=question["initial_peers"], start=True, **quiet)
                _tell(addresses=[str(address) for address in dht.get_visible_maddrs()])
            case "meet":
                averager = DecentralizedAverager(
                    [vector.values],
                    dht,
                    start=True,
                    prefix="weft_benchmark",
                    target_group_size=group,
                    min_group_size=group,
                    min_matchmaking_time=3.0,
                    request_timeout=1.5,
                    part_size_bytes=question["part_size"],
                )
                _tell()
            case "prepare":  # find the group beforehand, as hivemind.Optimizer does
                began = time.monotonic()
                with averager.get_tensors() as tensors:
                    vector.fill(tensors[0])
                step = averager.step(wait=False, require_trigger=True, timeout=60.0)
                while step.stage != AveragingStage.AWAITING_TRIGGER:
                    time.sleep(0.005)
                _tell(matchmaking_s=time.monotonic() - began)
            case "round":
                step.allow_allreduce()
                counted = len(step.result())
                _tell(at=time.monotonic(), counted=counted)
            case "check":
                with averager.get_tensors() as tensors:
                    _tell(**vector.check(tensors[0]))
    averager.shutdown()
    dht.shutdown()


def _ask() -> dict[str, Any]:
    """Return the next question; an empty one at the end."""
    line = sys.stdin.readline()
    return json.loads(line) if line else {}


def _tell(**answer: Any) -> None:
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    library, rank, num, folder, group = (
        sys.argv[1],
        int(sys.argv[2]),
        int(sys.argv[3]),
        Path(sys.argv[4]),
        int(sys.argv[5]),
    )
    if library == "weft":
        torch.set_num_threads(1)
        folder.mkdir()
        asyncio.run(weft(rank, num, folder, group))
    else:
        {"gloo": gloo, "hivemind": hivemind}[library](rank, num, folder, group)
