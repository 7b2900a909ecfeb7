"""What members that audit each other take of training: tokens a second and bytes a round beside a run in which they do
not.

    python -m benchmarks.audits --text FILE                 # 25 minutes; wants an idle machine
    python -m benchmarks.audits --text FILE --every 20 --rounds 4     # sooner

Three processes train over TLS on loopback, one thread each, on fewer cores than that: what one of them does for audits
is taken from all. So CPU time a token says the same as tokens a second, and other programs change it less. The same run
with `trust` as usual, and audited with each contribution looked at by both other members (`audit_rate = 1`, four times
as often in the first ten rounds, which are measured) and by hardly any. What audits cost is the difference of the
latter two; of fewer audits, their share of it. At the default rate a contribution expects 0.4 audits in the first ten
rounds, and 0.1 later. `weft plan --line loopback` forecasts
the same share for such a run file (`weft.cost.audits`).
"""

import argparse
import tempfile
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import NamedTuple

from benchmarks.report import load, load_line, table, write
from benchmarks.together import MACHINE, Process, crew
from weft.cost.audits import most_audits
from weft.events import RoundCommitted, WorkAudited, WorkDoubted
from weft.verify.suspicion import NEW, TIMES

NUM, WARM_ROUNDS = 3, 2
RATE, AIM = 0.1, 0.95  # the default rate; of the speed without audits
AIM_NBYTES = 1.65  # times the bytes without
SEQ, BATCH = 128, 16
RUN = """
name = "audits"
peers = 3
model = {{type = "shape", num_layers = 6, num_heads = 6, width = {width}, ffn_width = {ffn}}}
data = {{source = {{type = "text", paths = ["text.txt"]}}}}
train = {{seq_len = {seq}, batch_size = {batch}, tokens = 400_000_000, schedule = {{type = "constant", lr = 1e-4}}, \
evaluate_every = 0}}
method = {{type = "diloco", every = {every}, codec = {{type = "int8"}}}}
{trust}
"""
TRUSTS = {
    "members": "",
    "audited, rate 0.001": 'trust = {type = "audited", audit_rate = 0.001}',
    "audited, rate 1": 'trust = {type = "audited", audit_rate = 1.0}',
}


class Found(NamedTuple):
    """
    Args:
        rates: tokens a second that were counted, round by round.
        cpu_s: CPU-seconds of all processes for a million of those.
        num_audits: of training steps.
        sent_nbytes: by a peer in a round, in the mean.
    """

    rates: list[float]
    cpu_s: float
    num_audits: int
    sent_nbytes: float


def measured(trust: str, options: argparse.Namespace) -> Found:
    """Return what a run with these lines comes to."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        path = Path(folder)
        (path / "text.txt").write_text(options.text.read_text("utf-8"), "utf-8")
        sizes = {"width": options.width, "ffn": 8 * options.width // 3 // 8 * 8, "seq": SEQ, "batch": BATCH}
        (path / "run.toml").write_text(RUN.format(every=options.every, trust=trust, **sizes))
        peers, _ticket = crew(stack, path, NUM, [*MACHINE])
        first = peers[0]
        first.until(lambda: len(_rounds(first)) >= WARM_ROUNDS, within_s=3600)
        began, before_s = len(_rounds(first)), sum(peer.cpu_s() for peer in peers)
        first.until(lambda: len(_rounds(first)) >= began + options.rounds, within_s=3600)
        rounds, used_s = _rounds(first), sum(peer.cpu_s() for peer in peers) - before_s
        events = [entry.event for peer in peers for entry in peer.entries()]
    if any(isinstance(event, WorkDoubted) for event in events):
        raise RuntimeError("honest work was doubted")
    rates = [tokens / (at - before) for (before, _), (at, tokens) in pairwise(rounds[began - 1 :])]
    counted = sum(tokens for _, tokens in rounds[began:])
    sent = [event.sent_nbytes for event in events if isinstance(event, RoundCommitted) and event.round > 1]
    return Found(rates, 1e6 * used_s / counted, sum(isinstance(event, WorkAudited) for event in events), mean(sent))


def _rounds(first: Process) -> list[tuple[float, int]]:
    return [(entry.at, entry.event.tokens) for entry in first.entries() if isinstance(entry.event, RoundCommitted)]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--text", type=Path, required=True, help="that is trained on")
    parser.add_argument("--every", type=int, default=100, help="training steps of a round")
    parser.add_argument("--rounds", type=int, default=5, help="that are measured, of each run")
    parser.add_argument("--width", type=int, default=384, help="of the model: 384 is 10M parameters, 192 2.7M")
    options, before = parser.parse_args(), load()
    if options.rounds + WARM_ROUNDS > NEW:
        parser.error(
            f"--rounds: only the first {NEW} rounds are audited by all, so measure {NEW - WARM_ROUNDS} at most"
        )
    found = {name: measured(trust, options) for name, trust in TRUSTS.items()}
    speeds = {name: median(each.rates) for name, each in found.items()}
    plain, few, all_of_them = speeds.values()
    cpu, cpu_few, cpu_all = (each.cpu_s for each in found.values())
    sent, sent_few, sent_all = (each.sent_nbytes for each in found.values())
    rows = [
        [
            *(name, speeds[name], speeds[name] / plain, each.cpu_s, each.cpu_s / cpu),
            *(each.sent_nbytes / 1e6, each.sent_nbytes / sent, each.num_audits),
        ]
        for name, each in found.items()
    ]
    speed, nbytes = 0.0, 0.0
    for when, times in (("first ten rounds", TIMES), ("later", 1.0)):
        share = most_audits(RATE, times, NUM) / most_audits(1.0, TIMES, NUM)
        speed = 1 / (1 / few + share * (1 / all_of_them - 1 / few))
        cpu_s, nbytes = cpu_few + share * (cpu_all - cpu_few), sent_few + share * (sent_all - sent_few)
        row = [
            f"rate {RATE:g}, {when}, from these",
            speed,
            speed / plain,
            cpu_s,
            cpu_s / cpu,
            nbytes / 1e6,
            nbytes / sent,
        ]
        rows.append([*row, ""])
    verdict = "met" if speed >= AIM * plain else "**missed**"
    of_bytes = "met" if nbytes <= AIM_NBYTES * sent else "**missed**"
    text = f"{options.every} training steps a round. {load_line(before)}"
    header = [
        "trust",
        "tokens/s",
        "of the speed without",
        "CPU s a million tokens",
        "times those without",
        "MB a peer and round",
        "times those without",
    ]
    header += ["steps that were audited"]
    aim = (
        f"Aims at the default rate, later: {AIM:g} of the speed without: {verdict}; at most {AIM_NBYTES:g} times the "
        f"bytes: {of_bytes}."
    )
    write(
        "audits",
        "What audits take of training",
        "python -m benchmarks.audits --text FILE",
        [text, table(header, rows), aim],
        [],
    )


if __name__ == "__main__":
    main()
