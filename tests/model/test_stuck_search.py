"""Whatever liars say that they lack, an honest leader's round goes on, and one liar keeps nobody's work out."""

from collections.abc import Iterator
from itertools import combinations

import msgspec
import pytest

from model.world import contribution, first_base, hashable
from weft.ids import Attempt, PeerId, Tokens
from weft.rng import stream
from weft.sync.records.messages import Collect, Ready, Stuck
from weft.sync.round import round
from weft.sync.round.machine import Received, State, Trained
from weft.sync.round.rules import leader


def planned(num_members: int) -> State:
    base = msgspec.structs.replace(first_base(num_members, num_parts=num_members), keeper=None)
    first = leader(base, Attempt(0))
    state = round.begin(first, base)
    for number, peer in enumerate(base.electorate):
        mine = contribution(base, number, 0)
        if peer == first:
            state = round.step(state, Trained(ready=Ready(tokens=mine.tokens, parts=mine.parts)))[0]
        else:
            ready = Ready(tokens=Tokens(mine.tokens), parts=mine.parts)
            state = round.step(state, Received(sender=peer, message=ready))[0]
    return state


def words(plan: Collect, liars: set[PeerId]) -> Iterator[tuple[PeerId, Stuck]]:
    """Yield what owners may say: liars anything, the others that they lack what liars keep back from them."""
    for owner in sorted(set(plan.owners)):
        of = [each.peer for each in plan.contributions if owner in liars or each.peer in liars]
        for num in range(1, len(of) + 1):
            for missing in combinations(of, num):
                part = plan.owners.index(owner)
                yield owner, Stuck(attempt=plan.attempt, revision=plan.revision, part=part, missing=missing)


def plans(num_members: int) -> Iterator[tuple[PeerId, State]]:
    """Yield who lies, and every state of an honest leader that words may bring about."""
    start = planned(num_members)
    for liar in set(start.base.electorate) - {start.me}:
        seen, stack = set(), [start]
        while stack:
            state = stack.pop()
            yield liar, state
            assert state.plan is not None, "no plan is left"
            assert state.revision <= num_members**2, "plans without end"
            for sender, word in words(state.plan, {liar}):
                after = round.step(state, Received(sender=sender, message=word))[0]
                key = hashable(msgspec.structs.replace(after, plan=None))
                if key not in seen:
                    seen.add(key)
                    stack.append(after)


@pytest.mark.parametrize("num_members", [2, 3, 4])
def test_one_liar_keeps_nobodys_work_out(num_members: int) -> None:
    for liar, state in plans(num_members):
        assert state.plan is not None
        assert {each.peer for each in state.plan.contributions} >= set(state.base.electorate) - {liar}


@pytest.mark.parametrize(("num_members", "num_liars"), [(5, 2), (7, 3)])
def test_whatever_several_say_the_round_goes_on_with_more_than_half(num_members: int, num_liars: int) -> None:
    start, luck = planned(num_members), stream(0, "words")
    others = [peer for peer in start.base.electorate if peer != start.me]
    for _ in range(20):
        liars, state = {others[int(each)] for each in luck.permutation(len(others))[:num_liars]}, start
        while True:
            assert state.plan is not None
            counted = {each.peer for each in state.plan.contributions}
            assert 2 * len(counted | liars) > num_members  # who keeps its own work back is not missed
            assert state.revision <= num_members**2, "plans without end"
            said = list(words(state.plan, liars))
            if not said:
                break
            sender, word = said[int(luck.integers(len(said)))]
            state = round.step(state, Received(sender=sender, message=word))[0]


def test_where_one_word_is_enough_the_search_finds_who_is_kept_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(round, "WITNESSES", 1)
    with pytest.raises(AssertionError):
        test_one_liar_keeps_nobodys_work_out(4)
