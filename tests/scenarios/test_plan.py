"""Plans against plays: what `weft plan` reckons of a scenario is what production peers take on the virtual clock."""

from pathlib import Path
from statistics import fmean
from typing import Literal

import msgspec
import pytest

from scenarios.swarm import write_corpus
from weft.cli.plan.question import machines_of
from weft.codec.config import Fp32Config
from weft.data.corpus import CorpusConfig, TextSource
from weft.data.tokenizer import ByteTokenizer
from weft.events import RoundCommitted
from weft.log import read_jsonl
from weft.plan import profiles
from weft.plan.forecast import Pace, pace_of
from weft.plan.question import Question, cluster_of
from weft.run.config import RunFile, ShapedModel, TrainConfig
from weft.run.genesis import resolve
from weft.sim.play import play
from weft.sim.scenario import Kind, Scenario
from weft.sync.method.presets import DdpConfig, DiLoCoConfig, FedAvgConfig, MethodConfig, spell_out
from weft.sync.method.schedule import ConstantConfig

TINY = ShapedModel(num_layers=1, num_heads=2, width=32, ffn_width=48)  # 17,024 parameters
SMALL = ShapedModel(num_layers=2, num_heads=4, width=96, ffn_width=256)  # some 250,000
SEQ_LEN, BATCH = 16, 2
SKIPPED = 3  # rounds: the first open streams and have measured no deadlines
SETTLED = 7  # rounds: before, leaves look for aggregators and bring what they were leased meanwhile
NEAR = 0.05


def run_file(root: Path, model: ShapedModel, method: MethodConfig, num_peers: int, **train: int) -> RunFile:
    num_rounds = 40 if model is TINY else 9  # many are cheap, and luck evens out
    tokens = num_rounds * num_peers * BATCH * SEQ_LEN * getattr(method, "every", 1)
    return RunFile(
        name="planned",
        peers=num_peers,
        model=model,
        data=CorpusConfig(source=TextSource(paths=(str(write_corpus(root)),))),
        train=TrainConfig(
            seq_len=SEQ_LEN,
            batch_size=BATCH,
            tokens=tokens,
            schedule=ConstantConfig(lr=1e-3),
            **({"evaluate_every": 0, "evaluate_windows": 4} | train),
        ),
        method=method,
    )


def in_groups(file: RunFile) -> RunFile:
    """Return the same run with an electorate of three, as long as it takes to see rounds that count all."""
    num_rounds = 10
    lease = BATCH * SEQ_LEN * getattr(file.method, "every", 1)
    train = msgspec.structs.replace(file.train, tokens=num_rounds * file.peers * lease)
    return msgspec.structs.replace(file, electors=3, has_even_leases=True, train=train)


def planned(file: RunFile, root: Path, kinds: tuple[Kind, ...]) -> Pace:
    model = resolve(file, ByteTokenizer(), root)
    return pace_of(
        Question(
            model=model,
            train=file.train,
            choices=spell_out(file.method, file.peers),
            machines=tuple(map(machines_of, kinds)),
            cluster=cluster_of(profiles.device("h100-sxm"), 8, model, file.train, 2.0),
            has_even_leases=True,
            price_per_kwh=0.2,
            idle_share=0.3,
            electors=file.electors,
        )
    )


def played(
    file: RunFile,
    root: Path,
    kinds: tuple[Kind, ...],
    skipped: int = SKIPPED,
    compute: Literal["real", "cost"] = "real",
) -> tuple[float, float]:
    """Return seconds per round, and bytes that a mean peer sends in one."""
    lines: list[bytes] = []
    scenario = Scenario(run="", kind=kinds, seed=3, limit_s=1e6, compute=compute)
    outcome = play(scenario, file, root, root / "home", lines.append)
    assert outcome.broken == ()
    (root / "log.jsonl").write_bytes(b"".join(lines))
    entries = [entry for entry in read_jsonl(root / "log.jsonl") if isinstance(entry.event, RoundCommitted)]
    last = outcome.num_rounds
    began, ended = (min(entry.at for entry in entries if entry.event.round == number) for number in (skipped, last))
    sent = [entry.event.sent_nbytes for entry in entries if entry.event.round > skipped]
    return (ended - began) / (last - skipped), fmean(sent)


HOME = {"up_mbit": 20.0, "down_mbit": 100.0, "delay_ms": 10.0}
CASES: dict[str, tuple[ShapedModel, MethodConfig, tuple[Kind, ...]]] = {
    "latency alone, fp32": (
        TINY,
        FedAvgConfig(every=2, codec=Fp32Config()),
        (Kind(name="lab", count=4, tokens_per_s=640.0),),
    ),
    "two peers": (TINY, FedAvgConfig(every=2), (Kind(name="pair", count=2, tokens_per_s=640.0),)),
    "homes, int8": (SMALL, DiLoCoConfig(every=4), (Kind(name="home", count=5, tokens_per_s=200.0, **HOME),)),
    "ddp in bf16 on narrow lines": (
        SMALL,
        DdpConfig(),
        (Kind(name="home", count=3, tokens_per_s=100.0, up_mbit=5.0, down_mbit=40.0, delay_ms=20.0),),
    ),
    "jitter and loss": (
        TINY,
        DiLoCoConfig(every=4),
        (Kind(name="air", count=4, tokens_per_s=128.0, up_mbit=2.0, delay_ms=15.0, jitter_ms=10.0, loss=0.003),),
    ),
    "a site and homes": (
        SMALL,
        DiLoCoConfig(every=4),
        (
            Kind(name="site", count=2, tokens_per_s=128.0, delay_ms=5.0, up_mbit=500.0, down_mbit=500.0),
            Kind(name="home", count=3, tokens_per_s=110.0, **HOME),
        ),
    ),
}


QUICK = ("two peers", "a site and homes")


@pytest.mark.full
@pytest.mark.parametrize(
    "case", [*QUICK, *(pytest.param(case, marks=pytest.mark.slow) for case in CASES if case not in QUICK)]
)
def test_a_plan_is_what_a_play_takes(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.peer.loop.evaluate.SAMPLE_TOKENS", 4)
    model, method, kinds = CASES[case]
    file = run_file(tmp_path, model, method, sum(kind.count for kind in kinds))
    pace = planned(file, tmp_path, kinds)
    round_s, sent_nbytes = played(file, tmp_path, kinds)
    assert pace.round.total_s == pytest.approx(round_s, rel=NEAR)
    assert pace.traffic.sent_nbytes == pytest.approx(sent_nbytes, rel=NEAR)


GROUPED: dict[str, tuple[ShapedModel, MethodConfig, tuple[Kind, ...]]] = {
    "narrow lines": (
        TINY,
        FedAvgConfig(every=2),
        (Kind(name="home", count=12, tokens_per_s=64.0, up_mbit=5.0, down_mbit=20.0),),
    ),
    "homes": (SMALL, DiLoCoConfig(every=4), (Kind(name="home", count=12, tokens_per_s=40.0, **HOME),)),
    "homes, fp32": (
        SMALL,
        DiLoCoConfig(every=4, codec=Fp32Config()),
        (Kind(name="home", count=12, tokens_per_s=40.0, **HOME),),
    ),
    "a site and homes": (
        SMALL,
        DiLoCoConfig(every=4),
        (
            Kind(name="site", count=4, tokens_per_s=48.0, delay_ms=5.0, up_mbit=500.0, down_mbit=500.0),
            Kind(name="home", count=8, tokens_per_s=40.0, **HOME),
        ),
    ),
}


@pytest.mark.full
@pytest.mark.parametrize(
    "case",
    ["narrow lines", *(pytest.param(case, marks=pytest.mark.slow) for case in GROUPED if case != "narrow lines")],
)
def test_a_plan_of_groups_is_what_a_play_takes(case: str, tmp_path: Path) -> None:
    model, method, kinds = GROUPED[case]
    file = in_groups(run_file(tmp_path, model, method, 12))
    pace = planned(file, tmp_path, kinds)
    assert pace.levels is not None
    assert pace.levels.elector.sent_nbytes > 2 * pace.levels.ward.sent_nbytes
    round_s, sent_nbytes = played(file, tmp_path, kinds, SETTLED, "cost")
    assert pace.round.total_s == pytest.approx(round_s, rel=NEAR)
    assert pace.traffic.sent_nbytes == pytest.approx(sent_nbytes, rel=NEAR)


@pytest.mark.full
def test_evaluation_is_waited_for_as_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.peer.loop.evaluate.SAMPLE_TOKENS", 4)
    kinds = (Kind(name="lab", count=4, tokens_per_s=64.0),)
    file = run_file(tmp_path, TINY, FedAvgConfig(every=2), 4, evaluate_every=3, evaluate_windows=8)
    pace = planned(file, tmp_path, kinds)
    assert pace.round.evaluate_s > 0.1 * pace.round.train_s
    assert pace.round.total_s == pytest.approx(played(file, tmp_path, kinds)[0], rel=NEAR)
