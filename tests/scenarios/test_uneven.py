"""One of five machines is ten times slower, in computing or in sending: the files of recipes/scenarios, played."""

from itertools import pairwise
from pathlib import Path
from statistics import median

import msgspec
import pytest

from scenarios.swarm import write_corpus
from scenarios.theatre import Theatre
from weft.config import load
from weft.data import CorpusConfig, TextSource
from weft.events import RoundCommitted
from weft.peer.config import RunFile
from weft.sim.scenario import Scenario

RECIPES = Path(__file__).parents[2] / "recipes"
NUM_ROUNDS = 14
NUM_FIRST = 4  # have measured nothing yet


def rounds_s(scenario: Scenario, tmp_path: Path) -> tuple[list[float], dict[str, int]]:
    """Return how long each round took the first machine, and what of each machine was counted."""
    run_file = load(RECIPES / "nano.toml", RunFile)
    lease = run_file.method.every * run_file.train.batch_size * run_file.train.seq_len  # type: ignore[union-attr]
    num_machines = len(list(scenario.machines()))
    train = msgspec.structs.replace(
        run_file.train, tokens=NUM_ROUNDS * num_machines * lease, evaluate_every=0, evaluate_windows=1
    )
    corpus = CorpusConfig(source=TextSource(paths=(str(write_corpus(tmp_path)),)))
    theatre = Theatre(msgspec.structs.replace(run_file, train=train, data=corpus), tmp_path)
    first, *more = scenario.kind
    fields = msgspec.structs.asdict(first)
    played = theatre(
        **{key: value for key, value in fields.items() if key != "name"},
        more=tuple(more),
        scenario={"compute": scenario.compute},
    )
    theatre.check(played)
    at = [at for at, _ in theatre.heard(RoundCommitted, played.machines[0])][NUM_FIRST:]
    return [after - before for before, after in pairwise(at)], {
        machine.name: machine.counted for machine in played.machines
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", ["slow_computer", "slow_uplink"])
def test_who_is_ten_times_slower_makes_a_round_at_most_a_third_longer(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weft.peer.evaluation.SAMPLE_TOKENS", 1)
    scenario = load(RECIPES / "scenarios" / f"{name}.toml", Scenario)
    alone, _ = rounds_s(msgspec.structs.replace(scenario, kind=scenario.kind[:1]), tmp_path)
    together, counted = rounds_s(scenario, tmp_path)
    print(name, median(alone), max(together), counted)  # noqa: T201  # shown where it fails
    assert max(together) <= 1.3 * median(alone)
    share = counted["odd"] / counted["lab-0"]
    assert (0.07 < share < 0.15) if name == "slow_computer" else 0.1 < share <= 1.1
