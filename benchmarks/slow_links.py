"""What training keeps of machines on slow lines, and how long it takes to a loss: weft against torch's DDP over gloo.

    python -m benchmarks.slow_links                     # everything, three quarters of an hour
    python -m benchmarks.slow_links 20 auto streaming   # some rates, some methods; what else was found before stays
    python -m benchmarks.slow_links report              # nothing, but the report anew

Real processes, each in a network namespace on a line of its own, which needs root. Four of them train 1.8 million
parameters on Python's own library on lines of 5, 20 and 100 Mbit/s. What was found is kept in reports/slow_links.json,
each run with the commit that it is of.
"""

import math
import os
import sys

import msgspec

from benchmarks import report
from benchmarks._slow_ddp import GROUP
from benchmarks._slow_runs import METHODS, Peer, Weft, ddp, weft

RATES = ("5", "20", "100")
PEERS = {"ddp": "fp32", "ddp-fp16": "fp16"}
ROWS = (*PEERS, *(name for name in METHODS if name != "alone"))
FAST, FAST_MBIT = "fast", 10_000.0  # a line that is not waited for: how many steps DDP needs, and how many fit
FAST_ROWS = ("ddp", "alone")
SECONDS = {"5": 150.0, "20": 150.0, "100": 150.0, FAST: 45.0}
DDP_S, FAST_S = 40.0, 120.0
LEAST_AUTO, MOST_DDP, MOST_WAITED = 0.9, 0.05, 0.05  # the aims, of a line of 20 Mbit/s

FIGURES = report.FOLDER / "slow_links.json"
ABOUT = """
Four processes on one machine, every one in a network namespace on a line of its own (`tc tbf`, both ways alike), and in
a control group with its share of the cores (0.4 where there are two), so that what one leaves unused makes no other
faster. They train 1.8 million parameters (4 layers, width 192) on Python's own library, byte by byte: 4 windows of 64 a
step, AdamW, a constant learning rate of 2e-3 after a short warm-up. `ddp` is torch's DistributedDataParallel over gloo
with the same model, weights, windows, optimizer and learning rate, `ddp-fp16` the same with torch's own hook that sends
gradients in half precision (that for bf16 refuses gloo). The others are `weft train` and `weft join`, with the defaults
of each method.
""".strip()
HOW = """
*keeps*: the share of the time that a member spends in inner steps, by the event log; it also encodes, merges, evaluates
and waits. Of `ddp`: what a step takes while all four make theirs without a word, by what it takes with communication.
*to the loss*: from the first inner step to the first evaluation at or below it. Members of weft evaluate after some
rounds, and pay for it; `ddp` does every 20 steps while the clock stands still. Where `ddp` did not come so far its time
is **reckoned** (~): the steps that it needs in fp32 on a line that nobody waits for, by the seconds of one step here.
""".strip()


NOTES = """
Where other programs were at work (*load*; the run before is in it, too) all steps are slower, and *to the loss* later:
*of alone* tells by how much, and rows of one rate are compared with each other, not with those of another. What shares
of the time lose by it is not known. `auto` changes nothing for its first three rounds, so a short run keeps less than a
long one. Other settings that were tried are in docs/log.md.
""".strip()


class Found(msgspec.Struct, frozen=True):
    """All that is known, for the report: by rate and row."""

    weft: dict[str, Weft] = {}
    peers: dict[str, Peer] = {}


def measure(found: Found, rate: str, row: str) -> Found:
    mbit = FAST_MBIT if rate == FAST else float(rate)
    key = f"{rate} {row}"
    print(f"--- {key}", file=sys.stderr, flush=True)
    if row in PEERS:
        peer = ddp(PEERS[row], mbit, FAST_S if rate == FAST else DDP_S)
        return msgspec.structs.replace(found, peers=found.peers | {key: peer})
    run = weft(row, mbit, SECONDS[rate])
    return msgspec.structs.replace(found, weft=found.weft | {key: run})


def target(found: Found) -> float | None:
    """Return the lowest loss, in steps of 0.05, that every run of weft has come to, and DDP where nobody waits."""
    lowest = [min(loss for _, loss in run.losses) for run in found.weft.values() if run.losses]
    lowest += [min(loss for _, loss in peer.found.losses) for key, peer in found.peers.items() if key.startswith(FAST)]
    return math.ceil(20 * max(lowest)) / 20 if lowest else None


def save(found: Found) -> None:
    FIGURES.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1))
    loss = target(found)
    sections = [ABOUT]
    if loss is not None:
        sections += [_whole(found, loss), HOW, _verdicts(found), _details(found), NOTES, _changes(found), _peers(found)]
    report.write("slow_links", "Slow links", "python -m benchmarks.slow_links", [each for each in sections if each])


def _whole(found: Found, loss: float) -> str:
    header = ("", *(f"{rate} Mbit/s: {what}" for rate in RATES for what in ("keeps", f"to {loss:.2f}")))
    rows = []
    for row in ROWS:
        cells: list[str] = []
        for rate in RATES:
            key = f"{rate} {row}"
            if key in found.weft:
                at_s = found.weft[key].seconds_to(loss)
                cells += [f"{found.weft[key].utilisation:.1%}", "not reached" if at_s is None else f"{at_s:.0f} s"]
            elif key in found.peers:
                cells += [f"{found.peers[key].found.utilisation:.1%}", _reckoned(found, key, loss)]
            else:
                cells += ["not measured", "not measured"]
        rows.append((row, *cells))
    return f"Held-out loss to reach: {loss:.2f} nats per byte.\n\n{report.table(header, rows)}"


def _reckoned(found: Found, key: str, loss: float) -> str:
    """Return how long DDP takes to the loss, from a run where nobody waits."""
    peer, fast = found.peers[key], found.peers.get(f"{FAST} ddp")
    num = peer.steps_to(loss)
    if num is not None:
        return f"{num * peer.found.step_s:.0f} s"
    num = None if fast is None else fast.steps_to(loss)
    return "not known" if num is None else f"~{num * peer.found.step_s:,.0f} s"


def _verdicts(found: Found) -> str:
    lines = []
    if (auto := found.weft.get("20 auto")) and (peer := found.peers.get("20 ddp")):
        lines.append(
            f"At 20 Mbit/s `auto` keeps {auto.utilisation:.1%} of the whole run and {auto.settled:.1%} after its last "
            f"change (aim: {LEAST_AUTO:.0%}, {_verdict(auto.utilisation >= LEAST_AUTO)}), DDP "
            f"{peer.found.utilisation:.1%} (under {MOST_DDP:.0%}: {_verdict(peer.found.utilisation < MOST_DDP)})."
        )
    lines += [
        f"At {rate} Mbit/s a member of `streaming` ended {run.num_in_flight:.0f} of {run.num_steps:.0f} inner steps "
        f"while a fragment was in flight, which was {run.in_flight:.1%} of the time. One was and no step was made "
        f"{run.waited:.1%} of the time (aim: under {MOST_WAITED:.0%}, {_verdict(run.waited < MOST_WAITED)})."
        for rate in RATES
        if (run := found.weft.get(f"{rate} streaming"))
    ]
    if alone := found.weft.get(f"{FAST} alone"):
        lines.append(
            f"Without a round, and so without a word but heartbeats, members spend {alone.utilisation:.1%} of the time "
            f"in inner steps, and make {alone.num_steps / alone.seconds:.2f} a second."
        )
    if fast := found.peers.get(f"{FAST} ddp"):
        lines.append(
            f"On a line that nobody waits for DDP keeps {fast.found.utilisation:.1%}: gloo's sums and copies take "
            "processor time, of which each has its share."
        )
    return "\n".join(f"- {line}" for line in lines)


def _verdict(is_met: bool) -> str:
    return "met" if is_met else "**missed**"


def _details(found: Found) -> str:
    header = ("", "seconds", "keeps", "settled", "steps", "of alone", "rounds", "MB sent", "waited", "last loss")
    alone = found.weft.get(f"{FAST} alone")
    rows = [
        (
            key,
            f"{run.seconds:.0f}",
            f"{run.utilisation:.1%}",
            f"{run.settled:.1%}",
            f"{run.num_steps:.0f}",
            f"{run.num_steps / run.seconds / (alone.num_steps / alone.seconds):.1%}" if alone else "not known",
            run.num_rounds,
            f"{run.sent_nbytes / 1e6:.1f}",
            f"{run.waited:.1%}",
            f"{run.losses[-1][1]:.3f}" if run.losses else "",
            "not known" if run.load is None else f"{run.load:.1f}",
            run.commit,
        )
        for key, run in found.weft.items()
    ]
    return (
        "Means of the members. *settled*: what it keeps after the last change of `auto`, or after the first round. "
        "*of alone*: inner steps a second by those of members that hold no rounds (`alone`). *waited*: share of time "
        "in which a payload was in flight and no inner step was made; who is done first waits for others' steps, too. "
        "*load*: processes that wanted a core in the minute before.\n\n"
        + report.table((*header, "load", "commit"), rows)
    )


def _changes(found: Found) -> str:
    lines = []
    for key, run in found.weft.items():
        rate = key.partition(" ")[0]
        lines += [
            f"- {rate} Mbit/s, after {each.at_s:.0f} s: from round {each.round} on every {each.every} inner steps in "
            f"{each.codec}: {each.reason}."
            for each in run.changes
        ]
    if not lines:
        return ""
    return "What `auto` changed, and its reasons (it begins with 30 inner steps and e3m0):\n\n" + "\n".join(lines)


def _peers(found: Found) -> str:
    if not found.peers:
        return ""
    header = ("", "a step", "without a word", "keeps", "steps", "last loss", "load", "commit")
    rows = [
        (
            key,
            f"{peer.found.step_s:.3f} s",
            f"{peer.found.alone_s:.3f} s",
            f"{peer.found.utilisation:.1%}",
            peer.found.num_steps,
            f"{peer.found.losses[-1][1]:.3f}" if peer.found.losses else "",
            "not known" if peer.load is None else f"{peer.load:.1f}",
            peer.commit,
        )
        for key, peer in found.peers.items()
    ]
    return f"DistributedDataParallel, {GROUP} processes:\n\n" + report.table(header, rows)


def main() -> None:
    words = sys.argv[1:]
    if unknown := set(words) - {*RATES, *ROWS, *FAST_ROWS, FAST, "report"}:
        raise SystemExit(
            f"unknown: {', '.join(sorted(unknown))}. There are: {', '.join((*RATES, FAST, *ROWS))}; report."
        )
    if "report" not in words and os.geteuid() != 0:
        print("skipped: network namespaces need root")
        return
    found = msgspec.json.decode(FIGURES.read_bytes(), type=Found) if FIGURES.exists() else Found()
    rates = [each for each in (*RATES, FAST) if each in words] or [FAST, *RATES]
    rows = [each for each in (*ROWS, "alone") if each in words] or [*ROWS, "alone"]
    save(found)
    for rate in [] if "report" in words else rates:
        for row in rows:
            if row in (FAST_ROWS if rate == FAST else ROWS):
                found = measure(found, rate, row)
                save(found)


if __name__ == "__main__":
    main()
