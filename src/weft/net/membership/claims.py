"""Signed records of membership, made and read: between the bytes that travel and the claims that are believed.

A claim that does not hold is the fault of who passes it on: everybody checks before passing on. Claims read lately are
remembered whole, so the same one from many links is checked once; peers of one process may share a reader.
"""

from blake3 import blake3

from weft.errors import WireError
from weft.ids import PeerId, RunId
from weft.keys import verify
from weft.net.membership.members import Accused, Claim, Departed, Lives
from weft.net.messages import MAX_ADDRESSES, MAX_CLAIM_NBYTES, Accusation, Contact, Departure, Presence
from weft.wire import Record, Signed, Signer, decode, seal, unseal

MAX_READ = 4096  # remembered: twice the largest swarm


class Private(Record, frozen=True, kw_only=True, tag="Private"):
    """Signed for its signature alone, which nobody else can make; it is never sent."""

    purpose: str


def secret(signer: Signer, purpose: str) -> bytes:
    """Return 32 bytes that only the holder of the key can know, the same each time."""
    return blake3(seal(signer, Private(purpose=purpose)).signature).digest()


class ClaimReader:
    """Reads claims of one run."""

    def __init__(self, run: RunId) -> None:
        self._run = run
        self._read: dict[bytes, tuple[Signed, Claim]] = {}  # by signature

    def read(self, signed: Signed) -> Claim:
        """Return what `signed` says, once its signature holds.

        Raises:
            WireError: it does not, is too long, of another run, or no claim.
        """
        known = self._read.get(signed.signature)
        if known is not None and known[0] == signed:
            return known[1]
        if len(signed.body) > MAX_CLAIM_NBYTES:
            raise WireError(f"a claim of {len(signed.body)} bytes exceeds the bound of {MAX_CLAIM_NBYTES}")
        claim = self._unsealed(signed)
        while len(self._read) >= MAX_READ:
            del self._read[next(iter(self._read))]
        self._read[signed.signature] = (signed, claim)
        return claim

    def _unsealed(self, signed: Signed) -> Claim:
        signer = signed.signer
        match signed.kind:
            case "Presence":
                presence = unseal(signed, Presence, verify)
                self._check(presence.run)
                return Lives(signer, presence.instance, presence.incarnation, signed)
            case "Accusation":
                accusation = unseal(signed, Accusation, verify)
                self._check(accusation.run)
                return Accused(accusation.accused, accusation.instance, accusation.incarnation, signer, signed)
            case "Departure":
                departure = unseal(signed, Departure, verify)
                self._check(departure.run)
                return Departed(signer, departure.instance, signed)
        raise WireError("what was passed on as a claim of membership is none")

    def _check(self, run: RunId) -> None:
        if run != self._run:
            raise WireError("a claim of membership is about another run")


def live(signer: Signer, run: RunId, instance: bytes, incarnation: int, contact: Contact) -> Lives:
    """Return this process's own claim to live."""
    presence = Presence(
        run=run,
        instance=instance,
        incarnation=incarnation,
        name=contact.name,
        addresses=contact.addresses[:MAX_ADDRESSES],
    )
    return Lives(signer.peer, instance, incarnation, seal(signer, presence))


def accuse(signer: Signer, run: RunId, life: Lives) -> Accused:
    """Return this peer's claim that it cannot reach another."""
    accusation = Accusation(run=run, accused=life.peer, instance=life.instance, incarnation=life.incarnation)
    return Accused(life.peer, life.instance, life.incarnation, signer.peer, seal(signer, accusation))


def contact_of(peer: PeerId, proof: Signed) -> Contact:
    """Return where `peer` may be reached, as it says in a presence that was read before."""
    presence: Presence = decode(proof.body, Presence)
    return Contact(peer=peer, name=presence.name, addresses=presence.addresses)
