"""How soon the others know that a member died, and what membership costs meanwhile: 8 to 1,000 members.

    python -m benchmarks.detection           # all sizes; `python -m benchmarks.detection 8 100` those

Production `Node` and `Membership` objects over the memory transport, on a virtual clock, without training. Up to 32
members everybody hears everybody's heartbeats; above, each keeps about twelve links and pings one of them each second.
A member is killed (its streams are reset, as when a process dies) or vanishes (nothing is reset, nothing answers, as
when a machine loses power). Time is measured for each survivor, from the death until its own view says "gone".
"""

import asyncio
import gc
import sys
import time
from dataclasses import dataclass, field

from benchmarks.report import load, load_line, table, write
from benchmarks.rig.seats import Hall, Seat
from weft.events import Event, MemberGone
from weft.ids import PeerId
from weft.net.transport.memory import MemoryNetwork

SIZES = (8, 32, 100, 1000)
DELAY_S, JITTER_S, LOSS = 0.05, 0.1, 0.01
FILL_S = 20.0
SETTLE_S = 50.0  # until the links of newcomers have been closed that nobody needs
QUIET_S = 30.0  # in which bytes are counted
TRIAL_S = 25.0


@dataclass
class Figures:
    num: int
    wall_s: float = 0.0
    filled_nbytes: float = 0.0  # sent by each until all knew all
    bytes_per_s: float = 0.0  # sent by each
    mean_links: float = 0.0
    most_links: int = 0
    peer_hours: float = 0.0
    false_removals: int = 0
    times: dict[str, list[float]] = field(default_factory=lambda: {"killed": [], "vanished": []})
    num_missed: int = 0


def play(num: int) -> Figures:
    """Seat `num` members, count bytes while nothing happens, then let some die one after another."""
    began = time.perf_counter()
    hall, figures = Hall(MemoryNetwork(delay_s=DELAY_S, jitter_s=JITTER_S, loss=LOSS)), Figures(num)
    gone: list[tuple[float, Seat, PeerId]] = []

    def note(seat: Seat, event: Event) -> None:
        if isinstance(event, MemberGone):
            gone.append((hall.clock.now(), seat, event.member))

    async def scenario() -> None:
        await hall.fill(num, num / FILL_S)
        print(f"{num} members have come after {time.perf_counter() - began:.0f} s", flush=True)
        await asyncio.sleep(SETTLE_S)
        if any(len(seat.membership.alive()) != num - 1 for seat in hall.seats):
            raise RuntimeError("somebody does not know everybody")
        before = sum(seat.sent_nbytes() for seat in hall.seats)
        figures.filled_nbytes = before / num
        await asyncio.sleep(QUIET_S)
        figures.bytes_per_s = (sum(seat.sent_nbytes() for seat in hall.seats) - before) / num / QUIET_S
        links = [len(seat.node.peers) for seat in hall.seats]
        figures.mean_links, figures.most_links = sum(links) / num, max(links)
        num_trials = 2 if num in (8, 1000) else 4  # the least for 8 to stay a swarm, and for 1,000 to end soon
        for trial in range(num_trials):
            for how in ("killed", "vanished"):
                await asyncio.sleep(0.37 * trial)  # another moment between two pings
                victim = hall.living[(trial * 7919 + 3) % len(hall.living)]
                at, survivors = hall.clock.now(), len(hall.living) - 1
                victim.kill() if how == "killed" else victim.vanish()
                await asyncio.sleep(TRIAL_S)
                times = [when - at for when, seat, member in gone if member == victim.id and when >= at]
                figures.times[how] += times
                figures.num_missed += survivors - len(times)
        dead = {seat.id for seat in hall.seats if seat.is_dead}
        figures.false_removals = sum(member not in dead for _, _, member in gone)
        figures.peer_hours = hall.clock.now() * num / 3600

    hall.on_event = note
    hall.run(scenario)
    figures.wall_s = time.perf_counter() - began
    return figures


def _percentile(values: list[float], share: float) -> str:
    ordered = sorted(values)
    return f"{ordered[min(len(ordered) - 1, int(share * len(ordered)))]:.2f}" if ordered else "-"


def main() -> None:
    sizes = [int(word) for word in sys.argv[1:]] or list(SIZES)
    gc.set_threshold(200_000, 20, 50)  # a thousand peers are ten million objects, and nearly none of them in a cycle
    before, rows, costs, played = load(), [], [], []
    for num in sizes:
        figures = play(num)
        played.append(figures)
        for how, times in figures.times.items():
            rows.append((num, how, len(times), *(_percentile(times, share) for share in (0.5, 0.99, 1.0))))
        costs.append(
            (
                num,
                f"{figures.mean_links:.1f}",
                figures.most_links,
                f"{figures.bytes_per_s:.0f}",
                f"{figures.filled_nbytes / 1000:.0f}",
                f"{figures.peer_hours:.1f}",
                figures.false_removals,
                figures.num_missed,
                f"{figures.wall_s:.0f}",
            )
        )
        print(rows[-2:], costs[-1], flush=True)
    bounded = [figures.bytes_per_s for figures in played if figures.num > 32]
    sections = [
        load_line(before),
        f"Links of {1000 * DELAY_S:g} ms one way, jitter of up to {1000 * JITTER_S:g} ms, {100 * LOSS:g} % of packets "
        "lost and sent again. Sizes count the members before the first death.",
        "Seconds from the death until a survivor's view says gone, over all survivors and trials:",
        table(("members", "how", "views", "p50", "p99", "most"), rows),
        "What it costs: bytes that each peer sends, in frames, without the transport's own overhead; a heartbeat's "
        f"figures for people are in them. The first {FILL_S + SETTLE_S:g} s, in which all come, are a column of their "
        "own. Removals are false where a living member was declared gone, and missed where a dead one was not.",
        table(
            (
                "members",
                "links, mean",
                "most",
                "B/s sent by each",
                "kB sent by each while all come",
                "peer-hours",
                "false removals",
                "missed",
                "wall s of the simulation",
            ),
            costs,
        ),
    ]
    if len(bounded) > 1:
        share = 100 * (max(bounded) / min(bounded) - 1)
        sections.append(f"Bytes a second, the largest of more than 32 members against the smallest: {share:+.0f} %.")
    write(
        "detection", "How soon a dead member is known, and what that costs", "python -m benchmarks.detection", sections
    )


if __name__ == "__main__":
    main()
