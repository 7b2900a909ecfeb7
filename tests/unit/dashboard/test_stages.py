"""The history of a run with stages: one round for all stages' commits, who computes what, and words for it."""

import json
from functools import reduce
from typing import Any

import msgspec
import pytest

from unit.dashboard.test_history import A, B, C, commit, history, said, started, step
from weft.dashboard.history import History
from weft.dashboard.page import metrics_of
from weft.dashboard.report import told_of
from weft.dashboard.run import Run
from weft.dashboard.stages import Lead, Stages, holding, layers_of, led, ordinal, slowest, state_at_commit, told
from weft.dashboard.view import About
from weft.dashboard.words import NOTE, ROUTINE, WARNING, advice_of, described, notable, severity_of
from weft.events import (
    Entry,
    Event,
    HeldDropped,
    MemberLeft,
    MicroBatchFailed,
    PeerStopped,
    ReceiptFailed,
    ReceiptsDiffer,
    RoundCommitted,
    RoundProven,
    StageEmpty,
    StageHeld,
    StageLeft,
    StagesSeen,
    TeamFormed,
    TextChanged,
    TextMoved,
)
from weft.ids import BranchId, Digest, PeerId, Round, Tokens
from weft.model.sections import Section

RUN = About(tokens_per_step=100, layers=("layer 1", "layer 2", "layer 3"))


def of(stage: int, event: Event) -> Event:
    """Return an event as a stage tells it."""
    return msgspec.structs.replace(event, stage=stage)


def team(*members: PeerId) -> TeamFormed:
    return TeamFormed(stage=1, members=members, size=2)


def held(stage: int, reason: str = "the run begins") -> StageHeld:
    return StageHeld(stage=stage, num_stages=3, num_parameters=1_000_000, reason=reason)


def seen(*members: tuple[PeerId, ...]) -> StagesSeen:
    names = {A: "anna", B: "bert", C: "carl"}
    here = {each: names[each] for stage in members for each in stage}
    return StagesSeen(members=members, rates=(80.0, 20.0, 60.0), waiting=(1, 7, 0), names=here)


def committed(number: int, stage: int, peer: PeerId, at: float, **fields: Any) -> Entry:
    """Return a stage's commit, which has a branch of its own."""
    own = commit(number, 100 * number, peer, branch=BranchId(str(stage) * 64), contributed=(Tokens(100),), **fields)
    return said(peer, of(stage, own), at)


def whole(num_rounds: int = 3) -> list[Entry]:
    """Return what three peers tell of a run, the first stage last."""
    peers = (A, B, C)
    entries = [said(peer, held(stage)) for stage, peer in enumerate(peers)]
    entries += [said(peer, of(stage, started(peer[0]))) for stage, peer in enumerate(peers)]
    entries += [said(peer, seen((A,), (B,), (C,)), 2.0) for peer in peers]
    for number in range(1, num_rounds + 1):
        for stage in (2, 1, 0):
            entries.append(said(peers[stage], of(stage, step(3.0 / number)), 10.0 * number))
            entries.append(committed(number, stage, peers[stage], 10.0 * number + 3 - stage))
    return entries


def test_commits_of_all_stages_are_one_round_of_the_run() -> None:
    found = history(*whole(), run=RUN)
    tree = found.whole()
    assert [(row[1], row[5]) for row in tree["rounds"]] == [(1, 100), (2, 200), (3, 300)]
    assert [row[9] for row in tree["rounds"]] == [2, 0, 0]  # of the first round another stage tells first
    assert [(row[1], row[9]) for row in tree["beside"]] == [(1, 1), (1, 0), (2, 2), (2, 1), (3, 2), (3, 1)]
    assert (found.now.num_rounds, found.now.committed_tokens) == (3, 300)
    assert [row[2] for row in tree["train"]] == [pytest.approx(3.0 / number) for number in (1, 2, 3)]
    json.dumps(tree, allow_nan=False)


def test_each_stage_s_work_is_a_share_of_all() -> None:
    assert [peer.counted_tokens for peer in history(*whole(), run=RUN).now.peers] == [300, 300, 300]
    assert [row[8] for row in history(*whole(), run=RUN).whole()["turns"]] == [2, 1, 0] * 3


def test_one_stage_alone_stands_for_the_run() -> None:
    found = history(*(entry for entry in whole() if entry.peer == C))
    assert (found.now.num_rounds, found.now.committed_tokens) == (3, 300)
    assert found.whole()["beside"] == []


def test_the_run_s_name_and_size_are_not_those_of_a_stage() -> None:
    found = history(*whole()).run
    assert (found.id, found.num_parameters) == (None, 3_000_000)
    assert history(*whole()[:2]).run.num_parameters is None  # of one stage nothing is known


def test_a_ring_of_all_peers_is_what_bytes_stand_beside() -> None:
    rows = history(*whole(), run=RUN).whole()["bytes"]
    one = 2 * (2 * 2 * 3_000_000 * 2 // 3)
    assert [row[3] for row in rows] == [one, 4 * one, 7 * one]  # when the first was told, one peer had been heard


def test_who_computes_what_is_told_where_it_changes_and_now_and_then() -> None:
    seen_at = [(seen((A,), (B,), (C,)), at) for at in (2.0, 3.0, 33.0)] + [(seen((A, B), (), (C,)), 34.0)]
    found = history(said(A, held(0)), *(said(A, event, at) for event, at in seen_at)).whole()
    assert [(row[0], row[2]) for row in found["stages"]] == [
        (2.0, [[0], [1], [2]]),
        (33.0, [[0], [1], [2]]),
        (34.0, [[0, 1], [], [2]]),
    ]
    assert found["stages"][0][3:] == [[80.0, 20.0, 60.0], [1, 7, 0]]
    assert [row[1] for row in found["peers"] if row[1]] == ["anna", "bert", "carl"]


def test_an_older_word_changes_nothing() -> None:
    found = history(said(A, seen((A,), (B,), (C,)), 9.0), said(B, seen((), (), ()), 8.0))
    assert [stage.members for stage in found.now.stages] == [(A,), (B,), (C,)]


def test_who_moves_has_not_stopped_and_where_it_went_is_a_row() -> None:
    entries = [said(B, held(1)), said(B, of(1, started("bert"))), said(B, held(2)), said(B, of(1, step(2.0)))]
    entries += [said(B, of(1, PeerStopped(reason="goes"))), said(B, StageLeft(stage=1, reason="goes"), 5.0)]
    found = history(*entries)
    assert found.now.peers[0].is_here
    assert found.now.peers[0].stages == (2,)
    assert found.whole()["moves"][-1] == [5.0, 0, 1, False, "goes"]
    ended = history(*entries, said(B, of(2, PeerStopped(reason="complete"))))
    assert not ended.now.peers[0].is_here


def test_who_left_one_stage_for_another_is_here() -> None:
    entries = (*whole(), said(A, of(0, MemberLeft(member=B))))
    assert [peer.is_here for peer in history(*entries).now.peers] == [True] * 3
    gone = history(*entries, said(A, seen((A,), (), (C,)), 60.0))
    assert [peer.is_here for peer in gone.now.peers] == [True, False, True]


# --- words ---


def changed(round: int, *, is_exact: bool) -> TextChanged:
    return TextChanged(before=Round(8), round=Round(round), is_exact=is_exact)


@pytest.mark.parametrize(
    ("event", "severity", "words"),
    [
        (held(1), NOTE, "anna takes stage 2 of 3: the run begins"),
        (StageLeft(stage=1, reason="it is weak"), NOTE, "anna leaves stage 2: it is weak"),
        (StageEmpty(stage=2, restored_by=B, round=Round(7)), WARNING, "no peer holds stage 3: training waits; bert"),
        (StageEmpty(stage=2, restored_by=None, round=Round(0)), WARNING, "no peer holds stage 3, and none here has"),
        (HeldDropped(stage=0, num=3), WARNING, "anna had no room in stage 1 for the results of 3 micro-batches"),
        (team(A), NOTE, "anna computes stage 2 alone: there are too few peers for another team of 2"),
        (team(A, B), NOTE, "anna computes stage 2 together with bert"),
        (team(B, A), NOTE, "anna helps bert to compute stage 2"),
        (MicroBatchFailed(stage=1, member=B, reason="late"), NOTE, "stage 2 gave up a micro-batch that bert sent"),
        (TextMoved(stage=1, before=A, member=B), NOTE, "an answer goes on with bert in place of anna in stage 2"),
        (
            changed(16, is_exact=True),
            NOTE,
            "an answer goes on with the weights of round 16: nobody has those of round 8",
        ),
        (changed(8, is_exact=False), NOTE, "the rest of an answer may differ from what exact numbers give: "),
        (
            ReceiptsDiffer(stage=1, before=A, member=B),
            WARNING,
            "anna and bert have signed different things of what went",
        ),
        (
            ReceiptFailed(stage=1, member=B, reason="none came"),
            NOTE,
            "no good receipt of bert in stage 2 for an answer: none",
        ),
        (seen((A,), (B, C), ()), ROUTINE, "peers by stage: 1, 2, 0; 80, 20, 60 samples/s; 1, 7, 0 micro-batches wait"),
        (of(1, MemberLeft(member=B)), NOTE, "stage 2: bert left with a goodbye"),
        (of(1, commit(4, 400, B)), ROUTINE, "stage 2: round 4: 1 counted"),
    ],
)
def test_each_event_of_stages_has_its_words(event: Event, severity: int, words: str) -> None:
    names = {A: "anna", B: "bert"}
    name = lambda peer: names.get(peer, peer[:8])  # noqa: E731
    assert severity_of(event) == severity
    assert (notable(said(A, event), name) or described(event, name)).startswith(words)


def test_a_team_of_nobody_says_nothing() -> None:
    nobody = said(A, TeamFormed(stage=1, members=(), size=2))
    assert notable(nobody, str) is None
    assert told(Stages(), nobody) == Stages()


def test_who_helps_is_not_left_out_until_it_computes_for_itself() -> None:
    def state(*entries: Entry, is_counted: bool = False) -> str:
        ours = of(1, commit(4, 400, A))
        assert isinstance(ours, RoundCommitted)
        return state_at_commit(reduce(told, entries, Stages()), A, ours, is_counted=is_counted)

    helps = said(A, team(B, A))
    assert state(helps) == "helping"
    assert state(helps, is_counted=True) == "training"
    assert state(said(B, team(B, A))) == "left out"
    assert state(helps, said(A, team(A))) == "left out"
    assert state(helps, said(A, StageLeft(stage=1, reason="it is weak"))) == "left out"
    others = said(A, TeamFormed(stage=0, members=(A, B), size=2)), said(A, StageLeft(stage=0, reason="it is weak"))
    assert state(helps, *others) == "helping"


@pytest.mark.parametrize("by", [B, None])
def test_a_stage_that_nobody_holds_is_a_thing_to_do_something_about(by: PeerId | None) -> None:
    advice = advice_of(said(A, StageEmpty(stage=0, restored_by=by, round=Round(3))), lambda _: "bert")
    assert advice is not None
    about, what, remedy = advice
    assert about == by
    assert what.startswith("No peer holds stage 1")
    assert ("bert takes it over" in remedy) == (by is not None)


def test_layers_and_stages_are_counted_from_one() -> None:
    cuts = [Section(0, 2, range(3)), Section(1, 2, range(3, 4))]
    stages = told(Stages(layers=layers_of(cuts)), said(A, held(1)))
    assert layers_of(cuts) == ("layers 1-3", "layer 4")
    assert holding(stages, A) == "stage 2 of 3, layer 4"
    assert holding(stages, B) == ""
    assert ordinal([0, 1, 2], 4) == "stages 1, 2 and 3 of 4"


def test_the_slowest_is_named_once_all_are_measured() -> None:
    assert slowest(told(Stages(), said(A, seen((A,), (B,), (C,))))) == 1
    some = StagesSeen(members=((A,), (B,)), rates=(80.0, 0.0), waiting=(0, 0))
    assert slowest(told(Stages(), said(A, some))) is None


def test_what_strangers_tell_of_stages_is_bounded() -> None:
    many = StagesSeen(members=((),) * 5000, rates=(), waiting=())
    assert told(Stages(), said(A, many)) == Stages()
    assert told(Stages(), said(A, StageHeld(stage=9, num_stages=3, num_parameters=1, reason=""))) == Stages()


def test_the_lowest_stage_that_goes_on_leads() -> None:
    lead = Lead()
    for stage, at, leads in (
        *((2, 1.0, 2), (0, 2.0, 0), (1, 3.0, 0), (2, 4.0, 0)),
        *((1, 5.0, 0), (1, 5.1, 0), (1, 5.2, 0)),  # as many as come in a moment
        *((1, 62.5, 1), (0, 63.0, 0)),  # nothing was heard of the first for a minute
        *((2, 200.0, 0), (2, 201.0, 0), (0, 202.0, 0)),
    ):
        event = of(stage, commit(1, 100, A))
        lead = led(lead, event, at)  # type: ignore[arg-type]
        assert lead.stage == leads


def test_what_one_stage_has_told_before_the_first_is_heard_is_told_once() -> None:
    entries = [entry for entry in whole(5) if entry.peer == C] + [entry for entry in whole(6) if entry.peer == A]
    found = history(*entries, run=RUN)
    assert [(row[1], row[9]) for row in found.whole()["rounds"]] == [*((number, 2) for number in range(1, 6)), (6, 0)]
    assert (found.now.num_rounds, found.now.committed_tokens) == (6, 600)


# --- beyond the page ---


def test_signatures_are_told_with_their_stage() -> None:
    proven = RoundProven(
        branch=BranchId("1" * 64),
        round=Round(3),
        manifest=Digest("d" * 64),
        committed_tokens=Tokens(9),
        num_signed=3,
        num_electors=4,
    )
    found = History()
    found.take(said(C, of(1, proven)))
    assert found.whole()["proofs"] == [[1.0, 3, 3, 4, 1]]


def test_prometheus_has_a_gauge_for_each_stage() -> None:
    text = metrics_of(history(*whole(), run=RUN)).decode()
    for line in (
        'weft_stage_peers{stage="2"} 1.0',
        'weft_stage_samples_per_second{stage="2"} 20.0',
        'weft_stage_waiting_micro_batches{stage="2"} 7.0',
        "weft_rounds_total 3.0",
    ):
        assert line in text
    assert "weft_stage" not in metrics_of(history(said(A, started("anna")))).decode()


def test_a_report_says_who_computed_which_stage_and_who_moved() -> None:
    entries = [*whole(), said(B, StageLeft(stage=1, reason="it is slow"), 40.0)]
    (stages,) = [each for each in told_of(Run(title="r", history=history(*entries, run=RUN))) if each.title == "Stages"]
    assert stages.table[2] == ("2 of 3", "layer 2", "1,000,000", "3", "b", "20", "7")
    assert stages.texts[-1] == "0:39 b leaves stage 2: it is slow."
    alone = told_of(Run(title="r", history=history(said(A, started("anna")))))
    assert not [each for each in alone if each.title == "Stages"]
