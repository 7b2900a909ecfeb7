"""The signed letters that prove a decision: who accepted the manifest, and who had left for good.

Only what the machine counts is kept: a certificate says what the machine decided by, and nobody can take a vote out of
it by sending another.

It does not know what makes a quorum.
"""

from weft.ids import Attempt, PeerId
from weft.keys import Identity
from weft.peer.chain import Chain
from weft.sync.records.messages import Accept, AnyRoundMessage, Certificate, Committed, Goodbye, Manifest, RoundNote
from weft.sync.round.machine import State
from weft.sync.round.rules import is_quorum, spent_farewells
from weft.wire import Signed, digest_of, seal


class Proofs:
    """Those of the round after the chain's head."""

    def __init__(self, identity: Identity, chain: Chain) -> None:
        self._identity = identity
        self._chain = chain
        self._votes: dict[PeerId, Signed] = {}
        self._farewells: dict[PeerId, Signed] = {}

    def begin(self) -> None:
        """A round begins."""
        self._votes, self._farewells = {}, {}

    def keep(self, state: State, sender: PeerId, signed: Signed, message: AnyRoundMessage) -> None:
        """Keep a letter if the machine, in this state, may count it."""
        if isinstance(message, Accept):
            is_wanted = state.proposal is not None and accept_of(state.attempt, state.proposal) == message
            if is_wanted:
                self._votes[sender] = signed
        elif isinstance(message, Goodbye) and sender not in state.farewells:
            self._farewells[sender] = signed

    def seal(self, message: AnyRoundMessage) -> Signed:
        """Sign what this peer says in the round."""
        base = self._chain.base
        return seal(self._identity, RoundNote(branch=base.branch, round=base.round, message=message))

    def certify(self, state: State, committed: Committed) -> Certificate:
        """Return the proof of what this peer's machine decided in `state`, its own vote included."""
        mine = self.seal(accept_of(committed.attempt, committed.manifest))
        votes = {peer: self._votes[peer] for peer in state.votes & self._votes.keys()} | {self._identity.peer: mine}
        farewells: list[PeerId] = []  # as few as prove it: each may hold a manifest
        for peer in sorted(spent_farewells(state.farewells, committed.attempt)):
            if is_quorum(state.base, votes, farewells):
                break
            farewells.append(peer)
        return Certificate(
            attempt=committed.attempt,
            manifest=committed.manifest,
            votes=tuple(votes[peer] for peer in sorted(votes)),
            farewells=tuple(self._farewells[peer] for peer in farewells),
        )


def accept_of(attempt: Attempt, manifest: Manifest) -> Accept:
    return Accept(attempt=attempt, manifest=digest_of(manifest))
