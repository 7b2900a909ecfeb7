"""Looks at what other members of a stage compute, where the run audits: carries out what `weft.verify.passages` says.

    open      this peer has the parameters after a manifest: what it is told of them it may compute again
    looked    all that was drawn so far is looked at: before this peer says what it brings to the round
    close     the parameters are about to change

What a micro-batch was made of is fetched from who has computed it, or else from its neighbours, which have it, too. It
is computed there and back on this machine, once nothing else is to be done, and counts nowhere. Equal bytes are equal;
else both are measured. What this peer finds to be something else it tells all members, signed.

Failure:
- nobody gives what it was made of, or this peer is paused: it says nothing. Whoever gives nothing in all the time is
  not waited for again for twenty rounds.
- somebody tells of a passage with a signature that does not hold, or that it has not accepted itself: it is dropped.
- this peer changes its parameters before it has looked: likewise. At whom another accuses it then looks more often.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from msgspec import UNSET

from weft.clock import Clock
from weft.errors import CallFailed, ConfigError, NetError, NotFinite, PeerError, Refused, WireError
from weft.events import AccuserDoubted, Emit, Notice, PassageAudited, PassageDoubted
from weft.ids import Digest, PeerId, Round, several
from weft.peer.round.acts import PendingActs
from weft.pipeline.device import Comparing, Device, Given, Step, Ways, again
from weft.pipeline.link import Parcel, StageLink, parcel
from weft.pipeline.messages import PassageTold
from weft.pipeline.witness import AT_ONCE, Witness, read_passage
from weft.pipeline.worker import Run
from weft.run.staged import StagedConfig
from weft.stages.messages import MAX_UNTRUSTED
from weft.sync.records.acts import FalsePassage
from weft.sync.records.messages import Manifest
from weft.tasks import Tasks
from weft.verify.draw import Draw
from weft.verify.passages import (
    Accuse,
    Accused,
    Clear,
    Closed,
    Event,
    Key,
    Look,
    Looked,
    Opened,
    Passage,
    Told,
    Watch,
    is_near,
    is_wanted,
    is_whole,
    step,
)
from weft.verify.suspicion import LASTS
from weft.wire import Buffer, Signed, Signer, claimed, digest_of, seal

FETCH_S = 20.0  # for one of the things that a micro-batch was made of
NEXT_S = 2.0  # that one may let it wait before another is asked, too
WAIT_S = 10.0  # for what is being looked at, before the round goes on
MAX_HEARD = 4096  # passages that were told of, and may be looked at
FEW = 3  # members; of fewer none can be struck out
WHY = "what it passed on, or back, is not what its section makes of what it was sent"


class SectionDevice(Device, Comparing, Protocol):
    """What computes a section, and compares."""


@dataclass(frozen=True)
class Place:
    """Whose lookout it is.

    Args:
        run: of the stage.
        acts: where members tell what they have found; None: this peer has not come to its rounds yet.
    """

    stage: int
    run: StagedConfig
    signer: Signer
    link: StageLink
    witness: Witness
    clock: Clock
    emit: Emit
    acts: Callable[[], PendingActs | None]


class Lookout:
    """
    Args:
        device: computes the section.
        compute: does something with it when it is idle.
    """

    def __init__(self, place: Place, rate: float, device: SectionDevice, compute: Run) -> None:
        self._place = place
        self._device = device
        self._compute = compute
        self._watch = Watch(place.signer.peer, rate)
        self._heard: dict[Key, Signed] = {}  # the oldest first
        self._accusers: dict[Key, PeerId] = {}
        self._round = Round(0)
        self._num_members = FEW
        self._acts: PendingActs | None = None
        self._room = asyncio.Semaphore(AT_ONCE)
        self._turns: dict[PeerId, asyncio.Semaphore] = {}  # by who has told of what is looked at
        self._slow: set[PeerId] = set()  # who has let it wait, since the parameters changed
        self._found_false: dict[PeerId, None] = {}  # who has computed something else, as they were found
        self._silent: dict[PeerId, int] = {}  # who has given nothing in all the time, and until which round
        self._tasks = Tasks()
        pipeline = place.run.pipeline
        self._sent = str(pipeline.activations.__struct_config__.tag)
        self._sent_back = str((pipeline.gradients or pipeline.activations).__struct_config__.tag)
        place.link.hold(place.stage, PassageTold, self._on_told)

    @property
    def found_false(self) -> tuple[PeerId, ...]:
        """Return who has computed something else, as far as this peer has looked: members or not."""
        return tuple(self._found_false)

    # --- what rounds ask of it ---

    def open(self, head: Manifest) -> None:
        """Take it up that this peer has the parameters after a manifest."""
        place, name = self._place, digest_of(head)
        place.witness.enter(place.stage, name)
        if (acts := place.acts()) is not None and acts is not self._acts:
            self._acts = acts
            acts.on_false_passage(self._on_letter)
        if self._watch.opened is not None and self._watch.opened.head == name:
            return
        self._round = Round(head.round + 1)
        self._slow.clear()
        self._silent = {peer: until for peer, until in self._silent.items() if until > self._round}
        self._tell_few(len(head.members))
        draw = Draw(run=head.run, branch=head.branch, round=head.round, manifest=name)
        ticket = seal(place.signer, draw).signature
        self._feed(Opened(name, ticket, len(head.members), self._round))

    async def looked(self) -> None:
        """Wait until all that was drawn is looked at, but not for long."""
        await self._tasks.settled(WAIT_S)

    async def close(self) -> None:
        """Take it up that the parameters are about to change."""
        self._place.witness.leave(self._place.stage)
        await self._tasks.settled(WAIT_S)
        self._feed(Closed())  # nothing more is begun
        await self._tasks.aclose()
        self._turns.clear()

    async def aclose(self) -> None:
        place = self._place
        place.link.let_go(place.stage, PassageTold, self._on_told)
        await self._tasks.aclose()
        place.witness.leave(place.stage)
        place.witness.forget(place.stage)

    # --- what others say ---

    async def _on_told(self, peer: PeerId, note: PassageTold) -> None:
        try:
            passage = read_passage(note.passage, note.passage.signer)
        except WireError:
            return
        if passage.sender == peer:  # who has accepted it; nobody else has anything to tell of it
            key = self._remember(note.passage)
            self._feed(Told(peer, key, Digest(passage.head)))
            if not is_wanted(self._watch, key):
                del self._heard[key]

    def _on_letter(self, letter: Signed) -> None:
        found = claimed(letter, FalsePassage)
        key = self._remember(found.passage)
        self._accusers[key] = letter.signer
        self._feed(Accused(letter.signer, key, Digest(claimed(found.passage, Passage).head), int(found.round)))

    def _remember(self, passage: Signed) -> Key:
        key = Key(passage.signer, digest_of(passage))
        self._heard[key] = passage
        while len(self._heard) > MAX_HEARD:
            self._accusers.pop(oldest := next(iter(self._heard)), None)
            del self._heard[oldest]
        return key

    # --- what is decided ---

    def _feed(self, event: Event) -> None:
        self._watch, outputs = step(self._watch, event)
        for output in outputs:
            match output:
                case Look(key=key):
                    self._tasks.spawn(self._look(key))
                case Accuse(key=key):
                    self._accuse(key)
                case Clear(by=by, key=key):
                    told = AccuserDoubted(stage=self._place.stage, accuser=by, member=key.author)
                    self._place.emit(told)

    def _accuse(self, key: Key) -> None:
        place, signed = self._place, self._heard.get(key)
        self._found_false = dict.fromkeys([*self._found_false, key.author][-MAX_UNTRUSTED:])
        place.emit(PassageDoubted(stage=place.stage, member=key.author, round=self._round, why=WHY))
        if signed is not None and self._acts is not None:
            found = FalsePassage(run=place.run.run, peer=key.author, round=self._round, passage=signed, why=WHY)
            self._acts.take(seal(place.signer, found))

    def _tell_few(self, num: int) -> None:
        if num < FEW <= self._num_members:
            called = self._place.run.called(self._place.stage)
            text = (
                f"{called} has {several(num, 'member')}: of fewer than {FEW} none can be struck out, whatever it does"
            )
            self._place.emit(Notice(text=text))
        self._num_members = num

    # --- one look ---

    async def _look(self, key: Key) -> None:
        signed = self._heard.get(key)
        by = self._accusers.get(key) or (key.author if signed is None else PeerId(claimed(signed, Passage).sender))
        try:  # of each that tells not as many as there is room for: who tells of what nobody gives holds up no other
            async with self._turns.setdefault(by, asyncio.Semaphore(AT_ONCE // 2)), self._room:
                distance = await self._distance(key)
        except (PeerError, NetError, Refused, NotFinite, ConfigError, WireError, TimeoutError):
            self._feed(Looked(key, None))
            return
        if distance is None:
            self._feed(Looked(key, "differs"))
            return
        place = self._place
        place.emit(PassageAudited(stage=place.stage, member=key.author, round=self._round, distance=distance))
        self._feed(Looked(key, "equal"))

    async def _distance(self, key: Key) -> float | None:
        """Return how far what was passed on and back is from what this machine makes of it; None: too far."""
        passage = self._read(key)
        num, device = passage.num_samples, self._device
        before, after = PeerId(passage.sender), PeerId(passage.member or passage.sender)
        tokens = await self._fetched(key, passage.tokens, num * device.tokens_nbytes, before)
        activations = await self._fetched(key, passage.given, device.input_nbytes(num), before)
        returned = await self._fetched(key, passage.returned, device.gradient_nbytes(num), after)
        assert tokens is not None
        given = Given(num, bytes(tokens.data), activations, Step(passage.round, passage.step), sender=before)
        back = None if returned is None else returned.data
        mine, loss = await self._compute(partial(again, device, given, back))
        losses = passage.loss, passage.loss if loss is None else loss
        if (_name(mine.output), _name(mine.gradient)) == (passage.output, passage.gradient) and losses[0] == losses[1]:
            return 0.0
        output = await self._fetched(key, passage.output, _nbytes(mine.output), after)
        gradient = await self._fetched(key, passage.gradient, _nbytes(mine.gradient), before)
        theirs = Ways(None if output is None else output.data, None if gradient is None else gradient.data)
        found = await self._compute(partial(device.apart, given, back, theirs, mine))
        return max(0.0, *found) if is_near(found, losses, self._sent, self._sent_back) else None

    def _read(self, key: Key) -> Passage:
        """
        Raises:
            WireError: its author has not signed it, or it is none of this stage.
        """
        passage, run = read_passage(self._heard.get(key), key.author), self._place.run
        is_here = (passage.run, passage.stage) == (run.run, self._place.stage)
        is_whole_here = is_whole(passage, is_last=passage.stage == run.stages - 1)
        if not is_here or not is_whole_here or passage.num_samples > run.pipeline.micro_batch:
            raise WireError("this is no passage of this stage")
        return passage

    async def _fetched(self, key: Key, name: Digest | object, nbytes: int, neighbour: PeerId) -> Parcel | None:
        """Return bytes that a passage names, from whoever gives them; None: it names none.

        Raises:
            PeerError: nobody does.
        """
        if name is UNSET:
            return None
        sources = dict.fromkeys([key.author, neighbour, self._accusers.get(key, key.author)])
        return await self._from_one_of(
            [each for each in sources if each not in self._silent], Digest(str(name)), nbytes
        )

    async def _from_one_of(self, sources: Sequence[PeerId], name: Digest, nbytes: int) -> Parcel:
        """Return bytes from who gives them first: each is asked once those before it have failed, or let it wait.

        Whoever has computed something false could else let everybody wait until the parameters are others.

        Raises:
            PeerError: none does.
        """
        left, asked = sorted(sources, key=lambda each: each in self._slow), dict[asyncio.Future[Parcel], PeerId]()
        failed = "they have given nothing for long"
        try:
            async with asyncio.timeout(FETCH_S):
                while left or asked:
                    if left:
                        fetching = asyncio.ensure_future(self._place.link.fetch(left[0], name, nbytes))
                        asked[fetching] = left.pop(0)
                    limit_s = NEXT_S if left else None
                    done, _ = await asyncio.wait(asked, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
                    for each in done:
                        del asked[each]
                    failed = next((str(error) for each in done if (error := _failure(each))), failed)
                    if given := [each for each in done if each.exception() is None]:
                        return given[0].result()
        except TimeoutError:
            self._silent |= dict.fromkeys(asked.values(), self._round + LASTS)
            raise
        finally:
            self._slow |= set(asked.values())
            for waiting in asked:
                waiting.cancel()
        raise CallFailed(f"nobody gives what a micro-batch was made of: {failed}")


def _failure(fetching: asyncio.Future[Parcel]) -> BaseException | None:
    """Return why a peer did not give something; None: it did."""
    error = fetching.exception()
    if error is not None and not isinstance(error, PeerError | NetError | Refused):
        raise error
    return error


def _name(data: Buffer | None) -> Digest | object:
    return UNSET if data is None else parcel(data).digest


def _nbytes(data: Buffer | None) -> int:
    return 0 if data is None else memoryview(data).nbytes
