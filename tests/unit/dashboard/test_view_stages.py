"""The view of a run with stages: peers and queues of all stages, rounds and losses of one."""

import msgspec
import pytest

from unit.dashboard.test_view import A, B, C, commit, drawn, entry, evaluated, fold, started, step
from weft.cli.screen.draw import progress
from weft.cli.watch.status import as_tree
from weft.dashboard.view import About, View
from weft.events import Entry, Event, MemberLeft, PeerStopped, StageHeld, StageLeft, StagesSeen
from weft.ids import PeerId

RUN = About(
    name="r",
    total_tokens=1000,
    tokens_per_step=100,
    num_parameters=3_000_000,
    layers=("layers 1-3", "layers 4-6", "layers 7-9"),
)


def of(stage: int, said: Entry, at: float = 100.0) -> Entry:
    """Return an entry as a stage tells it."""
    return msgspec.structs.replace(said, at=at, event=msgspec.structs.replace(said.event, stage=stage))


def held(stage: int, peer: PeerId, at: float = 100.0) -> Entry:
    return entry(StageHeld(stage=stage, num_stages=3, num_parameters=1_000_000, reason="the run begins"), peer, at)


def seen(*members: tuple[PeerId, ...], at: float = 100.0, peer: PeerId = A, names: bool = True) -> Entry:
    called = {A: "anna", B: "bert", C: "carl"} if names else {}
    here = {each: called[each] for each in called if any(each in stage for stage in members)}
    found = StagesSeen(members=members, rates=(80.0, 20.0, 60.0), waiting=(1, 7, 0), names=here)
    return entry(found, peer, at)


def view(*entries: Entry) -> View:
    return fold(*entries, view=View(run=RUN))


def goodbye(stage: int, reason: str, peer: PeerId = A) -> tuple[Entry, Entry]:
    return of(stage, entry(PeerStopped(reason=reason), peer)), entry(StageLeft(stage=stage, reason=reason), peer)


def test_a_peer_sees_which_stage_it_holds_and_who_computes_the_others() -> None:
    found = view(held(1, A), of(1, started()), seen((B,), (A,), (C,)), of(1, commit(4, 400)))
    text = "\n".join(drawn(found))
    assert "this peer holds stage 2 of 3, layers 4-6" in text
    assert [line.split() for line in text.splitlines() if " of 3 " in line][1] == [
        *("2", "of", "3", "layers", "4-6", "1", "20", "samples/s,", "slowest", "7")
    ]
    assert "bert" in text
    assert "carl" in text
    assert progress(found).startswith("round 4  stage 2 of 3  3 peers  400 of 1k tokens")


def test_one_commit_told_by_three_stages_is_one_round_with_one_loss() -> None:
    entries = [held(number, peer) for number, peer in enumerate((A, B, C))]
    for number in (1, 2):
        for stage, peer in ((2, C), (0, A), (1, B)):
            entries += [of(stage, step(4.0 / number, peer)), of(stage, commit(number, 100 * number, peer))]
    found = view(*entries)
    assert (found.round, found.committed_tokens) == (2, 200)
    assert found.losses.points == ((100, 4.0), (200, 2.0))
    assert [found.lines[peer].round for peer in (A, B, C)] == [2, 2, 2]
    assert found.sent_nbytes == 6 * 1000  # of each its own


def test_the_rounds_of_another_stage_are_the_run_s_where_the_first_is_not_heard_or_goes_on_no_more() -> None:
    alone = view(*(of(2, commit(number, 100 * number, C)) for number in (1, 2)))
    assert (alone.round, alone.lead.stage) == (2, 2)
    first = fold(of(0, commit(3, 300, A)), view=alone)
    assert (first.round, first.lead.stage) == (3, 0)
    assert fold(of(2, commit(4, 390, C)), view=first).round == 3
    gone = fold(*(of(2, commit(number, 100 * number, C), 50.0 * number) for number in range(4, 8)), view=first)
    assert (gone.round, gone.committed_tokens, gone.lead.stage) == (7, 700, 2)


def test_who_goes_to_another_stage_has_not_stopped() -> None:
    both = view(held(0, A), of(0, started()), held(1, A), of(1, started()), of(0, commit(1, 100)))
    less = fold(*goodbye(0, "goes to another stage"), view=both)
    assert less.lines[A].state == "training"
    assert less.held == "stage 2 of 3, layers 4-6"
    last = fold(*goodbye(1, "complete"), view=less)
    assert (last.lines[A].state, last.held) == ("finished", "")


@pytest.mark.parametrize("gone", [MemberLeft(member=B)])
def test_who_left_one_stage_for_another_is_in_the_run(gone: Event) -> None:
    here = view(held(0, A), seen((A,), (B,), (C,)))
    assert fold(of(0, entry(gone)), view=here).lines[B].state == "training"
    assert fold(of(1, entry(gone)), view=here).lines[B].state == "left"


def test_who_is_seen_no_more_is_gone_and_an_older_word_changes_nothing() -> None:
    found = view(held(0, A), of(0, started()), seen((A,), (B,), (C,)), seen((A,), (B,), (), at=120.0))
    assert found.lines[C].state == "gone"
    assert "2 peers" in progress(found)
    assert "nobody computes stage 3" in progress(found)
    assert fold(seen((A,), (B,), (C,), at=110.0), view=found) == found


def test_a_ring_of_all_peers_would_have_moved_whole_gradients_for_the_first_stage_s_steps() -> None:
    entries = [held(number, peer) for number, peer in enumerate((A, B, C))]
    commits = [of(stage, commit(1, 100, peer, contributors=(peer,))) for stage, peer in ((1, B), (2, C), (0, A))]
    found = view(*entries, seen((A,), (B,), (C,)), *commits, of(0, commit(2, 200, A, contributors=(A,))))
    one = 2 * round(2 * 2 / 3 * 3_000_000 * 2)  # sent and received, in bf16, by one of three peers, for a step
    assert found.ring_nbytes == one + 3 * one  # when the first was told, one peer had been heard


def test_a_program_is_told_of_stages_too() -> None:
    tree = as_tree(view(held(1, A), seen((B,), (A,), ()), evaluated(100, 1.0)))
    assert [stage["peers"] for stage in tree["stages"]] == [[B], [A], []]
    assert tree["stages"][1] == {
        "stage": 2,
        "layers": "layers 4-6",
        "num_parameters": 1_000_000,
        "peers": [A],
        "samples_per_s": 20.0,
        "waiting": 7,
    }
    assert [peer["stages"] for peer in tree["peers"] if peer["peer"] == A] == [[2]]
    assert "stages" not in as_tree(fold(started()))
