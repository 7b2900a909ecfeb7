"""What members that audit each other take of training: tokens a second beside a run in which they do not.

    python -m benchmarks.audits --text FILE                 # 25 minutes; wants an idle machine
    python -m benchmarks.audits --text FILE --every 20 --rounds 4     # sooner

Three processes train over TLS on loopback, one thread each, on fewer cores than that: what one of them does for audits
is taken from all. The same run with `trust` as usual, and audited with every contribution looked at (`audit_rate = 1`)
and hardly any. What an audit costs is the difference of the latter two; a rate between them costs its share of it.
`weft plan --line loopback` forecasts the same share for such a run file (`weft.cost.audits`).
"""

import argparse
import tempfile
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import NamedTuple

from benchmarks.report import load, load_line, table, write
from benchmarks.together import MACHINE, Process, crew
from weft.events import RoundCommitted, WorkAudited, WorkDoubted

NUM = 3
RATE, AIM = 0.1, 0.95  # the default rate; of the speed without audits
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
        num_audits: of training steps.
    """

    rates: list[float]
    num_audits: int


def measured(trust: str, options: argparse.Namespace) -> Found:
    """Return what a run with these lines comes to."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        path = Path(folder)
        (path / "text.txt").write_text(options.text.read_text("utf-8"), "utf-8")
        sizes = {"width": options.width, "ffn": 8 * options.width // 3 // 8 * 8, "seq": SEQ, "batch": BATCH}
        (path / "run.toml").write_text(RUN.format(every=options.every, trust=trust, **sizes))
        peers, _ticket = crew(stack, path, NUM, [*MACHINE])
        first = peers[0]
        first.until(lambda: len(_rounds(first)) > options.rounds + 1, within_s=3600)
        rounds = _rounds(first)[1:]  # the first has the start in it
        events = [entry.event for peer in peers for entry in peer.entries()]
    if any(isinstance(event, WorkDoubted) for event in events):
        raise RuntimeError("honest work was doubted")
    rates = [tokens / (at - before) for (before, _), (at, tokens) in pairwise(rounds)]
    return Found(rates, sum(isinstance(event, WorkAudited) for event in events))


def _rounds(first: Process) -> list[tuple[float, int]]:
    return [(entry.at, entry.event.tokens) for entry in first.entries() if isinstance(entry.event, RoundCommitted)]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--text", type=Path, required=True, help="that is trained on")
    parser.add_argument("--every", type=int, default=100, help="training steps of a round")
    parser.add_argument("--rounds", type=int, default=5, help="that are measured, of each run")
    parser.add_argument("--width", type=int, default=192, help="of the model")
    options, before = parser.parse_args(), load()
    found = {name: measured(trust, options) for name, trust in TRUSTS.items()}
    speeds = {name: median(each.rates) for name, each in found.items()}
    plain, few, all_of_them = speeds.values()
    at_default = 1 / (1 / few + RATE * (1 / all_of_them - 1 / few))
    rows = [[name, speeds[name], speeds[name] / plain, each.num_audits] for name, each in found.items()]
    rows.append([f"audited, rate {RATE:g}, from these", at_default, at_default / plain, ""])
    verdict = "met" if at_default >= AIM * plain else "**missed**"
    text = f"{options.every} training steps a round. {load_line(before)}"
    header = ["trust", "tokens/s", "of the speed without", "steps that were audited"]
    aim = f"Aim: {AIM:g} of the speed without, at the default rate: {verdict}."
    write(
        "audits",
        "What audits take of training",
        "python -m benchmarks.audits --text FILE",
        [text, table(header, rows), aim],
        [],
    )


if __name__ == "__main__":
    main()
