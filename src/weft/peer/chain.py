"""The manifests of one branch as this peer knows them, and the choice between branches.

Of a branch it has the head, and proofs and results of the last rounds.

A manifest follows on the head when a quorum of the electorate that the head names accepted it; `proven` checks the
signatures. Results are kept as long as they fit a budget, so that newcomers and stragglers can replay them; who is
further behind fetches the state instead.

The fork choice: whose word is followed that others are further, and what it takes to move a peer that is in a round.

Everybody tells where it stands: branch, round, tokens. That is anybody's word. A certificate is more: who signed it
stands there. So a peer that *holds* its branch, with a majority in sight, goes over to another, or to a state that it
cannot follow round by round, only where a head is signed by as many members that it knows as stand beside it, itself
included, two at most:

    fewer signed     not followed, whatever it counts
    as many          the branch that counts more tokens goes on
    two, here one    that one goes on, whatever this one counts

In a run that audits two are not enough: more have to stand there than here (`num_there`), of the settled members, or as
many where this side has left the other.

Of two branches that meet one yields, then, whoever is linked to whom, for a certificate convinces whoever gets it. Who
holds nothing, because it comes or comes back, goes by what it is told: of branches with something new, of those that
two or more tell the one that counts most, and there no further than most tell.
"""

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from statistics import median_low

from msgspec import UNSET

from weft.data.assign import leases
from weft.ids import Attempt, BranchId, Digest, PeerId, Round, RunId, Tokens
from weft.keys import verify
from weft.net.messages import Heartbeat
from weft.peer.messages import GENESIS
from weft.rng import order_key
from weft.sync.governance import charter_after, forked, history, said, signers
from weft.sync.method.choices import Choices
from weft.sync.records import messages, quarantine
from weft.sync.records.ancestry import Stretch
from weft.sync.records.charter import Charter
from weft.sync.records.messages import Manifest
from weft.sync.round.rules import is_quorum, is_successor
from weft.wire import Buffer, Verify, digest_of, encode

Heads = Sequence[tuple[PeerId, messages.Manifest]]  # who holds which

FIRST = Round(0)
RESULTS_NBYTES = 512 << 20  # of the last rounds' results, kept for others
ANSWER_NBYTES = 900_000  # of certificates: below what a call's body may have
MAX_ELECTORS = 4096  # of all that there were, the newest
MAX_REMEMBERED = 256  # rounds whose certificates are kept


class Chain:
    def __init__(self, head: messages.Manifest, charter: Charter) -> None:
        """
        Args:
            charter: what holds after `head`, which names its digest.
        """
        self._charters: dict[Round, Charter] = {}
        self._choices: dict[Round, Choices] = {}  # found since there is this head: asked for with each blob
        self._electors: dict[PeerId, None] = {}  # as they came
        self._set_head(head, charter)
        self._certificates: dict[Round, messages.Certificate] = {}
        self._results: dict[Digest, tuple[Round, Buffer]] = {}
        self._named: dict[Round, set[Digest]] = {}  # the results of each round, oldest first
        self._nbytes = 0
        # Of the branch that was left last.
        self._former: tuple[BranchId, dict[Round, messages.Certificate]] | None = None

    def append(self, certificate: messages.Certificate) -> None:
        """Make the certificate's manifest the head. `proven` must have held, or the machine have decided."""
        manifest = certificate.manifest
        self._certificates[manifest.round] = certificate
        forgotten = Round(manifest.round - MAX_REMEMBERED)
        self._certificates.pop(forgotten, None)
        self._drop(self._named.pop(forgotten, ()), forgotten)
        unused = self._named.get(manifest.round, set()) - {part.result for part in manifest.parts}
        self._drop(unused, manifest.round)
        self._charters.pop(forgotten, None)
        self._set_head(manifest, charter_after(self.base, manifest))

    def recall(self, certificate: messages.Certificate) -> None:
        """Remember the proof of a round up to the head, of before this process began."""
        if certificate.manifest.round <= self.head.round:
            self._certificates[certificate.manifest.round] = certificate

    def restart(self, head: messages.Manifest, charter: Charter) -> None:
        """Go on from another head, whose branch may be another; results are kept, for they are named by their bytes."""
        if head.branch != self.head.branch:
            self._former = self.head.branch, self._certificates
        self._certificates = {}
        self._set_head(head, charter)

    @property
    def charter(self) -> Charter:
        """Return what holds after the head."""
        return self.base.charter

    def charter_in(self, round: Round) -> Charter:
        """Return the charter by which a round is computed: of those since the last restart, and the next."""
        return self._charters.get(round, self.charter)

    def choices_in(self, round: Round) -> Choices:
        """Return the choices by which a round is computed: of gossip, or of a mean."""
        if (found := self._choices.get(round)) is None:
            method = self.charter_in(round).settings.method
            is_gossip = self.base.round == round and self.base.is_gossip
            found = self._choices[round] = method if is_gossip else method.of_mean()
        return found

    @property
    def electors(self) -> frozenset[PeerId]:
        """Return who has had a vote on what the head stands on, as far as this process has seen or a charter tells.

        None that is banned, or was in quarantine, where a vote costs nothing.
        """
        return frozenset(self._electors) - set(self.charter.banned)

    def _set_head(self, head: messages.Manifest, charter: Charter) -> None:
        self.head = head
        voters = (*(member for fork in charter.forks for member in fork.members), *head.members)
        known = quarantine.settled(charter, voters)
        for peer in voters:
            if peer in known:
                self._electors.setdefault(peer)
        for peer in list(self._electors)[:-MAX_ELECTORS]:
            del self._electors[peer]
        self.base = messages.next_base(head, charter)  # of the round after the head: asked for at each message
        self._charters[self.base.round] = charter
        self._choices = {}

    def after(self, round: Round, limit: int) -> tuple[messages.Certificate, ...] | None:
        """Return the certificates after `round`, oldest first and at most `limit`; None where they are forgotten."""
        return _row(self._certificates, round, min(self.head.round, round + limit))

    def after_in(self, branch: BranchId, round: Round, limit: int) -> tuple[messages.Certificate, ...] | None:
        """Return what `after` does, of this branch or of the one that was left last: who is behind there ends it."""
        if branch == self.head.branch:
            return self.after(round, limit)
        if self._former is None or self._former[0] != branch:
            return None
        known = self._former[1]
        return _row(known, round, min(max(known, default=round), round + limit))

    def certificate(self, manifest: messages.Manifest) -> messages.Certificate | None:
        """Return the proof of a manifest of this branch or of the one that was left last, if it is known here."""
        found = [known.get(manifest.round) for known in (self._certificates, self._former[1] if self._former else {})]
        return next((each for each in found if each is not None and each.manifest == manifest), None)

    def may_be(self, round: Round, manifest: Digest) -> bool:
        """Return whether a round of this branch may have been decided by the manifest of this digest: it was, or which
        one it was is no longer known here."""
        after = self._certificates.get(Round(round + 1))
        known = self.base.previous if round == self.head.round else None if after is None else after.manifest.previous
        return known in (None, manifest)

    def keep(self, round: Round, result: Digest, data: Buffer) -> None:
        """Keep the bytes of a round's result for others; whole rounds give way, the first kept first, never two."""
        if result in self._results:
            self._drop([result], self._results[result][0])
        self._results[result] = round, data
        self._named.setdefault(round, set()).add(result)
        self._nbytes += memoryview(data).nbytes
        while self._nbytes > RESULTS_NBYTES and len(self._named) > 2:
            oldest = next(iter(self._named))
            self._drop(self._named.pop(oldest), oldest)

    def _drop(self, results: Iterable[Digest], round: Round) -> None:
        for result in results:
            if result in self._results and self._results[result][0] == round:
                self._nbytes -= memoryview(self._results.pop(result)[1]).nbytes

    def result(self, digest: Digest, since: Round = FIRST) -> Buffer | None:
        """Return a result of the round `since` or a later one, if it is here."""
        round, data = self._results.get(digest, (FIRST, None))
        return data if round >= since else None

    def proven(self, certificate: messages.Certificate, verify: Verify = verify) -> bool:
        """Return whether a quorum of the present electorate accepted the manifest."""
        return self.proof(certificate, verify) is not None

    def proof(self, certificate: messages.Certificate, verify: Verify = verify) -> set[PeerId] | None:
        """Return who of the present electorate accepted the manifest; None: no quorum did."""
        base, manifest = self.base, certificate.manifest
        if not is_successor(base, manifest):
            return None
        voters = signers(certificate, base.electorate, verify)
        left = {
            peer
            for peer, goodbye in said(manifest, base.electorate, certificate.farewells, messages.Goodbye, verify)
            if goodbye.promised <= certificate.attempt
        }
        return voters if is_quorum(base, voters, left) else None


def _row(known: dict[Round, messages.Certificate], after: Round, last: int) -> tuple[messages.Certificate, ...] | None:
    wanted = [Round(number) for number in range(after + 1, last + 1)]
    return tuple(known[each] for each in wanted) if all(each in known for each in wanted) else None


def open_branch(base: messages.Base, members: Iterable[PeerId], opener: PeerId, branch: BranchId) -> messages.Manifest:
    """Return a manifest that counts nothing and names the members of a branch: the first of a run, or of a minority.

    Args:
        base: the round in which the branch begins; a run's first is `genesis`.
    """
    members = tuple(sorted(members))
    leased, cursor = leases(base.cursor, dict.fromkeys(members, base.quota))
    return messages.Manifest(
        run=base.run,
        branch=branch,
        round=base.round,
        attempt=Attempt(0),
        leader=opener,
        previous=base.previous,
        contributions=(),
        parts=(),
        members=members,
        uplinks=(messages.MAX_UPLINK,) * len(members),
        joined=(),
        left=tuple(peer for peer in base.electorate if peer not in members),
        leases=leased,
        cursor=cursor,
        committed_tokens=base.committed_tokens,
        acts=(),
        charter=digest_of(base.charter if branch == base.branch else forked(base, members)),
        uncounted=base.uncounted[-messages.MAX_UNCOUNTED :],
        leased_again=base.leased_again,
        entry=messages.entry_of(base, ()),
    )


def genesis(run: RunId, founder: PeerId, charter: Charter) -> messages.Base:
    """Return the base of a run's first manifest."""
    return messages.Base(
        run=run,
        branch=BranchId(run),
        round=Round(0),
        previous=GENESIS,
        electorate=(founder,),
        keeper=founder,
        uplinks=(messages.MAX_UPLINK,),
        cursor=0,
        quota=charter.settings.quota,
        committed_tokens=Tokens(0),
        charter=charter,
    )


def branch_name(base: messages.Base, members: Iterable[PeerId], opener: PeerId) -> BranchId:
    """Return the name of the branch that `members` open where `base` lost its majority."""
    return BranchId(order_key("branch", base.previous, base.branch, base.round, opener, *sorted(members)))


def as_many_as_fit(certificates: tuple[messages.Certificate, ...]) -> tuple[messages.Certificate, ...]:
    """Return the first certificates that an answer holds, one at least: those of many members are large."""
    taken, nbytes = 0, 0
    while taken < len(certificates) and (nbytes := nbytes + len(encode(certificates[taken]))) < ANSWER_NBYTES:
        taken += 1
    return certificates[: max(taken, 1)]


MOST_NEEDED = 2  # signers: one liar is one
NEAR = 2  # rounds that may be decided while others tell

Told = Manifest | Heartbeat


@dataclass(frozen=True)
class Proof:
    """A head that members have signed.

    Args:
        num_signers: of those that this peer knows as members, at some time, of what it stands on.
        num_there: in a run that audits, as many of the same as may stand there (`num_there`).
    """

    manifest: Manifest
    num_signers: int
    num_there: int = 0


def num_there(manifest: Manifest, signers: Set[PeerId], known: Set[PeerId], beside: Set[PeerId]) -> int:
    """Return how many of those that a peer knows may stand at a manifest: who has signed it, and of the others that it
    names fewer, for more than half have signed.

    Args:
        beside: who stands where this peer does, whatever it has signed.
    """
    signed, named = signers - beside, known & set(manifest.members) - beside
    return max(len(signed), min(len(named), 2 * len(signed) - 1))


def is_further(one: Told, other: Manifest) -> bool:
    """Return whether `one` is later than `other` on its branch, or on one to prefer by what it counts.

    That is one of more tokens, of a later round (just opened, and not the one it leaves), or of a lower name.
    """
    if one.branch == other.branch:
        return one.round > other.round
    return _order(one) < _order(other)


def is_followed(mine: Manifest, charter: Charter, num_beside: int, proof: Proof) -> bool:
    """Return whether who holds `mine` goes over to what is proven.

    Args:
        charter: after `mine`.
        num_beside: members of its electorate that stand there too, itself included.
    """
    if charter.audits is not UNSET and num_beside > 1:
        return _is_followed_by_many(mine, charter, num_beside, proof)
    needed, found = min(num_beside, MOST_NEEDED), min(proof.num_signers, MOST_NEEDED)
    there = proof.manifest
    if found < needed or there.branch == mine.branch:
        return found >= needed and there.round > mine.round + 1  # one round on can be followed, or does not follow
    at = Stretch(branch=there.branch, start=there.round, stop=Round(there.round + 1))
    return not history(mine, charter).has(at) and (found > needed or is_further(there, mine))


def _is_followed_by_many(mine: Manifest, charter: Charter, num_beside: int, proof: Proof) -> bool:
    """Return the same where members audit each other: two that lie could else replace what all have learnt.

    Of two sides as large the one yields that has left the other's branch; of two that have left a third, the one that
    counts less.
    """
    there, num = proof.manifest, proof.num_there
    if num < num_beside or there.branch == mine.branch:
        return num > num_beside and there.round > mine.round + 1
    at = Stretch(branch=there.branch, start=there.round, stop=Round(there.round + 1))
    if history(mine, charter).has(at):
        return False
    has_left = any(fork.branch == there.branch for fork in charter.forks)
    return num > num_beside or has_left or (bool(charter.forks) and is_further(there, mine))


def believed(told: Sequence[Told]) -> tuple[BranchId, int]:
    """Return the branch that who comes goes to, and the furthest round of it that it believes in."""
    best = chosen(told)
    return best, furthest([each.round for each in told if each.branch == best])


def chosen(told: Iterable[Told]) -> BranchId:
    """Return the branch that who comes goes to: it is told by as many as any, of two at most, and counts most."""
    told_of: dict[BranchId, list[Told]] = {}
    for each in told:
        told_of.setdefault(each.branch, []).append(each)

    def order(branch: BranchId) -> tuple[int, int, int, BranchId]:
        there = told_of[branch]
        tokens, round, _ = median_low(_order(each) for each in there)
        return -min(len(there), MOST_NEEDED), tokens, round, branch

    return min(told_of, key=order)


def furthest(rounds: Sequence[Round]) -> int:
    """Return the furthest round to believe in where others tell of `rounds`, one or more."""
    return median_low(rounds) + NEAR


def _order(told: Told) -> tuple[int, int, BranchId]:
    return -told.committed_tokens, -told.round, told.branch
