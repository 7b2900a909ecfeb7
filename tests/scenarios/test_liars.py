"""Members with a valid key that lie in a round: what they can cost the others is bounded, and nobody ends for it."""

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from scenarios import rules
from scenarios.swarm import Life, Member, Swarm
from weft.events import ActEnacted, AttemptStarted, LieProven, PayloadRejected, RoundCommitted
from weft.ids import Attempt, Digest, PeerId
from weft.net.messages import BlobHeader
from weft.net.node import Node
from weft.net.transport.frame import encode_frame
from weft.peer.messages import Decision, Letter, StandingNote
from weft.peer.round.acts import lies_file
from weft.peer.round.driver import MAX_GIVEN_UP
from weft.peer.round.inbox import Heard, Step
from weft.peer.round.payloads import FETCH_FLOOR_S
from weft.sync.merge.reduce import parts_of
from weft.sync.records.messages import (
    MAX_COUNT,
    Accept,
    Base,
    Certificate,
    Goodbye,
    Manifest,
    Prepare,
    Promise,
    Propose,
    Ready,
    Refuse,
    RoundNote,
    Vote,
)
from weft.sync.round.rules import leader
from weft.wire import digest, digest_of, encode, seal

MakeSwarm = Callable[..., Swarm]
DEADLINE_S = 30.0  # of virtual time, for a round whose first leader dies


def say(liar: Member, to: list[Member], message: Any) -> None:
    base = liar.peer.rounds.chain.base  # type: ignore[union-attr]
    note = RoundNote(branch=base.branch, round=base.round, message=message)
    for member in to:
        Node.post(liar.peer.context.node, member.id, Letter(signed=seal(liar.identity, note)))  # past the watchers


def with_other_results(liar: Member, manifest: Manifest, *, is_served: bool) -> Manifest:
    """Return the manifest with results that decode to no number, which the liar serves, or which nobody has."""
    rounds = liar.peer.rounds
    assert rounds is not None
    parts = []
    for here, part in zip(parts_of(manifest, rounds.parts._scope), manifest.parts, strict=True):
        data = np.full(len(here), np.nan, "<f4").tobytes()
        if is_served:
            rounds.chain.keep(rounds.chain.base.round, digest(data), data)
        parts.append(msgspec.structs.replace(part, result=digest(data)))
    return msgspec.structs.replace(manifest, parts=tuple(parts))


@pytest.mark.parametrize("is_served", [True, False], ids=["not-finite", "absent"])
def test_nobody_votes_for_results_that_it_could_not_apply(make_swarm: MakeSwarm, is_served: bool) -> None:
    """The liar proposes other results than were merged, and makes a decision of whatever votes it is given."""
    swarm = make_swarm(num_rounds=8)

    async def scenario() -> None:
        *honest, liar = await swarm.start("abcd")
        await swarm.round(liar, 2)
        rounds = liar.peer.rounds
        assert rounds is not None
        send, judge = rounds._send, rounds.inbox._judge
        lies: dict[str, tuple[Manifest, Attempt]] = {}
        votes: list[Any] = []

        def lie(to: Any, message: Any) -> None:
            if isinstance(message, Propose):
                manifest = with_other_results(liar, message.manifest, is_served=is_served)
                lies[digest_of(manifest)] = manifest, message.attempt
                message = Propose(attempt=message.attempt, manifest=manifest)
            send(to, message)

        def collect(heard: Heard, after: Step | None = None) -> None:
            if isinstance(heard.message, Accept) and heard.message.manifest in lies:
                votes.append(heard.signed)
                manifest, attempt = lies[heard.message.manifest]
                certificate = Certificate(attempt=attempt, manifest=manifest, votes=tuple(votes), farewells=())
                for member in honest:
                    liar.peer.context.node.post(member.id, Decision(certificate=certificate))
                return
            judge(heard, after)

        rounds._send, rounds.inbox._judge = lie, collect  # type: ignore[method-assign]
        outcomes = await swarm.done(*honest)
        assert {outcome.reason for outcome in outcomes} == {"complete"}
        assert len({outcome.replica for outcome in outcomes}) == 1
        assert lies
        assert votes == []
        for member in honest:
            rejected = member.life.seen(PayloadRejected)
            assert {event.member for event in rejected} == {liar.id}
            assert "cannot be applied" in rejected[0].reason

    swarm.run(scenario)


@pytest.mark.parametrize("kind", [Promise, Goodbye])
def test_nobody_must_propose_what_a_liar_says_it_accepted(make_swarm: MakeSwarm, kind: type[Any]) -> None:
    """A later leader repeats what was accepted last: a manifest that nobody can apply would be repeated for ever."""
    swarm = make_swarm(num_rounds=8, num_peers=5)

    async def scenario() -> None:
        members = await swarm.start("abcde")
        await swarm.round(members[0], 2)
        base = members[0].peer.rounds.chain.base  # type: ignore[union-attr]
        first, liar = (next(m for m in members if m.id == leader(base, Attempt(turn))) for turn in (0, 4))
        honest = [member for member in members if member not in (first, liar)]
        told: list[Manifest] = []

        def act(life: Life, _to: Any, message: Any) -> bool:
            if life is first.life and isinstance(message, Propose) and not life.is_dead:
                told.append(with_other_results(liar, message.manifest, is_served=False))
                swarm.kill(first)
                if kind is Goodbye:
                    say(liar, honest, Goodbye(promised=Attempt(0), accepted=Vote(attempt=Attempt(0), manifest=told[0])))
            if life is liar.life and isinstance(message, Promise) and told and kind is Promise:
                vote = Vote(attempt=Attempt(0), manifest=told[0])
                say(liar, honest, Promise(attempt=message.attempt, accepted=vote))
                return False
            return not (life is liar.life and isinstance(message, Promise | Accept) and told)

        swarm.watchers.append(act)
        at = swarm.clock.now()
        event = await swarm.round(honest[0], base.round)
        assert told
        assert event.manifest != digest_of(told[0])
        assert swarm.clock.now() - at < DEADLINE_S

    swarm.run(scenario)


def test_a_contributor_that_drips_its_payload_is_left_out(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm(num_rounds=10)

    async def scenario() -> None:
        *honest, liar = await swarm.start("abcd")
        await swarm.round(honest[0], 4)  # what rounds take is measured
        blobs = liar.peer.context.node._blobs

        async def drip(bulk: Any, request: Any) -> None:
            found = (look(bulk.peer, request.digest) for look, _ in blobs._lookups)
            view = memoryview(next(data for data in found if data is not None)).cast("B")
            await bulk.send_slice(encode_frame(encode(BlobHeader(nbytes=len(view)))))
            for index in range(len(view)):
                await asyncio.sleep(5)
                await bulk.send_slice(view[index : index + 1])

        blobs._answer = drip  # type: ignore[method-assign]
        at = swarm.clock.now()
        event = await swarm.when(honest[0], RoundCommitted, lambda event: liar.id in event.left_out)
        assert swarm.clock.now() - at < 3 * FETCH_FLOOR_S
        assert event.round <= 6

    swarm.run(scenario)


@pytest.mark.parametrize("promised", [5, 1 << 40, MAX_COUNT])
def test_one_refusal_moves_nobody_to_another_attempt(make_swarm: MakeSwarm, promised: int) -> None:
    swarm = make_swarm(num_rounds=5)

    async def scenario() -> None:
        *honest, liar = members = await swarm.start("abcd")
        await swarm.round(liar, 2)
        await asyncio.sleep(0.5)
        for attempt in range(3):
            say(liar, honest, Refuse(attempt=Attempt(attempt), promised=Attempt(promised)))
        outcomes = await swarm.done(*members)
        assert {outcome.reason for outcome in outcomes} == {"complete"}
        assert all(member.life.seen(AttemptStarted) == [] for member in honest)

    swarm.run(scenario)


@pytest.mark.full
def test_who_claims_to_be_far_ahead_is_followed_some_attempts_at_once(make_swarm: MakeSwarm) -> None:
    """A pair's tie-breaker is a majority by itself: without a bound the other would write to its disk for ever."""
    swarm = make_swarm(num_rounds=40, num_peers=2)

    def led(member: Member) -> Base | None:
        """Return the round of `member` in which it is no tie-breaker, and would lead the attempt that it is led to.

        Where the other does, the pair waits for as long as late attempts may take: of two, one that lies can stop both.
        """
        base = member.peer.rounds.chain.base  # type: ignore[union-attr]
        is_it = base.keeper != member.id and leader(base, Attempt(MAX_GIVEN_UP)) == member.id
        return base if is_it else None

    async def scenario() -> None:
        members = await swarm.start("ab")
        for member in members:
            await swarm.round(member, 2)
        while not (found := [each for each in members if led(each) is not None]):
            await swarm.when(None, RoundCommitted)
        honest = found[0]
        (liar,) = (member for member in members if member is not honest)
        rounds = honest.peer.rounds
        assert rounds is not None
        base, quorum = rounds.chain.base, rounds.quorum
        is_over, asked = quorum.is_attempt_over, [0]

        def count(state: Any) -> bool:
            asked[0] += 1
            assert asked[0] < 10 * MAX_GIVEN_UP, "it gives up attempts without end"
            return is_over(state)

        quorum.is_attempt_over = count  # type: ignore[method-assign]
        note = StandingNote(branch=base.branch, round=base.round, attempt=Attempt(MAX_COUNT), has_vote=True)
        quorum.take(liar.id, note)
        rounds.keep_up()
        assert rounds._state is not None
        assert rounds._state.attempt == MAX_GIVEN_UP
        quorum.is_attempt_over = is_over  # type: ignore[method-assign]
        quorum._told.clear()
        outcomes = await swarm.done(*members)
        assert {outcome.reason for outcome in outcomes} == {"complete"}

    swarm.run(scenario)


def test_who_leaps_to_attempts_that_it_leads_stops_no_round(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm(num_rounds=8)

    async def scenario() -> None:
        *honest, liar = members = await swarm.start("abcd")
        await swarm.round(liar, 4)  # what rounds take is measured

        async def leap() -> None:
            while (state := honest[0].peer.rounds and honest[0].peer.rounds._state) is not None:
                ahead = (Attempt(state.attempt + turn) for turn in range(1, len(state.base.electorate) + 1))
                say(liar, honest, Prepare(attempt=next(a for a in ahead if leader(state.base, a) == liar.id)))
                await asyncio.sleep(0.2)

        leaping = asyncio.ensure_future(leap())
        outcomes = await swarm.done(*members)
        leaping.cancel()
        assert {outcome.reason for outcome in outcomes} == {"complete"}
        assert honest[0].life.seen(AttemptStarted)  # it was followed, once a round
        rules.no_long_wait(honest[0].life.times(RoundCommitted), DEADLINE_S)

    swarm.run(scenario)


def test_announcing_again_and_again_makes_nobody_wait_longer(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm(num_rounds=6)

    async def scenario() -> None:
        a, b, c, d = await swarm.start("abcd", train_s=3.0)
        await swarm.round(a, 1)
        timers = a.peer.rounds.timers  # type: ignore[union-attr]
        counted = [0]
        ready, begin = timers.note_ready, timers.begin

        def note(peer: PeerId) -> None:
            counted[-1] += 1
            ready(peer)

        def count_anew() -> None:
            counted.append(0)
            begin()

        timers.note_ready, timers.begin = note, count_anew  # type: ignore[method-assign]

        def repeat(life: Any, to: Any, message: Any) -> bool:
            if life is d.life and isinstance(message, Ready) and to == a.id:
                for _ in range(3):
                    say(d, [a], message)
            return True

        swarm.watchers.append(repeat)
        await swarm.done(a, b, c, d)
        assert max(counted) == 4

    swarm.run(scenario)


@pytest.mark.parametrize("is_kept", [True, False], ids=["kept", "lost"])
def test_a_proven_lie_outlives_all_who_heard_it(make_swarm: MakeSwarm, is_kept: bool) -> None:
    """Each honest member is killed as soon as it knows; nobody tells the lie again."""
    swarm = make_swarm(num_rounds=6, num_peers=3)

    async def scenario() -> None:
        *honest, liar = await swarm.start("abc")
        await swarm.round(liar, 1)
        await asyncio.sleep(0.3)
        for digit in "ab":
            say(liar, honest, Accept(attempt=Attempt(7), manifest=Digest(digit * 64)))
        for member in honest:
            if not member.life.seen(LieProven):
                await swarm.when(member, LieProven)
        for member in honest:
            swarm.kill(member)
            assert [event.kind for event in member.life.seen(ActEnacted)] == []
            if not is_kept:
                member.folder.lies.unlink()
        for member in honest:
            swarm.launch(member)
        await swarm.round(honest[0], 4)
        enacted = [(event.kind, event.subject) for event in honest[0].life.seen(ActEnacted)]
        assert enacted == ([("strike out", liar.id)] if is_kept else [])
        assert lies_file(honest[0].folder.lies).read().lies == ()

    swarm.run(scenario)
