"""`weft plan --serve`: what is told of a run file, a checkpoint and a folder, and what is timed for it."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from unit.cli.plan.test_plan import shaped
from unit.cli.small import Kept, Weft
from unit.engine.test_step import CONFIG
from weft.cli.plan import serve_here
from weft.cli.plan.serve_here import PIECE, ROWS, Found, measure
from weft.engine.numbers import Kind
from weft.model.config import ModelConfig, named, num_parameters
from weft.plan.serve import Timed

CPU = torch.device("cpu")
STAGES = ("--set", shaped(), "--set", "stages=2", "--set", "pipeline.activations.type=bf16")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is timed, and torch's choice is the CPU."""

    def timed(config: ModelConfig, kind: Kind, device: torch.device) -> Found:
        assert device.type == "cpu"
        timed = Timed(
            kind=kind,
            layer_s=((1, 0.001), (8, 0.002), (32, 0.004), (256, 0.02)),
            head_s=((1, 0.001), (8, 0.001), (32, 0.002)),
            draw_s=0.0005,
            look_s=1e-6,
            read_look_s=1e-8,
            bandwidth=1e10,
            rates={"fp32": 1e11, "bf16": 2e11, "w8a16": 4e11, "int8": 4e11, "exact": 4e11},
        )
        return Found(timed, f"a machine with {config.num_layers} layers")

    monkeypatch.setattr(serve_here, "measure", timed)
    monkeypatch.setattr("weft.training.device.best", lambda: "cpu")
    monkeypatch.setattr("weft.cli.plan.serving.free_nbytes", lambda _device: 1 << 30)


def told(weft: Weft, *arguments: object) -> dict[str, object]:
    answer = weft("plan", *arguments, "--serve", "--json")
    assert (answer.code, answer.err) == (0, ""), answer
    found: dict[str, object] = json.loads(answer.out)
    return found


def test_a_run_file_tells_weights_pages_speeds_and_the_first_token(weft: Weft, run_path: Path) -> None:
    answer = weft("plan", run_path, "--serve", "--numbers", "int8", "--set", "train.seq_len=512")
    assert (answer.code, answer.err) == (0, "")
    said = answer.out.splitlines()
    for word in ("small", "weights", "pages", "machine", "first token", "note"):
        assert any(line.startswith(word) for line in said), word
    assert "in int8, on a machine with 1 layers" in said[0]
    assert re.findall(r"^  (\d+) texts? ", answer.out, re.MULTILINE) == ["1", "8", "32"]
    assert "graphs" not in answer.out  # there is no GPU
    assert "stages" not in answer.out


def test_figures_are_those_of_what_was_timed(weft: Weft, run_path: Path) -> None:
    found = told(weft, run_path, "--numbers", "fp32", "--set", "train.seq_len=2048")
    speeds = found["speeds"]
    assert isinstance(speeds, list)
    assert [(each["prompt"], each["num_texts"]) for each in speeds] == [
        (prompt, num) for prompt in (128, 1024) for num in (1, 8, 32)
    ]
    assert speeds[0]["tokens_per_s"] == pytest.approx(1 / (0.001 + 64e-6 + 0.0015))
    assert speeds[4]["tokens_per_s"] == pytest.approx(8 / (0.002 + 8 * 960e-6 + 0.001 + 0.004))
    assert found["page_nbytes"] == 2 * 2 * 64 * 8 * 4
    assert found["numbers"] == "fp32"
    assert found["ring"] is None
    assert found["share"] is None


def test_a_checkpoint_and_a_folder_are_planned_as_they_are_served(weft: Weft, kept: Kept, tmp_path: Path) -> None:
    for given in ("last", "small", kept.folder):
        found = told(weft, given)
        assert found["name"] == "small"
        assert found["num_parameters"] == num_parameters(kept.run.model)
    assert weft("export", "last", tmp_path / "folder").code == 0
    assert told(weft, tmp_path / "folder")["num_parameters"] == found["num_parameters"]
    assert told(weft, tmp_path / "folder")["name"] == "folder"


def test_a_model_that_is_nowhere_is_said(weft: Weft) -> None:
    answer = weft("plan", "nowhere", "--serve")
    assert answer.code != 0
    assert "is not a folder with a model, or a run of this home" in answer.err
    assert answer.out == ""


def test_a_model_without_room_is_said_and_planned_all_the_same(
    weft: Weft, run_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weft.cli.plan.serving.free_nbytes", lambda _device: 1000)
    answer = weft("plan", run_path, "--serve")
    assert answer.code == 0
    assert "IT DOES NOT FIT" in answer.out
    assert "1 text" in answer.out


def test_stages_are_told_with_their_lines_and_what_a_share_takes(weft: Weft, run_path: Path) -> None:
    options = (run_path, *STAGES, "--peers", 4, "--tokens-per-s", 1000, "--up", "20mbit", "--delay", "10ms")
    answer = weft("plan", *options, "--serve", "--share", 0.5)
    assert (answer.code, answer.err) == (0, "")
    assert "a round trip of 40 ms and 20 Mbit/s between any two; 64 bytes a token" in " ".join(answer.out.split())
    assert any(line.startswith("share") for line in answer.out.splitlines())
    found, usual = told(weft, *options, "--share", 0.5), told(weft, *options)
    ring, share, less = found["ring"], found["share"], usual["share"]
    assert isinstance(ring, dict)
    assert isinstance(share, dict)
    assert isinstance(less, dict)
    assert ring["num_stages"] == 2
    assert ring["speeds"][0]["bound"] == "line"
    assert ring["speeds"][0]["tokens_per_s"] < 1 / 0.04
    alone, beside = share["training"]
    assert 0.45 * alone < beside < alone
    assert share["share"] == 0.5
    assert less["share"] == 0.3
    assert beside < less["training"][1]
    trained = json.loads(weft("plan", *options, "--json").out)
    assert alone == pytest.approx(trained["tokens_per_s"])


def test_more_stages_than_layers_are_refused(weft: Weft, kept: Kept) -> None:
    answer = weft("plan", kept.folder, "--serve", "--stages", 2)
    assert answer.code == 2
    assert "of a model of 1 layer." in answer.err
    assert answer.out == ""


@pytest.mark.parametrize("stages", [1, 2])
def test_a_folder_is_cut_as_is_asked_for(weft: Weft, stages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    config = named("nano", 257, 512)
    monkeypatch.setattr("weft.cli.plan.serving.find_checkpoint", lambda given, _home: Path(given))
    monkeypatch.setattr("weft.cli.plan.serving.read_config", lambda _folder: config)
    ring = told(weft, "nowhere", "--stages", stages)["ring"]
    assert (ring is None) == (stages == 1)
    if isinstance(ring, dict):
        assert ring["row_nbytes"] == 2 * config.width
        far = told(weft, "nowhere", "--stages", stages, "--delay", "100ms")["ring"]
        assert isinstance(far, dict)
        assert far["speeds"][0]["tokens_per_s"] < ring["speeds"][0]["tokens_per_s"]
        assert far["first_token_s"]["128"] > ring["first_token_s"]["128"]


def test_a_gpu_tells_what_its_graphs_hold(weft: Weft, run_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.cli.plan.serving._graphs_nbytes", lambda *_: 123_000_000)
    answer = weft("plan", run_path, "--serve")
    assert any(line.startswith("graphs") and "123 MB" in line for line in answer.out.splitlines())


def test_each_figure_is_timed_on_the_code_that_serves() -> None:
    """A clock that counts: 1 second for the first step, 2 for the next, and so on, each of which is made."""
    num = 0

    def clocked(step: Callable[[], None]) -> float:
        nonlocal num
        step()
        num += 1
        return float(num)

    found = measure(CONFIG, "int8", CPU, clocked).timed
    layers = CONFIG.num_layers
    assert [rows for rows, _ in found.layer_s] == [*ROWS, PIECE]
    assert [layers * took_s for _, took_s in found.layer_s] == pytest.approx([1, 2, 3, 5])
    assert found.look_s == pytest.approx((4 - 2) / layers / (8 * 960))
    assert found.read_look_s == pytest.approx((6 - 5) / layers / (256 * 768))
    assert [took_s for _, took_s in found.head_s] == pytest.approx([7, 8, 9])
    assert found.draw_s == pytest.approx(10)
    assert set(found.rates) >= {"fp32", "bf16"}


def test_where_others_have_the_cores_all_is_timed_on_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_here, "usual", lambda step: step() or 60.0)
    monkeypatch.setattr(serve_here, "of_one_core", lambda step: step() or 1.0)
    threads = torch.get_num_threads()
    for is_busy in (False, True):
        monkeypatch.setattr("weft.cli.plan.speed_here.is_disturbed", lambda *_, is_busy=is_busy: is_busy)
        found = measure(CONFIG, "fp32", CPU)
        assert CONFIG.num_layers * found.timed.layer_s[0][1] == pytest.approx(1.0 if is_busy else 60.0)
        assert ("a core to itself" in found.name) == is_busy
        assert torch.get_num_threads() == threads
