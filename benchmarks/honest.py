"""Honest members on other processors, some of which are killed, stopped, slow or late: whether anybody ever
says that what they did is something else. Writes reports/honest.md.

    python -m benchmarks.honest --into FILE             # four hours of one core; goes on from where it was stopped
    python -m benchmarks.honest --into FILE --report    # writes the report of what is there

Whole runs on the simulator, in which every second work is audited, and newcomers' more often. Each machine makes its
training steps in a process of some kind (`rig.elsewhere`): with AVX-512, AVX2 or SSE4.1, one thread or two. So a step
is made by one kind of processor, and made again by others. One machine comes later and is in quarantine first. By
chance machines are killed and come back, are stopped and started again from their checkpoints, compute at a fifth of
their speed, send so slowly that payloads are late, or lose payloads.

    python    trains on source of Python's own library
    digits    on squares of numbers, of which it has soon learnt what there is: gradients of the last layer's keys then
              lie near what rounding makes of them, and AdamW divides by how long they are
"""

import argparse
import json
import os
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from sysconfig import get_path
from typing import Any, Literal
from unittest.mock import patch

from torch import Tensor

from benchmarks.report import FOLDER, table, whole
from benchmarks.rig.elsewhere import KINDS, Elsewhere, Machine, machines
from weft import rng
from weft.clock import Clock
from weft.codec.config import Int8Config
from weft.data.corpus import CorpusConfig, TextSource
from weft.events import (
    AuditorDoubted,
    Event,
    LieProven,
    MergeAudited,
    MergeDoubted,
    RoundCommitted,
    WorkAudited,
    WorkDoubted,
)
from weft.log import read_jsonl
from weft.peer.audit import auditor, steps
from weft.peer.audit.checks import Audit
from weft.peer.audit.outcome import Found as Outcome
from weft.run.config import RunFile, ShapedModel, TrainConfig
from weft.run.trust import AuditedTrust
from weft.sim.play import Played, play
from weft.sim.scenario import Drop, Fault, Kill, Kind, Line, Scenario, Slow, Stop
from weft.sync.method.presets import DiLoCoConfig
from weft.sync.method.schedule import ConstantConfig

Numerics = Literal["exact", "fp32"]
Text = Literal["python", "digits"]
WHAT: tuple[tuple[Numerics, Text], ...] = (("exact", "python"), ("fp32", "python"), ("fp32", "digits"))
LIBRARY = ("json", "logging")  # packages of Python's own
NUM_MACHINES = 5  # of the kinds that there are: by chance which
NUM_SEEDS, NUM_ROUNDS, NUM_FAULTS, RATE = 200, 50, 8, 0.5
MOST_SEEDS: dict[Text, int] = {"python": NUM_SEEDS, "digits": 20}
EVERY, BATCH, SEQ = 2, 2, 16
LEASE = EVERY * BATCH * SEQ
ROUND_S = 10.0  # of training, virtual
AIM = 0.1  # of what is held for honest, in fp32
WRITE_S = 300.0  # between two reports


@dataclass(frozen=True, kw_only=True)
class Found:
    """What came of one run.

    Args:
        differs: verdicts on work or parts, or of auditors, that somebody's word is false.
        unanswered: audits that got no answer in time.
        struck_out: members; removed: that did not answer for too long.
        farthest: distance of two states that an audit compared, of parameters or moments.
        share: how near that came to what is held for honest, at most: 1 is as far as may be. Where parameters lie
            farther apart and follow their own moments, how near those came.
        num_lives: processes, of all machines.
        missing: works that rounds could count and did not.
        cpu_s: of all processes.
    """

    numerics: Numerics
    text: Text
    seed: int
    num_rounds: int
    num_audits: int
    num_unequal: int
    differs: int
    unanswered: int
    struck_out: int
    removed: int
    farthest: float
    num_lives: int
    missing: int
    cpu_s: float
    share: float = 0.0


class Farthest:
    """How far apart states lie that audits have compared."""

    def __init__(self) -> None:
        self.most, self.share, self.num = 0.0, 0.0, 0

    @contextmanager
    def watched(self) -> Iterator[None]:
        measured = steps.distance

        def distance(before: Tensor, mine: Tensor, theirs: Tensor) -> float:
            found = measured(before, mine, theirs)
            self.most, self.num = max(self.most, found), self.num + 1
            return found

        compared = auditor.Auditor._compared

        async def judged(of: auditor.Auditor, audit: Audit, shown: Any) -> Outcome:
            found = await compared(of, audit, shown)
            self.share = max(self.share, 0.0 if found.apart is None else found.apart.share)
            return found

        with patch.object(auditor, "distance", distance), patch.object(auditor.Auditor, "_compared", judged):
            yield


def scenario_of(seed: int, num_rounds: int) -> Scenario:
    """Return machines of all kinds, one of which comes later, and what befalls them by chance."""
    luck, speed = rng.stream(seed, "honest"), LEASE / ROUND_S
    names = [f"peer-{number}" for number in range(NUM_MACHINES)]
    kinds = tuple(
        Kind(name=name, tokens_per_s=speed, joins_at_s=0.0 if name != names[-1] else 60.0 + 100.0 * luck.random())
        for name in names
    )
    faults = []
    for _ in range(NUM_FAULTS):
        peer, at_s = names[int(luck.integers(len(names)))], ROUND_S * (4 + (num_rounds - 10) * float(luck.random()))
        lasts_s = ROUND_S * float(1 + 5 * luck.random())
        befalls: tuple[Fault, ...] = (
            Kill(peer=peer, at_s=at_s, returns_after_s=lasts_s / 4),
            Kill(peer=peer, at_s=at_s, returns_after_s=2 * lasts_s),
            Stop(peer=peer, at_s=at_s, returns_after_s=lasts_s),
            Slow(peer=peer, at_s=at_s, factor=0.2, lasts_s=3 * lasts_s),
            Line(peer=peer, at_s=at_s, up_mbit=0.02, lasts_s=3 * lasts_s),
            Drop(peer=peer, at_s=at_s, share=0.5, lasts_s=3 * lasts_s),
        )
        faults.append(befalls[int(luck.integers(len(befalls)))])
    return Scenario(run="", kind=kinds, fault=tuple(faults), seed=seed, limit_s=50 * num_rounds * ROUND_S)


def run_file_of(numerics: Numerics, text: Text, seed: int, num_rounds: int) -> RunFile:
    library = Path(get_path("stdlib"))
    of_python = tuple(str(library / each / "*.py") for each in LIBRARY)
    return RunFile(
        name="honest",
        seed=seed,
        peers=NUM_MACHINES,
        model=ShapedModel(num_layers=2, num_heads=4, num_kv_heads=2, width=32, ffn_width=48),
        data=CorpusConfig(source=TextSource(paths=of_python if text == "python" else ("digits.txt",))),
        train=TrainConfig(
            seq_len=SEQ,
            batch_size=BATCH,
            tokens=num_rounds * NUM_MACHINES * LEASE,
            schedule=ConstantConfig(lr=3e-3),
            evaluate_every=0,
        ),
        method=DiLoCoConfig(every=EVERY, codec=Int8Config()),
        trust=AuditedTrust(audit_rate=RATE, numerics=numerics),
    )


def run(
    what: tuple[Numerics, Text], seed: int, elsewhere: Mapping[str, Machine], num_rounds: int = NUM_ROUNDS
) -> Found:
    """Play one run of so many rounds, if all are counted in each."""
    began, of_clocks, farthest = _spent_s(elsewhere), dict[Clock, Machine](), Farthest()
    kinds = [elsewhere[name] for name in rng.stream(seed, "kinds").permutation(sorted(elsewhere))]

    def make(*given: Any) -> Elsewhere:
        clock: Clock = given[4]  # a machine's own, in all its lives
        of_clocks.setdefault(clock, kinds[len(of_clocks)])
        return Elsewhere(of_clocks[clock], *given)

    with tempfile.TemporaryDirectory() as name, farthest.watched():
        folder = Path(name)
        (folder / "digits.txt").write_text(" ".join(str(number * number) for number in range(8000)), "utf-8")
        with (folder / "log.jsonl").open("wb") as log:
            scenario, run_file = scenario_of(seed, num_rounds), run_file_of(*what, seed, num_rounds)
            played = play(scenario, run_file, folder, folder / "home", log.write, make_trainer=make)
        events = [entry.event for entry in read_jsonl(folder / "log.jsonl")]
    if played.broken:
        raise RuntimeError(f"{what}, seed {seed}: {played.broken}")
    return _found(what, seed, played, events, farthest, _spent_s(elsewhere) - began)


def _spent_s(elsewhere: Mapping[str, Machine]) -> float:
    """Return the CPU time of this process and of those that make its steps."""
    return time.process_time() + sum(each.cpu_s for each in elsewhere.values())


def _found(
    what: tuple[Numerics, Text], seed: int, played: Played, events: list[Event], farthest: Farthest, cpu_s: float
) -> Found:
    doubts = [each for each in events if isinstance(each, WorkDoubted | MergeDoubted)]
    false = [each for each in events if isinstance(each, AuditorDoubted) and each.outcome == "false"]
    lies = [each for each in events if isinstance(each, LieProven)]
    outcomes = Counter(each.outcome for each in doubts)
    counted = {each.round: len(each.contributors) for each in events if isinstance(each, RoundCommitted)}
    return Found(
        numerics=what[0],
        text=what[1],
        seed=seed,
        num_rounds=played.num_rounds,
        num_audits=sum(isinstance(each, WorkAudited | MergeAudited) for each in events),
        num_unequal=farthest.num,
        differs=outcomes["differs"] + len(false) + len(lies),
        unanswered=outcomes["unanswered"],
        struck_out=sum(each.struck_out is not None for each in played.machines),
        removed=sum("it did not show auditors" in each.end for each in played.machines),
        farthest=farthest.most,
        share=farthest.share,
        num_lives=sum(each.num_lives for each in played.machines),
        missing=sum(max(0, NUM_MACHINES - 1 - num) for num in counted.values()),
        cpu_s=round(cpu_s, 1),
    )


# --- what is there already ---


def known(path: Path) -> list[Found]:
    """Return the runs that a file has; a last line that was cut short is none."""
    lines = path.read_text("utf-8").split("\n")[:-1] if path.exists() else []
    return [Found(**json.loads(line)) for line in lines]


def keep(path: Path, found: Found) -> None:
    text = path.read_text("utf-8") if path.exists() else ""
    with path.open("a", encoding="utf-8") as file:
        if text and not text.endswith("\n"):
            file.write("\n")
        file.write(json.dumps(asdict(found)) + "\n")
        file.flush()
        os.fsync(file.fileno())


def report(all_found: list[Found]) -> bool:
    """Write the report of what is there; return whether nobody honest was found false, and all is as near as it is to
    be."""
    rows, is_well = list[list[object]](), True
    for numerics, text in WHAT:
        some = [each for each in all_found if (each.numerics, each.text) == (numerics, text)]
        if not some:
            continue
        most, share = max(each.farthest for each in some), max(each.share for each in some)
        is_well = is_well and not any(each.differs or each.struck_out for each in some) and share < AIM
        rows.append(
            [
                f"{numerics}, {text}",
                len(some),
                sum(each.num_rounds for each in some),
                sum(each.num_lives for each in some),
                sum(each.missing for each in some),
                sum(each.num_audits for each in some),
                sum(each.num_unequal for each in some),
                sum(each.differs for each in some),
                sum(each.struck_out for each in some),
                f"{most:.2g}",
                f"{share:.3f}" if numerics == "fp32" else "",
                sum(each.unanswered for each in some),
                sum(each.removed for each in some),
                f"{sum(each.cpu_s for each in some):,.0f}",
            ]
        )
    header = ["numbers", "runs", "rounds", "processes", "works that rounds lack", "audits", "states not equal"]
    header += [
        "found false",
        "struck out",
        "farthest",
        "of what is held",
        "no answer in time",
        "removed for that",
        "CPU s",
    ]
    sections = [
        (__doc__ or "").split("\n\n", 1)[1].strip(),
        f"{NUM_MACHINES} machines of these kinds: {', '.join(KINDS)}. {NUM_ROUNDS} rounds of {EVERY} steps, "
        f"{NUM_FAULTS} faults in each run. Payloads, merging and outer steps of all are computed in one process.",
        table(header, rows),
        f"Aim: nobody found false, and in fp32 nothing nearer to what is held than {AIM:g} of it: "
        + ("met." if is_well else "**missed**."),
    ]
    command = "python -m benchmarks.honest --into FILE"
    page = whole("Honest members on other processors", command, sections)
    (FOLDER / "honest.md").write_text(page, encoding="utf-8")
    return is_well


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--into", type=Path, required=True, help="where runs are kept, one a line")
    parser.add_argument("--seeds", type=int, default=NUM_SEEDS, help="runs of each row")
    parser.add_argument("--report", action="store_true", help="play nothing, and write the report")
    options = parser.parse_args()
    all_found = known(options.into)
    done = {((each.numerics, each.text), each.seed) for each in all_found}
    jobs = [(what, seed) for seed in range(options.seeds) for what in WHAT if seed < MOST_SEEDS[what[1]]]
    if not options.report:
        told_at = time.monotonic()
        with machines() as elsewhere:
            for what, seed in jobs:
                if (what, seed) in done:
                    continue
                all_found.append(run(what, seed, elsewhere))
                keep(options.into, all_found[-1])
                print(all_found[-1], flush=True)
                if time.monotonic() - told_at > WRITE_S:
                    report(all_found)
                    told_at = time.monotonic()
    return 0 if report(all_found) else 1


if __name__ == "__main__":
    raise SystemExit(main())
