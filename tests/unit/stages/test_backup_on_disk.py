"""Which stages' states lie on a disk: what this peer held itself, and copies for others."""

from pathlib import Path

import torch

from charters import charter
from unit.stages.pieces import RUN
from weft.ids import BranchId, PeerId, RunId
from weft.peer.chain import Chain, genesis, open_branch
from weft.peer.state.checkpoint import Snapshot, save
from weft.stages.backup import StagesOnDisk
from weft.store.home import PeerFolder
from weft.store.journal import Votes
from weft.sync.merge.method import OUTER
from weft.sync.round.rules import Durable

PEERS = tuple(PeerId(letter * 64) for letter in "abc")
RUN_ID = RunId("cc" * 32)


def keep(folder: PeerFolder, stage: int, *, is_copy: bool) -> None:
    run = RUN.of_stage(stage)
    replicated = {OUTER: torch.zeros(run.num_parameters)}
    counters = {} if is_copy else {"uncounted_tokens": 0}
    save(
        folder.stage(stage).checkpoint,
        Snapshot(config=run, tokenizer=b"", head=None, replicated=replicated, counters=counters),
    )


def test_a_copy_is_told_from_what_was_held_here(tmp_path: Path) -> None:
    folder = PeerFolder(tmp_path)
    on_disk = StagesOnDisk(folder)
    assert on_disk.rounds == {}
    keep(folder, 0, is_copy=True)
    keep(folder, 2, is_copy=False)
    assert on_disk.rounds == {0: 0, 2: 0}
    assert on_disk.own == {2: 0}
    keep(folder, 0, is_copy=False)  # taken up, and saved again
    assert on_disk.own == {0: 0, 2: 0}


def test_the_rounds_that_were_voted_in_are_known_without_a_state(tmp_path: Path) -> None:
    folder = PeerFolder(tmp_path)
    last = Chain(open_branch(genesis(RUN_ID, PEERS[0], charter(4)), PEERS, PEERS[0], BranchId(RUN_ID)), charter(4)).base
    for stage, has_left in ((0, False), (2, True)):
        folder.stage(stage).root.mkdir(parents=True)
        votes = Votes(folder.stage(stage).durable)
        votes.write(Durable(base=last, has_left=has_left))
        votes.close()
    folder.stage(1).root.mkdir()
    folder.stage(1).durable.write_bytes(b"damaged")
    assert StagesOnDisk(folder).voted() == {0: last}
    assert StagesOnDisk(folder).rounds == {}


def test_what_is_half_written_does_not_count(tmp_path: Path) -> None:
    folder = PeerFolder(tmp_path)
    keep(folder, 1, is_copy=True)
    path = folder.stage(1).checkpoint / "checkpoint.json"
    path.write_bytes(path.read_bytes()[:-20])
    assert StagesOnDisk(folder).rounds == {}
