import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.ids import PeerId
from weft.net.membership import members as table
from weft.net.membership.full_mesh import FORGET_S, Forgotten, Full, Gone, Left, New, Recovered, Suspected
from weft.net.membership.members import (
    EMPTY,
    EXPIRES_S,
    LEAST_SUSPICION_S,
    MAX_KNOWN,
    MOST_SUSPICION_S,
    Accused,
    Correct,
    Departed,
    Lives,
    Members,
    Renew,
    Spread,
    believe,
    bury,
    forgive,
    moved,
    recover,
    suspicion_s,
    sweep,
)

ME, A, B, C, D = (PeerId(letter * 64) for letter in "0abcd")
OLD, NEW = b"old-life", b"new-life"


def lives(peer, incarnation=0, instance=OLD):
    return Lives(peer, instance, incarnation, f"{peer[:1]} lives at {incarnation}")


def accused(peer, accuser, incarnation=0, instance=OLD):
    return Accused(peer, instance, incarnation, accuser, f"{accuser[:1]} accuses {peer[:1]} at {incarnation}")


class Trial:
    def __init__(self, *claims):
        self.now = 0.0
        self.members = Members(me=ME, instance=NEW)
        for claim in claims:
            self.hear(claim)

    def hear(self, claim, sender=B):
        before = self.members
        self.members, effects = believe(before, claim, sender, self.now)
        assert believe(before, claim, sender, self.now) == (self.members, effects)  # nothing was changed in place
        return effects

    def bury(self):
        self.members, effects = bury(self.members, self.now)
        return effects

    def status(self, peer):
        return self.members.entries[peer].status


def test_who_says_that_it_lives_is_new_and_passed_on_once():
    trial = Trial()
    assert trial.hear(lives(A)) == (New(A), Spread(lives(A), is_urgent=False))
    assert trial.hear(lives(A)) == ()
    assert trial.hear(lives(A, 1)) == (Spread(lives(A, 1), is_urgent=False),)
    assert trial.hear(lives(A, 0)) == ()
    assert trial.members.entries[A].life == lives(A, 1)
    assert trial.members.num_present == 2


def test_an_accusation_holds_against_its_own_incarnation_only():
    trial = Trial(lives(A, 5))
    for claim in (accused(A, B, 4), accused(A, B, 6), accused(A, B, 5, NEW), accused(C, B)):
        assert trial.hear(claim) == ()
    suspected, spread = trial.hear(accused(A, B, 5))
    assert (type(suspected), spread) == (Suspected, Spread(accused(A, B, 5)))
    assert trial.hear(accused(A, B, 5)) == ()


def test_a_higher_incarnation_refutes_and_is_urgent():
    trial = Trial(lives(A), accused(A, B))
    assert trial.hear(lives(A, 1)) == (Recovered(A), Spread(lives(A, 1), is_urgent=True))
    assert trial.hear(accused(A, C)) == ()
    assert trial.bury() == ()


@pytest.mark.parametrize("num_accusers", [1, 2, 3])
def test_the_more_accuse_the_sooner_it_is_gone(num_accusers):
    trial = Trial(lives(A))
    for accuser in (B, C, D)[:num_accusers]:
        trial.hear(accused(A, accuser))
    trial.now = suspicion_s(num_accusers) - 0.01
    assert trial.bury() == ()
    trial.now += 0.02
    ((gone),) = trial.bury()
    assert gone.peer == A
    assert trial.status(A) == "gone"
    assert trial.members.num_present == 1


def test_time_to_refute_lies_between_six_and_twelve_seconds():
    assert suspicion_s(1) == MOST_SUSPICION_S
    assert suspicion_s(3) == suspicion_s(9) == LEAST_SUSPICION_S
    assert LEAST_SUSPICION_S < suspicion_s(2) < MOST_SUSPICION_S


def test_no_more_than_three_accusers_are_passed_on():
    trial = Trial(lives(A), accused(A, B), accused(A, C), accused(A, D))
    assert trial.hear(accused(A, ME)) == ()
    assert len(trial.members.entries[A].against) == 3


def test_who_is_gone_and_refutes_has_recovered():
    trial = Trial(lives(A), accused(A, B))
    trial.now = 13.0
    assert [type(effect) for effect in trial.bury()] == [Gone]
    assert trial.hear(lives(A)) == ()
    assert trial.hear(lives(A, 1))[0] == Recovered(A)


def test_who_is_heard_itself_is_not_suspected_here():
    trial = Trial(lives(A), accused(A, B))
    assert recover(trial.members, A, 0.5, 0.6)[1] == ()  # it may have been under way
    trial.members, effects = recover(trial.members, A, 1.5, 1.6)
    assert effects == (Recovered(A),)
    trial.now = 2.0
    assert type(trial.hear(accused(A, C))[0]) is Suspected  # by somebody who could not reach it after that


def test_a_goodbye_is_final_for_the_process_that_said_it():
    trial = Trial(lives(A, 3))
    assert trial.hear(Departed(A, OLD, "bye")) == (Left(A), Spread(Departed(A, OLD, "bye")))
    assert trial.hear(Departed(A, OLD, "bye")) == ()
    assert trial.hear(lives(A, 4)) == ()
    assert trial.hear(accused(A, B, 3)) == ()
    assert trial.hear(lives(A, 5, NEW)) == (New(A), Spread(lives(A, 5, NEW)))
    assert trial.hear(Departed(A, OLD, "bye")) == ()
    assert trial.status(A) == "alive"


def test_a_goodbye_that_comes_before_the_presence_keeps_it_out():
    trial = Trial()
    assert trial.hear(Departed(A, OLD, "bye")) == ()
    assert trial.hear(lives(A)) == ()
    assert A not in trial.members.entries


def test_this_peer_refutes_what_is_said_of_it_and_nothing_else():
    trial = Trial()
    assert trial.hear(accused(ME, B, 0, NEW)) == (Renew(1, is_refutation=True),)
    assert trial.hear(accused(ME, C, 0, NEW)) == ()  # refuted already
    assert trial.hear(accused(ME, C, 1, OLD)) == ()  # another process
    assert trial.hear(accused(ME, C, 1 << 50, NEW)) == ()  # nobody can have seen that
    assert trial.hear(lives(ME, 1, NEW)) == ()
    assert trial.members.incarnation == 1


def test_a_process_that_starts_again_goes_on_above_its_predecessor():
    others = Trial(lives(A, 7, OLD))
    assert others.hear(lives(A, 0, NEW), sender=A) == (Correct(A, lives(A, 7, OLD)),)
    assert others.hear(lives(A, 0, NEW), sender=B) == ()
    mine = Trial()
    assert mine.hear(lives(ME, 7, OLD)) == (Renew(8),)
    assert others.hear(lives(A, 8, NEW), sender=A)[-1] == Spread(lives(A, 8, NEW), is_urgent=False)


def test_the_long_gone_and_what_nobody_renews_are_forgotten():
    trial = Trial(lives(A), lives(B), accused(A, C))
    trial.now = 20.0
    trial.bury()
    trial.members, effects = sweep(trial.members, 20.0 + FORGET_S)
    assert effects == (Forgotten(A),)
    trial.members, effects = sweep(trial.members, EXPIRES_S)
    assert effects == (Gone(B, EXPIRES_S), Forgotten(B))
    assert trial.members.entries == {}


def test_what_is_known_is_bounded_and_the_longest_gone_make_room():
    trial = Trial(*(lives(PeerId(f"{number:064x}")) for number in range(1, MAX_KNOWN + 1)))
    assert trial.hear(lives(A)) == (Full(A),)
    trial.hear(accused(PeerId(f"{7:064x}"), B))
    trial.now = 20.0
    trial.bury()
    assert trial.hear(lives(A))[:2] == (Forgotten(PeerId(f"{7:064x}")), New(A))
    assert len(trial.members.entries) == MAX_KNOWN


def test_an_own_stall_leaves_the_accused_their_time():
    trial = Trial(lives(A), accused(A, B))
    trial.now = 30.0
    trial.members = forgive(trial.members, 28.0, 30.0)
    assert trial.bury() == ()


CLAIMS = st.one_of(
    st.builds(lives, st.sampled_from([ME, A, B]), st.integers(0, 6), st.sampled_from([OLD, NEW])),
    st.builds(accused, st.sampled_from([ME, A, B]), st.sampled_from([B, C, D]), st.integers(0, 6), st.just(OLD)),
    st.builds(Departed, st.sampled_from([ME, A, B]), st.sampled_from([OLD, NEW]), st.just("bye")),
    st.floats(0.1, 400.0),  # let so many seconds pass
)


def assert_indexed(members):
    """The view holds who is present, and sums that are those of a view in which nothing ever changed."""
    present = {peer: entry.life.incarnation for peer, entry in members.entries.items() if peer not in members.buried}
    assert {peer for each in members.buckets for peer in each.peers} == set(present)
    fresh = EMPTY
    for peer, incarnation in present.items():
        fresh = moved(fresh, peer, None, incarnation)
    assert [each.sum for each in members.buckets] == [each.sum for each in fresh]


@given(st.lists(CLAIMS, max_size=60))
def test_whatever_is_said_incarnations_rise_and_the_drawn_paths_are_walked(said):
    trial = Trial()
    incarnations, last, outputs = {}, {}, []
    for claim in said:
        mine = trial.members.incarnation
        if isinstance(claim, float):
            trial.now += claim
            effects = trial.bury()
            trial.members, more = sweep(trial.members, trial.now)
            effects += more
        else:
            effects = trial.hear(claim)
        assert trial.members.incarnation >= mine
        outputs += effects
        for effect in effects:
            if isinstance(effect, Forgotten):
                incarnations.pop(effect.peer, None)
        for peer, entry in trial.members.entries.items():
            assert entry.life.incarnation >= incarnations.get(peer, 0)
            incarnations[peer] = entry.life.incarnation
            assert (entry.status == "suspected") == (peer in trial.members.suspected)
            assert (entry.status in ("gone", "left")) == (peer in trial.members.buried)
            assert all(each.incarnation == entry.life.incarnation for each in entry.against)
        assert_indexed(trial.members)
    following = {
        New: {None, Left, Forgotten},
        Suspected: {New, Recovered},
        Recovered: {Suspected, Gone},
        Gone: {Suspected, New, Recovered},  # not suspected before, where nobody renewed it
        Left: {New, Suspected, Recovered, Gone},
        Forgotten: {Gone, Left},
    }
    for effect in outputs:
        if type(effect) in following:
            assert last.get(effect.peer) in following[type(effect)]
            last[effect.peer] = type(effect)
    assert ME not in trial.members.entries


def test_others_are_shown_the_presence_and_what_is_said_against_it():
    members = Trial(lives(A), accused(A, B), lives(C), Departed(C, OLD, "bye")).members
    assert table.proofs(members.entries[A]) == ("a lives at 0", "b accuses a at 0")
    assert table.proofs(members.entries[C]) == ("c lives at 0", "bye")


def test_a_goodbye_said_again_after_that_of_another_process_is_no_news():
    trial = Trial(lives(A), Departed(A, OLD, "bye"), Departed(A, NEW, "bye"))
    assert trial.hear(Departed(A, OLD, "bye")) == ()
    assert trial.status(A) == "left"
