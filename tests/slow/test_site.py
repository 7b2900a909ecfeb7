"""A site of real processes beside a peer of one: the same bits, also once a rank is lost; little memory on rank 0."""

import json
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from slow.shell import COMMIT_S, LOCAL, START_S, Shell
from weft.events import CheckpointSaved, Entry, PeerStopped, RoundCommitted, StateJoined
from weft.model.config import ModelConfig
from weft.model.flat import layout
from weft.ranks.strips import strips

pytestmark = pytest.mark.slow

LIMITED = "OMP_NUM_THREADS"
KEPT = 7  # vectors of `Memory`: parameters, gradient, two moments, outer parameters, momentum, what was merged


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LIMITED, "1")


def rank_0(shell: Shell) -> psutil.Process:
    """Return the first process of a site, once torchrun has started it."""
    deadline = time.monotonic() + START_S
    assert shell.process is not None
    while time.monotonic() < deadline:
        for child in psutil.Process(shell.process.pid).children(recursive=True):
            if child.environ().get("RANK") == "0":
                return child
        time.sleep(0.05)
    raise AssertionError(shell.said.read_text())


def counts(*names: str) -> Callable[[Entry], bool]:
    return lambda entry: isinstance(entry.event, RoundCommitted) and len(entry.event.contributors) == len(names)


def ended(shell: Shell, report: Path) -> dict[str, object]:
    """Return a peer's report, once it has ended well."""
    assert shell.process is not None
    assert shell.process.wait(COMMIT_S) == 0, shell.said.read_text()
    found: dict[str, object] = json.loads(report.read_text())
    return found


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("is_maker", [True, False])
def test_a_site_and_a_peer_of_one_process_have_one_replica(
    ranks: int, is_maker: bool, shells: Callable[..., Shell], run_file: Path, tmp_path: Path
) -> None:
    site, other = shells("site"), shells("other")
    maker, joins = (site, other) if is_maker else (other, site)
    long = ("--set", "train.tokens=60_000", "--set", "model.width=64", "--set", "model.num_layers=3")
    reports = {shell: tmp_path / f"{shell.folder.name}.json" for shell in (site, other)}

    def many(shell: Shell) -> int:
        return ranks if shell is site else 0

    maker.run(
        "train", str(run_file), *long, *LOCAL, "--wait-for", "2", "--report", str(reports[maker]), ranks=many(maker)
    )
    given = maker.ticket() + "\n"
    joins.run("join", "-", "--yes", *LOCAL, "--report", str(reports[joins]), given=given, ranks=many(joins))
    found = [ended(shell, reports[shell]) for shell in (site, other)]
    assert [each["reason"] for each in found] == ["complete"] * 2
    assert found[0]["replica"] == found[1]["replica"]
    assert found[0]["loss"] == pytest.approx(found[1]["loss"], rel=1e-5)
    assert found[0]["round"] == found[1]["round"]
    entry = site.wait(counts("site", "other"))
    assert isinstance(entry.event, RoundCommitted)


def test_a_site_that_lost_a_rank_ends_and_comes_back(
    shells: Callable[..., Shell], run_file: Path, tmp_path: Path
) -> None:
    site, other = shells("site"), shells("other")
    endless = ("--set", "train.tokens=4_000_000_000", "--set", "method.every=10")
    other.run("train", str(run_file), *endless, *LOCAL, "--wait-for", "2")
    given = other.ticket() + "\n"
    site.run("join", "-", "--yes", *LOCAL, given=given, ranks=3)
    both = counts("site", "other")
    site.wait(both, within_s=START_S)
    assert site.process is not None
    lost = [each for each in psutil.Process(site.process.pid).children() if each.environ().get("RANK") == "2"]
    at = time.time()
    lost[0].kill()
    assert site.process.wait(COMMIT_S) != 0
    other.wait(counts("other"), after=at)  # it goes on alone
    site.run("join", "-", "--yes", *LOCAL, given=given, ranks=2)  # on as many as are left
    again = time.time()
    site.wait(both, after=again, within_s=START_S)
    other.wait(both, after=again)
    site.send(signal.SIGINT)  # torchrun itself ends with 1
    last = [type(entry.event) for entry in site.entries() if isinstance(entry.event, CheckpointSaved | PeerStopped)]
    assert last[-2:] == [CheckpointSaved, PeerStopped]
    assert other.send(signal.SIGINT) == 0


class Peak:
    """The most memory of its own that a process ever holds; files that it maps are not its own."""

    def __init__(self, process: psutil.Process) -> None:
        self.nbytes = 0
        self._process = process
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        try:
            while True:
                status = Path(f"/proc/{self._process.pid}/status").read_text()
                line = next(line for line in status.splitlines() if line.startswith("RssAnon"))
                self.nbytes = max(self.nbytes, 1024 * int(line.split()[1]))
                time.sleep(0.02)
        except (OSError, StopIteration):
            return

    def wait(self) -> int:
        self._thread.join()
        return self.nbytes


def options(width: int, num_layers: int, tokens: int) -> list[str]:
    """Return what makes a run file one of a model of such a shape, whose rounds are short."""
    shape = {"num_heads": 8, "width": width, "ffn_width": 3 * width, "num_layers": num_layers}
    sets = [f"model.{field}={value}" for field, value in shape.items()]
    sets += ["train.seq_len=16", "train.batch_size=3", f"train.tokens={tokens}", "method.every=3"]
    return [word for each in sets for word in ("--set", each)]


def allowed() -> int:
    """Return what `LARGE` may add to the peak of rank 0, of three: its share of what is kept, the largest tensor."""
    model = ModelConfig(
        vocab_size=257, num_layers=14, num_heads=8, num_kv_heads=8, width=512, ffn_width=1536, max_seq_len=2048
    )
    spans = layout(model)
    assert spans.num_parameters > 45_000_000
    shard = 4 * KEPT * len(strips(spans.num_parameters, 3)[0])
    return int(1.2 * shard) + 4 * max(span.num for span in spans)


LARGE, SMALL = (512, 14), (32, 1)  # width and layers


def test_rank_0_holds_its_shard_and_little_more(shells: Callable[..., Shell], run_file: Path) -> None:
    """What a model of 48 million parameters adds to the peak of rank 0, of three."""

    def peak(name: str, shape: tuple[int, int]) -> int:
        site, other = shells(f"site-{name}"), shells(f"other-{name}")
        site.run("train", str(run_file), *options(*shape, 600), *LOCAL, "--wait-for", "2", ranks=3)
        found = Peak(rank_0(site))
        other.run("join", "-", "--yes", *LOCAL, given=site.ticket() + "\n")
        for shell in (site, other):
            assert shell.process is not None
            assert shell.process.wait(5 * COMMIT_S) == 0, shell.said.read_text()
        return found.wait()

    assert peak("large", LARGE) - peak("small", SMALL) <= allowed()


def test_rank_0_holds_no_more_of_a_state_that_comes_to_it(shells: Callable[..., Shell], run_file: Path) -> None:
    """The same where the site comes late, and where it goes on from a checkpoint."""

    def peaks(name: str, shape: tuple[int, int]) -> list[int]:
        site, other = shells(f"site-{name}"), shells(f"other-{name}")
        other.run("train", str(run_file), *options(*shape, 4_000_000_000), *LOCAL)
        given = other.ticket() + "\n"
        other.wait(counts("other"))
        found = []
        for _ in range(2):
            at = time.time()
            site.run("join", "-", "--yes", *LOCAL, given=given, ranks=3)
            watched = Peak(rank_0(site))
            site.wait(counts("site", "other"), after=at, within_s=START_S)
            site.send(signal.SIGINT)
            found.append(watched.wait())
        joined = [entry for entry in site.entries() if isinstance(entry.event, StateJoined)]
        assert joined
        assert other.send(signal.SIGINT) == 0
        return found

    large, small = peaks("large", LARGE), peaks("small", SMALL)
    added = [more - less for more, less in zip(large, small, strict=True)]
    assert max(added) <= allowed(), added
