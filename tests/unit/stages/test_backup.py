"""Who keeps the state of a stage that one machine alone holds."""

import pytest

from weft.ids import PeerId
from weft.stages.backup import backups
from weft.stages.messages import Held, StageNews, State
from weft.stages.table import StageTable

A, B, C, D, E, F = (PeerId(digit * 64) for digit in "abcdef")


def roll_of(*stages: tuple[PeerId, ...], states: dict[PeerId, State] | None = None) -> StageTable:
    """Return a roll of peers by the stages that they hold."""
    table = StageTable(len(stages))
    for peer in sorted({peer for members in stages for peer in members}):
        held = tuple(
            Held(stage=stage, since=1, state=(states or {}).get(peer, "ready"), round=7, rate=1.0, num_waiting=0)
            for stage, members in enumerate(stages)
            if peer in members
        )
        table.told(peer, StageNews(held=held, kept=(), is_trainer=True))
    return table


def apart(*peers: PeerId) -> dict[PeerId, frozenset[str]]:
    return {peer: frozenset({f"host-{peer[:1]}"}) for peer in peers}


ALL = apart(A, B, C, D, E, F)


def test_the_lowest_peer_of_the_next_stage_keeps_a_stage_with_one_member() -> None:
    assert backups(roll_of((A,), (D, C), (E, F)), ALL) == {0: C}


def test_the_first_stage_comes_after_the_last() -> None:
    assert backups(roll_of((B, A), (C, D), (E,)), ALL) == {2: A}


def test_each_of_single_members_keeps_the_stage_before() -> None:
    assert backups(roll_of((A,), (B,), (C,)), ALL) == {0: B, 1: C, 2: A}


def test_a_stage_of_several_machines_is_kept_by_nobody() -> None:
    assert backups(roll_of((A, B), (C, D), (E, F)), ALL) == {}


def test_members_on_one_machine_count_as_one() -> None:
    hosts = {**ALL, B: ALL[A]}
    assert backups(roll_of((A, B), (C, D), (E, F)), hosts) == {0: C}


def test_another_machine_keeps_it_where_there_is_one() -> None:
    hosts = {**ALL, C: ALL[A]}
    assert backups(roll_of((A,), (C, D), (E, F)), hosts) == {0: D}
    assert backups(roll_of((A,), (C,), (E, F)), {**hosts, E: ALL[A]})[0] == F
    assert backups(roll_of((A,), (C,)), {A: ALL[A], C: ALL[A]}) == {0: C, 1: A}  # better than none


def test_who_holds_a_stage_is_no_backup_of_it() -> None:
    assert backups(roll_of((A,), (A, B), (A,)), ALL) == {0: B, 2: B}
    assert backups(roll_of((A,), (A,), (A,)), ALL) == {}


@pytest.mark.parametrize("state", ["joining", "paused", "finishing"])
def test_who_is_not_ready_neither_keeps_nor_counts(state: State) -> None:
    assert backups(roll_of((A,), (C, D), (E, F), states={C: state}), ALL) == {0: D, 1: E}
    assert 1 not in backups(roll_of((A,), (C,), (E, F), states={C: state}), ALL)  # nobody has its state to give
