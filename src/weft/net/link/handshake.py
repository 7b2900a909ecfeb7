"""The first two frames of a control connection: both sides show their run and their admission.

The transport has verified both keys before. What can be wrong is told apart, because each needs another remedy:
another version (`WireError`: update), another run (`GenesisMismatch`: ask for a ticket of the right one), no
admission (`Refused`: ask a member). A refusal is a frame of its own, so the joiner's user reads the reason.

In admission by ticket the secret never travels: what travels is BLAKE3, keyed with it, over the run and both keys in
order. The transport has verified those keys, so a proof overheard by one peer is worth nothing in another's hands, nor
when shown to another peer.
"""

import asyncio
import hmac
from contextlib import suppress
from dataclasses import dataclass, field
from typing import assert_never

import msgspec
from blake3 import blake3

from weft.errors import DialError, GenesisMismatch, PeerError, Refused, WireError
from weft.ids import PeerId, RunId, short
from weft.net.admission import Admission, Anyone, ByKeys, ByTicket
from weft.net.link.trial import TURNED_AWAY
from weft.net.messages import MAX_HANDSHAKE_NBYTES, MAX_TOLD_CONTACTS, PROTOCOL, Admitted, Greeting, Hello, Rejected
from weft.net.transport.base import Stream
from weft.net.transport.frame import FrameReader, write_frame
from weft.rng import fresh_secret
from weft.tasks import within
from weft.wire import Signer, decode, encode, printable

HANDSHAKE_S = 5.0  # for the other's frame, once the transport stands: two round trips on the worst path are 2 s
_BANNED = "this key is banned from the run: its stewards banned it, or it signed what no honest peer signs"
MAX_BANNED_BY = MAX_TOLD_CONTACTS  # twice as many as can vote, which are all that matter: keys are free to make
LINGER_S = 2.0  # how long a refused peer may take to read why


@dataclass(kw_only=True)
class Passport:
    """What this peer shows when it connects, and what it asks of others.

    `admission` may be replaced while the node runs: a newcomer learns the run's rule from its RunConfig. So may
    `banned`: the run's charter says who is.
    """

    identity: Signer
    run: RunId
    name: str
    admission: Admission
    instance: bytes = field(default_factory=lambda: fresh_secret(8))  # this process; another one has another
    predecessor: RunId | None = None  # the run that this one goes on with
    banned: frozenset[PeerId] = frozenset()
    banned_by: set[PeerId] = field(default_factory=set)  # who says that this peer is
    peer: PeerId = field(init=False)

    def __post_init__(self) -> None:
        self.peer = self.identity.peer

    def proof_for(self, verifier: PeerId) -> bytes:
        return prove(self.admission, self.run, self.peer, verifier)

    def objection_to(self, prover: PeerId, proof: bytes) -> str | None:
        """Return why `prover` may not be a peer, in words for its user, or None when it may."""
        match self.admission:
            case ByTicket():
                if hmac.compare_digest(proof, prove(self.admission, self.run, prover, self.peer)):
                    return None
                if not proof:
                    return "this run admits by ticket, and this peer showed none; ask a member for one: weft ticket"
                return "the ticket's secret is not this run's; ask a member for a fresh one: weft ticket"
            case ByKeys():
                if prover in self.admission.allowed:
                    return None
                return f"key {short(prover)} is not on this run's list; ask its maker to add {prover}"
            case Anyone():
                return None
            case _:
                assert_never(self.admission)


def prove(admission: Admission, run: RunId, prover: PeerId, verifier: PeerId) -> bytes:
    """Return what `prover` shows `verifier`: 32 bytes, or none where the rule needs no proof."""
    if not isinstance(admission, ByTicket):
        return b""
    key = blake3(admission.secret, derive_key_context="weft 2026 admission secret v1").digest()
    return blake3(f"{run} {prover} {verifier}".encode(), key=key).digest()


def handshake_reader(stream: Stream) -> FrameReader:
    """Return a reader with the bounds that hold before admission."""
    return FrameReader(stream, max_nbytes=MAX_HANDSHAKE_NBYTES, finish_s=HANDSHAKE_S)


class _AnyVersion(msgspec.Struct):
    version: int


async def greet(stream: Stream, reader: FrameReader, hello: Hello, passport: Passport) -> Admitted | None:
    """Say hello as the dialler; return the welcome, or None when another link to this peer stands already.

    Raises:
        Refused: the other side does not admit this peer.
        GenesisMismatch: it is in another run.
        WireError: it speaks another version, or no weft at all.
        PeerError: it could not prove its own admission.
        DialError: it is busy, fell silent or went away.
    """
    who = short(stream.peer)
    limit = asyncio.timeout(HANDSHAKE_S)
    try:
        async with limit:
            await write_frame(stream, encode(hello))
            data = await reader.read()
    except WireError:
        raise
    except (PeerError, TimeoutError) as error:
        why = f"no answer within {HANDSHAKE_S:g} s" if limit.expired() else str(error)
        raise DialError(f"{who} did not finish the handshake: {why}") from None
    if data is None:
        raise DialError(f"{who} closed the connection during the handshake")
    greeting: Admitted | Rejected = decode(data, Greeting)
    if isinstance(greeting, Rejected):
        if greeting.code == "banned" and len(passport.banned_by) < MAX_BANNED_BY:
            passport.banned_by.add(stream.peer)
        _raise_rejected(who, greeting)
        return None
    passport.banned_by.discard(stream.peer)
    why_not = passport.objection_to(stream.peer, greeting.proof)
    if stream.peer in passport.banned:
        why_not = _BANNED
    if why_not is not None:
        raise PeerError(f"{who} answers for run {short(passport.run)} but could not prove its own admission: {why_not}")
    return greeting


def _raise_rejected(who: str, rejected: Rejected) -> None:
    reason = printable(rejected.reason)
    match rejected.code:
        case "duplicate":
            return
        case "version":
            raise WireError(f"{who} speaks another version of weft: {reason}")
        case "run":
            raise GenesisMismatch(f"{who} trains another run: {reason}")
        case "admission" | "banned":
            raise Refused(f"{who} refuses this peer: {reason}")
        case _:
            raise DialError(f"{who} {TURNED_AWAY}: {reason}")


async def hear(reader: FrameReader) -> Hello | Rejected | None:
    """Return the dialler's hello, the refusal it deserves, or None when it went away without a word.

    Raises:
        WireError: not a hello, or none in time.
    """
    async with within(HANDSHAKE_S, lambda: WireError(f"no hello within {HANDSHAKE_S:g} s")):
        data = await reader.read()
    if data is None:
        return None
    # A later version may have other fields, so its number is read first.
    with suppress(msgspec.DecodeError, ValueError, RecursionError):
        version = msgspec.msgpack.decode(data, type=_AnyVersion).version
        if version != PROTOCOL:
            return Rejected(
                code="version",
                reason=f"one side has protocol {version}, the other {PROTOCOL}; update the older one: pip install -U "
                "weft",
            )
    hello: Hello = decode(data, Hello)
    return hello


def judge(passport: Passport, prover: PeerId, hello: Hello) -> Rejected | None:
    """Return why `prover` is turned away, or None."""
    if hello.run == passport.predecessor:
        reason = (
            f"run {short(hello.run)} has ended and goes on here as run {short(passport.run)}; ask a member for a "
            "ticket of that one: weft ticket"
        )
        return Rejected(code="run", reason=reason)
    if hello.run != passport.run:
        reason = (
            f"this peer trains run {short(passport.run)}, not {short(hello.run)}; ask a member for a fresh ticket: "
            "weft ticket"
        )
        return Rejected(code="run", reason=reason)
    if prover in passport.banned:
        return Rejected(code="banned", reason=_BANNED)
    why_not = passport.objection_to(prover, hello.proof)
    return None if why_not is None else Rejected(code="admission", reason=why_not)


async def turn_away(stream: Stream, rejected: Rejected) -> None:
    """Tell the dialler why, wait a moment for it to read that, and close."""
    with suppress(PeerError, TimeoutError):
        async with asyncio.timeout(LINGER_S):
            await write_frame(stream, encode(rejected))
            scrap = memoryview(bytearray(256))
            while await stream.recv_into(scrap):
                pass
    await stream.close()
