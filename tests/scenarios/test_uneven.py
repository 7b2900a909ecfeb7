"""One of five machines is ten times slower, in computing or in sending: the files of recipes/scenarios, played."""

from itertools import pairwise
from pathlib import Path
from statistics import median

import msgspec
import pytest

from scenarios.swarm import write_corpus
from scenarios.theatre import Theatre, names
from weft.config import load
from weft.data.corpus import CorpusConfig, TextSource
from weft.events import RoundCommitted
from weft.ids import PeerId
from weft.run.config import RunFile
from weft.sim.play import Machine, Played
from weft.sim.scenario import Scenario
from weft.sync.merge.method import Scope
from weft.sync.merge.reduce import parts_of
from weft.sync.records.messages import Manifest

RECIPES = Path(__file__).parents[2] / "recipes"
NUM_ROUNDS = 14
NUM = 1 << 20  # elements of a vector that is cut among owners
NUM_FIRST = 4  # rounds in which not all is measured yet


def played(scenario: Scenario, tmp_path: Path) -> tuple[list[float], Played]:
    """Return how long each round took the first machine, and how it went."""
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
    found = theatre(
        **{key: value for key, value in fields.items() if key != "name"},
        more=tuple(more),
        scenario={"compute": scenario.compute},
    )
    theatre.check(found)
    at = [at for at, _ in theatre.heard(RoundCommitted, found.machines[0])][NUM_FIRST:]
    return [after - before for before, after in pairwise(at)], found


@pytest.fixture(autouse=True)
def no_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.peer.loop.evaluate.SAMPLE_TOKENS", 1)


def with_the_odd(name: str, tmp_path: Path) -> tuple[Machine, Machine, list[Manifest]]:
    """Play a scenario without the odd machine and with it, and compare how long rounds take.

    Returns:
        one of the others, the odd one, and the manifests once all is measured.
    """
    scenario = load(RECIPES / "scenarios" / f"{name}.toml", Scenario)
    alone, _ = played(msgspec.structs.replace(scenario, kind=scenario.kind[:1]), tmp_path)
    together, found = played(scenario, tmp_path)
    assert max(together) <= 1.3 * median(alone)
    one, odd = names(found, "lab-0", "odd")
    manifests = {manifest.round: manifest for manifest in found.manifests}
    return one, odd, [manifest for number, manifest in sorted(manifests.items()) if number > NUM_FIRST]


def contributors(manifest: Manifest) -> set[PeerId]:
    return {each.peer for each in manifest.contributions}


@pytest.mark.slow
def test_who_computes_ten_times_slower_makes_no_round_much_longer_and_trains_a_tenth(tmp_path: Path) -> None:
    one, odd, _ = with_the_odd("slow_computer", tmp_path)
    assert 0.07 < odd.counted / one.counted < 0.15


@pytest.mark.slow
def test_who_sends_ten_times_slower_makes_no_round_much_longer_and_owns_nothing(tmp_path: Path) -> None:
    one, odd, manifests = with_the_odd("slow_uplink", tmp_path)
    for manifest in manifests:
        owned = parts_of(manifest, Scope(NUM))[manifest.members.index(odd.peer)]
        assert len(owned) == 0, f"round {manifest.round}: {len(owned)} elements, which it sends to all"
    assert all(one.peer in contributors(manifest) for manifest in manifests)
    is_in = [odd.peer in contributors(manifest) for manifest in manifests]
    assert 0.4 <= sum(is_in) / len(is_in) <= 0.6, is_in  # every other: its payload travels for nearly two rounds
