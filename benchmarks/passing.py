"""What passing a micro-batch on takes of a processor: messages, digests, encryption, sockets; computing apart.

    python -m benchmarks.passing        # two minutes

Three real processes, one in each of three stages, whose devices wait for 10 ms in place of computing. The stage in the
middle has two boundaries, the last one; the first has one and begins all micro-batches. The planner has its constants
from here. Where it can (root on Linux), the benchmark moves itself to a network namespace that has loopback only.
"""

import argparse
import tempfile
from statistics import median

from benchmarks._isolated import isolate
from benchmarks.report import load, load_line, table, write
from benchmarks.scheduling import crew_of

STAGES, PART_S, FOR_S = 3, 0.01, 12.0
SIZES = (20_000, 1 << 18, 1 << 20)
NAMES = ("first", "middle", "last")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--isolated", action="store_true", help=argparse.SUPPRESS)
    options, before = parser.parse_args(), load()
    if not options.isolated:
        isolate("benchmarks.passing")
    found: dict[int, list[list[float]]] = {nbytes: [] for nbytes in SIZES}
    for _ in range(options.times):
        for nbytes, each in found.items():
            each.append(_cpu_s(nbytes))
    usual = {size: [median(column) for column in zip(*each, strict=True)] for size, each in found.items()}
    small, large = usual[SIZES[0]], usual[SIZES[-1]]
    # The middle stage moves four times so many bytes: two boundaries, each way.
    per_byte = (large[1] - small[1]) / (4 * (SIZES[-1] - SIZES[0]))
    side = (small[1] - 4 * SIZES[0] * per_byte) / 2
    begin = small[0] - 2 * SIZES[0] * per_byte - side
    rows = [(f"{nbytes:,}", *(f"{1000 * each:.2f}" for each in usual[nbytes])) for nbytes in SIZES]
    write(
        "passing",
        "What passing micro-batches takes of a processor",
        "python -m benchmarks.passing",
        [
            f"CPU-milliseconds a micro-batch of each member, forward and back, by the bytes of its activations and of "
            f"their gradient; median of {options.times}. {load_line(before)}",
            table(("bytes", *NAMES), rows),
            f"So {1000 * side:.1f} ms for each boundary that a member has, {1000 * begin:.1f} ms for who begins it, "
            f"and {1e9 * per_byte:.1f} ns for each byte sent or received.",
        ],
    )


def _cpu_s(nbytes: int) -> list[float]:
    """Return the CPU-seconds that each member took for a micro-batch."""
    everybody = range(STAGES)
    with tempfile.TemporaryDirectory(prefix="weft-bench-") as folder, crew_of("weft", STAGES, folder) as crew:
        started = crew.ask([{"do": "start"}] * STAGES)
        addresses = {each["peer"]: each["addresses"] for each in started}
        stages = [[each["peer"]] for each in started]
        said = {"do": "meet", "addresses": addresses, "stages": stages, "part_s": PART_S, "nbytes": nbytes}
        crew.ask([{**said, "stage": stage} for stage in everybody])
        before = crew.each_cpu_s()
        told = crew.ask([{"do": "go", "for_s": FOR_S, "warm_s": 0.0}] * STAGES)
        used = zip(crew.each_cpu_s(), before, told, strict=True)
        return [(after - since) / each["counted"] for after, since, each in used]


if __name__ == "__main__":
    main()
