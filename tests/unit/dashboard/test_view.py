"""The view as a fold, and how it is drawn."""

import io
import math
import re
from dataclasses import replace
from functools import reduce

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from commits import committed
from weft.cli.screen.draw import axis, curve, draw, progress, scale, traffic
from weft.cli.screen.screen import LiveScreen, PlainScreen, plain_line
from weft.cost import training as cost
from weft.dashboard import figures
from weft.dashboard.view import MAX_NOTABLE, MAX_VISITS, About, Line, View, ended, update
from weft.dashboard.words import ROUTINE, WARNING, described, notable, severity_of
from weft.events import (
    HUNG_UP,
    ActEnacted,
    ActRefused,
    ActWaits,
    BranchOpened,
    CheckpointSaved,
    ConnectionDropped,
    CountedThrough,
    DataReady,
    Diverged,
    Entry,
    Evaluated,
    Event,
    JoinTooSlow,
    LinkDown,
    LinkUp,
    MajorityLost,
    MemberGone,
    MemberJoined,
    MemberLeft,
    MemberProgress,
    MemberStrays,
    MemberSuspected,
    Notice,
    NotLearning,
    Paused,
    PeerStarted,
    PeerStopped,
    Preferred,
    Resumed,
    RoundMissed,
    RoundsUnlike,
    RunBlocked,
    RunUnblocked,
    Sampled,
    Sponsored,
    StepDone,
    TrainsOn,
    WorkDropped,
    Working,
)
from weft.ids import BranchId, Digest, PeerId, Round, RunId, Step, Tokens

A, B, C, D = (PeerId(letter * 64) for letter in "abcd")
RUN = About(name="r", total_tokens=1000, tokens_per_step=10)
NUM = 1_000_000


def entry(event: Event, peer: PeerId = A, at: float = 100.0) -> Entry:
    return Entry(v=1, at=at, peer=peer, event=event)


def started(peer: PeerId = A, name: str = "anna") -> Entry:
    return entry(PeerStarted(run=RunId("f" * 64), name=name, software="", device="cpu", num_parameters=NUM), peer)


def step(loss: float, peer: PeerId = A, num_tokens: int = 10, duration_s: float = 0.1) -> Entry:
    done = StepDone(
        step=Step(1), loss=loss, learning_rate=0.1, gradient_norm=1.0, num_tokens=num_tokens, duration_s=duration_s
    )
    return entry(done, peer)


def commit(
    number: int,
    committed_tokens: int,
    peer: PeerId = A,
    at: float = 100.0,
    contributors: tuple[PeerId, ...] = (A, B),
    tokens: int = 100,
    num_through: int = 0,
) -> Entry:
    made = committed(
        round=Round(number),
        contributors=contributors,
        num_through=num_through,
        tokens=Tokens(tokens),
        committed_tokens=Tokens(committed_tokens),
        sent_nbytes=1000,
        received_nbytes=500,
        duration_s=0.1,
    )
    return entry(made, peer, at)


def progressed(member: PeerId, state: str = "training") -> Entry:
    return entry(
        MemberProgress(
            member=member, name="bert", round=Round(3), state=state, loss=2.5, tokens_per_s=700.0, link="tls"
        )
    )


def evaluated(committed: int, per_byte: float, peer: PeerId = A) -> Entry:
    made = Evaluated(
        round=Round(1), loss=2 * per_byte, nats_per_byte=per_byte, num_tokens=9, committed_tokens=Tokens(committed)
    )
    return entry(made, peer)


def fold(*entries: Entry, view: View | None = None) -> View:
    return reduce(update, entries, View(run=RUN) if view is None else view)


# --- the fold ---


def test_a_peer_is_shown_with_what_it_says_of_itself() -> None:
    line = fold(started(), step(3.0), commit(7, 100)).lines[A]
    assert (line.name, line.round, line.loss, line.state) == ("anna", 7, 3.0, "training")
    assert line.tokens_per_s == pytest.approx(100.0)


def test_the_view_before_is_left_as_it_was() -> None:
    before = fold(started())
    after = update(before, step(3.0))
    assert before.lines[A].loss is None
    assert after.lines[A].loss == 3.0


def test_others_are_shown_by_what_they_tell_in_heartbeats() -> None:
    line = fold(started(), progressed(B), entry(LinkUp(remote=B, transport="tls", address="tls://x:1"))).lines[B]
    assert (line.name, line.round, line.loss, line.tokens_per_s, line.link) == ("bert", 3, 2.5, 700.0, "tls")


def test_what_a_peer_says_of_itself_beats_what_others_say() -> None:
    view = fold(started(), started(B, "bert"), step(3.0, B), progressed(B, state="joining"))
    assert view.lines[B].state == "training"
    assert view.lines[B].loss == 3.0


def test_who_is_missed_and_heard_again_is_here_whatever_comes_late() -> None:
    def told(event: Event, at: float) -> Entry:
        return entry(event, A, at)

    heard = msgspec.structs.replace(progressed(B), at=120.0)
    late = msgspec.structs.replace(progressed(B), at=105.0)  # heard before it was missed, told after
    away: tuple[Event, ...] = (MemberGone(member=B, silent_s=9.0), MemberLeft(member=B))
    for event in away:
        for own in ([started(B, "bert"), step(2.0, B)], [progressed(B)]):
            missed = [*own, told(event, 110.0)]
            assert fold(*missed, late).lines[B].state in {"gone", "left"}
            assert fold(*missed, late, heard).lines[B].state == "training"
    stopped = entry(PeerStopped(reason="asked to"), B, at=111.0)
    assert fold(started(B, "bert"), stopped, told(away[0], 112.0), heard).lines[B].state == "stopped"


@pytest.mark.parametrize(
    ("event", "state"),
    [
        (MemberSuspected(member=B, silent_s=6.0, reason=""), "silent"),
        (MemberGone(member=B, silent_s=8.0), "gone"),
        (MemberLeft(member=B), "left"),
        (MemberJoined(member=B, name="bert"), "joined"),
    ],
)
def test_a_member_is_shown_as_it_comes_and_goes(event: Event, state: str) -> None:
    assert fold(started(), entry(event)).lines[B].state == state


def test_a_lost_majority_is_the_state_of_who_lost_it() -> None:
    lost = MajorityLost(
        branch=BranchId("f" * 64), round=Round(1), alive=1, electorate=3, opens_branch_in_s=60.0, reason="gone"
    )
    assert fold(started(), entry(lost)).lines[A].state == "1 of 3 left"


def test_a_step_that_was_under_way_when_a_pause_began_does_not_end_it() -> None:
    paused = fold(started(), step(3.0), entry(Paused(reason="on request")), step(2.0))
    assert (paused.lines[A].state, paused.lines[A].tokens_per_s, paused.lines[A].loss) == ("paused", 0.0, 2.0)
    assert fold(entry(Resumed(reason="on request", paused_s=9.0)), step(1.0), view=paused).lines[A].state == "training"


def test_a_link_that_broke_is_down() -> None:
    up, down = LinkUp(remote=B, transport="iroh", address="iroh://x"), LinkDown(remote=B, reason="reset")
    assert fold(progressed(B), entry(up)).lines[B].link == "iroh"
    assert fold(progressed(B), entry(up), entry(down)).lines[B].link == "down"


def linked(remote: PeerId, own: PeerId = A) -> Entry:
    return entry(LinkUp(remote=remote, transport="tls", address=""), own)


def unlinked(remote: PeerId, own: PeerId = A) -> Entry:
    return entry(LinkDown(remote=remote, reason="closed"), own)


def test_who_takes_no_part_is_no_line_and_no_peer_but_watches() -> None:
    view = fold(started(), progressed(B), linked(B), linked(C), linked(D))
    assert set(view.lines) == {A, B}
    assert "2 peers" in progress(view)
    assert view.num_watching == 2
    assert "watching: 2" in drawn(view)
    assert fold(unlinked(C), unlinked(D), view=view).num_watching == 0
    assert "watching" not in "".join(drawn(fold(started(), step(3.0))))


def test_a_killed_machine_is_not_hidden_behind_who_watches() -> None:
    view = fold(started(), progressed(B), linked(B), linked(C), entry(MemberGone(member=B, silent_s=8.0)))
    assert "1 peer " in progress(view)


def test_who_watches_through_several_members_is_one_and_leaves_with_the_last_link() -> None:
    view = fold(started(), started(B, "bert"), linked(C), linked(C, B))
    assert view.num_watching == 1
    assert fold(unlinked(C), view=view).num_watching == 1
    assert fold(unlinked(C), unlinked(C, B), view=view).num_watching == 0


def test_links_of_who_is_gone_or_began_anew_keep_nobody_watching() -> None:
    view = fold(started(), started(B, "bert"), linked(C, B))
    assert fold(entry(MemberGone(member=B, silent_s=8.0)), view=view).num_watching == 0
    assert fold(started(B, "bert"), view=view).num_watching == 0


def test_who_watches_tells_nothing_that_makes_it_a_peer() -> None:
    view = fold(started(), entry(Notice(text="2 s of anna are not shown"), C), linked(A, C), linked(C))
    assert set(view.peers) == {A}
    assert view.notables[-1].text == "2 s of anna are not shown"
    assert view.num_watching == 1


def test_who_begins_to_take_part_has_the_links_that_it_had() -> None:
    asked = fold(linked(B, A), linked(A, B), started())  # as a newcomer tells it: links first
    assert set(asked.lines) == {A}
    assert asked.num_watching == 1
    assert {peer: line.link for peer, line in fold(started(B, "bert"), view=asked).lines.items()} == {
        A: "tls",
        B: "tls",
    }


def test_links_of_strangers_are_bounded() -> None:
    view = fold(started(), *(linked(PeerId(f"{number:064x}")) for number in range(MAX_VISITS + 5)))
    assert view.num_watching == MAX_VISITS


def test_a_commit_that_all_report_counts_once_and_its_bytes_for_each() -> None:
    view = fold(commit(1, 100, A), commit(1, 100, B))
    assert view.committed_tokens == 100
    assert len(view.commits) == 1
    assert (view.sent_nbytes, view.received_nbytes) == (2000, 1000)


def test_the_curve_has_one_point_per_commit_the_mean_over_all_peers_steps() -> None:
    view = fold(step(4.0), step(2.0, B), commit(1, 100), commit(1, 100, B), step(1.0), commit(2, 200))
    assert view.losses.points == ((100, 3.0), (200, 1.0))


def test_what_a_peer_told_late_of_steps_long_ago_is_in_no_later_round() -> None:
    def trained(loss: float, at: float) -> Entry:
        return msgspec.structs.replace(step(loss, B), at=at)

    view = fold(step(3.0), commit(1, 100, at=100.0), trained(9.0, 10.0), trained(2.0, 90.0), commit(2, 200, at=130.0))
    assert view.losses.points == ((100, 3.0), (200, 2.0))


def test_a_round_that_does_not_go_on_counts_no_tokens_twice() -> None:
    assert fold(commit(5, 500), commit(2, 200, B)).committed_tokens == 500


def test_bytes_are_held_against_a_ring_for_the_same_steps() -> None:
    # 100 tokens of two peers with 10 tokens per step: five steps each.
    view = fold(started(), commit(1, 100))
    ring = cost.ring_ddp_traffic(NUM, 2, 5)
    assert view.ring_nbytes == ring.sent_nbytes + ring.received_nbytes


def test_a_ring_would_go_through_those_without_a_vote_too() -> None:
    # 100 tokens of two peers and three leaves with 10 tokens per step: two steps each.
    view = fold(started(), commit(1, 100, num_through=3))
    ring = cost.ring_ddp_traffic(NUM, 5, 2)
    assert view.ring_nbytes == ring.sent_nbytes + ring.received_nbytes


def test_who_is_counted_with_its_aggregator_is_not_left_out() -> None:
    view = fold(started(C, "carl"), entry(CountedThrough(round=Round(1), tokens=Tokens(5)), C), commit(1, 100, C))
    assert view.lines[C].state == "training"
    assert fold(commit(2, 200, C), view=view).lines[C].state == "left out"


def test_a_peer_alone_would_need_no_ring() -> None:
    assert fold(started(), commit(1, 100, contributors=(A,))).ring_nbytes == 0


def test_time_left_follows_the_pace_of_the_commits() -> None:
    view = fold(commit(1, 100, at=100.0), commit(2, 200, at=110.0))
    assert view.time_left_s == pytest.approx(80.0)
    assert update(view, replace_at(step(1.0), 115.0)).time_left_s == pytest.approx(75.0)


def replace_at(before: Entry, at: float) -> Entry:
    return Entry(v=before.v, at=at, peer=before.peer, event=before.event)


def test_the_time_that_all_were_away_is_no_part_of_the_pace() -> None:
    """All were stopped, or killed, and came back; where one stayed, its rounds went on."""
    about = View(run=About(total_tokens=1000))
    before = fold(started(), started(B, "bert"), commit(1, 100, at=100.0), commit(2, 200, at=110.0), view=about)
    both = fold(started(), started(B, "bert"), view=before)
    after = fold(commit(3, 300, at=90_000.0), commit(4, 400, at=90_010.0), view=both)
    assert after.time_left_s == pytest.approx(60.0)
    stayed = fold(step(1.0), started(B, "bert"), view=before)
    assert stayed.commits == before.commits


def test_time_left_is_unknown_before_the_second_commit() -> None:
    assert fold(commit(1, 100)).time_left_s is None
    assert replace(fold(commit(1, 100), commit(2, 200, at=200.0)), run=About()).time_left_s is None


def test_an_evaluation_that_all_report_counts_once() -> None:
    lines = lines_of(evaluated(100, 2.0), evaluated(100, 2.0, B), evaluated(200, 1.5), evaluated(100, 2.0, C))
    assert [line.split(":")[0] for line in lines] == ["held-out loss after round 1"] * 2


def test_a_held_out_loss_is_that_of_its_round_whenever_it_is_told() -> None:
    view = fold(evaluated(200, 1.5), evaluated(100, 2.0))
    assert view.evaluated is not None
    assert view.evaluated.committed_tokens == 200
    assert "held-out 3.000 nats per token (round 1)" in progress(fold(commit(2, 200), view=view))
    assert "(round" not in progress(fold(commit(1, 100), view=view))


def test_a_held_out_loss_of_text_whose_bytes_nobody_counted_is_per_token() -> None:
    view = fold(commit(1, 100), evaluated(100, math.nan))
    view = replace(view, evaluated=msgspec.structs.replace(view.evaluated, loss=2.5))
    assert "held-out 2.500 nats per token" in progress(view)
    assert figures.heldout(2.5, math.nan) == "2.5000 nats per token (perplexity 12.2)"


def test_a_held_out_loss_of_pairs_is_per_pair_and_says_how_many_are_right() -> None:
    pairs = Preferred(accuracy=0.715, margin=0.4219, kl=0.0131)
    event = evaluated(100, math.nan).event
    told = msgspec.structs.replace(event, loss=0.5, preferred=pairs)
    view = fold(step(0.6), commit(1, 100), entry(told), view=View(run=About(loss_of="pair")))
    assert "loss 0.600 nats per pair" in progress(view)
    assert "held-out 0.500 nats per pair" in progress(view)
    said = "0.5000 nats per pair, 71.5 % of the pairs right, margin 0.422"
    assert figures.heldout(0.5, math.nan, pairs) == f"{said}, 0.0131 nats per token from where it began"
    assert figures.heldout(0.5, math.nan, msgspec.structs.replace(pairs, kl=msgspec.UNSET)) == said
    assert said in described(told, str)


@pytest.mark.parametrize(
    ("committed", "words"), [(4, "4 of 1k tokens (0 %)"), (999, "999 of 1k tokens (99 %)"), (1000, "1k tokens (100 %)")]
)
def test_how_much_is_done_is_rounded_down(committed: int, words: str) -> None:
    assert words in progress(fold(commit(1, committed)))


def test_a_last_round_that_counts_more_than_was_wanted_is_not_above_100_percent() -> None:
    assert "1.02k tokens (100 %)" in progress(fold(commit(9, 1024)))
    work = Working(what="tokenizing", unit="B", done=130, total=100, rate=1.0, left_s=0.0, is_over=False)
    assert figures.work(work).startswith("tokenizing: 100 % of 100 B")
    assert figures.work_in_short(work) == "tokenizing 100 %"


@pytest.mark.parametrize(
    ("more", "text"), [(26.66, "26.7x"), (12.0, "12x"), (0.0123, "0.0123x"), (1234.5, "1,230x"), (2e7, "20,000,000x")]
)
def test_a_ratio_has_three_digits_that_count(more: float, text: str) -> None:
    assert figures.ratio(more, 1) == text


def test_losses_have_their_units_and_perplexity() -> None:
    assert figures.heldout(2.0, 1.0) == "1.0000 nats per byte (1.4427 bits); 2.0000 nats per token (perplexity 7.39)"
    assert figures.heldout(1.0, 1.0) == "1.0000 nats per byte (1.4427 bits)"  # a token is a byte
    assert figures.nats(1e9) == "1000000000.0000 nats per token"
    assert figures.nats(math.nan) == "nan nats per token"


def test_sample_and_checkpoint_are_kept() -> None:
    view = fold(
        entry(Sampled(round=Round(1), prompt="def ", text="f")),
        entry(CheckpointSaved(path="p", round=Round(1), digest=Digest("0" * 64), nbytes=1)),
        entry(PeerStopped(reason="complete")),
    )
    assert (view.sample, view.checkpoint, view.lines[A].state) == ("def f", "p", "finished")


def test_only_the_last_notable_events_stay_each_once() -> None:
    view = fold(*(entry(Notice(text=f"n{n}")) for n in range(20)), entry(Notice(text="n19"), B))
    assert tuple(news.text for news in view.notables) == tuple(f"n{n}" for n in range(20 - MAX_NOTABLE, 20))


def test_what_happens_again_is_told_again_but_not_by_everybody() -> None:
    gone = Notice(text="C is gone")
    said = [entry(gone, at=100), entry(gone, B, at=101), entry(gone, at=110), entry(gone, B, at=112)]
    assert [news.at for news in fold(*said).notables] == [100, 110]
    view, lines = View(), []
    for each in [*said, entry(gone, B, at=200)]:
        after = update(view, each)
        lines.append(plain_line(view, after, each))
        view = after
    assert lines == ["C is gone", None, "C is gone", None, "C is gone"]


def test_no_words_of_others_reach_the_terminal_as_commands() -> None:
    evil = "a\x1b]0;owned\x07\x1b[2Jb"
    said = [
        entry(Notice(text=evil)),
        entry(MemberJoined(member=B, name=evil)),
        entry(MemberProgress(member=B, name=evil, round=Round(1), state=evil, loss=None, tokens_per_s=1.0, link=evil)),
        entry(Sampled(round=Round(1), prompt="", text=evil + "\n\tc")),
    ]
    console = Console(file=io.StringIO(), width=100)
    console.print(draw(fold(*said)))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    plain = "".join(str(plain_line(View(), View(), each)) for each in said)
    assert "\x1b]0" not in shown
    assert "\x1b[2J" not in shown
    assert "\x07" not in shown
    assert "\x1b" not in plain
    assert fold(*said).sample == "a?]0;owned??[2Jb\n\tc"


@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from([A, B, C]), st.integers(0, 900)), max_size=40))
def test_any_order_of_entries_can_be_shown(said: list[tuple[int, PeerId, int]]) -> None:
    def make(kind: int, peer: PeerId, number: int) -> Entry:
        return (
            started(peer),
            step(number / 100, peer),
            commit(number, number, peer, at=100.0 + number),
            progressed(peer),
            evaluated(number, 1.0, peer),
            entry(MemberGone(member=peer, silent_s=1.0)),
        )[kind]

    view = fold(*(make(*each) for each in said))
    console = Console(file=io.StringIO(), width=100)
    console.print(draw(view))
    assert view.committed_tokens == max((n for kind, _, n in said if kind == 2), default=0)


# --- words ---

TOO_SLOW = JoinTooSlow(received_bps=950e3, added_bps=2.9e6, needs_s=130.0, is_blocking=False)


def enacted(kind: str, subject: str = "", num: int = 1, **changes: str) -> ActEnacted:
    by = (B, A)[:num]
    said = {"branch": BranchId("f" * 64), "round": Round(1), "by": by, "reason": "slow", "changes": changes}
    return ActEnacted(kind=kind, subject=subject, **said)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("event", "words"),
    [
        (MemberJoined(member=B, name="bert"), "bert joined"),
        (MemberLeft(member=B), "bert left with a goodbye"),
        (MemberGone(member=B, silent_s=8.0), "bert is gone"),
        (
            Sponsored(round=Round(1), sponsor=B),
            "bert hands the updates of anna on from now: as many peers decide on rounds as this run allows",
        ),
        (
            Sponsored(round=Round(1), sponsor=B, has_room=True),
            "no round has counted anna in yet: until one does, bert hands its updates on",
        ),
        (MemberSuspected(member=B, silent_s=6.0, reason="silent for 6.0 s"), "bert is silent (for 6.0 s)"),
        (MemberSuspected(member=B, silent_s=6.0, reason=""), "bert is silent (for 6 s)"),
        (MemberSuspected(member=B, silent_s=0.0, reason="no {heartbeat}"), "bert is silent (no {heartbeat})"),
        (
            BranchOpened(branch=BranchId("b" * 64), round=Round(4), members=(A,), reason="the others are away"),
            "anna goes on alone: the others are away",
        ),
        (
            BranchOpened(branch=BranchId("b" * 64), round=Round(4), members=(A, B), reason="the others are away"),
            "anna, bert go on by themselves: the others are away",
        ),
        (
            WorkDropped(tokens=Tokens(10240), reason="it is old"),
            "10,240 tokens that anna trained last do not count: it is old",
        ),
        (
            RunBlocked(by=B, needs_s=90.0, longest_s=600.0),
            "bert is slower than this run: anna waits until it has caught up, about 1:30 as it estimates, 10:00",
        ),
        (RunUnblocked(by=B, blocked_s=61.0, reason="it is in"), "anna no longer waits for bert, after 1:01: it is in"),
        (TOO_SLOW, "receives 950 kbit/s, and the run adds 2.9 Mbit/s of results"),
        (TOO_SLOW, "`weft join --blocking` asks members to wait until it has caught up, about 2:10 at this pace"),
        (
            msgspec.structs.replace(TOO_SLOW, is_blocking=True),
            "Members are asked to wait until it has caught up, about 2:10",
        ),
        (
            msgspec.structs.replace(TOO_SLOW, is_in=True),
            "falls behind again: it receives 950 kbit/s, and the run adds 2.9",
        ),
        (RoundMissed(round=Round(3), carried_tokens=Tokens(1), reason="late"), "anna missed round 3"),
        (
            MemberStrays(member=B, round=Round(3), what="loss", value=5.88, usual=2.4),
            "the loss of bert is 5.88, and the others' is 2.40",
        ),
        (
            MemberStrays(member=B, round=Round(3), what="update", value=0.36, usual=0.06),
            "an update of bert is 6 times as large",
        ),
        (
            MemberStrays(member=B, round=Round(3), what="update", value=0.01, usual=0.2),
            "an update of bert is 1/20 as large",
        ),
        (
            MemberStrays(member=B, round=Round(3), what="loss", value=2.5, usual=2.4, is_back=True),
            "the loss of bert is like the others' again",
        ),
        (
            MemberStrays(member=B, round=Round(3), what="steps", value=5e-5, usual=0.0),
            "training steps of bert are longer than the same made by anna, nearly each time, by 5e-05 on average",
        ),
        (
            MemberStrays(member=B, round=Round(3), what="steps", value=0.0, usual=0.0, is_back=True),
            "training steps of bert are as long as the same made by anna again",
        ),
        (
            RoundsUnlike(distance=4e-5, held=1.5e-4, num_members=3, num_unlike=2),
            "made again by anna end up to 4e-05 from those of 2 of 3 members, and up to 0.00015 is held for honest: "
            "this machine computes otherwise than most",
        ),
        (
            RoundsUnlike(distance=4e-5, held=1.5e-4, num_members=1, num_unlike=1),
            "from those of a member, and up to 0.00015 is held for honest: one of both rounds otherwise than others do",
        ),
        (
            RoundsUnlike(distance=4e-4, held=1.5e-4, num_members=3, num_unlike=1),
            "of 1 of 3 members, and up to 0.00015 is held for honest: theirs are false, or this machine computes",
        ),
        (
            NotLearning(round=Round(9), committed_tokens=Tokens(65536), first_loss=3.69, loss=4.31),
            "no lower than the 3.69 at the start: learning rates may be too high, or rounds count outdated work",
        ),
        (
            Diverged(round=Round(1), committed_tokens=Tokens(65536), loss=239.0, nothing=5.549),
            "after 65,536 tokens the held-out loss is 239 nats, far above the 5.55 of a model that knows",
        ),
        (ActWaits(by=B, kind="amend", subject=""), "bert asks to change the run's settings: that waits for a round"),
        (ActWaits(by=B, kind="ban", subject=A), "bert asks to ban anna: that waits for a round"),
        (ActWaits(by=B, kind="{by}", subject=A), "bert asks to {by} anna"),
        (ActRefused(by=B, kind="remove", subject=A, reason="x"), "bert asks to remove anna, which has no effect: x"),
        (enacted("pardon", A), "bert lets anna in again"),
        (enacted("vote out", A, 2), "2 members vote anna out (slow)"),
        (enacted("succeed", "f" * 64), "bert says that run ffffffff goes on in place of this one"),
        (
            enacted("amend", tokens="6000000", schedule='{"type":"wsd","lr":0.003,"total_tokens":6000000,"floor":0.0}'),
            "bert changes the run's settings: 6,000,000 tokens in all, learning rate at most 0.003, planned for "
            "6,000,000 tokens (slow)",
        ),
        (
            enacted("amend", batch_size="1", every="1", codec='{"type":"int8"}', apply='{"type":"sgd","lr":0.5}'),
            "settings: 1 sample a training step, 1 training step a round, updates sent in int8, results applied by sgd "
            "(lr 0.5) (slow)",
        ),
        (enacted("amend", tokens="{me}", later="[1]"), "tokens = {me}, later = [1]"),
        (ConnectionDropped(address="bulk stream", remote=B, reason="gone"), "anna could not fetch from bert: gone"),
        (ConnectionDropped(address="tls (incoming)", remote=B, reason="x"), "a connection with bert was dropped: x"),
        (ConnectionDropped(address="1.2.3.4:5", remote=None, reason="x"), "a connection with 1.2.3.4:5 was dropped"),
        (ConnectionDropped(address="", remote=None, reason="no handle is left"), "a connection was dropped: no handle"),
        (
            TrainsOn(branch=BranchId("f" * 64), round=Round(1), steps=80),
            "anna keeps training meanwhile, for at most 80",
        ),
    ],
)
def test_what_matters_is_said_with_names(event: Event, words: str) -> None:
    names = {A: "anna", B: "bert"}
    assert words in (notable(entry(event), lambda peer: names[peer]) or "")


def test_nobody_s_work_is_outdated_in_a_run_of_one_peer() -> None:
    event = NotLearning(round=Round(9), committed_tokens=Tokens(1), first_loss=3.69, loss=4.31, num_members=1)
    assert (notable(entry(event), lambda _peer: "anna") or "").endswith("learning rates may be too high")


def test_what_a_peer_did_before_it_said_its_name_is_told_with_it() -> None:
    ready = entry(DataReady(num_shards=1, fetched_nbytes=1000, train_tokens=1, heldout_tokens=1))
    assert [news.text for news in fold(ready, started()).notables] == ["anna fetched 1 kB of data"]


def test_a_key_in_a_text_is_the_peer_s_name_where_it_is_known() -> None:
    told = entry(Notice(text="bbbbbbbb is gone, cccccccc waits, bert (bbbbbbbb) too, blob 12345678"))
    view = fold(started(), progressed(B), told)
    assert view.notables[-1].text == "bert is gone, cccccccc waits, bert (bbbbbbbb) too, blob 12345678"
    named = fold(entry(MemberJoined(member=C, name="cleo")), view=view)
    assert named.notables[0].text == "bert is gone, cleo waits, bert (bbbbbbbb) too, blob 12345678"


def test_who_shares_a_name_is_told_with_a_part_of_the_key() -> None:
    view = fold(started(), progressed(B), started(C, "bert"))
    assert [view.name(peer) for peer in (A, B, C, D)] == ["anna", "bert (bbbbbbbb)", "bert (cccccccc)", "dddddddd"]
    assert view.name(B) in "".join(drawn(view))
    assert fold(started(C, "cleo"), view=view).name(B) == "bert"


def test_who_only_looked_whether_this_machine_answers_is_no_news() -> None:
    gone = ConnectionDropped(address="1.2.3.4:5", remote=None, reason=f"{HUNG_UP}: Connection reset by peer")
    assert notable(entry(gone), str) is None
    assert severity_of(gone) == ROUTINE
    assert severity_of(msgspec.structs.replace(gone, reason="it lies")) == WARNING


def test_news_are_told_with_the_time_that_they_are_of() -> None:
    """Long after all were back, a screen said that one goes on alone."""
    told = msgspec.structs.replace(entry(Notice(text="one is away")), at=3 * 86400.0)
    later = msgspec.structs.replace(commit(1, 100), at=3 * 86400.0 + 480)
    assert re.search(r"· \d\d:\d\d one is away", "".join(drawn(fold(told, later))))
    days = msgspec.structs.replace(commit(1, 100), at=9 * 86400.0)
    assert re.search(r"· 1970-01-0\d \d\d:\d\d one is away", "".join(drawn(fold(told, days))))


def test_nobody_says_how_long_a_run_takes_that_nobody_trains() -> None:
    view = fold(started(), commit(1, 100, at=10.0), commit(2, 200, at=20.0))
    assert "left" in progress(view)
    assert "left" not in progress(fold(entry(PeerStopped(reason="stopped by Ctrl-C")), view=view))
    gone = ended(view)
    assert "left" not in progress(gone)
    assert gone.line(A).state == "was training"


def test_both_losses_are_written_with_the_same_unit_however_narrow_the_line() -> None:
    view = fold(started(), step(1.0), commit(1, 100), evaluated(100, 2.0), step(1.0), commit(2, 200))
    both = [progress(view, width) for width in range(30, 200)]
    assert any("nats/token" in line for line in both)
    assert any(line.count("nats per token") == 2 for line in both)
    assert not any("nats/token" in line and "nats per token" in line for line in both)


def test_what_happened_before_is_shown_and_not_told(capsys: pytest.CaptureFixture[str]) -> None:
    screen = PlainScreen()
    screen.take([commit(1, 100)])
    assert (screen.view.round, capsys.readouterr().err) == (1, "")


def test_data_that_was_ready_before_a_peer_began_is_ready() -> None:
    ready = entry(DataReady(num_shards=1, fetched_nbytes=0, train_tokens=1, heldout_tokens=1))
    view = fold(ready, started())
    assert view.lines[A].state == "data ready"
    stopped = fold(entry(PeerStopped(reason="asked to")), started(), view=view)
    assert stopped.lines[A].state == "starting"


def test_routine_is_not_notable() -> None:
    assert [notable(each, str) for each in (step(1.0), commit(1, 1), progressed(B), evaluated(1, 1.0))] == [None] * 4


# --- drawing ---


def test_the_curve_falls_where_the_loss_falls() -> None:
    rows = curve([4.0, 3.0, 2.0, 1.0], width=10, height=4)
    heights = [sum(row[column] != " " for row in rows) for column in range(4)]
    assert heights == sorted(heights, reverse=True)
    assert heights[0] == 4
    assert rows[-1][-1] != " "  # the lowest value is still there


def test_the_curve_says_its_highest_and_its_lowest_value_where_they_lie() -> None:
    """Four values that differ little do not reach the lowest line, which stands for 3/4 of the highest."""
    assert axis([4.0, 3.9, 3.6, 3.4], width=10, height=4) == ["4.000", "", "3.400", ""]
    assert axis([4.0, 1.0], width=10, height=4) == ["4.000", "", "", "1.000"]
    assert axis([2.0, 2.0], width=10, height=4) == ["2.000", "", "", ""]


def test_before_the_first_round_nothing_is_said_of_what_is_done() -> None:
    """Who has just come to a run knows only how many tokens it wants."""
    view = fold(started(), progressed(B))
    assert "1k tokens in all" in progress(view)
    assert "0 of 1k" not in progress(view)
    assert "500 of 1k tokens (50 %)" in progress(fold(commit(1, 500), view=view))


def test_a_loss_of_one_peer_alone_says_whose_it_is() -> None:
    alone = fold(started(), step(3.0), commit(1, 100))
    assert "loss 3.000 nats per token  " in progress(alone) + "  "
    view = fold(progressed(B), view=alone)
    assert "loss 3.000 nats per token of anna" in progress(view)
    assert "training loss of anna" in "".join(drawn(fold(step(2.0), commit(2, 200), view=view)))
    assert " of anna" not in progress(fold(started(B, "bert"), step(2.0, B), view=view))


def test_a_long_curve_is_averaged_to_its_width() -> None:
    rows = curve([1.0, 3.0] * 50, width=10, height=2)
    assert [len(row) for row in rows] == [10, 10]
    assert len(set(rows[-1])) == 1  # all columns are the same mean


def test_the_whole_view_is_drawn() -> None:
    entries = [started(), progressed(B), entry(LinkUp(remote=B, transport="tls", address="tls://x:1"))]
    for number in range(1, 5):
        entries += [step(5.0 - number), commit(number, 100 * number, at=100.0 + number)]
    console = Console(file=io.StringIO(), width=100)
    console.print(draw(fold(*entries, evaluated(400, 1.9), entry(Notice(text="a thing"))), 100))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    for words in ("anna", "bert", "tls", "round 4", "40 %", "loss 1.000", "3.800 nats", "ring DDP", "█", "a thing"):
        assert words in text


def test_work_that_takes_long_is_shown_in_the_place_of_the_state() -> None:
    work = Working(what="evaluating", unit="windows", done=45, total=100, rate=1.0, left_s=55.0, is_over=False)
    view = fold(started(), step(2.0), entry(work))
    assert any("evaluating 45 %" in line for line in drawn(view))
    view = fold(entry(msgspec.structs.replace(work, is_over=True)), view=view)
    assert not any("evaluating" in line for line in drawn(view))
    assert any("training" in line for line in drawn(view))


def test_bytes_are_shown_beside_the_rings() -> None:
    view = replace(View(), sent_nbytes=3_000_000, received_nbytes=1_000_000, ring_nbytes=400_000_000)
    assert traffic(view).splitlines() == [
        "sent 3 MB, received 1 MB",
        "ring DDP, which exchanges gradients at every step: 400 MB, 100 times as much",
    ]
    two = replace(view, peers={A: Line(is_heard=True), B: Line(is_heard=True)})
    assert traffic(two).startswith("2 peers together sent 3 MB")


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (999, "999 B"), (3_200_000, "3.2 MB"), (812e6, "812 MB"), (1.5e12, "1.5 TB")]
)
def test_bytes_read_well(count: float, text: str) -> None:
    assert figures.nbytes(count) == text


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (100, "1:40"), (7500, "2 h 05"), (3 * 86400, "3.0 days")])
def test_durations_read_well(seconds: float, text: str) -> None:
    assert figures.duration(seconds) == text


def drawn(view: View, width: int = 80, height: int = 40) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    console.print(draw(view, width, height))
    return [line.rstrip() for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]


def busy() -> View:
    """A long run of many tokens, with everything that the line of progress can say."""
    entries = [started(), *(step(1.385, num_tokens=10) for _ in range(3)), evaluated(100, 1.4241)]
    view = fold(*entries, commit(14_812, 3_030_000, at=100.0), step(1.5), commit(14_813, 3_031_000, at=130.0))
    return replace(view, run=About(name="r", total_tokens=4_510_000, tokens_per_step=10))


@pytest.mark.parametrize("width", [20, 40, 60, 79, 80, 100])
def test_the_line_of_progress_never_takes_a_second_line(width: int) -> None:
    line = progress(busy(), width)
    assert len(line) <= width
    assert "round 14813" in line
    assert [each for each in drawn(busy(), width) if each == line.rstrip()] == [line.rstrip()]
    assert "67 %" in line
    if width >= 80:
        assert "held-out 2.848" in line


def test_who_waits_says_for_how_many() -> None:
    view = replace(fold(started()), run=RUN, wait_for=3)
    assert progress(view) == progress(view, 80) == "waiting for 2 more peers"
    assert "waiting" in drawn(view)[1]
    linked = update(view, entry(LinkUp(remote=B, transport="tls", address="tls://x:1")))
    assert progress(linked) == "waiting for 2 more peers"  # it is no member yet
    view = update(linked, entry(MemberJoined(member=B, name="bert")))
    assert progress(view) == "waiting for 1 more peer"
    assert "waiting" not in progress(update(view, step(3.0)))


def test_the_plain_screen_says_that_it_waits(capsys: pytest.CaptureFixture[str]) -> None:
    PlainScreen().start(RUN, 2)
    assert capsys.readouterr().err == "waiting for 1 more peer\n"


def test_where_there_will_be_no_view_what_has_happened_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    for screen in (PlainScreen(), LiveScreen()):
        screen.write(entry(Notice(text="the run is complete")))
        screen.say()
        screen.close()
        assert capsys.readouterr().err.count("the run is complete") == 1


def test_who_is_about_to_join_is_shown_as_joining() -> None:
    view = fold(started(), entry(MemberJoined(member=B, name="bert")), linked(B))
    assert view.lines[B].state == "joined"
    assert fold(started(), commit(1, 100), linked(B)).lines[B].state == "joining"  # a manifest names it
    assert fold(progressed(B), entry(LinkUp(remote=B, transport="tls", address=""))).lines[B].state == "training"


def test_peers_of_a_complete_run_have_finished() -> None:
    up = [entry(LinkUp(remote=peer, transport="tls", address="")) for peer in (B, C)]
    named = [
        progressed(B),
        entry(
            MemberProgress(
                member=C, name="cleo", round=Round(1), state="training", loss=None, tokens_per_s=1.0, link="tls"
            )
        ),
    ]
    early = entry(MemberLeft(member=C))
    down = entry(LinkDown(remote=B, reason="closed"))
    view = fold(started(), *up, *named, early, commit(9, 1000), entry(MemberLeft(member=B)), down)
    view = fold(
        entry(PeerStopped(reason="complete")), entry(MemberSuspected(member=A, silent_s=1, reason="")), view=view
    )
    assert {peer: line.state for peer, line in view.lines.items()} == {A: "finished", B: "finished", C: "left"}
    text = "\n".join(drawn(view))
    assert "down" not in text
    assert "0 peers" not in text
    assert "left" not in progress(view)


def test_who_has_the_last_round_has_finished_though_nothing_more_is_heard_of_it() -> None:
    view = fold(started(), started(B, "bert"), step(2.0), step(2.0, B), commit(9, 1000), commit(9, 1000, B))
    assert {peer: line.state for peer, line in view.lines.items()} == {A: "finished", B: "finished"}
    assert "0 peers" not in progress(view)
    assert fold(step(2.0), view=view).lines[A].state == "finished"  # it was under way
    others = fold(started(), progressed(B), commit(9, 1000), progressed(B, "finishing"))
    assert others.lines[B].state == "finished"
    assert others.lines[B].tokens_per_s == 0


def test_what_others_did_last_is_no_news_once_nobody_is_heard() -> None:
    view = fold(started(), progressed(B), entry(PeerStopped(reason="asked to")))
    assert view.lines[B].state == "was training"
    assert not view.is_here(B)
    assert fold(started(), progressed(B), view=view).lines[B].state == "training"  # it began again
    two = fold(started(), started(C, "cleo"), progressed(B), entry(PeerStopped(reason="asked to")))
    assert two.lines[B].state == "training"  # cleo is there, and hears it


def test_what_happened_is_wrapped_and_never_cut() -> None:
    reason = " ".join(f"word{number}" for number in range(40))
    lines = drawn(fold(started(), entry(Notice(text=reason))))
    assert " ".join(line.strip() for line in lines).endswith(reason)
    assert max(map(len, lines)) <= 80
    many = fold(started(), *(entry(Notice(text=f"{number} {reason}")) for number in range(6)))
    assert len(drawn(many)) <= 12
    assert len(drawn(many, height=10)) <= 10


def test_a_narrow_terminal_has_fewer_columns_and_whole_names() -> None:
    view = fold(
        entry(PeerStarted(run=RunId("f" * 64), name="annabel-of-the-north", software="", device="", num_parameters=1)),
        step(2.0),
    )
    for width in (40, 50, 59):
        title, row, *_ = drawn(view, width)
        assert "annabel-of-the-north" in row
        assert "state" in title
        assert "tokens/s" not in title
    assert "tokens/s" in drawn(view, 60)[0]


def test_noise_is_not_drawn_as_a_fall() -> None:
    noise = [1.40 + 0.02 * (number % 2) for number in range(40)]
    rows = curve(noise, width=64, height=6)
    heights = [sum(row[column] != " " for row in rows) for column in range(40)]
    assert set(heights) == {6}
    assert scale([1.40, 1.42]) == (pytest.approx(1.42 * 0.75), 1.42)
    assert scale([1.0, 4.0]) == (1.0, 4.0)


# --- plain lines ---


def lines_of(*entries: Entry) -> list[str]:
    view, lines = View(run=RUN), []
    for each in entries:
        after = update(view, each)
        line = plain_line(view, after, each)
        view = after
        if line is not None:
            lines.append(line)
    return lines


def test_one_plain_line_per_commit_evaluation_and_change() -> None:
    lines = lines_of(
        started(),
        step(3.0),
        commit(1, 100),
        commit(1, 100, B),
        evaluated(100, 2.0),
        evaluated(100, 2.0, B),
        entry(MemberGone(member=B, silent_s=8.0)),
        entry(MemberGone(member=B, silent_s=8.0), C),
        commit(2, 200, at=110.0),
    )
    assert len(lines) == 4
    assert lines[0].startswith("round 1  ")
    assert "2.0000 nats per byte" in lines[1]
    assert lines[2].endswith("is gone")
    assert lines[3].startswith("round 2  1 peer  200 of 1k tokens (20 %)")


@pytest.mark.parametrize(
    ("told", "total"), [("2000", 2000), ("", 1000), ("0", 1000), ("-5", 1000), ("1e9", 1000), ("9" * 5000, 1000)]
)
def test_an_amendment_of_the_tokens_counts_where_it_is_one(told: str, total: int) -> None:
    said = {"branch": BranchId("0" * 64), "round": Round(1), "by": (A,), "kind": "amend", "subject": "", "reason": ""}
    act = entry(ActEnacted(**said, changes={"tokens": told}))  # type: ignore[arg-type]
    assert fold(act).run.total_tokens == total


def test_progress_says_no_more_than_all() -> None:
    assert "(100 %)" in progress(fold(commit(1, 1200)))


def test_the_plain_screen_writes_to_standard_error_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    screen = PlainScreen()
    screen.start(RUN)
    screen.write(commit(1, 100))
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("round 1  ")
