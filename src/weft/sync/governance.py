"""What signed records come to: the charter after a manifest, who is no member any more, and what it counts of branches
that ended.

    genesis ──► charter ──warrants of a manifest──► charter ──► ...        `enact`, the same on every member

What an act changes, it changes between two rounds: the round that decides it is computed by the charter before.

A legacy is what a branch that was given up had counted, as one contribution of a round of the branch that goes on:

    weight   its tokens, but at most the median of the round's other contributions
    length   of each part, at most the median of the others' (`weft.sync.merge.reduce.Merger`)
    once     no round of it may be in the history already, nor in another legacy of the same round

so whoever makes a branch up, with whatever tokens, moves the parameters no further than one member's round does, nor
the run's count of tokens. All of it can be checked from the base and the contributions alone. What is taken in is
written into the charter, which comes with every state.

Two notes of one member that contradict each other prove by themselves that it lies (`weft.sync.equivocation`). What
else does is the part of `weft.verify.evidence`. Signatures of notes are checked elsewhere.
"""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar, assert_never

import msgspec
from msgspec import UNSET, UnsetType

from weft.errors import WireError
from weft.ids import Digest, PeerId, Round, Tokens, short
from weft.keys import verify
from weft.sync.amendments import amended
from weft.sync.equivocation import equivocation
from weft.sync.records import acts, counters, messages, quarantine, rewinds
from weft.sync.records.ancestry import Fork, History, Stretch, fork_point, is_ahead, with_fork, with_taken
from weft.sync.records.charter import (
    MAX_BANNED,
    MAX_UNANSWERED,
    UNANSWERED_FOR,
    Body,
    Charter,
    Expelled,
    Struck,
    Unanswered,
)
from weft.sync.records.passages import Convicted, accused_in, convicted
from weft.sync.records.tuning import Tuned, is_allowed, tuned_charter
from weft.sync.records.work import Work
from weft.verify.evidence.evidence import Lie, read
from weft.verify.evidence.shown import Unproven
from weft.wire import Signed, Verify, decode, digest_of, unseal

Void = acts.Void
replace = msgspec.structs.replace
replaced = dataclasses.replace
B = TypeVar("B", bound=messages.Brought)
M = TypeVar("M")


@dataclass(frozen=True)
class Enacted:
    """What warrants come to."""

    charter: Charter
    removed: tuple[PeerId, ...] = ()  # of the electorate, ascending
    struck: PeerId | None = None  # of those, whose lie was proven: nothing of it is counted
    is_rewound: bool = False  # the parameters after it are those after an earlier round


@lru_cache(maxsize=256)  # asked with every message that holds a manifest
def enact(charter: Charter, body: Body, warrants: tuple[acts.Warrant, ...]) -> Enacted:
    """Return the charter after `warrants`, in their order.

    Raises:
        Void: one of them has no effect where it stands.
    """
    enacted = Enacted(charter)
    for warrant in warrants:
        enacted = _follow(enacted, body, warrant)
    return enacted


def in_effect(charter: Charter, body: Body, warrants: Sequence[acts.Warrant], limit: int) -> tuple[acts.Warrant, ...]:
    """Return the first `limit` warrants that take effect one after the other; those that do not are left out."""
    chosen: tuple[acts.Warrant, ...] = ()
    for warrant in warrants:
        if len(chosen) < limit and objection(charter, body, (*chosen, warrant)) is None:
            chosen = (*chosen, warrant)
    return chosen


def objection(charter: Charter, body: Body, warrants: tuple[acts.Warrant, ...]) -> str | None:
    """Return why `warrants` do not take effect, or None where they do."""
    try:
        enact(charter, body, warrants)
    except Void as void:
        return str(void)
    return None


def _follow(before: Enacted, body: Body, warrant: acts.Warrant) -> Enacted:
    if warrant.shown is not UNSET:
        return _strike_out(before, body, warrant)
    if warrant.letters[0].kind == acts.Ballot.__name__:
        return _expel(before, body, warrant.letters)
    if warrant.letters[0].kind == acts.Finding.__name__:
        return _judge(before, body, warrant.letters)
    if warrant.letters[0].kind == acts.RewindBallot.__name__:
        return _rewind_by_votes(before, body, warrant.letters)
    if warrant.letters[0].kind == acts.FalsePassage.__name__:
        found = convicted(before.charter, body, warrant.letters)
        if not isinstance(found, Convicted):
            raise Void(found)
        return _banned_as_liar(before, body, *found)
    if accused(warrant) is not None:
        return _strike_out(before, body, warrant)
    if len(warrant.letters) != 1:
        raise Void("an act has one signature")
    signed, act = warrant.letters[0], read_act(warrant.letters[0])
    charter = before.charter
    if is_alone(charter, body, signed.signer) and isinstance(act.deed, acts.Amend):
        if act.run != body.run or act.serial != body.round:
            raise Void(f"such an act is for one round of one run: this is round {body.round} of {short(body.run)}")
        return _do(before, body, act.deed)
    if not charter.stewards:
        raise Void("this run has no stewards: only a majority of its members can act on it (weft act vote-out)")
    if signed.signer not in charter.stewards:
        raise Void(f"{short(signed.signer)} is not a steward of this run")
    if act.run != body.run:
        raise Void(f"the act is for run {short(act.run)}, this is run {short(body.run)}")
    if (wanted := charter.serial_of(signed.signer) + 1) != act.serial:
        raise Void(
            f"it is act {act.serial} of {short(signed.signer)}, whose next act is {wanted}"
            + (": that act was decided already, or another took its place" if act.serial < wanted else "")
        )
    serials = [*charter.serials]
    serials[charter.stewards.index(signed.signer)] = act.serial
    return _do(replaced(before, charter=replace(charter, serials=tuple(serials))), body, act.deed)


def is_alone(charter: Charter, body: Body, peer: PeerId) -> bool:
    """Return whether `peer` is all members of a run that names no stewards and has not split: it may amend the run.

    Its act counts no acts of its own: it names the round that decides it, in place of a serial.
    """
    return not charter.stewards and not charter.forks and body.electorate == (peer,)


def accused(warrant: acts.Warrant) -> PeerId | None:
    """Return whose lie a warrant says it proves; None: it is of another kind."""
    first = warrant.letters[0]
    if warrant.shown is not UNSET:
        return first.signer
    if first.kind == acts.Finding.__name__:
        verdicts = findings_in(warrant)
        return PeerId(verdicts[0].peer) if verdicts and {each.outcome for each in verdicts} == {"differs"} else None
    if first.kind == acts.FalsePassage.__name__:
        return accused_in(warrant.letters)
    return first.signer if first.kind == messages.RoundNote.__name__ else None


def clears(warrant: acts.Warrant) -> bool:
    """Return whether a warrant says that nothing wrong was found with a work that waits."""
    verdicts = findings_in(warrant)
    return bool(verdicts) and {each.outcome for each in verdicts} == {"equal"}


def findings_in(warrant: acts.Warrant) -> tuple[acts.Finding, ...]:
    """Return a warrant's findings, as they read; none: it is of another kind."""
    if warrant.shown is not UNSET or warrant.letters[0].kind != acts.Finding.__name__:
        return ()
    try:
        return tuple(decode(letter.body, acts.Finding) for letter in warrant.letters)
    except WireError:
        return ()


def round_of(warrant: acts.Warrant) -> Round | None:
    """Return of which round the first letter is that is said to prove a lie, as it reads; None: it is none such."""
    first = warrant.letters[0]
    kind = Work if first.kind == Work.__name__ else messages.RoundNote
    try:
        said: Work | messages.RoundNote = decode(first.body, kind)
    except WireError:
        return None
    return Round(said.round)


@lru_cache(maxsize=64)  # asked whenever a manifest is, which may be often
def read_lie(warrant: acts.Warrant) -> Lie:
    """Return what a warrant proves to be a lie.

    Raises:
        Void: nothing.
    """
    if warrant.shown is UNSET:
        note, what = read_contradiction(warrant)
        return Lie(warrant.letters[0].signer, None, note.branch, note.round, what)
    try:
        return read(warrant.letters, warrant.shown)
    except Unproven as why:
        raise Void(str(why)) from None


def read_contradiction(warrant: acts.Warrant) -> tuple[messages.RoundNote, str]:
    """Return one of two notes that one member signed, and in which way they contradict each other.

    Raises:
        Void: they do not, or it did not sign both.
    """
    letters = warrant.letters
    if len(letters) != 2 or letters[0].signer != letters[1].signer:
        raise Void("two notes of one member are needed to prove a lie")
    if warrant.nbytes > acts.MAX_CONTRADICTION_NBYTES:
        raise Void(f"two notes may have at most {acts.MAX_CONTRADICTION_NBYTES} bytes together")
    try:
        one, other = (unseal(letter, messages.RoundNote, verify) for letter in letters)
    except WireError as error:
        raise Void(str(error)) from None
    if (what := equivocation(one, other)) is None:
        raise Void("an honest member may sign both notes")
    return one, what


def read_act(signed: Signed) -> acts.Act:
    """Return what is signed, once the signature holds.

    Raises:
        Void: it does not, or is no act.
    """
    act: acts.Act = _read(signed, acts.Act)
    return act


def read_ballot(signed: Signed) -> acts.Ballot:
    """Return what is signed, once the signature holds.

    Raises:
        Void: it does not, or is no ballot.
    """
    ballot: acts.Ballot = _read(signed, acts.Ballot)
    return ballot


def read_finding(signed: Signed) -> acts.Finding:
    """Return what is signed, once the signature holds.

    Raises:
        Void: it does not, or is no verdict.
    """
    verdict: acts.Finding = _read(signed, acts.Finding)
    return verdict


def read_rewind_ballot(signed: Signed) -> acts.RewindBallot:
    """Return what is signed, once the signature holds.

    Raises:
        Void: it does not, or is no ballot for going back.
    """
    ballot: acts.RewindBallot = _read(signed, acts.RewindBallot)
    return ballot


def _read(signed: Signed, kind: type[Any]) -> Any:
    if len(signed.body) > acts.MAX_LETTER_NBYTES:
        raise Void(f"{len(signed.body)} bytes are more than the {acts.MAX_LETTER_NBYTES} that an act may have")
    try:
        return unseal(signed, kind, verify)
    except WireError as error:
        raise Void(str(error)) from None


def _do(enacted: Enacted, body: Body, deed: acts.AnyDeed) -> Enacted:
    charter = enacted.charter
    match deed:
        case acts.Remove(peer=peer):
            return _without(enacted, body, peer)
        case acts.Ban(peer=peer):
            if peer in charter.banned:
                raise Void(f"{short(peer)} is banned already")
            if len(charter.banned) == MAX_BANNED:
                raise Void(f"{MAX_BANNED} keys are banned, which is the most. Pardon one first")
            if peer in body.electorate and peer not in enacted.removed:
                enacted = _without(enacted, body, peer)
            return replaced(enacted, charter=replace(charter, banned=tuple(sorted((*charter.banned, peer)))))
        case acts.Pardon(peer=peer):
            if peer not in charter.banned:
                raise Void(f"{short(peer)} is not banned")
            banned = tuple(each for each in charter.banned if each != peer)
            return replaced(enacted, charter=replace(charter, banned=banned))
        case acts.Amend():
            return replaced(enacted, charter=amended(charter, body.cursor, deed))
        case acts.Rewind():
            return _rewound(enacted, body, deed)
        case acts.Succeed(run=run):
            if run == body.run:
                raise Void("a run cannot succeed itself")
            return replaced(enacted, charter=replace(charter, successor=deed))
        case _:
            assert_never(deed)


def _without(enacted: Enacted, body: Body, peer: PeerId) -> Enacted:
    if peer not in body.electorate or peer in enacted.removed:
        raise Void(f"{short(peer)} is not a member")
    removed = tuple(sorted((*enacted.removed, peer)))
    if len(removed) == len(body.electorate):
        raise Void(f"without {short(peer)} the run would have no member left")
    return replaced(enacted, removed=removed)


def _expel(before: Enacted, body: Body, letters: Sequence[Signed]) -> Enacted:
    ballots, voters = [read_ballot(signed) for signed in letters], [each.signer for each in letters]
    first, charter = ballots[0], before.charter
    if voters != sorted(set(voters)) or not set(voters) <= set(body.electorate):
        raise Void("only members vote, and each once")
    if any((each.run, each.peer, each.serial) != (body.run, first.peer, first.serial) for each in ballots):
        raise Void("the ballots are not for one removal in this run")
    if first.serial != charter.times_expelled(first.peer) + 1:
        raise Void(f"members have removed {short(first.peer)} since these ballots were cast")
    if not is_majority(len(voters), len(body.electorate)):
        raise Void(f"{len(voters)} of {len(body.electorate)} members are not a majority")
    others = [each for each in charter.expelled if each.peer != first.peer]
    if len(others) == MAX_BANNED:
        raise Void(f"members have removed {MAX_BANNED} keys, which is the most")
    expelled = sorted([*others, Expelled(peer=first.peer, times=first.serial)], key=lambda each: each.peer)
    return _without(replaced(before, charter=replace(charter, expelled=tuple(expelled))), body, first.peer)


def _rewind_by_votes(before: Enacted, body: Body, letters: Sequence[Signed]) -> Enacted:
    ballots, voters = [read_rewind_ballot(signed) for signed in letters], [each.signer for each in letters]
    electorate = rewinds.voters(before.charter, body.electorate)
    if voters != sorted(set(voters)) or not set(voters) <= set(electorate):
        raise Void("only members vote, none that is in quarantine, and each once")
    first = ballots[0].rewind
    if any((each.run, rewinds.target(each.rewind)) != (body.run, rewinds.target(first)) for each in ballots):
        raise Void("the ballots are not for going back to one round of this run")
    if not is_majority(len(voters), len(electorate)):
        raise Void(f"{len(voters)} of {len(electorate)} members are not a majority")
    return _rewound(before, body, first)


def _rewound(before: Enacted, body: Body, rewind: acts.Rewind) -> Enacted:
    if before.is_rewound:
        raise Void("one round goes back once")
    if why := rewinds.why_not(before.charter, body.round, rewind):
        raise Void(why)
    return replaced(before, charter=rewinds.after(before.charter, body.round, rewind), is_rewound=True)


def _judge(before: Enacted, body: Body, letters: Sequence[Signed]) -> Enacted:
    verdicts, voters = [read_finding(signed) for signed in letters], [each.signer for each in letters]
    first, charter = verdicts[0], before.charter
    if charter.audits is UNSET:
        raise Void("nobody's work is audited in this run")
    judges = quarantine.judges(charter, body.electorate, PeerId(first.peer))
    if not are_judges(voters, judges, PeerId(first.peer)):
        raise Void("only other members judge a member's work, none that is in quarantine, and each once")
    named = {(each.run, each.peer, each.round, each.work) for each in verdicts}
    outcomes = {each.outcome for each in verdicts}
    if named != {(body.run, first.peer, first.round, first.work)} or ("equal" in outcomes and len(outcomes) > 1):
        raise Void("the verdicts are not on one work in this run, or some find no fault with it")
    if outcomes == {"equal"}:
        return _cleared(before, body, first, voters)
    if not is_majority(len(voters), len(judges)):
        raise Void(f"{len(voters)} of {len(judges)} members that judge it are not a majority")
    if outcomes == {"differs"} and may_note_false(charter, PeerId(first.peer), first.round):
        noted = _with_false(before, len(judges), verdicts)
        if noted == before:
            raise Void(f"{short(first.peer)} was banned already for that")
        return noted
    if outcomes == {"differs"}:
        return _with_false(_banned_as_liar(before, body, PeerId(first.peer), first.round), len(judges), verdicts)
    return _unanswered(before, body, PeerId(first.peer), first.round)


def _cleared(before: Enacted, body: Body, first: acts.Finding, voters: Sequence[PeerId]) -> Enacted:
    """Let count what a member in quarantine has brought, with which others find no fault."""
    charter, settled = before.charter, quarantine.settled(before.charter, body.electorate)
    if not quarantine.awaits(charter, PeerId(first.peer), first.round, Digest(first.work)):
        raise Void("they find no fault with it, and it does not wait for that")
    if not set(voters) <= settled or not is_majority(len(voters), len(settled)):
        raise Void(
            f"{len(set(voters) & settled)} of {len(settled)} members that are not in quarantine are not a majority"
        )
    return replaced(before, charter=quarantine.clear(charter, PeerId(first.peer)))


def _with_false(struck: Enacted, num_judges: int, verdicts: Sequence[acts.Finding]) -> Enacted:
    """Note what is to be taken out again, where more than half of the judges say alike what was counted."""
    first = verdicts[0]
    for weighed, num in Counter(each.weighed for each in verdicts).items():
        if weighed is not UNSET and is_majority(num, num_judges):
            charter = counters.with_false(struck.charter, PeerId(first.peer), first.round, weighed)
            return replaced(struck, charter=charter)
    return struck


def may_note_false(charter: Charter, peer: PeerId, round: Round) -> bool:
    """Return whether members may still say what is to be taken out of a round: evidence that has struck out who brought
    it does not tell what the mean was made of."""
    known = any(each.peer == peer and each.round == round for each in charter.false_works or ())
    return charter.is_dealt_with(peer, round) and not known and not rewinds.is_dropped(charter, round)


def is_majority(num_voters: int, num_electors: int) -> bool:
    return 2 * num_voters > num_electors


def are_judges(voters: Sequence[PeerId], judges: Sequence[PeerId], peer: PeerId) -> bool:
    """Return whether these, ascending, are judges, others than the one that is judged, and each once."""
    return list(voters) == sorted(set(voters)) and set(voters) <= set(judges) - {peer}


def is_counted(charter: Charter, peer: PeerId, round: Round) -> bool:
    """Return whether it was counted that a peer left auditors without an answer of this round, or of a later one."""
    known = next((each.rounds for each in charter.unanswered or () if each.peer == peer), ())
    return any(round <= each for each in known)


def _unanswered(before: Enacted, body: Body, peer: PeerId, round: Round) -> Enacted:
    """Count that a member left auditors without an answer; of too many rounds, and it is removed.

    Who is removed keeps one round, the present: verdicts on what it did before are dealt with, should it come again.
    """
    charter = before.charter
    known = [each for each in charter.unanswered or () if each.rounds[-1] + UNANSWERED_FOR >= body.round]
    if peer not in body.electorate or peer in before.removed:
        raise Void(f"{short(peer)} is not a member")
    mine = next((each.rounds for each in known if each.peer == peer), ())
    recent = tuple(each for each in mine if each + UNANSWERED_FOR >= round)
    if is_counted(charter, peer, round) or round + UNANSWERED_FOR < body.round:
        raise Void(f"that {short(peer)} did not answer of round {round} was counted already, or is long ago")
    others = [each for each in known if each.peer != peer]
    if len(recent) < MAX_UNANSWERED:
        if len(others) == MAX_BANNED:
            raise Void(f"{MAX_BANNED} keys have not answered, which is the most")
        others = sorted([*others, Unanswered(peer=peer, rounds=(*recent, round))], key=lambda each: each.peer)
        return replaced(before, charter=replace(charter, unanswered=tuple(others)))
    if len(others) < MAX_BANNED:
        others = sorted([*others, Unanswered(peer=peer, rounds=(body.round,))], key=lambda each: each.peer)
    left = replace(charter, unanswered=tuple(others))
    return _without(replaced(before, charter=left), body, peer)


def _strike_out(before: Enacted, body: Body, warrant: acts.Warrant) -> Enacted:
    lie = read_lie(warrant)
    if lie.run not in (None, body.run):
        raise Void(f"it proves a lie in run {short(lie.run or '')}, this is run {short(body.run)}")
    if not may_be_of(lie.round, body.round):
        raise Void(f"it proves a lie in round {lie.round}, to which this run has not come")
    return _banned_as_liar(before, body, lie.peer, lie.round)


def may_be_of(lied_in: Round, round: Round) -> bool:
    """Return whether a lie in one round matters in another: who is struck out for later ones is pardoned for those."""
    return lied_in <= round + 1


def _banned_as_liar(before: Enacted, body: Body, peer: PeerId, round: Round) -> Enacted:
    """Ban a key whose lie in a round is proven."""
    charter = before.charter
    if before.struck is not None:
        raise Void("one round bans one key that lied")  # what proves a lie may be large
    if charter.is_dealt_with(peer, round):
        raise Void(f"{short(peer)} was banned already for that")
    enacted = replaced(_without(before, body, peer), struck=peer)
    if peer in charter.banned or max(len(charter.banned), len(charter.struck)) == MAX_BANNED:
        return enacted  # there is no room to ban more keys: it is removed only
    others = [each for each in charter.struck if each.peer != peer]
    struck = sorted([*others, Struck(peer=peer, round=max(round, body.round))], key=lambda each: each.peer)
    banned = tuple(sorted((*charter.banned, peer)))
    return replaced(enacted, charter=replace(charter, banned=banned, struck=tuple(struck)))


def history(head: messages.Manifest, charter: Charter) -> History:
    """Return what the state after `head` is made of."""
    return History(head.branch, charter.forks, Round(head.round + 1), charter.taken_in)


def history_before(base: messages.Base) -> History:
    """Return what the state is made of that the round of `base` starts from."""
    return History(base.branch, base.charter.forks, base.round, base.charter.taken_in)


def countable(base: messages.Base, offered: Iterable[B]) -> tuple[B, ...]:
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
    return _cut(sorted(counted, key=lambda each: each.peer), base.unclaimed)


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


def median_tokens(contributions: Iterable[messages.Brought]) -> int:
    """Return the median weight of those that have any, the lower of two; 0 where nobody has.

    A group counts as one of its peers.
    """
    weights = sorted(each.tokens // each.num_peers for each in contributions if each.tokens and each.legacy is None)
    return weights[(len(weights) - 1) // 2] if weights else 0


def _tokens(contribution: messages.Brought) -> int:
    return 0 if contribution.legacy is None else contribution.legacy.tokens


def enacted(
    base: messages.Base,
    acts: tuple[acts.Warrant, ...],
    contributions: Sequence[messages.Brought],
    tuned: Tuned | None = None,
    countered: tuple[PeerId, ...] | UnsetType = UNSET,
) -> Enacted:
    """Return what a round comes to: its acts, how it tunes the method, the legacies that it takes in, and what it takes
    out again.

    Args:
        countered: whose false works are taken out.

    Raises:
        Void: an act has no effect where it stands, the method may not be tuned so, or a work may not be taken out.
    """
    done = enact(base.charter, base.body, acts)
    if tuned is not None:
        if acts or not is_allowed(done.charter, base.round, tuned):
            raise Void("the method cannot be tuned this way, or not yet")
        done = replaced(done, charter=tuned_charter(done.charter, base.round, tuned))
    if countered is not UNSET:
        if (without := counters.with_taken_out(base, done.charter, countered)) is None:
            raise Void("no such false work can be taken out in this round")
        done = replaced(done, charter=rewinds.without_dropped(without) if done.is_rewound else without)
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
    return replaced(done, charter=charter)


def forked(base: messages.Base, members: Sequence[PeerId]) -> Charter:
    """Return the charter of a branch of these that begins where `base` lost its majority: who was no member is new."""
    fork = Fork(
        branch=base.branch,
        round=base.round,
        manifest=base.previous,
        members=base.electorate,
        committed_tokens=base.committed_tokens,
    )
    charter = replace(base.charter, forks=with_fork(base.charter.forks, fork))
    return quarantine.after(charter, base.round, members, set(members) - set(base.electorate))


def charter_after(base: messages.Base, manifest: messages.Manifest) -> Charter:
    """Return what holds after a manifest that follows on `base`, or opens a branch there."""
    if manifest.branch != base.branch:
        return forked(base, manifest.members)
    after = enacted(base, manifest.acts, manifest.contributions, manifest.tuned, manifest.counters)
    return with_members(after, manifest).charter


def with_members(done: Enacted, manifest: messages.Manifest) -> Enacted:
    """Return what a round comes to, with who is in quarantine after it."""
    counted, held = manifest.contributions, manifest.held or ()
    charter = quarantine.after(done.charter, manifest.round, manifest.members, manifest.joined, counted, held)
    return replaced(done, charter=charter)


def legacy_tokens(base: messages.Base, ready: messages.Ready) -> Tokens:
    """Return how many tokens of a branch that was given up `ready` shows: none where members audit each other, for a
    member can make branches up alone, and what they have counted nobody can look at."""
    legacy, proof = ready.legacy, ready.proof
    if (
        base.charter.audits is not UNSET
        or legacy is None
        or proof is None
        or digest_of(proof.charter) != proof.certificate.manifest.charter
    ):
        return Tokens(0)
    head = proof.certificate.manifest
    here = history_before(base)
    found = fork_point(history(head, proof.charter), here)
    if head.run != base.run or found is None or is_ahead(found.fork, here) or found.stretches != legacy.stretches:
        return Tokens(0)
    tokens = max(0, min(legacy.tokens, head.committed_tokens - found.fork.committed_tokens))
    if not signers(proof.certificate, found.fork.members):
        tokens = min(tokens, base.charter.settings.quota_tokens)
    return Tokens(tokens)


def signers(certificate: messages.Certificate, known: Iterable[PeerId], verify: Verify = verify) -> set[PeerId]:
    """Return who of `known` has accepted the certificate's manifest."""
    return set(votes_of(certificate, known, verify))


def votes_of(
    certificate: messages.Certificate, known: Iterable[PeerId], verify: Verify = verify
) -> dict[PeerId, messages.Accept]:
    """Return the votes of `known` for the certificate's manifest."""
    manifest = certificate.manifest
    name = digest_of(manifest)
    return {
        peer: accept
        for peer, accept in said(manifest, known, certificate.votes, messages.Accept, verify)
        if accept.attempt == certificate.attempt and accept.manifest == name
    }


def said(
    of: messages.Manifest, known: Iterable[PeerId], letters: Iterable[Signed], kind: type[M], verify: Verify = verify
) -> list[tuple[PeerId, M]]:
    """Return what `known` said of a round, one letter of each: to check a signature takes longer than to send one."""
    found, awaited = list[tuple[PeerId, M]](), set(known)
    for signed in letters:
        if signed.signer not in awaited:
            continue
        awaited.remove(signed.signer)
        try:
            note = unseal(signed, messages.RoundNote, verify)
        except WireError:
            continue
        if (note.branch, note.round) == (of.branch, of.round) and isinstance(note.message, kind):
            found.append((signed.signer, note.message))
    return found
