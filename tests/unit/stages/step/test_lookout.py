"""One member's look at what others of its stage compute: whom it hears, whom it asks, and when it stops."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from msgspec import UNSET

from charters import charter
from unit.stages.pieces import RUN
from weft.clock import VirtualClock
from weft.errors import CallFailed
from weft.events import Event, Notice, PassageAudited, PassageDoubted
from weft.ids import BranchId, Digest, PeerId
from weft.keys import Identity
from weft.peer.chain import genesis, open_branch
from weft.pipeline.link import parcel
from weft.pipeline.messages import PassageTold
from weft.run.trust import AuditedTrust
from weft.stages.step.lookout import FETCH_S, Lookout, Place
from weft.sync.records.acts import FalsePassage
from weft.sync.records.messages import Manifest
from weft.verify.passages import Passage
from weft.wire import Signed, claimed, digest_of, seal

ME, AUTHOR, SENDER, AFTER, OTHER = (Identity.from_seed(bytes([number]) * 32) for number in range(1, 6))
STAGE = msgspec.structs.replace(RUN, trust=AuditedTrust(audit_rate=1.0, quarantine=0)).of_stage(1)
MEMBERS = tuple(sorted(each.peer for each in (ME, AUTHOR, OTHER)))
X, Y, DY, DX, TOKENS = (name.encode() * 4 for name in ("x", "y", "b", "a", "t"))


def head(round: int = 0) -> Manifest:
    run = STAGE.run
    opening = open_branch(genesis(run, ME.peer, charter(4)), list(MEMBERS), ME.peer, BranchId(run))
    return msgspec.structs.replace(opening, round=opening.round + round)


class Link:
    """Some give some bytes."""

    def __init__(self) -> None:
        self.me = ME.peer
        self.given: dict[PeerId, set[bytes]] = {}
        self.stalled: set[PeerId] = set()  # who answers, and never delivers
        self.asked: list[PeerId] = []
        self.handlers: dict[type, Any] = {}

    def hold(self, _stage: int, kind: type, handler: Any) -> None:
        self.handlers[kind] = handler

    def let_go(self, _stage: int, kind: type, _handler: Any) -> None:
        del self.handlers[kind]

    async def fetch(self, peer: PeerId, name: Digest, nbytes: int) -> Any:
        self.asked.append(peer)
        if peer in self.stalled:
            await asyncio.sleep(1e6)
        found = [data for data in self.given.get(peer, ()) if parcel(data).digest == name and len(data) == nbytes]
        if not found:
            raise CallFailed("it does not give that")
        return parcel(found[0])


class Device:
    """Makes `output` and `gradient` of anything."""

    tokens_nbytes = 2
    output, gradient = Y, DX
    apart_by = (0.0, 0.0)

    def input_nbytes(self, num: int) -> int:
        return 2 * num

    gradient_nbytes = input_nbytes

    def forward(self, _given: Any) -> Any:
        return SimpleNamespace(output=self.output, loss=None, backward=lambda _: self.gradient)

    def apart(self, *_: Any) -> tuple[float, float]:
        return self.apart_by


class Trial:
    def __init__(self) -> None:
        self.link, self.device, self.events = Link(), Device(), list[Event]()
        self.letters: list[Signed] = []
        self.heard: list[Callable[[Signed], None]] = []
        self.busy = asyncio.Event()
        self.busy.set()
        self.num_entered = 0
        witness = SimpleNamespace(enter=lambda *_: self._entered(), leave=lambda _: None, forget=lambda _: None)
        acts = SimpleNamespace(on_false_passage=self.heard.append, take=self.letters.append)
        place: Any = Place(
            1,
            STAGE,
            ME,
            self.link,
            witness,
            SimpleNamespace(now=lambda: 0.0),
            self.events.append,
            lambda: acts,  # type: ignore[arg-type]
        )
        self.lookout = Lookout(place, 2.0, self.device, self._compute)  # type: ignore[arg-type]

    def _entered(self) -> None:
        self.num_entered += 1

    async def _compute(self, work: Callable[[], Any]) -> Any:
        await self.busy.wait()
        return work()

    async def told(self, passage: Signed, by: Identity = SENDER) -> None:
        await self.link.handlers[PassageTold](by.peer, PassageTold(stage=1, passage=passage))

    async def accused(self, passage: Signed, by: Identity = OTHER) -> None:
        found = FalsePassage(run=STAGE.run, peer=passage.signer, round=head().round + 1, passage=passage)
        for each in self.heard:
            each(seal(by, found))

    def seen(self) -> list[str]:
        return [type(event).__name__ for event in self.events if isinstance(event, PassageAudited | PassageDoubted)]


def passage(by: Identity = AUTHOR, of: Manifest | None = None, **fields: Any) -> Signed:
    names = {"given": X, "output": Y, "returned": DY, "gradient": DX, "tokens": TOKENS}
    usual: dict[str, Any] = {name: parcel(data).digest for name, data in names.items()}
    usual |= {"run": STAGE.run, "head": digest_of(of or head()), "stage": 1, "origin": SENDER.peer, "number": 1}
    usual |= {"attempt": 0, "round": 0, "step": 0, "num_samples": 1, "sender": SENDER.peer, "member": AFTER.peer}
    return seal(by, Passage(**(usual | {"loss": 2.0} | fields)))


def with_bytes(nbytes: int) -> list[bytes]:
    return [data[:nbytes] for data in (X, Y, DY, DX, TOKENS)]


SMALL: dict[str, Any] = {
    name: parcel(data).digest
    for name, data in zip(("given", "output", "returned", "gradient", "tokens"), with_bytes(2), strict=True)
}


@pytest.fixture
def trial() -> Trial:
    made = Trial()
    made.device.output, made.device.gradient = Y[:2], DX[:2]
    made.link.given[AUTHOR.peer] = set(with_bytes(2))
    made.lookout.open(head())
    return made


async def test_what_comes_to_the_same_bytes_is_right_and_outputs_are_not_fetched(trial: Trial) -> None:
    await trial.told(passage(**SMALL))
    await trial.lookout.looked()
    assert trial.seen() == ["PassageAudited"]
    assert len(trial.link.asked) == 3
    assert trial.letters == []


async def test_what_comes_to_other_bytes_is_measured_and_told_where_it_is_far(trial: Trial) -> None:
    trial.device.output = b"zz"
    await trial.told(passage(**SMALL))
    await trial.lookout.looked()
    assert trial.seen() == ["PassageAudited"], "as near as honest machines are"
    trial.device.apart_by = (0.5, 0.0)
    await trial.told(signed := passage(number=2, **SMALL))
    await trial.lookout.looked()
    assert trial.seen() == ["PassageAudited", "PassageDoubted"]
    (letter,) = trial.letters
    assert trial.lookout.found_false == (AUTHOR.peer,), "for those who send work to the stage"
    found = claimed(letter, FalsePassage)
    assert (letter.signer, found.peer, found.passage) == (ME.peer, AUTHOR.peer, signed)


async def test_neighbours_are_asked_where_who_has_computed_it_gives_nothing(trial: Trial) -> None:
    del trial.link.given[AUTHOR.peer]
    trial.link.given[SENDER.peer] = {TOKENS[:2], X[:2]}
    await trial.told(passage(**SMALL))
    await trial.lookout.looked()
    assert trial.seen() == [], "nobody gives what came back: nothing is said"
    trial.link.given[AFTER.peer] = {DY[:2]}
    await trial.told(passage(**SMALL))
    await trial.lookout.looked()
    assert trial.seen() == ["PassageAudited"]


@pytest.mark.parametrize(
    ("signed", "by"),
    [
        (passage(**SMALL), OTHER),
        (msgspec.structs.replace(passage(**SMALL), signature=bytes(64)), SENDER),
        (msgspec.structs.replace(passage(**SMALL), body=b"x"), SENDER),
        (passage(**(SMALL | {"num_samples": 2})), SENDER),
        (passage(**(SMALL | {"output": UNSET})), SENDER),
        (passage(**(SMALL | {"stage": 2})), SENDER),
        (passage(**(SMALL | {"run": RUN.of_stage(0).run})), SENDER),
        (passage(ME, **SMALL), SENDER),
    ],
)
async def test_what_its_sender_does_not_tell_or_is_no_passage_of_the_stage_is_not_looked_at(
    trial: Trial, signed: Signed, by: Identity
) -> None:
    trial.device.apart_by = (9.0, 9.0)
    await trial.told(signed, by)
    await trial.lookout.looked()
    assert (trial.seen(), trial.letters) == ([], [])


async def test_nothing_is_said_of_what_it_has_not_looked_at_before_its_parameters_change(trial: Trial) -> None:
    trial.busy.clear()
    await trial.told(passage(**SMALL))
    closing = asyncio.ensure_future(trial.lookout.close())
    await asyncio.sleep(0)
    trial.busy.set()
    await closing
    assert trial.seen() == ["PassageAudited"], "what is under way is waited for"
    await trial.told(passage(number=2, **SMALL))
    await trial.accused(passage(number=3, **SMALL))
    assert not len(trial.lookout._tasks)
    trial.lookout.open(head(1))
    assert not len(trial.lookout._tasks), "that was of other parameters"
    await trial.told(passage(of=head(1), number=4, **SMALL))
    await trial.lookout.looked()
    assert trial.seen() == ["PassageAudited"] * 2


async def test_what_another_accuses_is_looked_at_with_what_that_one_has(trial: Trial) -> None:
    trial.lookout._watch = replace(trial.lookout._watch, rate=0.0)
    del trial.link.given[AUTHOR.peer]
    trial.link.given[OTHER.peer] = set(with_bytes(2))
    await trial.told(signed := passage(**SMALL))
    assert not len(trial.lookout._tasks), "not drawn"
    trial.device.apart_by, trial.device.output = (9.0, 9.0), b"zz"
    await trial.accused(signed)
    await trial.lookout.looked()
    assert trial.seen() == ["PassageDoubted"]


def test_who_delivers_nothing_for_long_hides_nothing(trial: Trial) -> None:
    """Neighbours are asked before the parameters change."""
    trial.link.stalled.add(AUTHOR.peer)
    trial.link.given |= {SENDER.peer: set(with_bytes(2)), AFTER.peer: set(with_bytes(2))}
    trial.device.apart_by, trial.device.output = (9.0, 9.0), b"zz"
    clock = VirtualClock()

    async def play() -> None:
        await trial.told(passage(**SMALL))
        await trial.lookout.looked()
        assert trial.seen() == ["PassageDoubted"]
        assert clock.now() < 5.0, "it is waited for once, and asked last from then on"
        await trial.lookout.aclose()

    clock.run(play())


def test_who_tells_of_what_nobody_gives_holds_up_no_other_and_not_for_long(trial: Trial) -> None:
    trial.link.stalled.add(OTHER.peer)
    trial.link.given[AUTHOR.peer] = set(with_bytes(2))
    clock = VirtualClock()

    async def play() -> None:
        for number in range(8):  # its own words, of what it has sent to itself
            usual = SMALL | {"sender": OTHER.peer, "member": OTHER.peer, "number": number}
            await trial.told(passage(OTHER, **usual), OTHER)
        await trial.told(passage(**SMALL))
        await asyncio.sleep(1.0)
        assert trial.seen() == ["PassageAudited"]
        await asyncio.sleep(FETCH_S)
        assert not len(trial.lookout._tasks), "once it has given nothing in all the time it is asked no more"
        asked = len(trial.link.asked)
        trial.lookout.open(head(1))
        usual = SMALL | {"sender": OTHER.peer, "member": OTHER.peer}
        await trial.told(passage(OTHER, of=head(1), **usual), OTHER)
        await trial.lookout.looked()
        assert len(trial.link.asked) == asked, "nor after the next round"
        await trial.lookout.aclose()

    clock.run(play())


async def test_a_flood_of_what_is_not_looked_at_pushes_out_nothing_that_is(trial: Trial) -> None:
    trial.busy.clear()
    await trial.told(passage(**SMALL))
    trial.lookout._watch = replace(trial.lookout._watch, rate=0.0)
    for number in range(2, 12):
        await trial.told(passage(number=number, **SMALL))
    assert len(trial.lookout._heard) == 1
    trial.busy.set()
    await trial.lookout.looked()
    assert trial.seen() == ["PassageAudited"]


async def test_a_stage_too_small_to_strike_anybody_out_is_told_once() -> None:
    trial = Trial()
    few = msgspec.structs.replace(head(), members=MEMBERS[:2])
    trial.lookout.open(few)
    trial.lookout.open(msgspec.structs.replace(few, round=few.round + 1))
    assert [event.text for event in trial.events if isinstance(event, Notice)] == [
        "stage 2 has 2 members: of fewer than 3 none can be struck out, whatever it does"
    ]
    await trial.lookout.aclose()
    assert trial.link.handlers == {}
