"""weft gather, and what other verbs say of a run with stages before and after it."""

import os
import tomllib
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from benchmarks.rig.flat import join
from torch import Tensor

from unit.cli.small import RUN, TEXT, Kept, Weft, as_trained
from unit.peer.snapshots import manifest
from weft.config import from_tree
from weft.data.tokenizer import ByteTokenizer
from weft.peer.state.checkpoint import Snapshot, load_model, save
from weft.run.config import RunFile
from weft.run.genesis import initial, seal
from weft.run.staged import StagedConfig
from weft.store.home import Home, PeerFolder
from weft.wire import digest_of

Keep = Callable[..., list[Tensor]]
CUT = RUN.replace("num_layers = 1", "num_layers = 3\nis_tied = false").replace(
    "peers = 1", 'peers = 1\nstages = 3\nmethod = {type = "ddp"}\ntokenizer = {type = "json", path = "tok"}'
)
SETTINGS = b'{"eos_token":   "<|endoftext|>"}'
PEERS = ("ab" * 32, "cd" * 32)


@pytest.fixture
def staged(tmp_path: Path, home: Path) -> tuple[StagedConfig, Keep]:
    """A run with stages, and what keeps sections of it in the home: (stage, round, number of the peer)."""
    (tmp_path / "text.txt").write_text(TEXT)
    (tmp_path / "tok").mkdir()
    (tmp_path / "tok" / "tokenizer.json").write_bytes(ByteTokenizer().to_json())
    (tmp_path / "tok" / "tokenizer_config.json").write_bytes(SETTINGS)
    run_file: RunFile = from_tree(tomllib.loads(CUT), RunFile, where="run.toml")
    place = Home(home)
    sealed = seal(run_file, tmp_path, place, lambda _event: None)
    run = sealed.config
    assert isinstance(run, StagedConfig)

    def keep(*sections: tuple[int, int, int]) -> list[Tensor]:
        found = []
        for stage, round, peer in sections:
            of_stage = run.of_stage(stage)
            vector = initial(of_stage, place)
            assert vector is not None
            vector = vector + round / 100
            head = msgspec.structs.replace(manifest(round), run=of_stage.run)
            folder = PeerFolder(home / "runs" / run.run / PEERS[peer]).stage(stage)
            replicated = {"outer": vector}
            save(
                folder.checkpoint,
                Snapshot(config=of_stage, tokenizer=sealed.tokenizer.to_bytes(), head=head, replicated=replicated),
            )
            found.append(vector)
        return found

    return run, keep


def test_sections_of_one_home_become_a_model_that_all_verbs_take(
    weft: Weft, staged: tuple[StagedConfig, Keep], home: Path, tmp_path: Path
) -> None:
    run, keep = staged
    parts = keep((0, 7, 0), (1, 7, 0), (2, 7, 1))
    before = weft("generate", "last", "def ")
    assert before.code != 0
    assert f"weft gather {run.run[:8]}" in before.err

    told = weft("gather", "last")
    assert told.code == 0, told.err
    assert "3 sections put together, of round 7; all of them here" in told.out
    folder = next(home.glob(f"runs/{run.run}/*/checkpoint"))
    assert torch.equal(load_model(folder)[2], join(run.model, parts))

    assert weft("generate", "last", "def ", "--max-tokens", "4").code == 0
    assert "nats per byte" in weft("eval", "last", "--windows", "4").out
    assert weft("export", run.run[:8], tmp_path / "exported").code == 0
    assert (tmp_path / "exported" / "model.safetensors").exists()
    assert (tmp_path / "exported" / "tokenizer_config.json").read_bytes() == SETTINGS
    inspected = weft("inspect", "last").out
    assert f"run         small  {run.run}" in inspected
    assert "round       7" in inspected


def test_the_newest_round_that_all_sections_have_is_taken(weft: Weft, staged: tuple[StagedConfig, Keep]) -> None:
    run, keep = staged
    parts = keep((0, 7, 0), (1, 7, 0), (2, 7, 1))
    keep((0, 9, 1))  # another peer's, further than the rest
    told = weft("gather", run.run[:8], "--into", "here")
    assert "of round 7" in told.out
    assert torch.equal(load_model(Path("here"))[2], join(run.model, parts))


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_sections_of_different_rounds_are_put_together_and_it_is_said(
    weft: Weft, staged: tuple[StagedConfig, Keep]
) -> None:
    _, keep = staged
    keep((0, 7, 0), (1, 6, 0), (2, 7, 1))
    told = weft("gather", "last")
    assert told.code == 0
    assert "of rounds 6 to 7" in told.out
    assert "round 7 for stage 1, round 6 for stage 2" in " ".join(told.err.split())


def test_a_section_that_is_not_here_is_named(weft: Weft, staged: tuple[StagedConfig, Keep]) -> None:
    _, keep = staged
    keep((0, 7, 0), (2, 7, 1))
    told = weft("gather", "last")
    assert told.code != 0
    assert "has 3 stages, and these are not here: stage 2." in " ".join(told.err.split())


def test_a_model_without_stages_is_found_beside_older_sections(
    weft: Weft, staged: tuple[StagedConfig, Keep], kept: Kept, home: Path
) -> None:
    _, keep = staged
    keep((0, 7, 0))
    for file in home.glob("runs/*/*/stage-*/checkpoint/checkpoint.json"):
        os.utime(file, (1e9, 1e9))
    as_trained(kept.folder, 1, None)
    assert kept.run.run in weft("inspect", "last").out


def test_one_section_is_no_model_but_can_be_inspected(
    weft: Weft, staged: tuple[StagedConfig, Keep], home: Path
) -> None:
    run, keep = staged
    keep((1, 7, 0))
    folder = home / "runs" / run.run / PEERS[0] / "stage-1" / "checkpoint"
    assert "holds stage 2 of a model in 3 stages" in " ".join(weft("generate", folder, "x").err.split())
    assert "section     2 of 3: layers 2 to 2 are here" in weft("inspect", folder).out
    told = weft("generate", folder.parents[1], "x")  # a peer's folder, which has no whole model
    assert "weft gather" in told.err
    assert weft("generate", folder.parents[2], "x").code != 0


def test_what_names_no_run_with_stages_is_refused(weft: Weft, kept: Kept) -> None:
    last, named = weft("gather", "last"), weft("gather", kept.run.run[:8])
    assert last.code == 17
    assert "no run with stages was trained in this home" in " ".join(last.err.split())
    assert named.code == 40
    assert f"this home holds no section of run {kept.run.run[:8]} (small)" in " ".join(named.err.split())
    assert digest_of(kept.run) == kept.run.run
