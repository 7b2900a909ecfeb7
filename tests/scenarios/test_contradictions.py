"""A member signs what no honest member signs: the others prove it, strike its key out, and go on without it.

R1 to R4 are checked of the log as in any play. What the liar brings to the round that strikes it out is not counted.
"""

import pytest

from scenarios.theatre import Theatre, names
from weft.events import ActEnacted, AttemptStarted, LieProven
from weft.peer.round.driver import LIED
from weft.sim.play import Played
from weft.sim.scenario import Drop, Fault, Kill, Lie


def struck_out(theatre: Theatre, played: Played, name: str) -> str:
    """Assert that all others strike the key of `name` out, in one round and for good; return what it did."""
    (liar,) = names(played, name)
    honest = [machine for machine in played.machines if machine.name != name]
    assert [machine.end for machine in honest] == len(honest) * ["complete"]
    assert "banned this key" in liar.end
    proven = theatre.heard(LieProven, *honest)
    assert {event.member for _, event in proven} == {liar.peer}
    assert len(proven) == len(honest)  # each was told, whoever found it out
    (enacted,) = {(event.round, event.kind, event.subject) for _, event in theatre.heard(ActEnacted, *honest)}
    assert enacted[1:] == ("strike out", liar.peer)
    for manifest in played.manifests:
        assert (liar.peer in manifest.members) == (manifest.round < enacted[0])
        if manifest.round == enacted[0]:
            assert liar.peer in manifest.left
            assert liar.peer not in {each.peer for each in manifest.contributions}
    assert [event.left_out[liar.peer] for event in theatre.commits(honest[0]) if event.round == enacted[0]] == [LIED]
    (what,) = {event.what for _, event in proven}
    return what


def leader_of(theatre: Theatre, round: int, **options: int) -> str:
    """Return which machine leads a round of a play in which nothing happens."""
    played = theatre(**options)  # type: ignore[arg-type]
    (manifest,) = [each for each in played.manifests if each.round == round]
    return next(machine.name for machine in played.machines if machine.peer == manifest.leader)


@pytest.mark.full
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_leader_that_proposes_two_manifests_is_struck_out(theatre: Theatre, seed: int) -> None:
    liar = leader_of(theatre, 4, seed=seed)
    played = theatre(Lie(peer=liar, about="rivals", at_round=2), seed=seed)
    theatre.check(played)
    assert "it accepted two manifests in attempt" in struck_out(theatre, played, liar)


@pytest.mark.full
def test_it_is_struck_out_where_neither_manifest_is_decided(theatre: Theatre) -> None:
    """Its decision reaches nobody: the next leader is shown both proposals."""
    liar = leader_of(theatre, 4, count=5)
    mute = Drop(peer=liar, what="letters", kinds=("Decision",), share=1.0, at_round=2)
    played = theatre(Lie(peer=liar, about="rivals", at_round=2), mute, count=5)
    theatre.check(played)
    assert "it accepted two manifests in attempt" in struck_out(theatre, played, liar)
    assert theatre.heard(AttemptStarted)


@pytest.mark.full
def test_a_voter_that_denies_its_vote_is_struck_out(theatre: Theatre) -> None:
    """Votes of the others are lost, so a later leader asks; the one before shows it what the liar had accepted."""
    lost: list[Fault] = [
        Drop(peer=f"lab-{number}", what="letters", kinds=("Accept",), share=1.0, at_round=2, lasts_s=20.0)
        for number in (0, 2, 3, 4)
    ]
    # The seed gives the order of leaders: where the liar leads the next attempt, nobody asks it what it voted for.
    played = theatre(Lie(peer="lab-1", about="votes", at_round=2), *lost, count=5, seed=2)
    theatre.check(played)
    assert "it denied what it accepted in attempt" in struck_out(theatre, played, "lab-1")


@pytest.mark.full
def test_honest_members_that_are_killed_and_come_back_are_believed(theatre: Theatre) -> None:
    kills = [Kill(peer=f"lab-{number % 4}", at_s=3.0 + 2.3 * number, returns_after_s=1.0) for number in range(6)]
    loss = Drop(peer="lab", what="letters", kinds=("Propose", "Accept"), share=0.3, at_s=3.0, lasts_s=5.0)
    played = theatre(*kills, loss)
    theatre.check(played)
    assert theatre.heard(AttemptStarted)
    assert theatre.heard(LieProven) == []
