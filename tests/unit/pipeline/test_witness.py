"""What goes with micro-batches where members of a stage audit each other: who signs what, and what is accepted."""

import asyncio
from itertools import chain
from typing import Any

import pytest
from msgspec import UNSET
from msgspec.structs import replace

from unit.pipeline.stages import HEAD, RUNS, Member, Stages, distance
from unit.pipeline.test_worker import all_of, batches
from weft.errors import PeerError
from weft.events import Event, PassageRefused
from weft.ids import PeerId
from weft.pipeline.messages import PassageTold
from weft.pipeline.witness import UNKNOWN, Made, Witness
from weft.verify.passages import Passage, is_joined
from weft.wire import Signed, claimed, digest, seal

NUM = 6  # micro-batches of each origin


class Ear:
    """Hears what is told of a stage."""

    def __init__(self, stages: Stages) -> None:
        self.told = dict[PeerId, list[Signed]]()
        for member in stages.members:
            self._listen(member)

    def _listen(self, member: Member) -> None:
        heard = self.told.setdefault(member.peer, [])

        async def hear(_peer: PeerId, note: PassageTold) -> None:
            assert note.stage == member.stage
            heard.append(note.passage)

        member.link.hold(member.stage, PassageTold, hear)

    def all(self) -> dict[tuple[int, PeerId, int], tuple[PeerId, Passage]]:
        """Return what was told of each micro-batch in each stage."""
        letters = {each.signature: each for heard in self.told.values() for each in heard}.values()
        read = ((each.signer, claimed(each, Passage)) for each in letters)
        return {(passage.stage, passage.origin, passage.number): (by, passage) for by, passage in read}


def test_the_other_members_of_a_stage_hear_of_all_that_one_has_computed_and_neighbours_say_the_same() -> None:
    stages = Stages(is_audited=True)

    async def play() -> None:
        ear = Ear(stages)
        await all_of(stages, NUM)
        await asyncio.sleep(1.0)
        told = ear.all()
        assert len(told) == 3 * 2 * NUM
        for (stage, origin, number), (author, passage) in told.items():
            others = {each.peer for each in stages.of(stage)} - {author}
            assert {
                peer for peer, heard in ear.told.items() if passage in [claimed(e, Passage) for e in heard]
            } == others
            assert (passage.run, passage.head) == (RUNS[stage], HEAD)
            if stage < 2:
                after, there = told[stage + 1, origin, number]
                assert is_joined(passage, author, there, after)
        for stage in range(3):
            counted = await stages.round(stage)
            assert sorted(chain(*(each.counted for each in counted.values()))) == sorted(batches(stages, NUM))
            assert distance(stages.total(stage), stages.expected(stage, batches(stages, NUM))) < 1e-6

    stages.run(play)


def test_what_a_passage_was_made_of_is_there_until_the_parameters_are_others() -> None:
    stages = Stages(is_audited=True)

    async def play() -> None:
        ear = Ear(stages)
        await all_of(stages, 1)
        await asyncio.sleep(1.0)
        author, passage = next(found for place, found in ear.all().items() if place[0] == 1)
        member = next(each for each in stages.members if each.peer == author)
        asks = next(each for each in stages.members if each.stage == 2)
        names = (passage.tokens, passage.given, passage.output, passage.returned, passage.gradient)
        sizes = (2 * 7 * 4, *[2 * 6 * 8 * 4] * 4)
        for name, nbytes in zip(names, sizes, strict=True):
            assert digest((await asks.link.fetch(author, name, nbytes)).data) == name  # type: ignore[arg-type]
        before = next(each for each in stages.members if each.peer == passage.sender)
        for name, nbytes in ((passage.given, sizes[1]), (passage.gradient, sizes[1])):
            assert digest((await asks.link.fetch(before.peer, name, nbytes)).data) == name  # type: ignore[arg-type]
        assert member.witness is not None
        member.witness.enter(1, digest(b"next"))
        with pytest.raises(PeerError):
            await asks.link.fetch(author, passage.output, sizes[1])  # type: ignore[arg-type]

    stages.run(play)


class Lies(Witness):
    """Signs something else than what it sends.

    Args:
        change: fields of a passage.
    """

    change: dict[str, Any] | None = None

    def signed(self, *given: Any) -> Signed:
        right = super().signed(*given)
        return seal(self._link.signer, replace(claimed(right, Passage), **(self.change or {})))


@pytest.mark.parametrize(
    ("stage", "change"),
    [
        (1, {"output": digest(b"other")}),
        pytest.param(2, {"loss": 0.0}, marks=pytest.mark.full),
        pytest.param(1, {"returned": digest(b"other")}, marks=pytest.mark.full),
        pytest.param(1, {"gradient": digest(b"other")}, marks=pytest.mark.full),
        pytest.param(1, {"given": digest(b"other")}, marks=pytest.mark.full),
        pytest.param(0, {"member": UNSET}, marks=pytest.mark.full),
        pytest.param(2, {"run": RUNS[0]}, marks=pytest.mark.full),
    ],
)
def test_who_signs_something_else_than_it_sends_is_left_for_another_and_each_still_counts_once(
    stage: int, change: dict[str, Any]
) -> None:
    stages = Stages(is_audited=True)

    async def play() -> None:
        liar = stages.of(stage)[0]
        assert liar.witness is not None
        liar.witness.__class__ = Lies
        liar.witness.change = change  # type: ignore[attr-defined]
        await all_of(stages, NUM)
        await asyncio.sleep(60.0)
        events: list[Event] = [event for each in stages.members for event in each.events]
        refused = [event for event in events if isinstance(event, PassageRefused)]
        assert refused
        assert {event.member for event in refused} == {liar.peer}
        for number in range(3):
            for _ in range(2):
                await stages.round(number)
            assert distance(stages.total(number), stages.expected(number, batches(stages, NUM))) < 1e-6

    stages.run(play)


def test_a_member_of_the_next_stage_may_be_gone_since_it_signed_and_one_never_heard_of_blames_nobody() -> None:
    stages = Stages(is_audited=True)

    async def play() -> None:
        sender = stages.of(0)[0]
        witness = sender.witness
        assert witness is not None
        last = stages.of(2)[0].peer
        assert witness._has_held(last, 2)
        witness._members = lambda _stage: ()
        assert witness._has_held(last, 2)
        assert not witness._has_held(PeerId("9" * 64), 2)
        witness.refuse(last, 1, UNKNOWN)
        assert sender.events == []
        witness.refuse(last, 1, "it names another loss")
        assert [type(event) for event in sender.events] == [PassageRefused]

    stages.run(play)


def test_a_member_whose_parameters_changed_meanwhile_signs_nothing() -> None:
    stages = Stages(is_audited=True)

    async def play() -> None:
        member = stages.of(1)[0]
        witness = member.witness
        assert witness is not None
        witness.leave(1)
        began = asyncio.ensure_future(all_of(stages, 2))
        await asyncio.sleep(5.0)
        witness.enter(1, digest(b"next"))
        await began
        assert await witness.head(1) == digest(b"next")
        request: Any = type("Request", (), {"stage": 1, "tokens": b""})()
        with pytest.raises(PeerError):
            witness.signed(request, member.peer, HEAD, Made(None, None, member.peer, None, None, 0.0))

    stages.run(play)


def test_of_more_than_there_is_room_for_the_oldest_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.pipeline.witness.KEPT_NBYTES", 4000)
    stages = Stages(is_audited=True)

    async def play() -> None:
        await all_of(stages, NUM)
        for member in stages.members:
            assert member.witness is not None
            kept = member.witness._kept[member.stage]
            assert 0 < sum(len(bytes(each.data)) for each in kept) <= 4000

    stages.run(play)
