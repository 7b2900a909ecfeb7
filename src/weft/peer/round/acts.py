"""Acts on their way into a manifest: taken from whoever hands them in, told to all, kept until they are decided.

    a person  -- HandIn -->  any member  -- ActNote -->  all members  -- next manifest -->  holds for all
    what proves by itself that a member lies  -- LieNote -->  likewise, and nobody has to ask

A member keeps what takes effect where the run stands. Acts of one steward wait in the order of their serials; ballots
for the removal of a key wait until more than half of the electorate has cast one. What waits is told again now and
then, for those that were away, and is on disk before whoever handed it in is told so: it outlives the end of all
members. What proves a lie may be large, and is told once to each; it is on disk, too, until its teller is struck out.

On disk, each one canonical record that is replaced whole:

    awaiting.bin    the letters of stewards, voters, auditors and members of stages that wait
    lies.bin        what proves that members lie, one lie of each, until a manifest has struck them out

What is read is taken up as if somebody had just handed it in or told it, so nothing in the files is believed: a damaged
one costs what it held, and what others keep comes back from them. Of lies no more is kept than fits the record; the
first that were proven go first into it.

Failure:
- an act that has no effect, or not any more: it is dropped, and an event says why.
- a leader that keeps an act back: the next one has it, too.
- somebody proves lies of keys that are no member's: nothing is kept or passed on of them, and what is known of who is a
  member no more is dropped. So at most one lie of each member waits, until a manifest strikes it out.
- a disk that is full: the act or proof waits in memory, and an event says that it would not outlive this process.
"""

from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Protocol

import msgspec
from msgspec import Meta

from weft.errors import DataError, DiskFull, WireError
from weft.events import ActEnacted, ActRefused, ActWaits, Emit, LieProven, Notice
from weft.ids import Digest, PeerId, several, short
from weft.net.membership.full_mesh import MAX_MEMBERS
from weft.net.messages import MAX_REASON_CHARS
from weft.net.node import Node
from weft.peer.chain import Chain
from weft.peer.messages import ActNote, CharterAnswer, CharterRequest, HandIn, HandInAnswer, LieNote
from weft.peer.round import passages, verdicts
from weft.store.home import RecordFile
from weft.sync import governance
from weft.sync.governance import Void
from weft.sync.records import acts, rewinds
from weft.sync.records.messages import Manifest
from weft.verify.evidence.evidence import Lie
from weft.wire import Record, Signed, claimed, decode, digest_of, printable

MAX_LIES = MAX_MEMBERS  # one of each of an electorate
MAX_NBYTES = 4 << 20  # ten of the largest; most have some hundred bytes
MARGIN_NBYTES = 1 << 10  # of one in the record, beside the bodies of its letters
MAX_LETTERS = 4096  # more than all stewards and members may have waiting


class Earlier(Protocol):
    """What the parameters were after earlier rounds, as far as this peer has them."""

    def why_not(self, rewind: acts.Rewind) -> str: ...

    def is_here(self, rewind: acts.Rewind) -> bool: ...

    def find(self, manifest: Manifest) -> Awaitable[object]: ...


class KnownLies(Record, frozen=True, kw_only=True):
    lies: Annotated[tuple[acts.Warrant, ...], Meta(max_length=MAX_LIES)]


class Letters(Record, frozen=True, kw_only=True):
    letters: Annotated[tuple[Signed, ...], Meta(max_length=MAX_LETTERS)]


def lies_file(path: Path) -> RecordFile[KnownLies]:
    return RecordFile(path, KnownLies, MAX_NBYTES, KnownLies(lies=()))


def letters_file(path: Path) -> RecordFile[Letters]:
    return RecordFile(path, Letters, MAX_NBYTES, Letters(letters=()))


def that_fit(lies: Iterable[acts.Warrant]) -> KnownLies:
    """Return as many of these as fit the record."""
    chosen: list[acts.Warrant] = []
    left_nbytes = MAX_NBYTES - MARGIN_NBYTES
    for lie in lies:
        nbytes = MARGIN_NBYTES + lie.nbytes
        if len(chosen) < MAX_LIES and nbytes <= left_nbytes:
            chosen.append(lie)
            left_nbytes -= nbytes
    return KnownLies(lies=tuple(chosen))


MAX_AHEAD = 8  # acts of one steward that may wait
MAX_BALLOTS = 8  # of one member that may wait
MAX_REMEMBERED = 256  # letters that were decided: ballots are many
TELL_AGAIN_S = 5.0
TELL_NBYTES = 1 << 20  # of what proves lies, to one peer in that time: a part of what may wait on its link


# What takes a key's place among the members: told to a peer, it ends it.
STRIKE_OUT, UNANSWERED = "strike out", "no answer"
REMOVALS = ("remove", "ban", "vote out", STRIKE_OUT, UNANSWERED)
DIFFERS = "what it has done is not what it says"
NO_ANSWER = "it did not show auditors what it said it had done; the third round removes it"


class PendingActs:
    """What waits in one peer, for the round after the chain's head.

    Args:
        awaiting: where letters that wait are kept.
        lies: where what proves lies is kept.
        on_change: told when what the next manifest should hold has changed.
    """

    def __init__(
        self,
        node: Node,
        chain: Chain,
        emit: Emit,
        awaiting: RecordFile[Letters],
        lies: RecordFile[KnownLies],
        on_change: Callable[[], None],
    ) -> None:
        self._awaiting = awaiting
        self._lies_file = lies
        self._node = node
        self._chain = chain
        self._emit = emit
        self._on_change = on_change
        self._waiting: dict[tuple[PeerId, int], Signed] = {}  # by steward and serial
        self._ballots: dict[tuple[PeerId, PeerId], Signed] = {}  # by the key to be removed, and the voter
        self._for_rewind: dict[tuple[rewinds.Target, PeerId], Signed] = {}  # ballots, by what they name, and the voter
        self._earlier: Earlier | None = None
        self._verdicts: verdicts.Cast = {}
        self._on_verdict: list[Callable[[Signed, acts.Finding], None]] = []
        self._passages: passages.Cast = {}
        self._on_false_passage: list[Callable[[Signed], None]] = []
        self._on_lie: list[Callable[[Lie, acts.Warrant], None]] = []
        self._lies: dict[PeerId, acts.Warrant] = {}  # by who told them, of present members, oldest first
        self._aware: dict[PeerId, set[PeerId]] = {}  # of each of these, who of those linked has heard
        self._told_nbytes: dict[PeerId, int] = {}  # of them, to each since they were last told again
        self._decided: dict[Digest, None] = {}  # letters, oldest first
        self._told_at = 0.0
        self._bar()
        node.serve(HandIn, self._on_hand_in)
        node.serve(CharterRequest, self._on_request)
        node.on_note(ActNote, self._on_note)
        node.on_note(LieNote, self._on_lie_note)
        node.on_link(self._on_link)

    def go_back_by(self, earlier: Earlier) -> None:
        """Let the next manifest go back only where `earlier` has what the parameters were."""
        self._earlier = earlier

    def recall(self) -> None:
        """Take up what waited when a process before this one ended."""
        for letter in self._awaiting.read().letters:
            with suppress(Void):  # decided meanwhile, or without effect where the run stands now
                self._add(letter)
        for lie in self._lies_file.read().lies:
            self.accuse(lie)

    def warrants(self) -> tuple[acts.Warrant, ...]:
        """Return what the next manifest should hold, in order."""
        base = self._chain.base
        handed_in = [acts.Warrant(letters=(self._waiting[key],)) for key in sorted(self._waiting)]
        votes = [warrant for peer in base.electorate if (warrant := self._majority(peer)) is not None]
        votes += self._majorities_for_rewind()
        found = [*verdicts.warrants(self._verdicts, base), *passages.warrants(self._passages, base)]
        waiting = [*self._lies.values(), *handed_in, *votes, *found]
        able = [each for each in waiting if self._is_able(each)]
        return governance.in_effect(base.charter, base.body, able, acts.MAX_ACTS) if able else ()

    def _is_able(self, warrant: acts.Warrant) -> bool:
        """Return whether this peer has what a warrant goes back to, if it does."""
        rewind = rewinds.read(warrant.letters[0])
        return rewind is None or (self._earlier is not None and self._earlier.is_here(rewind))

    @property
    def liars(self) -> tuple[PeerId, ...]:
        """Return whose lie is proven, and whose key no manifest has struck out yet."""
        return tuple(self._lies)

    def follow(self, manifest: Manifest) -> None:
        """Take up what a manifest has decided: the chain's head."""
        for warrant in manifest.acts:
            for letter in warrant.letters:
                self._decided[digest_of(letter)] = None
        for forgotten in list(self._decided)[:-MAX_REMEMBERED]:
            del self._decided[forgotten]
        self._bar()
        for peer in [peer for peer, lie in self._lies.items() if self._is_dealt_with(lie)]:
            del self._lies[peer], self._aware[peer]
        self._save_lies()
        self._drop_void()
        self._verdicts = verdicts.still(self._verdicts, self._chain.base)
        self._passages = passages.still(self._passages, self._chain.base)
        self._save()

    def _bar(self) -> None:
        banned = self._chain.charter.banned
        if self._node.passport.banned != frozenset(banned):
            self._node.ban(banned)

    def tell_again(self, now: float) -> None:
        """Tell all that are linked what waits, if it is time."""
        ballots = (*self._ballots.values(), *self._for_rewind.values())
        letters = (*self._waiting.values(), *ballots, *self._found())
        if (letters or self._lies) and now - self._told_at >= TELL_AGAIN_S:
            self._told_at = now
            for letter in letters:
                self._tell(ActNote(letter=letter), but=None)
            self._told_nbytes = {}
            for liar in self._lies:
                self._prove(liar)

    def take(self, letter: Signed, sender: PeerId | None = None) -> str | None:
        """Keep an act, ballot or verdict and tell the others; return why it is not kept, or None."""
        try:
            is_news = self._add(letter)
        except Void as void:
            return str(void)
        if is_news:
            self._save()
            if letter.kind not in (acts.Finding.__name__, acts.FalsePassage.__name__):
                self._emit(ActWaits(by=letter.signer, kind=kind_of(letter), subject=subject_of(letter)))
            self._tell(ActNote(letter=letter), but=sender)
            self._on_change()
        return None

    def accuse(self, lie: acts.Warrant, sender: PeerId | None = None) -> None:
        """Keep what proves a lie of a member, one of each, and tell the others; drop what proves nothing."""
        peer = lie.letters[0].signer
        if peer in self._lies:
            self._aware[peer].update(() if sender is None else (sender,))
        if peer in self._lies or self._is_dealt_with(lie):
            return
        try:
            read = governance.read_lie(lie)
        except Void:
            return
        base = self._chain.base
        if read.run not in (None, base.run) or not governance.may_be_of(read.round, base.round):
            return
        self._lies[peer], self._aware[peer] = lie, set() if sender is None else {sender}
        self._save_lies()
        self._emit(LieProven(member=peer, branch=read.branch, round=read.round, what=read.what))
        for callback in self._on_lie:
            callback(read, lie)
        self._prove(peer)
        self._on_change()

    def on_lie(self, callback: Callable[[Lie, acts.Warrant], None]) -> None:
        """Call `callback(lie, warrant)` for each that is proven of a member, once."""
        self._on_lie.append(callback)

    def _is_dealt_with(self, lie: acts.Warrant) -> bool:
        """Return whether its teller is no member, or was struck out for it: keys are free to make, places are not."""
        peer, base = lie.letters[0].signer, self._chain.base
        round = governance.round_of(lie)
        return peer not in base.electorate or round is None or base.charter.is_dealt_with(peer, round)

    def _prove(self, liar: PeerId) -> None:
        """Tell those linked that have not heard of this lie, as far as it is not too much for them at a time."""
        note, nbytes = LieNote(lie=self._lies[liar]), self._lies[liar].nbytes
        for peer in sorted({*self._node.peers} - self._aware[liar]):
            told = self._told_nbytes.get(peer, 0) + nbytes
            if told <= TELL_NBYTES and self._node.post(peer, note):
                self._told_nbytes[peer] = told
                self._aware[liar].add(peer)

    def _on_link(self, peer: PeerId, _is_up: bool, _reason: str) -> None:
        """Hold nothing for told to who may not have got it."""
        for aware in self._aware.values():
            aware.discard(peer)

    def _add(self, letter: Signed) -> bool:
        """Let a letter wait; return whether it is new.

        Raises:
            Void: it has no effect.
        """
        if letter.kind == acts.Finding.__name__:
            return self._keep_verdict(letter)
        if letter.kind == acts.RewindBallot.__name__:
            return self._keep_for_rewind(letter)
        if letter.kind == acts.FalsePassage.__name__:
            return self._keep_false_passage(letter)
        return self._keep_ballot(letter) if letter.kind == acts.Ballot.__name__ else self._keep_act(letter)

    def _save(self) -> None:
        waiting = (self._waiting[key] for key in sorted(self._waiting))
        ballots = [self._ballots[key] for key in sorted(self._ballots)]
        ballots += [self._for_rewind[key] for key in sorted(self._for_rewind)]
        try:
            self._awaiting.keep(Letters(letters=(*waiting, *ballots, *self._found())))
        except (DiskFull, DataError) as error:
            self._emit(Notice(text=f"letters that wait are kept only in this process's memory: {error}"))

    def _found(self) -> Iterator[Signed]:
        yield from verdicts.letters(self._verdicts)
        yield from passages.letters(self._passages)

    def _save_lies(self) -> None:
        try:
            self._lies_file.keep(that_fit(self._lies.values()))
        except (DiskFull, DataError) as error:
            self._emit(Notice(text=f"proofs that members lie are kept only in this process's memory: {error}"))

    def _keep_act(self, letter: Signed) -> bool:
        act, base, signer = governance.read_act(letter), self._chain.base, letter.signer
        if self._waiting.get((signer, act.serial)) == letter:
            return False
        before = [number for steward, number in self._waiting if steward == signer and number < act.serial]
        if (signer, act.serial) in self._waiting or len(before) >= MAX_AHEAD:
            raise Void(f"other acts of {short(signer)} wait in its place")
        waiting = tuple(acts.Warrant(letters=(self._waiting[signer, number],)) for number in sorted(before))
        waiting = (*waiting, acts.Warrant(letters=(letter,)))
        if (why_not := governance.objection(base.charter, base.body, waiting)) is not None:
            raise Void(why_not)
        if (rewind := rewinds.read(letter)) is not None:
            self._require_right(rewind)
        self._waiting[signer, act.serial] = letter
        return True

    def _keep_ballot(self, letter: Signed) -> bool:
        ballot, base, voter = governance.read_ballot(letter), self._chain.base, letter.signer
        if self._ballots.get((ballot.peer, voter)) == letter:
            return False
        if ballot.run != base.run:
            raise Void(f"the ballot is for run {short(ballot.run)}, this is run {short(base.run)}")
        if voter not in base.electorate:
            raise Void(f"{short(voter)} is not a member: only members vote")
        if ballot.peer not in base.electorate:
            raise Void(f"{short(ballot.peer)} is not a member")
        if (next_serial := base.charter.times_expelled(ballot.peer) + 1) != ballot.serial:
            raise Void(f"it is for removal {ballot.serial} of {short(ballot.peer)}; the next is {next_serial}")
        if sum(by == voter for _, by in self._ballots) >= MAX_BALLOTS:
            raise Void(f"{MAX_BALLOTS} ballots of {short(voter)} wait already")
        self._ballots[ballot.peer, voter] = letter
        return True

    def _keep_for_rewind(self, letter: Signed) -> bool:
        ballot, base, voter = governance.read_rewind_ballot(letter), self._chain.base, letter.signer
        key = rewinds.target(ballot.rewind), voter
        if key in self._for_rewind:
            return False
        if ballot.run != base.run:
            raise Void(f"the ballot is for run {short(ballot.run)}, this is run {short(base.run)}")
        if voter not in base.electorate:
            raise Void(f"{short(voter)} is not a member: only members vote")
        if why_not := rewinds.why_not(base.charter, base.round, ballot.rewind):
            raise Void(why_not)
        self._require_right(ballot.rewind)
        if sum(by == voter for _, by in self._for_rewind) >= MAX_BALLOTS:
            raise Void(f"{MAX_BALLOTS} ballots of {short(voter)} wait already")
        self._for_rewind[key] = letter
        return True

    def _require_right(self, rewind: acts.Rewind) -> None:
        """
        Raises:
            Void: this peer knows the round, and it was another.
        """
        if self._earlier is not None and (why_not := self._earlier.why_not(rewind)):
            raise Void(why_not)

    def _majorities_for_rewind(self) -> Iterator[acts.Warrant]:
        base = self._chain.base
        electorate = rewinds.voters(base.charter, base.electorate)
        for target in sorted({target for target, _ in self._for_rewind}):
            cast = [self._for_rewind[target, peer] for peer in electorate if (target, peer) in self._for_rewind]
            if governance.is_majority(len(cast), len(electorate)):
                yield acts.Warrant(letters=tuple(cast))

    def on_verdict(self, callback: Callable[[Signed, acts.Finding], None]) -> None:
        """Call `callback(letter, verdict)` for each that a member tells, and that finds a fault."""
        self._on_verdict.append(callback)

    def findings(self) -> list[tuple[Signed, acts.Finding]]:
        """Return what members have found, and no manifest has dealt with yet."""
        return verdicts.findings(self._verdicts)

    def _keep_verdict(self, letter: Signed) -> bool:
        cast = verdicts.kept(self._verdicts, self._chain.base, letter)
        if cast is self._verdicts:
            return False
        self._verdicts = cast
        for callback in self._on_verdict:
            callback(letter, claimed(letter, acts.Finding))
        return True

    def on_false_passage(self, callback: Callable[[Signed], None]) -> None:
        """Call `callback(letter)` for each that a member tells of what another has computed."""
        self._on_false_passage.append(callback)

    def _keep_false_passage(self, letter: Signed) -> bool:
        cast = passages.kept(self._passages, self._chain.base, letter)
        if cast is self._passages:
            return False
        self._passages = cast
        for callback in self._on_false_passage:
            callback(letter)
        return True

    def _majority(self, peer: PeerId) -> acts.Warrant | None:
        base = self._chain.base
        cast = {voter: self._ballots[peer, voter] for voter in base.electorate if (peer, voter) in self._ballots}
        if not governance.is_majority(len(cast), len(base.electorate)):
            return None
        return acts.Warrant(letters=tuple(cast[voter] for voter in sorted(cast)))

    def _drop_void(self) -> None:
        """Drop what was decided, and what has no effect any more."""
        base = self._chain.base
        for signer, number in sorted(self._waiting):
            before = [other for steward, other in sorted(self._waiting) if steward == signer and other < number]
            letters = [self._waiting[signer, other] for other in (*before, number)]
            why_not = governance.objection(
                base.charter, base.body, tuple(acts.Warrant(letters=(each,)) for each in letters)
            )
            if why_not is not None:
                self._drop(self._waiting.pop((signer, number)), why_not)
        for peer, voter in sorted(self._ballots):
            ballot = governance.read_ballot(self._ballots[peer, voter])
            is_member = peer in base.electorate and voter in base.electorate
            if not is_member or ballot.serial != base.charter.times_expelled(peer) + 1:
                self._drop(self._ballots.pop((peer, voter)), "voter or key is no longer a member")
        for target, voter in sorted(self._for_rewind):
            rewind = governance.read_rewind_ballot(self._for_rewind[target, voter]).rewind
            why_not = rewinds.why_not(base.charter, base.round, rewind)
            if why_not or voter not in base.electorate:
                self._drop(self._for_rewind.pop((target, voter)), why_not or "the voter is no longer a member")

    def _drop(self, letter: Signed, reason: str) -> None:
        if digest_of(letter) not in self._decided:
            self._refuse(letter, reason)

    def _refuse(self, letter: Signed, reason: str) -> None:
        self._emit(ActRefused(by=letter.signer, kind=kind_of(letter), subject=subject_of(letter), reason=reason))

    def _tell(self, note: ActNote, but: PeerId | None) -> None:
        for peer in sorted(self._node.peers):
            if peer != but:
                self._node.post(peer, note)

    # --- what others say ---

    async def _on_note(self, peer: PeerId, note: ActNote) -> None:
        self.take(note.letter, peer)  # what is void here is so by the time it comes, or was never meant

    async def _on_lie_note(self, peer: PeerId, note: LieNote) -> None:
        self.accuse(note.lie, peer)

    async def _on_hand_in(self, _peer: PeerId, request: HandIn) -> HandInAnswer:
        if digest_of(request.letter) in self._decided:
            return HandInAnswer(outcome="decided")
        why_not = self.take(request.letter)
        if why_not is None:
            return HandInAnswer(outcome="waits")
        self._refuse(request.letter, why_not)
        return HandInAnswer(outcome="refused", reason=why_not[:MAX_REASON_CHARS])

    async def _on_request(self, _peer: PeerId, _request: CharterRequest) -> CharterAnswer:
        head = self._chain.head
        return CharterAnswer(charter=self._chain.charter, round=head.round, members=head.members)


# --- in words ---


def told(manifest: Manifest) -> Iterator[ActEnacted]:
    """Yield an event for each act that a committed manifest holds.

    Verdicts on who is struck out by evidence say what is to be taken out again, and do nothing else.
    """
    proven = {governance.accused(warrant) for warrant in manifest.acts if not governance.findings_in(warrant)}
    for warrant in manifest.acts:
        first = warrant.letters[0]
        if governance.clears(warrant):  # what comes of it is told as it is counted
            continue
        if verdicts := governance.findings_in(warrant):
            verdict, is_lie = verdicts[0], governance.accused(warrant) is not None
            if is_lie and (verdict.peer in proven or verdict.peer not in manifest.left):
                continue
            yield ActEnacted(
                branch=manifest.branch,
                round=manifest.round,
                by=tuple(letter.signer for letter in warrant.letters),
                kind=STRIKE_OUT if is_lie else UNANSWERED,
                subject=verdict.peer,
                reason=printable(verdict.why) or DIFFERS if is_lie else NO_ANSWER,
                changes={},
            )
            continue
        if first.kind == acts.FalsePassage.__name__:
            yield ActEnacted(
                branch=manifest.branch,
                round=manifest.round,
                by=tuple(letter.signer for letter in warrant.letters),
                kind=STRIKE_OUT,
                subject=claimed(first, acts.FalsePassage).peer,
                reason=printable(claimed(first, acts.FalsePassage).why) or DIFFERS,
                changes={},
            )
            continue
        if (liar := governance.accused(warrant)) is not None:
            yield ActEnacted(
                branch=manifest.branch,
                round=manifest.round,
                by=(),
                kind=STRIKE_OUT,
                subject=liar,
                reason=governance.read_lie(warrant).what,
                changes={},
            )
            continue
        yield ActEnacted(
            branch=manifest.branch,
            round=manifest.round,
            by=tuple(letter.signer for letter in warrant.letters),
            kind=kind_of(first),
            subject=subject_of(first),
            reason=reason_of(first),
            changes=changes_in(first),
        )


def why_removed(event: ActEnacted) -> str:
    """Return what a removed peer is told."""
    if event.kind == STRIKE_OUT and event.by:
        return (
            f"most members banned this key after round {event.round}: {event.reason}. They have done again "
            "what it says it has done, and came to something else. A machine whose memory or processor is broken does "
            "that, and so does a changed program. The key may not come back; have the machine checked."
        )
    if event.kind == UNANSWERED:
        return (
            f"most members removed this peer after round {event.round}: of three rounds it did not show auditors what "
            "it said it had done. Its line or its machine may be too slow for a run that audits. It may join again: "
            "weft join."
        )
    if event.kind == STRIKE_OUT:
        return (
            f"the members banned this key after round {event.round}: {event.reason}. A peer whose disk and memory are "
            "intact never signs that: this key runs on two machines, or its folder was restored from a copy, or the "
            "machine computes wrongly, or the program was changed. The key may not come back; join with another (weft "
            "keys new)."
        )
    who = several(len(event.by), "member") if event.kind == "vote out" else f"steward {short(event.by[0])}"
    reason = event.reason.rstrip(".") or "no reason was given"
    what_now = "Its key may not come back." if event.kind == "ban" else "It may join again: weft join."
    return f"{who} removed this peer from the run after round {event.round} ({event.kind}): {reason}. {what_now}"


def kind_of(letter: Signed) -> str:
    """Return what a letter is, in a word or two."""
    deed = _deed(letter)
    if isinstance(deed, acts.Ballot):
        return "vote out"
    return "unknown" if deed is None else type(deed).__name__.lower()


def subject_of(letter: Signed) -> str:
    """Return the key or run that a letter is about; none where it is about settings."""
    match _deed(letter):
        case acts.Remove(peer=subject) | acts.Ban(peer=subject) | acts.Pardon(peer=subject) | acts.Ballot(peer=subject):
            return subject
        case acts.Succeed(run=run):
            return run
        case _:
            return ""


def reason_of(letter: Signed) -> str:
    deed = _deed(letter)
    return "" if deed is None else printable(deed.reason)


def changes_in(letter: Signed) -> dict[str, str]:
    """Return what an amendment changes, as text."""
    deed = _deed(letter)
    if isinstance(deed, acts.Rewind):
        return {"round": str(deed.round)}
    changed = acts.changes_of(deed) if isinstance(deed, acts.Amend) else {}
    return {name: msgspec.json.encode(value).decode() for name, value in changed.items()}


def _deed(letter: Signed) -> acts.AnyDeed | acts.Ballot | None:
    if letter.kind == acts.RewindBallot.__name__:
        return rewinds.read(letter)
    try:
        if letter.kind == acts.Ballot.__name__:
            ballot: acts.Ballot = decode(letter.body, acts.Ballot)
            return ballot
        act: acts.Act = decode(letter.body, acts.Act)
        return act.deed
    except WireError:
        return None
