"""The bytes that a round moves, by the members' meters, against the closed forms of `weft.cost.training`.

    python -m benchmarks.bytes

Members average a vector over TLS on loopback, all in one process. What is counted is what `node.traffic` counts: frames
and blobs, without TLS and TCP. Sent and received are means over the members, since leaders take turns.
"""

import asyncio
import time

import torch

from benchmarks._member import Member, averaging, swarm
from benchmarks.report import load, load_line, table, write
from weft.codec.build import build
from weft.codec.config import Bf16Config, CodecConfig, Fp32Config, Int8Config, TopKConfig
from weft.cost import training as cost
from weft.cost.training import Encoding, Traffic

ROUNDS = 6
NUM = 2_000_000
CODECS: dict[str, CodecConfig] = {
    "int8": Int8Config(),
    "bf16": Bf16Config(),
    "fp32": Fp32Config(),
    "top_k": TopKConfig(),
}
SETTLE_S = 0.3  # for the last messages of a round to arrive


async def measure(num_members: int, num: int, codec: CodecConfig) -> tuple[float, float, float]:
    """Return the bytes a member sends and receives in a round, and the seconds of a round."""
    vectors = [torch.randn(num) for _ in range(num_members)]
    outs = [torch.empty(num) for _ in range(num_members)]

    async def one_round(members: list[Member]) -> None:
        for vector in vectors:
            vector.mul_(1.1)  # what is known already would not be fetched again
        await asyncio.gather(*(each.average(x, y) for each, x, y in zip(members, vectors, outs, strict=True)))

    async with swarm(num_members, num, averaging(codec), "tls") as members:
        await one_round(members)  # opens bulk streams
        await asyncio.sleep(SETTLE_S)
        before, began = [each.traffic() for each in members], time.monotonic()
        for _ in range(ROUNDS):
            await one_round(members)
        await asyncio.sleep(SETTLE_S)
        took_s = time.monotonic() - began
        after = [each.traffic() for each in members]
    sent, received = (
        sum(b[way] - a[way] for a, b in zip(before, after, strict=True)) / num_members / ROUNDS for way in (0, 1)
    )
    return sent, received, took_s / ROUNDS


def expected(num_members: int, num: int, encoding: Encoding, round_s: float) -> float:
    """Return what `weft.cost.training` says that the mean member sends in a round, and receives."""
    total = Traffic(0, 0)
    for index in range(num_members):
        owned = cost.part_size(num, num_members, index)
        total += cost.contribute_traffic(num, owned, num_members, encoding)
        total += cost.result_traffic(num, owned, num_members, encoding)
    # Rounded down per round in the closed form, which has longer rounds in mind.
    control = (
        cost.control_traffic(num_members, ROUNDS * round_s).sent_nbytes - cost.control_traffic(num_members).sent_nbytes
    )
    return total.sent_nbytes / num_members + cost.control_traffic(num_members).sent_nbytes + control / ROUNDS


def main() -> None:
    torch.set_num_threads(1)
    before, rows = load(), []
    for num_members in (2, 4):
        for name, codec in CODECS.items():
            rows.append(_row(num_members, NUM, name, codec))
    few = (2, 4, 8, 16)  # hardly anything but messages
    rows.extend(_row(num_members, 4096 * num_members, "int8", CODECS["int8"]) for num_members in few)
    worst = max(abs(float(str(row[-1]).rstrip("%"))) for row in rows[: 2 * len(CODECS)])
    sections = [
        load_line(before),
        f"{ROUNDS} rounds each, after one that opens the streams. The first {2 * len(CODECS)} rows average {NUM:,} "
        "numbers; the others one block per part, so that the messages themselves are compared.",
        table(
            (
                "members",
                "numbers",
                "codec",
                "sent a round",
                "received a round",
                "closed form",
                "measured / closed form",
            ),
            rows,
        ),
        f"Largest difference with payload: {worst:.2f} %. Aim: 3 %.",
    ]
    write("bytes", "Bytes per round against the closed forms", "python -m benchmarks.bytes", sections)


def _row(num_members: int, num: int, name: str, codec: CodecConfig) -> tuple[object, ...]:
    sent, received, round_s = asyncio.run(measure(num_members, num, codec))
    said = expected(num_members, num, build(codec), round_s)
    return num_members, num, name, round(sent), round(received), round(said), f"{100 * (sent / said - 1):+.2f}%"


if __name__ == "__main__":
    main()
