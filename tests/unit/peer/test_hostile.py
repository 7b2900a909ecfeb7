"""A member with a valid key and a valid ticket that lies, over real sockets: the others refuse it and go on.

In every case an event at an honest member says why, and the honest end with one digest.
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from unit.peer.crew import LEASE_TOKENS, Crew, Member
from weft.codec.config import Bf16Config, CodecConfig, Fp32Config, Int8Config
from weft.events import ConnectionDropped, Event, Notice, PayloadRejected, RoundCommitted
from weft.ids import Digest, Tokens
from weft.keys import Identity
from weft.peer.messages import Decision, Letter
from weft.peer.peer import Peer
from weft.run.amend import first_charter
from weft.sync.merge.reduce import EncodedPart, named
from weft.sync.method.presets import FedAvgConfig
from weft.sync.records.messages import Accept, Certificate, Goodbye, Ready, RoundNote, next_base
from weft.wire import Buffer, Signed, digest_of, seal

NUM_ROUNDS = 3
ABSURD = Tokens(1 << 40)

Mischief = Callable[[Peer], Coroutine[Any, Any, None] | None]
Change = Callable[[Buffer], Buffer]


async def meet(tmp_path: Path, mischief: Mischief, codec: CodecConfig | None = None) -> tuple[Member, Member, Member]:
    """Run two honest members and one that `mischief` makes lie, until the honest have completed the run."""
    method = FedAvgConfig(every=2, codec=codec or Fp32Config())
    crew = Crew(tmp_path, num_rounds=NUM_ROUNDS, method=method)
    async with crew.deadline():
        a, b = crew.found("a", wait_for=3), crew.join("b")
        liar = crew.join("liar", prepare=mischief)
        await crew.done(a, b)
    return a, b, liar


def said(kind: type[Event], *members: Member) -> str:
    """Return every reason that honest members gave in events of a kind."""
    events = [event for member in members for event in member.seen(kind)]
    return "\n".join(event.text if isinstance(event, Notice) else event.reason for event in events)  # type: ignore[attr-defined]


def was_never_counted(liar: Member, *honest: Member) -> bool:
    commits = [event for member in honest for event in member.seen(RoundCommitted)]
    return bool(commits) and all(liar.id not in event.contributors for event in commits)


# --- payloads ---


def overwrite(value: bytes) -> Change:
    def change(part: Buffer) -> bytes:
        return (value + bytes(part)[len(value) :])[: len(part)]

    return change


NAN, INFINITY = np.float32(np.nan).tobytes(), np.float32(np.inf).tobytes()


@pytest.mark.parametrize(
    ("codec", "change", "words"),
    [
        (Fp32Config(), overwrite(NAN), "NaN"),
        pytest.param(Fp32Config(), overwrite(INFINITY), "infinity", marks=pytest.mark.slow),
        pytest.param(Bf16Config(), overwrite(NAN[2:]), "NaN", marks=pytest.mark.slow),
        pytest.param(Int8Config(), overwrite(NAN), "scale", marks=pytest.mark.slow),
        # Codes of 127 times the largest scale would decode to infinity.
        (Int8Config(), overwrite(np.float32(3e38).tobytes()), "scale"),
    ],
    ids=["fp32-nan", "fp32-infinity", "bf16-nan", "int8-nan", "int8-beyond-its-bound"],
)
async def test_a_payload_that_decodes_to_no_number_is_refused(
    tmp_path: Path, codec: CodecConfig, change: Change, words: str
) -> None:
    def prepare(peer: Peer) -> None:
        honest = peer._carry.encode
        peer._carry.encode = lambda parts, round, **more: tuple(  # type: ignore[method-assign]
            named(change(part.encoded)) for part in honest(parts, round, **more)
        )

    a, b, liar = await meet(tmp_path, prepare, codec)
    rejected = [*a.seen(PayloadRejected), *b.seen(PayloadRejected)]
    assert {event.member for event in rejected} == {liar.id}
    assert words in said(PayloadRejected, a, b)
    assert was_never_counted(liar, a, b)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        pytest.param(lambda part: bytes(part)[:-4], "and not", marks=pytest.mark.slow),
        (lambda part: bytes(part) + bytes(1 << 20), "and not"),
        pytest.param(lambda part: b"", "and not", marks=pytest.mark.slow),
        (lambda part: bytes(len(part)), "for"),
    ],
    ids=["short", "long", "empty", "other-bytes"],
)
async def test_a_payload_that_is_not_what_was_announced_is_refused(tmp_path: Path, change: Change, words: str) -> None:
    def prepare(peer: Peer) -> Coroutine[Any, Any, None]:
        async def serve_other_bytes() -> None:
            while peer.rounds is None:  # noqa: ASYNC110  # the peer tells nobody when it begins
                await asyncio.sleep(0)
            parts = peer.rounds.parts

            def offer(payload: Sequence[EncodedPart]) -> tuple[Digest, ...]:
                parts._payload = {part.digest: change(part.encoded) for part in payload}
                return tuple(part.digest for part in payload)

            parts.offer = offer  # type: ignore[method-assign,assignment]

        return serve_other_bytes()

    a, b, liar = await meet(tmp_path, prepare)
    assert words in said(ConnectionDropped, a, b)
    dropped = {event.remote for member in (a, b) for event in member.seen(ConnectionDropped)}
    assert dropped - {None} == {liar.id}  # None: a dial that was on its way when the liar's link was cut
    # One word against it is not two: where only one of the honest had a part to merge, the liar itself merged the rest.
    commits = [event for member in (a, b) for event in member.seen(RoundCommitted)]
    assert any(set(event.contributors) == {a.id, b.id} for event in commits)


# --- letters ---


def each_round(act: Callable[[Peer], None]) -> Mischief:
    """Return mischief that acts now and then for as long as the liar lives."""

    def prepare(peer: Peer) -> Coroutine[Any, Any, None]:
        async def run() -> None:
            while True:
                if peer.rounds is not None:
                    act(peer)
                await asyncio.sleep(0.1)

        return run()

    return prepare


def to_all(peer: Peer, record: msgspec.Struct) -> None:
    for other in peer.context.node.peers:
        peer.context.node.post(other, record)


@pytest.mark.full
async def test_garbage_in_the_place_of_a_letter_ends_the_link(tmp_path: Path) -> None:
    def act(peer: Peer) -> None:
        for other in peer.context.node.peers:
            link = peer.context.node._links.get(other)
            if link is not None:
                link.session.post("Letter", b"\xc1" * 100)

    a, b, liar = await meet(tmp_path, each_round(act))
    dropped = [*a.seen(ConnectionDropped), *b.seen(ConnectionDropped)]
    unproven = {None}  # who dials again while the other end dials too may lose a connection before it has a name
    assert {event.remote for event in dropped} - unproven == {liar.id}
    assert "Letter" in said(ConnectionDropped, a, b)


STRANGER = Identity.from_seed(b"s" * 32)


def by_a_stranger(peer: Peer, note: RoundNote) -> Signed:
    return seal(STRANGER, note)


def with_another_name(peer: Peer, note: RoundNote) -> Signed:
    return msgspec.structs.replace(seal(STRANGER, note), signer=peer.peer)


def altered(peer: Peer, note: RoundNote) -> Signed:
    signed = seal(peer.context.identity, note)
    return msgspec.structs.replace(signed, body=signed.body[:-1] + bytes([signed.body[-1] ^ 1]))


@pytest.mark.parametrize(
    "sign",
    [
        pytest.param(by_a_stranger, marks=pytest.mark.slow),
        with_another_name,
        pytest.param(altered, marks=pytest.mark.slow),
    ],
)
async def test_a_letter_that_its_sender_did_not_sign_is_not_read(
    tmp_path: Path, sign: Callable[[Peer, RoundNote], Signed]
) -> None:
    def act(peer: Peer) -> None:
        """Say goodbye in the name of somebody: were it read, that one would be taken for gone."""
        assert peer.rounds is not None
        base = peer.rounds.chain.base
        note = RoundNote(branch=base.branch, round=base.round, message=Goodbye(promised=base.round, accepted=None))
        to_all(peer, Letter(signed=sign(peer, note)))

    a, b, _ = await meet(tmp_path, each_round(act))
    assert "handler of a note failed: WireError" in said(Notice, a, b)
    assert all(not event.left_out for event in a.seen(RoundCommitted))


async def test_a_decision_without_a_quorum_is_not_followed(tmp_path: Path) -> None:
    def act(peer: Peer) -> None:
        """Claim that everybody has left and the run is over, with the votes of the liar and of strangers."""
        assert peer.rounds is not None
        head = peer.rounds.chain.head
        base = next_base(head, first_charter(peer.run))
        manifest = msgspec.structs.replace(
            head,
            round=base.round,
            previous=base.previous,
            contributions=(),
            leader=peer.peer,
            members=(peer.peer,),
            committed_tokens=ABSURD,
        )
        accept = RoundNote(
            branch=base.branch, round=base.round, message=Accept(attempt=0, manifest=digest_of(manifest))
        )
        mine = seal(peer.context.identity, accept)
        votes = (mine, mine, mine, seal(STRANGER, accept))
        forged = [msgspec.structs.replace(mine, signer=other) for other in head.members]
        to_all(peer, Decision(certificate=Certificate(attempt=0, manifest=manifest, votes=votes, farewells=())))
        to_all(peer, Decision(certificate=Certificate(attempt=0, manifest=manifest, votes=tuple(forged), farewells=())))

    a, _, _ = await meet(tmp_path, each_round(act))
    enough = NUM_ROUNDS * 3 * LEASE_TOKENS
    assert enough <= a.task.result().committed_tokens < enough + 3 * LEASE_TOKENS  # type: ignore[union-attr]


# --- claims ---


async def test_a_claim_above_the_lease_counts_as_the_lease(tmp_path: Path) -> None:
    def prepare(peer: Peer) -> None:
        honest = peer._carry.add_steps

        def add_steps(work: Any) -> None:
            honest(work)
            peer._carry.tokens = ABSURD

        peer._carry.add_steps = add_steps  # type: ignore[method-assign]

    a, b, liar = await meet(tmp_path, prepare)
    commits = a.seen(RoundCommitted)
    assert any(liar.id in event.contributors for event in commits)
    assert all(event.committed_tokens <= 3 * LEASE_TOKENS * event.round for event in commits)
    assert "claims" in said(Notice, a, b)


@pytest.mark.parametrize("tokens", [-5, (1 << 63) - 1])
async def test_a_claim_that_is_no_amount_of_work_is_refused_or_cut(tmp_path: Path, tokens: int) -> None:
    def act(peer: Peer) -> None:
        assert peer.rounds is not None
        base = peer.rounds.chain.base
        ready = Ready(tokens=Tokens(tokens), parts=(Digest("0" * 64),) * base.num_parts)
        note = RoundNote(branch=base.branch, round=base.round, message=ready)
        to_all(peer, Letter(signed=seal(peer.context.identity, note)))

    a, _, _ = await meet(tmp_path, each_round(act))
    for event in a.seen(RoundCommitted):  # who missed a round is counted with two leases in the next
        assert event.tokens > 0
        assert event.committed_tokens <= 3 * LEASE_TOKENS * event.round
