"""Evidence as a warrant carries it: it strikes a key out without a vote, and nothing else of it does."""

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from unit.verify.evidence.forge import ME, OTHER, PEERS, done, mixed, rules
from unit.verify.evidence.test_merges import flipped
from unit.verify.evidence.test_merges import proven as merge_proven
from unit.verify.evidence.test_steps import changed
from unit.verify.evidence.test_steps import proven as step_proven
from unit.verify.evidence.test_works import claimed, encoded, moved, paid, started
from weft.errors import WireError
from weft.ids import Round, Tokens
from weft.sync.governance import Void, accused, enact, objection, read_lie
from weft.sync.records.acts import MAX_CONTRADICTION_NBYTES, Ballot, Finding, Warrant, Weighed
from weft.sync.records.charter import Body
from weft.verify.evidence.evidence import read
from weft.verify.evidence.shown import Unproven
from weft.wire import decode, digest, digest_of, encode, seal


def claim() -> Warrant:
    lied = done().renamed(tokens=Tokens(33))
    return Warrant(letters=(lied.signed,), shown=encode(claimed(lied)))


def start() -> Warrant:
    before = done(seed=1)
    lied = done(seed=2, follows=before)
    lied.states[0]["moment1"][3] += 1
    lied = lied.renamed()
    return Warrant(letters=(lied.signed, before.signed), shown=encode(started(lied, before)))


def new() -> Warrant:
    lied = done()
    lied.states[0]["moment2"][3] += 1
    return Warrant(letters=(lied.renamed().signed,), shown=encode(started(lied.renamed())))


def move() -> Warrant:
    lied = done(segments=2)
    lied.states[3]["moment2"][3] += 1
    return Warrant(letters=(lied.renamed().signed,), shown=encode(moved(lied.renamed(), 1, 1)))


def payload() -> Warrant:
    honest = done()
    delta = honest.states[0]["local"] - honest.states[-1]["local"]
    lied = dataclasses.replace(honest, payload=encoded(honest, -delta)).renamed()
    return Warrant(letters=(lied.signed,), shown=encode(paid(lied, encoded(honest, delta))))


def step() -> Warrant:
    lied = changed(done(), 1, "local", 300)
    return Warrant(letters=(lied.signed, seal(ME, lied.made(1))), shown=encode(step_proven(lied, 1)))


def merge() -> Warrant:
    part = mixed()
    other = flipped(part.right, 700)
    return Warrant(letters=(seal(ME, part.note(other)),), shown=encode(merge_proven(part, other)))


KINDS = [claim, start, new, move, payload, step, merge]
RUN = done().work.run
BODY = Body(run=RUN, round=Round(7), electorate=tuple(each.peer for each in PEERS), cursor=1000)
each_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)


@each_kind
def test_it_strikes_out_who_signed_it_without_a_vote(kind: Callable[[], Warrant]) -> None:
    proof, charter = kind(), rules()
    lie = read_lie(proof)
    assert (lie.peer, lie.run, lie.round in (4, 5), accused(proof)) == (ME.peer, RUN, True, ME.peer)
    assert (lie.work is None) == (kind is merge) == (lie.part is not None)
    enacted = enact(charter, BODY, (proof,))
    assert (enacted.struck, enacted.charter.banned) == (ME.peer, (ME.peer,))
    assert "banned already" in (objection(msgspec.structs.replace(enacted.charter, banned=()), BODY, (proof,)) or "")
    assert proof.nbytes < 100_000
    assert decode(encode(proof), Warrant) == proof


@each_kind
def test_any_change_of_it_is_refused(kind: Callable[[], Warrant]) -> None:
    data, luck = encode(kind()), random.Random(0)
    for _ in range(150):
        at = luck.randrange(len(data))
        other = bytes((*data[:at], data[at] ^ 1 << luck.randrange(8), *data[at + 1 :]))
        try:
            warrant = decode(other, Warrant)
        except WireError:
            continue
        with pytest.raises(Void):
            enact(rules(), BODY, (warrant,))


@each_kind
def test_it_is_of_one_run(kind: Callable[[], Warrant]) -> None:
    elsewhere = dataclasses.replace(BODY, run=digest(b"another run"))
    assert "lie in run" in (objection(rules(), elsewhere, (kind(),)) or "")


@each_kind
def test_it_takes_the_letters_of_one_member(kind: Callable[[], Warrant]) -> None:
    proof = kind()
    assert proof.shown is not msgspec.UNSET
    ballot = seal(ME, Ballot(run=RUN, peer=OTHER.peer, serial=1, reason=""))
    theirs = msgspec.structs.replace(proof.letters[0], signer=OTHER.peer)
    for letters in (
        (*proof.letters, proof.letters[0]),
        (ballot,),
        (ballot, *proof.letters[1:]),
        (*proof.letters, ballot),
        (theirs, *proof.letters[1:]),
        tuple(reversed(proof.letters)) if len(proof.letters) > 1 else (ballot,),
    ):
        with pytest.raises(Unproven):
            read(letters, proof.shown)
    for shown in (b"", proof.shown[:-1], proof.shown + b"\0", bytes(MAX_CONTRADICTION_NBYTES + 1)):
        with pytest.raises(Unproven):
            read(proof.letters, shown)


def test_a_step_of_another_work_is_none_of_this() -> None:
    lied, other = changed(done(), 1, "local", 300), changed(done(seed=1), 1, "local", 300)
    with pytest.raises(Unproven, match="of another work"):
        read((lied.signed, seal(ME, other.made(1))), encode(step_proven(other, 1)))


def test_a_work_that_names_another_as_its_worker_proves_nothing() -> None:
    lied = done().renamed(tokens=Tokens(33), peer=OTHER.peer)
    with pytest.raises(Unproven, match="another's"):
        read((lied.signed,), encode(claimed(lied)))


def test_no_other_warrant_holds_beside_what_is_shown() -> None:
    """Ballots or verdicts with something shown are read as evidence, and as nothing else."""
    ballots = tuple(
        seal(each, Ballot(run=RUN, peer=ME.peer, serial=1, reason=""))
        for each in sorted(PEERS[1:], key=lambda p: p.peer)
    )
    assert enact(rules(), BODY, (Warrant(letters=ballots),)).removed == (ME.peer,)
    assert objection(rules(), BODY, (Warrant(letters=ballots, shown=b""),)) is not None


def found(weighed: Any, num: int = 3) -> Warrant:
    verdict = Finding(
        run=RUN, peer=ME.peer, round=Round(6), work=digest(b"w"), before=0, outcome="differs", weighed=weighed
    )
    return Warrant(letters=tuple(seal(each, verdict) for each in PEERS[1 : 1 + num]))


def test_members_can_say_afterwards_what_is_to_be_taken_out() -> None:
    """Evidence comes before their verdicts, and does not tell what the mean was made of."""
    weighed = Weighed(branch=RUN, manifest=digest(b"m"), weights=(3, 5), late=0, method=digest(b"method"))
    struck = enact(rules(), BODY, (step(),)).charter
    later = dataclasses.replace(BODY, round=Round(8), electorate=BODY.electorate[1:])
    after = enact(struck, later, (found(weighed),))
    assert (after.struck, after.removed) == (None, ())
    (false,) = after.charter.false_works or ()
    assert (false.peer, false.round, false.weighed) == (ME.peer, 6, weighed)
    assert "banned already" in (objection(after.charter, later, (found(weighed),)) or "")
    assert "not a majority" in (objection(struck, later, (found(weighed, 2),)) or "")
    assert "banned already" in (objection(struck, later, (found(msgspec.UNSET),)) or "")
    both = enact(rules(), BODY, (step(), found(weighed)))
    assert both.struck == ME.peer
    assert len(both.charter.false_works or ()) == 1


def test_a_ground_that_its_signer_has_made_up_proves_nothing() -> None:
    """Who signs a work may name any round in it, also one whose vector is cut among nobody."""
    honest = done()
    delta = honest.states[0]["local"] - honest.states[-1]["local"]
    lied = dataclasses.replace(honest, payload=encoded(honest, -delta)).renamed()
    rounds = msgspec.structs.replace(honest.heads[0], uplinks=())
    segment = msgspec.structs.replace(honest.work.segments[0], head=digest_of(rounds))
    made_up = dataclasses.replace(lied, heads=[rounds]).renamed(segments=(segment,))
    shown = msgspec.structs.replace(paid(lied, encoded(honest, delta)), ground=made_up.ground())
    with pytest.raises(Unproven, match="does not fit together"):
        read([made_up.signed], encode(shown))
