"""The history: rows by list, each told once, the same whether taken at once or piece by piece."""

import json
import math
from typing import Any

import msgspec
import pytest

from commits import committed
from weft.dashboard.history import LISTS, MAX_ROWS, History
from weft.dashboard.view import About
from weft.events import (
    VERSION,
    CheckpointFailed,
    CheckpointSaved,
    CountedThrough,
    Entry,
    Evaluated,
    Event,
    LinkDown,
    LinkUp,
    MajorityLost,
    MemberGone,
    MemberJoined,
    MemberProgress,
    MergeAudited,
    MethodTuned,
    Notice,
    PayloadOffered,
    PeerStarted,
    PeerStopped,
    Preferred,
    RoundCommitted,
    RoundMissed,
    RoundProven,
    Sampled,
    StepDone,
    WorkAudited,
    Working,
)
from weft.ids import BranchId, Digest, PeerId, Round, RunId, Step, Tokens

A, B, C = (PeerId(letter * 64) for letter in "abc")
BRANCH = BranchId("1" * 64)


def said(peer: PeerId, event: Event, at: float = 1.0) -> Entry:
    return Entry(v=VERSION, at=at, peer=peer, event=event)


def working(done: int, *, is_over: bool = False) -> Working:
    return Working(
        what="evaluating", unit="windows", done=done, total=10, rate=1.0, left_s=10.0 - done, is_over=is_over
    )


def started(name: str) -> PeerStarted:
    return PeerStarted(run=RunId("e" * 64), name=name, software="weft 1", device="cpu", num_parameters=1000)


def step(loss: float) -> StepDone:
    return StepDone(step=Step(1), loss=loss, learning_rate=0.1, gradient_norm=1.0, num_tokens=50, duration_s=0.5)


def commit(round: int, counted_tokens: int, *counted: PeerId, **fields: Any) -> RoundCommitted:
    told = {"branch": BRANCH, "sent_nbytes": 10, "received_nbytes": 20, "duration_s": 1.5, "work_s": 3.5}
    return committed(
        round=Round(round), contributors=counted, committed_tokens=Tokens(counted_tokens), **(told | fields)
    )


def progress(member: PeerId, state: str, round: int = 1, name: str = "bert") -> MemberProgress:
    return MemberProgress(
        member=member, name=name, round=Round(round), state=state, loss=2.0, tokens_per_s=7.0, link="tls"
    )


def history(*entries: Entry, run: About | None = None) -> History:
    found = History(run)
    for entry in entries:
        found.take(entry)
    return found


def rows(name: str, *entries: Entry) -> list[list[Any]]:
    found: list[list[Any]] = history(*entries).whole()[name]
    return found


def test_peers_are_numbered_as_they_are_heard_of_and_named_when_they_say_who_they_are() -> None:
    found = rows("peers", said(A, started("anna")), said(A, MemberJoined(member=B, name="")), said(B, started("bert")))
    assert found == [[A, "", "", ""], [A, "anna", "cpu", "weft 1"], [B, "", "", ""], [B, "bert", "cpu", "weft 1"]]


def test_a_round_that_all_report_is_there_once_and_its_account_for_each() -> None:
    told = msgspec.structs.replace(commit(1, 100, A, B, left_out={C: "late"}), leader=B)
    found = history(said(A, told, 5.0), said(B, commit(1, 100, A, B), 5.1)).whole()
    assert found["rounds"] == [[5.0, 1, 0, 1, 100, 100, [0, 1], [[2, "late"]], None]]
    assert found["turns"] == [[5.0, 0, 1, 3.5, 1.5, 10, 20, True], [5.1, 1, 1, 3.5, 1.5, 10, 20, True]]


def test_what_each_brought_is_as_the_round_says_and_where_it_does_not_by_its_own_account() -> None:
    told = msgspec.structs.replace(commit(1, 100, A, B), contributed=(Tokens(70), Tokens(30)))
    offered = PayloadOffered(round=Round(1), tokens=Tokens(50), nbytes=1)
    shares = lambda *entries: [peer.counted_tokens for peer in history(*entries).now.peers]  # noqa: E731
    assert shares(said(A, offered), said(A, told), said(B, told)) == [70, 30]
    assert shares(said(A, offered), said(A, commit(1, 100, A, B)), said(B, commit(1, 100, A, B))) == [50, 0]
    through = msgspec.structs.replace(told, num_through=1)  # groups: what an elector brought is not its own
    assert shares(said(A, offered), said(A, through), said(B, through)) == [50, 0]


def test_who_is_counted_through_an_aggregator_is_counted() -> None:
    through = CountedThrough(round=Round(1), tokens=Tokens(5))
    assert rows("turns", said(C, through), said(C, commit(1, 100, A)))[0][-1] is True
    assert rows("turns", said(C, commit(1, 100, A)))[0][-1] is False


def test_loss_is_the_mean_of_the_inner_steps_since_the_last_commit_and_what_is_no_number_is_none() -> None:
    found = history(
        said(A, step(3.0)),
        said(B, step(2.0)),
        said(B, step(float("nan"))),
        said(A, commit(1, 100, A, B), 4.0),
        said(B, commit(1, 100, A, B), 4.0),
        said(A, commit(2, 200, A, B), 5.0),
        said(A, step(1.0)),
        said(A, commit(3, 300, A, B), 6.0),
    ).whole()
    assert found["train"] == [[4.0, 100, 2.5], [6.0, 300, 1.0]]
    json.dumps(found, allow_nan=False)


def test_bytes_stand_beside_those_of_a_ring() -> None:
    run = About(tokens_per_step=10, num_parameters=1000)
    found = history(said(A, commit(1, 100, A, B)), said(B, commit(1, 100, A, B)), run=run).whole()["bytes"]
    # 5 steps of each of two; in a ring of two each sends and receives 2000 bytes of bf16 a step
    assert found == [[1.0, 100, 30, 2 * 5 * 2000]]


def test_held_out_losses_and_samples_come_once() -> None:
    evaluated = Evaluated(round=Round(1), loss=2.0, nats_per_byte=1.5, num_tokens=9, committed_tokens=Tokens(100))
    sample = Sampled(round=Round(1), prompt="a", text="b\n\x1b[2J")
    found = history(said(A, evaluated), said(B, evaluated), said(A, sample)).whole()
    assert found["heldout"] == [[1.0, 100, 2.0, 1.5, 1]]
    assert found["samples"][0][2:] == ["a", "b\n?[2J"]


def test_of_pairs_of_answers_it_is_kept_what_was_found_of_them() -> None:
    found = Preferred(accuracy=0.7, margin=0.1)
    event = Evaluated(
        round=Round(1), loss=2.0, nats_per_byte=math.nan, num_tokens=9, committed_tokens=Tokens(100), preferred=found
    )
    assert history(said(A, event)).whole()["heldout"] == [[1.0, 100, 2.0, None, 1, {"accuracy": 0.7, "margin": 0.1}]]


def test_what_others_say_is_their_word_until_a_peer_speaks_for_itself() -> None:
    claim = progress(B, "training")
    found = rows("states", said(A, claim), said(A, claim), said(B, step(2.5)), said(A, progress(B, "paused", 9)))
    assert found == [[1.0, 1, "training", 1, 2.0, 7.0, 0], [1.0, 1, "training", 1, 2.5, 100.0, 1]]


def test_a_peer_that_ended_by_itself_is_not_gone() -> None:
    gone = MemberGone(member=B, silent_s=10.0)
    states = rows("states", said(B, PeerStopped(reason="complete")), said(A, gone))
    assert [row[2] for row in states] == ["finished"]
    assert [row[2] for row in rows("states", said(B, step(1.0)), said(A, gone))] == ["training", "gone"]


@pytest.mark.parametrize(
    ("event", "severity", "words"),
    [
        (commit(1, 100, A, B), 0, "round 1: 2 counted, 100 tokens in 5.0 s"),
        (MemberJoined(member=B, name="bert"), 1, "bert joined"),
        (RoundMissed(round=Round(3), carried_tokens=Tokens(5), reason="late"), 2, "missed round 3"),
        (CheckpointFailed(path="x", reason="disk full"), 3, "disk full"),
        (LinkUp(remote=B, transport="tls", address=""), 0, "over tls"),
        (Notice(text="<b>\x1b[2J"), 1, "<b>?[2J"),
    ],
)
def test_events_have_a_severity_and_words(event: Event, severity: int, words: str) -> None:
    ((_, number, found, kind, text),) = rows("events", said(A, step(1.0)), said(A, event))
    assert (number, found, kind) == (0, severity, type(event).__name__)
    assert words in text


def test_steps_and_progress_are_not_listed() -> None:
    assert rows("events", said(A, step(1.0)), said(A, progress(B, "training"))) == []


def test_what_is_wrong_comes_with_what_to_do() -> None:
    lost = MajorityLost(branch=BRANCH, round=Round(1), alive=1, electorate=4, opens_branch_in_s=None, reason="a cable")
    ((at, about, text, what_to_do),) = rows("advice", said(A, started("anna")), said(A, lost, 9.0))
    assert (at, about) == (9.0, 0)
    assert text == "anna reaches none of the 3 other members: no round can end until more are back."
    assert "network" in what_to_do


def test_links_and_changes_of_the_method_are_kept() -> None:
    tuned = MethodTuned(round=Round(6), every=100, codec="e3m0", waited_s=1.0, worked_s=2.0, reason="slow")
    up, down = LinkUp(remote=B, transport="tls", address=""), LinkDown(remote=B, reason="reset")
    here = [said(A, step(1.0)), said(A, progress(B, "training"))]
    found = history(*here, said(A, up, 1.0), said(A, down, 2.0), said(A, tuned, 3.0)).whole()
    assert found["links"] == [[1.0, 0, 1, "tls"], [2.0, 0, 1, ""]]
    assert found["methods"] == [[3.0, 6, "from round 6 on, rounds have 100 training steps, in e3m0: slow"]]


def test_pieces_add_up_to_the_whole() -> None:
    entries = [said(A, started("anna")), said(A, step(3.0)), said(A, commit(1, 100, A)), said(A, step(2.0))]
    entries += [said(A, commit(2, 200, A)), said(B, started("bert"))]
    found, pieces, cursor = History(), {name: list[Any]() for name in LISTS}, 0
    for entry in entries:
        found.take(entry)
        piece = found.since(cursor)
        cursor = piece["cursor"]
        for name in LISTS:
            pieces[name] += piece.get(name, [])
    whole = found.whole()
    assert {name: whole[name] for name in LISTS} == pieces
    assert found.since(cursor) == {"cursor": cursor, "run": whole["run"], "moved": whole["moved"]}


def test_a_history_is_no_longer_than_a_page_can_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    assert MAX_ROWS >= 300_000
    monkeypatch.setattr("weft.dashboard.history.MAX_ROWS", 5)
    found = history(*(said(A, RoundMissed(round=Round(1), carried_tokens=Tokens(5), reason="")) for _ in range(10)))
    assert found.cursor >= 5
    assert found.num_left_out == 7


def test_work_that_takes_long_is_a_state_until_it_is_over() -> None:
    history = History()
    for event in (started("anna"), step(2.0), working(4), working(8), working(10, is_over=True)):
        history.take(said(A, event))
    tree = history.whole()
    assert [row[2] for row in tree["states"]][-4:] == ["training", "evaluating 40 %", "evaluating 80 %", "training"]
    assert all(row[2] != "Working" for row in tree["events"])


def test_who_takes_no_part_is_in_no_row_but_that_of_how_many() -> None:
    up, down = LinkUp(remote=C, transport="tls", address=""), LinkDown(remote=C, reason="closed")
    entries = [
        said(A, started("anna")),
        said(A, up, 2.0),
        said(C, Notice(text="nothing heard"), 3.0),
        said(A, down, 4.0),
    ]
    found = history(*entries)
    tree = found.whole()
    assert {row[0] for row in tree["peers"]} == {A}
    assert tree["links"] == []
    assert tree["watching"] == [[2.0, 1], [4.0, 0]]
    assert [row[1] for row in tree["events"]] == [0, 0, None, 0]
    assert [peer.key for peer in found.now.peers] == [A]


def test_links_and_events_of_who_joins_are_its_own_once_it_begins() -> None:
    up = LinkUp(remote=A, transport="tls", address="")
    entries = [said(A, started("anna")), said(B, up, 2.0), said(B, started("bert"), 5.0)]
    tree = history(*entries).whole()
    assert tree["links"] == [[5.0, 1, 0, "tls"]]
    assert [row[:2] + row[3:4] for row in tree["events"]][1:] == [[2.0, 1, "LinkUp"], [5.0, 1, "PeerStarted"]]
    assert tree["watching"] == []


def test_who_checks_signatures_is_no_peer_of_the_run() -> None:
    history = History()
    history.take(said(A, started("anna")))
    proven = RoundProven(
        branch=BRANCH,
        round=Round(3),
        manifest=Digest("d" * 64),
        committed_tokens=Tokens(9),
        num_signed=3,
        num_electors=4,
    )
    history.take(said(C, proven))
    tree = history.whole()
    assert tree["proofs"] == [[1.0, 3, 3, 4]]
    assert {row[0] for row in tree["peers"]} == {A}


@pytest.mark.parametrize(
    ("event", "words"),
    [
        (
            PayloadOffered(round=Round(2), tokens=Tokens(2048), nbytes=1_000_000),
            "offers 2,048 tokens to round 2, in 1 MB",
        ),
        (CheckpointSaved(path="", round=Round(2), digest=Digest("d" * 64), nbytes=2_000_000), "saves round 2, 2 MB"),
        (
            CountedThrough(round=Round(2), tokens=Tokens(64)),
            "64 tokens of it are counted in round 2, which another peer handed on",
        ),
        (
            WorkAudited(round=Round(2), member=B, work=Digest("d" * 64), num_steps=1, distance=0.0),
            f"has done 1 training step of {B[:8]} again: they are what it says",
        ),
        (
            MergeAudited(round=Round(2), member=B, part=1, result=Digest("d" * 64)),
            f"has merged part 1 of round 2 again: it is what {B[:8]} has found",
        ),
    ],
    ids=lambda each: type(each).__name__,
)
def test_routine_is_told_in_words(event: Event, words: str) -> None:
    history = History()
    history.take(said(A, event))
    assert history.whole()["events"][0][4] == words


def test_what_others_do_is_told_as_past_once_nobody_is_heard_any_more() -> None:
    progress = MemberProgress(
        member=B, name="bert", round=Round(1), state="training", loss=2.0, tokens_per_s=70.0, link="tls"
    )
    history = History()
    for entry in (said(A, started("anna")), said(A, progress), said(A, PeerStopped(reason="asked to"), 2.0)):
        history.take(entry)
    told = {row[1]: row[2] for row in history.whole()["states"]}
    assert [told[number] for number in sorted(told)] == ["stopped", "was training"]
    assert [peer.is_here for peer in history.now.peers] == [False, False]
    assert history.now.peers[1].trained_at_tokens_per_s == 70.0
