"""What a round costs beside its payload: milliseconds a round with 4 and 16 members, and where they go.

    python -m benchmarks.rounds

All members live in one process, over TLS on loopback and over the memory transport; each part is one block of numbers
(4 KiB), so what is left is messages, signatures, promises on disk and the event loop. One process does the work of all
members: a member of its own machine waits for a fraction of it. The peer of the comparison is one round trip of a
4 KiB call between two members of the same swarm, which no protocol can avoid.
"""

import asyncio
import cProfile
import pstats
import time
from statistics import median

import msgspec
import torch

from benchmarks._member import Member, averaging, swarm
from benchmarks.report import load, load_line, table, write
from weft.codec.config import Int8Config
from weft.ids import PeerId

ROUNDS = 12
BLOCK = 4096
# Functions that do not call one another, by the file's end and the function's name.
WHERE = {
    "signing": (("weft/keys.py", "sign"),),
    "checking signatures": (("weft/keys.py", "verify"),),
    "records to bytes and back": (("weft/wire.py", "encode"), ("weft/wire.py", "decode")),
    "promises to disk": (("weft/store/journal.py", "write"),),
    "the round machine": (("weft/sync/round/round.py", "step"),),
    "TLS and sockets": (("weft/net/transport/tls_stream.py", "_read"), ("weft/net/transport/tls_stream.py", "_write")),
    "waiting": (("~", "<method 'poll' of 'select.epoll' objects>"),),
}


class Echo(msgspec.Struct, frozen=True, tag="Echo"):
    body: bytes


Rounds = list[tuple[float, float]]


async def measure(num_members: int, transport: str) -> tuple[Rounds, list[float], dict[str, float]]:
    """Return the ms of each round and what it took of processors, the ms of each plain call, and the shares of what was
    done in a profiled round."""
    num = BLOCK * num_members
    vectors, outs = [torch.randn(num) for _ in range(num_members)], [torch.empty(num) for _ in range(num_members)]

    async def one_round(members: list[Member]) -> tuple[float, float]:
        for vector in vectors:
            vector.mul_(1.1)
        began, computed = time.perf_counter(), time.process_time()
        await asyncio.gather(*(each.average(x, y) for each, x, y in zip(members, vectors, outs, strict=True)))
        return 1000 * (time.perf_counter() - began), 1000 * (time.process_time() - computed)

    async with swarm(num_members, num, averaging(Int8Config()), transport) as members:  # type: ignore[arg-type]
        members[1].node.serve(Echo, _echo)
        for _ in range(2):
            await one_round(members)
        rounds, calls = Rounds(), []
        for _ in range(ROUNDS):
            rounds.append(await one_round(members))
            began = time.perf_counter()
            await members[0].node.call(members[1].peer, Echo(body=bytes(BLOCK)), Echo, deadline_s=5.0)
            calls.append(1000 * (time.perf_counter() - began))
        profile = cProfile.Profile()
        profile.enable()
        for _ in range(3):
            await one_round(members)
        profile.disable()
    return rounds, calls, _shares(profile)


async def _echo(_peer: PeerId, request: Echo) -> Echo:
    return request


def _shares(profile: cProfile.Profile) -> dict[str, float]:
    """Return the share of the event loop's time that each entry of `WHERE` took; the profiler slows all of them."""
    stats = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    total = sum(own for _, _, own, _, _ in stats.values())
    shares = {}
    for what, functions in WHERE.items():
        found = 0.0
        for (file, _, name), (_, _, _, cumulative, _) in stats.items():
            if any(file.replace("\\", "/").endswith(end) and name == function for end, function in functions):
                found += cumulative
        shares[what] = found / total
    return {**shares, "everything else (event loop, frames, tasks)": 1 - sum(shares.values())}


def main() -> None:
    torch.set_num_threads(1)
    before, rows, shares = load(), [], {}
    for num_members in (4, 16):
        for transport in ("tls", "memory"):
            rounds, calls, where = asyncio.run(measure(num_members, transport))
            took, computed = zip(*rounds, strict=True)
            ms, cpu_ms, call_ms = median(took), median(computed), median(calls)
            figures = [f"{figure:.1f}" for figure in (ms, min(took), max(took), cpu_ms, ms / num_members, call_ms)]
            rows.append((num_members, transport, *figures, f"{ms / call_ms:.0f}"))
            shares[f"{num_members}, {transport}"] = where
    sections = [
        load_line(before),
        f"{ROUNDS} rounds each, after two. All members in one process and one event loop.",
        table(
            (
                "members",
                "transport",
                "median ms",
                "min",
                "max",
                "median CPU ms",
                "ms per member",
                "one call, ms",
                "round / call",
            ),
            rows,
        ),
        "Where the event loop's time goes, in a profiled run of three rounds (profiling slows small functions most):",
        table(
            ("of the time", *shares),
            [
                (what, *(f"{100 * where[what]:.0f} %" for where in shares.values()))
                for what in next(iter(shares.values()))
            ],
        ),
    ]
    write("rounds", "What a round costs beside its payload", "python -m benchmarks.rounds", sections)


if __name__ == "__main__":
    main()
