"""Training steps made again: the same bits, from wherever in a lease."""

from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from unit.peer.tiny import batches, run_config
from weft.clock import VirtualClock
from weft.data.assign import Lease
from weft.errors import DataError
from weft.ids import PeerId, Round
from weft.model.initial import initial_vector
from weft.peer.audit.heads import Head
from weft.peer.audit.steps import LOCAL, Away, repeat, state_of
from weft.peer.chain import genesis, open_branch
from weft.run.amend import first_charter
from weft.run.machine import PeerConfig
from weft.sync.records.index import VectorIndex
from weft.sync.records.work import Segment
from weft.training.trainer import Trainer
from weft.wire import digest_of

ME, OTHER = PeerId("aa" * 32), PeerId("bb" * 32)
RUN = run_config(batch_size=2)
NUM = 6


def trainer(path: Path) -> Trainer:
    torch.set_num_threads(1)
    made = Trainer(RUN, PeerConfig(device="cpu", threads=1), batches(path), lambda _event: None, VirtualClock())
    made.start(initial_vector(RUN.model, RUN.seed))
    return made


def head() -> Head:
    charter = first_charter(RUN)
    start = genesis(RUN.run, ME, charter)
    manifest = open_branch(start, [ME, OTHER], ME, start.branch)
    lease = Lease(peer=ME, start=4, stop=4 + 2 * NUM)
    leases = (lease, Lease(peer=OTHER, start=40, stop=40 + 2 * NUM))
    return Head(
        manifest=replace(manifest, leases=leases), charter=charter, outer=VectorIndex(name="outer", num=0, chunks=())
    )


def segment(holder: PeerId = ME, num: int = NUM) -> Segment:
    return Segment(head=digest_of(head().manifest), round=Round(0), holder=holder, num_steps=num)


def copied(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: vector.clone() for name, vector in state.items()}


def test_steps_are_the_same_bits_again_from_any_state_in_between(tmp_path: Path) -> None:
    one, other, states = trainer(tmp_path), trainer(tmp_path), list[dict[str, Tensor]]()
    states.append(copied(state_of(one)))
    given: dict[str, Any] = {"head": head(), "segment": segment(), "outer": None, "num_before": 0}

    def note(_num: int) -> None:
        states.append(copied(state_of(one)))

    end = repeat(one, RUN, state=states[0], first=0, num_steps=NUM, on_step=note, **given)
    assert len(states) == NUM + 1
    assert all(torch.equal(end[name], states[-1][name]) for name in end)
    other.train(torch.arange(8).numpy(), 0, 1)  # the other is in the middle of its own
    before = copied(state_of(other))
    for first, num in ((0, 1), (2, 3), (NUM - 1, 1)):
        again = repeat(other, RUN, state=states[first], first=first, num_steps=num, **given)
        assert again.keys() == states[0].keys()
        assert all(torch.equal(again[name], states[first + num][name]) for name in again)
    assert all(torch.equal(value, before[name]) for name, value in state_of(other).items())
    assert not torch.equal(states[0][LOCAL], states[1][LOCAL])


@pytest.mark.parametrize(("first", "num", "holder"), [(NUM, 1, ME), (0, NUM + 1, ME), (0, 1, PeerId("cc" * 32))])
def test_steps_that_a_lease_does_not_have_are_refused(tmp_path: Path, first: int, num: int, holder: PeerId) -> None:
    one = trainer(tmp_path)
    with pytest.raises(DataError, match="has no"):
        repeat(one, RUN, head(), segment(holder), copied(state_of(one)), None, 0, first, num)


def test_a_trainer_that_has_not_started_makes_no_steps_of_others_yet(tmp_path: Path) -> None:
    """A peer that was just started again may be asked at once."""
    made = Trainer(RUN, PeerConfig(device="cpu", threads=1), batches(tmp_path), lambda _event: None, VirtualClock())
    state = {LOCAL: initial_vector(RUN.model, RUN.seed)}
    with pytest.raises(Away):
        repeat(made, RUN, head(), segment(), state, state[LOCAL], 0, 0, 1)
