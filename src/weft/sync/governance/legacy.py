"""What a branch that was given up had counted, as one contribution of a round of the branch that goes on.

    weight   its tokens, but at most the median of the round's other contributions
    length   of each part, at most the median of the others' (`weft.sync.merge.reduce.Merger`)
    once     no round of it may be in the history already, nor in another legacy of the same round

so whoever makes a branch up, with whatever tokens, moves the parameters no further than one member's round does, nor
the run's count of tokens. All of it can be checked from the base and the contributions alone. What is taken in is
written into the charter, which comes with every state.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import TypeVar

import msgspec

from weft.errors import WireError
from weft.ids import PeerId, Round, Tokens
from weft.keys import verify
from weft.sync.governance.enact import Enacted, Void, enact
from weft.sync.records.acts import Warrant
from weft.sync.records.ancestry import Fork, History, Stretch, fork_point, with_fork, with_taken
from weft.sync.records.charter import Charter
from weft.sync.records.messages import Accept, Base, Brought, Certificate, Manifest, Ready, RoundNote
from weft.sync.records.tuning import Tuned, is_allowed, tuned_charter
from weft.wire import digest_of, unseal

MAX_ROUTED = 64  # quotas that a round counts where what members train on is routed to them

replace = msgspec.structs.replace
B = TypeVar("B", bound=Brought)


def history(head: Manifest, charter: Charter) -> History:
    """Return what the state after `head` is made of."""
    return History(head.branch, charter.forks, Round(head.round + 1), charter.taken_in)


def history_before(base: Base) -> History:
    """Return what the state is made of that the round of `base` starts from."""
    return History(base.branch, base.charter.forks, base.round, base.charter.taken_in)


def countable(base: Base, offered: Iterable[B]) -> tuple[B, ...]:
    """Return the contributions that a round can count, ascending by peer: legacies with their weight, and each once.

    Args:
        offered: of a legacy, the weight is not asked: it follows from the others.
    """
    offered = tuple(offered)
    counted = [each for each in offered if each.legacy is None]
    most = median_tokens(counted) or base.charter.settings.quota_tokens
    known = history_before(base)
    taken: list[Stretch] = []
    for each in sorted(offered, key=lambda each: (-_tokens(each), each.peer)):
        if each.legacy is None or not each.legacy.tokens:
            continue
        stretches = each.legacy.stretches
        is_new = not any(known.has(one) or any(one.overlaps(other) for other in taken) for one in stretches)
        if is_new and all(one.start < one.stop for one in stretches):
            taken += stretches
            counted.append(replace(each, tokens=Tokens(min(each.legacy.tokens, most))))
    return _cut(sorted(counted, key=lambda each: each.peer), unclaimed(base))


def unclaimed(base: Base) -> Tokens:
    """Return the tokens that were leased, and that no manifest has counted: no round can count more.

    Where what members train on is routed to them, each may have had all that others were leased: no bound is known.
    """
    if base.charter.is_routed:
        return Tokens(MAX_ROUTED * base.charter.settings.quota_tokens)
    return Tokens(max(0, base.charter.leased_tokens(base.cursor) + base.leased_again - base.committed_tokens))


def _cut(counted: Sequence[B], most: int) -> tuple[B, ...]:
    """Return the contributions with at most so many tokens together, legacies apart: who claims most is cut first.

    Every claim may be possible by itself; were their sum counted, nothing would be left that can be claimed next.
    """
    left, cap = most, most
    claims = sorted(each.tokens for each in counted if each.legacy is None)
    for number, tokens in enumerate(claims):
        cap = left // (len(claims) - number)  # were all that follow cut
        if tokens > cap:
            break
        left -= tokens
    else:
        return tuple(counted)
    return tuple(
        each if each.legacy is not None or each.tokens <= cap else replace(each, tokens=Tokens(cap)) for each in counted
    )


def median_tokens(contributions: Iterable[Brought]) -> int:
    """Return the median weight of those that have any, the lower of two; 0 where nobody has.

    A group counts as one of its peers.
    """
    weights = sorted(
        each.tokens // (1 if each.group is None else 1 + each.group.num_counted)
        for each in contributions
        if each.tokens and each.legacy is None
    )
    return weights[(len(weights) - 1) // 2] if weights else 0


def _tokens(contribution: Brought) -> int:
    return 0 if contribution.legacy is None else contribution.legacy.tokens


def enacted(
    base: Base, acts: tuple[Warrant, ...], contributions: Sequence[Brought], tuned: Tuned | None = None
) -> Enacted:
    """Return what a round comes to: its acts, how it tunes the method, and the legacies that it takes in.

    Raises:
        Void: an act has no effect where it stands, or the method may not be tuned so.
    """
    done = enact(base.charter, base.body, acts)
    if tuned is not None:
        if acts or not is_allowed(done.charter, base.round, tuned):
            raise Void("the method is not to be tuned so, or not yet")
        done = dataclasses.replace(done, charter=tuned_charter(done.charter, base.round, tuned))
    brought = [each for each in contributions if each.legacy is not None]
    if not brought:
        return done
    stretches = [stretch for each in brought if each.legacy is not None for stretch in each.legacy.stretches]
    charter = replace(
        done.charter,
        taken_in=with_taken(history_before(base), stretches),
        # Nothing was leased here for what they count.
        tokens_before=done.charter.tokens_before + sum(each.tokens for each in brought),
    )
    return dataclasses.replace(done, charter=charter)


def forked(base: Base) -> Charter:
    """Return the charter of a branch that begins where `base` lost its majority."""
    fork = Fork(
        branch=base.branch,
        round=base.round,
        manifest=base.previous,
        members=base.electorate,
        committed_tokens=base.committed_tokens,
    )
    return replace(base.charter, forks=with_fork(base.charter.forks, fork))


def charter_after(base: Base, manifest: Manifest) -> Charter:
    """Return what holds after a manifest that follows on `base`, or opens a branch there."""
    if manifest.branch != base.branch:
        return forked(base)
    return enacted(base, manifest.acts, manifest.contributions, manifest.tuned).charter


def legacy_tokens(base: Base, ready: Ready) -> Tokens:
    """Return how many tokens of a branch that was given up `ready` shows."""
    legacy, proof = ready.legacy, ready.proof
    if legacy is None or proof is None or digest_of(proof.charter) != proof.certificate.manifest.charter:
        return Tokens(0)
    head = proof.certificate.manifest
    found = fork_point(history(head, proof.charter), history_before(base))
    if head.run != base.run or found is None or found.stretches != legacy.stretches:
        return Tokens(0)
    tokens = max(0, min(legacy.tokens, head.committed_tokens - found.fork.committed_tokens))
    if _signers(proof.certificate).isdisjoint(found.fork.members):
        tokens = min(tokens, base.charter.settings.quota_tokens)
    return Tokens(tokens)


def _signers(certificate: Certificate) -> set[PeerId]:
    """Return who has signed that it accepts the manifest."""
    manifest, signers = certificate.manifest, set[PeerId]()
    wanted = Accept(attempt=certificate.attempt, manifest=digest_of(manifest))
    for signed in certificate.votes:
        try:
            note = unseal(signed, RoundNote, verify)
        except WireError:
            continue
        if (note.branch, note.round, note.message) == (manifest.branch, manifest.round, wanted):
            signers.add(signed.signer)
    return signers
