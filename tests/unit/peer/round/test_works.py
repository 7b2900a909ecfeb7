"""What members say of how they came to what they bring: heard, checked against what they announce, asked for."""

from collections.abc import Callable
from typing import Any

import pytest
from msgspec import UNSET
from msgspec.structs import replace

from charters import charter
from unit.sync.test_governance import MEMBERS, NAMES, RUN
from weft.errors import DeadlineExceeded, PayloadError
from weft.ids import BranchId, Digest, PeerId, Round, Tokens
from weft.keys import Identity
from weft.peer.chain import Chain, genesis, open_branch
from weft.peer.round.works import MAX_KEPT, Works
from weft.sync.records.ancestry import Legacy, Stretch
from weft.sync.records.charter import AuditTerms
from weft.sync.records.messages import Base, Counted, HeldWork, Manifest, Ready, next_base, payload_of
from weft.sync.records.work import Segment, Work
from weft.wire import Signed, digest, digest_of, encode, seal

AUDITED = replace(charter(4), audits=AuditTerms(rate=0.1, trace_every=1))
START = genesis(RUN, NAMES[0], AUDITED)
OPENING = open_branch(START, list(NAMES), NAMES[0], START.branch)
BASE: Base = next_base(OPENING, AUDITED)
PARTS = (digest(b"one"), digest(b"two"))
WHO = MEMBERS[1]


class Others:
    """A node whose peers have some blobs."""

    def __init__(self, **blobs: bytes) -> None:
        self.peer = NAMES[0]
        self.peers = NAMES[1:]
        self.blobs = blobs
        self.lookup: Callable[[PeerId, Digest], bytes | None] = lambda _peer, _wanted: None
        self.asked: list[PeerId] = []

    def serve_blobs(self, lookup: Any) -> None:
        self.lookup = lookup

    async def fetch_small(self, peer: PeerId, wanted: Digest, _most: int) -> bytes:
        self.asked.append(peer)
        if wanted not in self.blobs or peer != NAMES[2]:
            raise DeadlineExceeded("nothing")
        return self.blobs[wanted]


def work(**other: Any) -> Work:
    head = digest_of(OPENING)
    fields: dict[str, Any] = {
        "run": RUN,
        "branch": BASE.branch,
        "round": BASE.round,
        "peer": WHO.peer,
        "segments": (Segment(head=head, round=Round(0), holder=WHO.peer, num_steps=4),),
        "follows": None,
        "num_before": 0,
        "trace": digest(b"trace"),
        "payload": payload_of(PARTS),
        "tokens": Tokens(32),
        "error": None,
        "left": None,
    }
    return Work(**(fields | other))


def ready(signed: Signed | None, tokens: int = 32) -> Ready:
    return Ready(tokens=Tokens(tokens), parts=PARTS, work=UNSET if signed is None else signed)


def hears(said: Ready, base: Base = BASE) -> bool:
    works: Any = Works(Others(), Chain(OPENING, AUDITED))  # type: ignore[arg-type]
    return bool(works.hear(base, WHO.peer, said))


def segment(round: int, num: int = 4) -> Segment:
    return Segment(head=digest(b"%d" % round), round=Round(round), holder=WHO.peer, num_steps=num)


def test_an_announcement_says_how_it_came_about_where_that_is_audited() -> None:
    assert hears(ready(seal(WHO, work())))
    assert not hears(ready(None))
    assert hears(ready(None), replace(BASE, charter=charter(4)))


def test_what_a_branch_had_counted_is_not_heard_where_that_is_audited() -> None:
    legacy = Legacy(stretches=(Stretch(branch=BASE.branch, start=Round(0), stop=Round(1)),), tokens=Tokens(32))
    assert hears(replace(ready(None), legacy=legacy), replace(BASE, charter=charter(4)))
    assert not hears(replace(ready(None), legacy=legacy))
    assert not hears(replace(ready(seal(WHO, work())), legacy=legacy))


@pytest.mark.parametrize(
    "other",
    [
        {"run": "ab" * 32},
        {"branch": BranchId("ab" * 32)},
        {"peer": NAMES[2]},
        {"payload": payload_of(PARTS[:1])},
        {"tokens": Tokens(33)},
        {"round": Round(2)},
        {"segments": (segment(0), segment(0))},
        {"segments": (segment(1), segment(0))},
        {"segments": (segment(0, num=0),)},
        {"segments": (segment(0),)},  # no such round
        {"segments": (segment(0),), "round": Round(3)},
    ],
    ids=lambda other: next(iter(other)),
)
def test_one_that_says_something_else_is_not_counted(other: dict[str, Any]) -> None:
    assert not hears(ready(seal(WHO, work(**other))))


def test_one_that_a_round_has_counted_is_not_counted_again() -> None:
    works: Any = Works(Others(), Chain(OPENING, AUDITED))  # type: ignore[arg-type]
    signed = seal(WHO, work())
    assert works.hear(BASE, WHO.peer, ready(signed))
    works.follow(counting(digest_of(signed)))
    assert not works.hear(BASE, WHO.peer, ready(signed))


def test_training_steps_that_a_round_has_counted_are_not_counted_again_by_another_name() -> None:
    """The same words are signed with another number, or the same lease is trained on with another optimizer."""
    works: Any = Works(Others(), Chain(OPENING, AUDITED))  # type: ignore[arg-type]
    signed, later = seal(WHO, work()), replace(BASE, round=Round(2))
    works.follow(replace(counting(digest_of(signed)), round=Round(1)))
    again, other = replace(signed, signature=bytes(64)), seal(WHO, work(trace=digest(b"other")))
    works._verify = lambda *_: True
    assert len({digest_of(each) for each in (signed, again, other)}) == 3
    assert not any(works.hear(later, WHO.peer, ready(each)) for each in (again, other))
    elsewhere = replace(later, branch=BranchId("ab" * 32))
    assert works.hear(elsewhere, WHO.peer, ready(seal(WHO, work(branch=elsewhere.branch))))
    works.restart()
    assert works.hear(later, WHO.peer, ready(other))


def test_many_works_of_one_peer_push_out_none_of_others() -> None:
    works: Any = Works(Others(), Chain(OPENING, AUDITED))  # type: ignore[arg-type]
    mine = seal(MEMBERS[2], work(peer=NAMES[2]))
    works.keep(mine)
    for number in range(3 * MAX_KEPT):
        works.keep(seal(WHO, work(num_before=number)))
    assert works.known(digest_of(mine)) is not None
    assert works.known(digest_of(seal(WHO, work(num_before=0)))) is None
    assert works.known(digest_of(seal(WHO, work(num_before=3 * MAX_KEPT - 1)))) is not None


def test_one_that_another_signed_is_not_counted() -> None:
    signed = seal(WHO, work())
    forged = replace(signed, signature=bytes(64))
    assert not hears(ready(forged))
    assert not hears(ready(seal(Identity.from_seed(bytes(32)), work())))


def counting(name: Digest, tokens: int = 32, payload: Digest | None = None) -> Manifest:
    each = Counted(peer=WHO.peer, tokens=Tokens(tokens), payload=payload or payload_of(PARTS), work=name)
    return replace(OPENING, contributions=(each,))


def holding(name: Digest, peer: PeerId = WHO.peer) -> Manifest:
    return replace(OPENING, held=(HeldWork(peer=peer, work=name),))


async def test_a_work_that_waits_is_asked_for_like_one_that_counts() -> None:
    signed = seal(WHO, work())
    name = digest_of(signed)
    works = Works(Others(**{name: encode(signed)}), Chain(OPENING, AUDITED))  # type: ignore[arg-type]
    assert not works.has(holding(name))
    await works.find(holding(name), NAMES[3])
    assert works.has(holding(name))
    with pytest.raises(PayloadError, match="nobody shows"):
        await works.find(holding(name, NAMES[2]), NAMES[3])
    with pytest.raises(PayloadError, match="nobody shows"):
        await works.find(holding(digest(b"none")), NAMES[3])
    works.follow(holding(name))
    assert works.hear(BASE, WHO.peer, ready(signed)), "it has not been counted"


async def test_a_work_that_is_missing_is_asked_for_and_handed_on() -> None:
    signed = seal(WHO, work())
    name = digest_of(signed)
    node = Others(**{name: encode(signed)})
    works = Works(node, Chain(OPENING, AUDITED))  # type: ignore[arg-type]
    assert not works.has(counting(name))
    await works.find(counting(name), NAMES[3])
    assert works.has(counting(name))
    assert works.known(name) == work()
    assert node.asked[:2] == [NAMES[3], WHO.peer]  # who proposed it, then who made it
    assert node.lookup(NAMES[4], name) == encode(signed)


@pytest.mark.parametrize("kind", ["nobody has it", "it is of another payload", "it is of fewer tokens", "of another"])
async def test_what_a_manifest_counts_without_showing_it_is_not_voted_for(kind: str) -> None:
    signed = seal(WHO, work())
    if kind == "of another":
        signed = seal(MEMBERS[2], work(peer=NAMES[2]))
    name = digest_of(signed)
    works = Works(Others(**({} if kind == "nobody has it" else {name: encode(signed)})), Chain(OPENING, AUDITED))  # type: ignore[arg-type]
    tokens = 33 if "tokens" in kind else 32
    payload = digest(b"other") if "payload" in kind else None
    with pytest.raises(PayloadError, match="nobody shows how"):
        await works.find(counting(name, tokens, payload), NAMES[3])
