import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.ids import PeerId
from weft.net.membership.full_mesh import (
    FORGET_S,
    MAX_MEMBERS,
    Forgotten,
    Full,
    Gone,
    Heard,
    Joined,
    Left,
    LinkLost,
    New,
    Recovered,
    Redial,
    RedialFailed,
    SaidGoodbye,
    SendHeartbeat,
    Stalled,
    State,
    Suspected,
    Tick,
    next_due,
    step,
)

A, B, C = (PeerId(letter * 64) for letter in "abc")


class Trial:
    """Feeds the machine; ticks whenever it asks to."""

    def __init__(self, *peers):
        self.now = 0.0
        self.state = State()
        self.outputs = []
        self.feed(Tick())
        for peer in peers:
            self.feed(Joined(peer))

    def feed(self, event):
        before = self.state
        self.state, outputs = step(self.state, event, self.now)
        assert step(before, event, self.now) == (self.state, outputs)  # nothing was changed in place
        self.outputs += [(self.now, output) for output in outputs]
        return outputs

    def until(self, end, heard=()):
        while True:
            due = next_due(self.state, self.now)
            if due > end:
                self.now = end
                return
            self.now = max(due, self.now)
            for peer in heard:
                self.feed(Heard(peer, self.now))
            self.feed(Tick())
            self.now += 1e-6

    def of(self, *kinds):
        return [(round(at, 3), output) for at, output in self.outputs if isinstance(output, kinds)]


def test_heartbeats_go_to_all_every_two_seconds():
    trial = Trial(B, A)
    trial.until(7.0, heard=(A, B))
    assert trial.of(SendHeartbeat) == [(at, SendHeartbeat()) for at in (0.0, 2.0, 4.0, 6.0)]


def test_silence_is_suspected_at_six_and_gone_at_eight_seconds():
    trial = Trial(A, B)
    trial.until(20.0, heard=(B,))
    (suspected, gone) = trial.of(Suspected, Gone)
    assert suspected[0] == 6.0
    assert suspected[1].peer == A
    assert suspected[1].reason == "silent for 6.0 s"
    assert gone[0] == 8.0
    assert gone[1].peer == A
    assert [output for _, output in trial.of(New)] == [New(A), New(B)]


def test_any_byte_refutes_a_suspicion():
    trial = Trial(A)
    trial.until(7.0)
    trial.feed(Heard(A, 6.9))
    assert trial.of(Recovered) == [(7.0, Recovered(A))]
    trial.until(12.5)
    assert not trial.of(Gone)
    assert trial.of(Suspected)[-1][0] == 6.0
    trial.until(13.0)
    assert trial.of(Suspected)[-1][0] == 12.9


def test_reset_link_is_redialled_and_suspected_as_soon_as_that_fails():
    trial = Trial(A)
    trial.until(1.0)
    assert trial.feed(LinkLost(A, "reset")) == (Redial(A),)
    trial.until(1.2)
    assert trial.feed(RedialFailed(A, "nothing listens")) == (Suspected(A, 1.2, "nothing listens"),)
    assert trial.feed(RedialFailed(A, "again")) == ()
    trial.until(9.0)
    assert [at for at, _ in trial.of(Gone)] == [8.0]


def test_reset_link_that_comes_back_is_never_suspected():
    trial = Trial(A)
    trial.until(1.0)
    trial.feed(LinkLost(A, "reset"))
    trial.feed(Joined(A))
    trial.until(6.5)
    assert trial.of(Suspected, Gone, Recovered) == []


def test_gone_member_that_speaks_again_has_recovered():
    trial = Trial(A)
    trial.until(30.0)
    assert trial.feed(LinkLost(A, "dropped")) == ()
    assert trial.feed(Joined(A)) == (Recovered(A),)


def test_goodbye_is_final_until_a_newcomer_joins():
    trial = Trial(A)
    assert trial.feed(SaidGoodbye(A)) == (Left(A),)
    assert trial.feed(SaidGoodbye(A)) == ()
    trial.until(3.0)
    assert trial.feed(Heard(A, 2.9)) == ()
    assert trial.feed(LinkLost(A, "closed")) == ()
    assert trial.feed(RedialFailed(A, "closed")) == ()
    trial.until(20.0)
    assert trial.of(Suspected, Gone, Recovered) == []
    assert trial.feed(Joined(A)) == (New(A),)


def test_own_stall_makes_nobody_look_dead():
    trial = Trial(A, B)
    trial.until(5.0, heard=(A, B))
    trial.now = 65.0  # this process was stopped for a minute
    assert trial.feed(Tick()) == (Stalled(pytest.approx(59.5, abs=0.5)), SendHeartbeat())
    assert trial.feed(RedialFailed(A, "the network is not up yet")) == ()
    trial.until(74.9, heard=(B,))
    assert trial.of(Suspected) == []
    trial.until(90.0, heard=(B,))
    suspected, gone = trial.of(Suspected, Gone)
    assert suspected[0] == 75.0  # it has listened for ten seconds
    assert gone[0] == 75.0
    assert gone[1].silent_s >= 8.0


def test_a_short_stall_is_no_silence_and_tells_its_length():
    trial = Trial(A, B)
    trial.until(5.0, heard=(A, B))
    trial.now = 8.0
    (stalled, _) = trial.feed(Tick())
    assert 2.0 <= stalled.stall_s <= 3.0
    trial.until(20.0, heard=(B,))
    ((suspected, _), (gone, _)) = trial.of(Suspected, Gone)
    assert suspected == pytest.approx(11.0 + stalled.stall_s, abs=0.5)
    assert gone == pytest.approx(13.0 + stalled.stall_s, abs=0.5)
    assert len(trial.of(Stalled)) == 1


def test_who_stalls_less_than_half_of_the_time_still_judges():
    trial = Trial(A, B)
    while trial.now < 30.0:
        trial.until(trial.now + 1.2, heard=(B,))
        trial.now += 0.9
        trial.feed(Heard(B, trial.now))
        trial.feed(Tick())
    assert len(trial.of(Stalled)) > 10
    assert [output.peer for _, output in trial.of(Gone)] == [A]


def test_short_delays_of_ticks_are_no_stall():
    trial = Trial(A)
    trial.now = 0.9
    assert trial.feed(Tick()) == ()
    trial.until(6.1)
    assert trial.of(Suspected)[0][0] == 6.0


def test_no_more_members_than_heartbeats_to_all_can_serve():
    trial = Trial(*(PeerId(f"{i:064x}") for i in range(40)))
    assert len(trial.state.members) == MAX_MEMBERS - 1
    assert trial.feed(Joined(PeerId(f"{39:064x}"))) == (Full(PeerId(f"{39:064x}")),)
    trial.feed(SaidGoodbye(PeerId(f"{0:064x}")))
    assert trial.feed(Joined(PeerId(f"{39:064x}"))) == (New(PeerId(f"{39:064x}")),)


def test_newcomer_takes_the_place_of_who_is_longest_gone():
    crowd = [PeerId(f"{i:064x}") for i in range(MAX_MEMBERS - 1)]
    trial = Trial(*crowd)
    trial.until(9.0, heard=crowd[1:])
    assert trial.of(Gone) == [(8.0, Gone(crowd[0], 8.0))]
    trial.until(20.0)
    assert len(trial.of(Gone)) == len(crowd)
    assert trial.feed(Joined(A)) == (Forgotten(crowd[0]), New(A))
    assert crowd[0] not in trial.state.members


def test_who_was_away_for_ten_minutes_is_forgotten_and_comes_back_as_new():
    trial = Trial(A, B, C)
    trial.feed(SaidGoodbye(B))
    trial.until(700.0, heard=(C,))
    assert trial.of(Forgotten) == [(FORGET_S, Forgotten(A)), (FORGET_S, Forgotten(B))]
    assert set(trial.state.members) == {C}
    assert trial.feed(Heard(A, 699.9)) == ()
    assert trial.feed(Joined(A)) == (New(A),)


EVENTS = st.one_of(
    st.builds(Joined, st.sampled_from([A, B, C])),
    st.builds(LinkLost, st.sampled_from([A, B, C]), st.just("reset")),
    st.builds(RedialFailed, st.sampled_from([A, B, C]), st.just("refused")),
    st.builds(SaidGoodbye, st.sampled_from([A, B, C])),
    st.builds(Heard, st.sampled_from([A, B, C]), st.floats(0, 60)),
    st.floats(0.001, 700.0),  # let so many seconds pass
)


@given(st.lists(EVENTS, max_size=40))
def test_whatever_happens_each_member_walks_the_drawn_paths(events):
    trial = Trial()
    for event in events:
        if isinstance(event, float):
            trial.until(trial.now + event)
        elif not isinstance(event, Heard) or event.at <= trial.now:
            trial.feed(event)
    following = {
        New: {None, Left, Forgotten},
        Suspected: {New, Recovered},
        Recovered: {Suspected, Gone},
        Gone: {Suspected},
        Left: {New, Suspected, Recovered, Gone},
        Forgotten: {Gone, Left},
    }
    last = {}
    for _, output in trial.outputs:
        if type(output) in following:
            assert last.get(output.peer) in following[type(output)]
            last[output.peer] = type(output)
            if isinstance(output, Gone):
                assert output.silent_s >= 8.0
    assert trial.now <= next_due(trial.state, trial.now) <= trial.now + 0.5
