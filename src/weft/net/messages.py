"""The records of the network itself, below both ends of every connection.

A control connection, opened by whoever dials:

    dialler                       acceptor
      Hello ───────────────────────►         who I am, of which run, and my proof of admission
      ◄─────────────── Admitted | Rejected   the same from the other side, or why not
      Call ────────────────────────►         number, method, deadline, body
      ◄────────────────────── Reply | Failed
      Cancel ──────────────────────►         the caller no longer waits
      Note ────────────────────────►         one way, in order
    and Call, Reply, Failed, Cancel, Note the other way as well.

A bulk connection, one direction at a time:

    fetcher                       holder
      BlobRequest ─────────────────►         a digest
      ◄──────────────── BlobHeader, bytes    its length or none, then the raw bytes
      RangeRequest ────────────────►         a digest and a range of it: the same, and of the bytes only these
    A holder that was asked to dial (BulkPlease) says BulkOffer first; requests then come to the dialler.

A stream between two peers that cannot reach each other, through one that reaches both (net/blobs/relay.py):

    dialler                       relay                        target
      RelayPlease ─────────────────► Relayed ────────────────────►
      ◄──────────────── RelayAnswer                                from then on raw bytes both ways, which the relay
      TLS of the two ends ◄─────────────────────────────────────►  copies and cannot read
    Which of its peers could be such a relay, the dialler asks each over its control connection (WhoReaches).

Every bound is here, with its reason.
"""

from typing import Annotated, Literal

from msgspec import Meta

from weft.ids import BranchId, Digest, PeerId, Round, RunId
from weft.wire import Record, Signed

PROTOCOL = 1  # raised when records here change meaning; both ends must agree

MAX_NAME_CHARS = 64  # shown to people
MAX_ADDRESS_CHARS = 512  # an iroh address with relay and direct paths is about 300
MAX_ADDRESSES = 16  # a host has a few networks, twice for two transports; many virtual ones make no longer tickets
MAX_TOLD_CONTACTS = 64  # twice the size of a swarm whose members all know each other
MAX_METHOD_CHARS = 64  # a class name
MAX_REASON_CHARS = 300  # one line for a person
MAX_BODY_NBYTES = 1 << 20  # of a call, reply or note; a frame holds 4 KiB more for the record around it
MAX_HANDSHAKE_NBYTES = 64 << 10  # before admission a stranger may make us hold this much
MAX_BLOB_RECORD_NBYTES = 256  # a digest or a length
MAX_ANSWER_CHARS = 150  # of a relay's refusal, which fits such a record
MAX_DEADLINE_S = 3600.0  # no call may occupy a slot longer
MAX_ENDED_LINKS = 8  # how many lost links a Hello names
MAX_NEWS = 32  # signed claims in one note
MAX_CLAIM_NBYTES = 10 << 10  # of one: 16 of the longest addresses
NUM_BUCKETS = 64  # into which members are divided for comparing
MAX_LISTED = 512  # peers in one answer to a comparison: a quarter of the largest swarm

# \Z and not $: no line break may hide at the end of what is shown or logged.
HexDigest = Annotated[Digest, Meta(pattern=r"^[0-9a-f]{64}\Z")]
HexPeer = Annotated[PeerId, Meta(pattern=r"^[0-9a-f]{64}\Z")]
HexRun = Annotated[RunId, Meta(pattern=r"^[0-9a-f]{64}\Z")]
HexBranch = Annotated[BranchId, Meta(pattern=r"^[0-9a-f]{64}\Z")]
Name = Annotated[str, Meta(max_length=MAX_NAME_CHARS, pattern=r"^[\w .@()+-]*\Z")]
Address = Annotated[str, Meta(max_length=MAX_ADDRESS_CHARS, pattern=r"^[a-z]+://[!-~]+\Z")]
Addresses = Annotated[tuple[Address, ...], Meta(max_length=MAX_ADDRESSES)]
Method = Annotated[str, Meta(max_length=MAX_METHOD_CHARS, pattern=r"^[A-Za-z_]\w*\Z")]
Reason = Annotated[str, Meta(max_length=MAX_REASON_CHARS)]
Body = Annotated[bytes, Meta(max_length=MAX_BODY_NBYTES)]
CallNumber = Annotated[int, Meta(ge=0, lt=1 << 62)]
LinkId = Annotated[bytes, Meta(min_length=8, max_length=8)]
Proof = Annotated[bytes, Meta(max_length=32)]


class Contact(Record, frozen=True, kw_only=True):
    """Where a peer may be reached. Unsigned: a wrong address leads to another key, which the dial refuses.

    On the wire `peer` is whole; one that a ticket named may be the first digits of it (`ids.is_start`).
    """

    peer: HexPeer
    name: Name
    addresses: Addresses


Contacts = Annotated[tuple[Contact, ...], Meta(max_length=MAX_TOLD_CONTACTS)]


# --- admission ---


class Hello(Record, frozen=True, kw_only=True, tag="hello"):
    """The dialler's first frame. `ended` names links to this peer that its sender has lost or given up."""

    version: int
    run: HexRun
    name: Name
    proof: Proof
    addresses: Addresses
    link: LinkId  # chosen by the dialler; names this connection
    instance: LinkId  # changes when the sender's process restarts
    ended: Annotated[tuple[LinkId, ...], Meta(max_length=MAX_ENDED_LINKS)] = ()


class Admitted(Record, frozen=True, kw_only=True, tag="admitted"):
    """The acceptor admits the dialler, proves its own admission and says who else it knows."""

    name: Name
    proof: Proof
    addresses: Addresses
    instance: LinkId
    contacts: Contacts


class Rejected(Record, frozen=True, kw_only=True, tag="rejected"):
    """The acceptor's refusal. `code`: version, run, admission, banned, duplicate (a link already stands) or busy."""

    code: Annotated[str, Meta(max_length=16)]
    reason: Reason


class Acquaint(Record, frozen=True, kw_only=True, tag="Acquaint"):
    """A note: peers that the receiver may not have met yet, by what they said of themselves. It is not passed on."""

    contacts: Contacts


# --- calls ---


class Call(Record, frozen=True, kw_only=True, tag="call"):
    number: CallNumber  # counts up from 0 on one connection
    method: Method
    deadline_s: float  # seconds that the caller waits from now
    body: Body


class Reply(Record, frozen=True, kw_only=True, tag="reply"):
    number: CallNumber
    body: Body


class Failed(Record, frozen=True, kw_only=True, tag="failed"):
    number: CallNumber
    code: Annotated[str, Meta(max_length=16)]  # unknown, deadline or error
    reason: Reason


class Cancel(Record, frozen=True, kw_only=True, tag="cancel"):
    number: CallNumber


class Note(Record, frozen=True, kw_only=True, tag="note"):
    method: Method
    body: Body


RpcFrame = Call | Reply | Failed | Cancel | Note
Greeting = Admitted | Rejected


# --- blobs ---


class BlobRequest(Record, frozen=True, kw_only=True, tag="blob"):
    digest: HexDigest


class RangeRequest(Record, frozen=True, kw_only=True, tag="range"):
    """Bytes of a blob from `begin` up to `end`: the header tells the whole length, and only these follow it."""

    digest: HexDigest
    begin: Annotated[int, Meta(ge=0, lt=1 << 50)]
    end: Annotated[int, Meta(ge=1, lt=1 << 50)]


class BlobHeader(Record, frozen=True, kw_only=True, tag="header", omit_defaults=True):
    nbytes: Annotated[int, Meta(ge=0, lt=1 << 50)] | None  # None: the holder has no such blob
    is_coming: bool = False  # but is about to: ask again


class BulkPlease(Record, frozen=True, kw_only=True, tag="BulkPlease"):
    """A call: open a bulk connection to me, since I may not be able to reach you."""

    offer: LinkId


class BulkDialled(Record, frozen=True, kw_only=True, tag="BulkDialled"):
    """The answer: the connection is open."""


class BulkOffer(Record, frozen=True, kw_only=True, tag="offer"):
    """First record on a bulk connection that its dialler will serve."""

    offer: LinkId


# --- relays ---


class WhoReaches(Record, frozen=True, kw_only=True, tag="WhoReaches"):
    """A call: would you pass bytes on between `peer` and me?"""

    peer: HexPeer


class Reaches(Record, frozen=True, kw_only=True, tag="Reaches"):
    is_reached: bool  # a direct link to it stands, and there is room


class RelayPlease(Record, frozen=True, kw_only=True, tag="relay"):
    """Pass what follows on to `peer`."""

    peer: HexPeer
    lane: Literal["control", "bulk"]


class RelayAnswer(Record, frozen=True, kw_only=True, tag="passing"):
    reason: Annotated[str, Meta(max_length=MAX_ANSWER_CHARS)] = ""  # why not; empty: what follows is passed on


class Relayed(Record, frozen=True, kw_only=True, tag="relayed"):
    """What follows comes from `peer`, as the relay says; inside, the peer proves it."""

    peer: HexPeer
    lane: Literal["control", "bulk"]


BulkRequest = BlobRequest | RangeRequest | RelayPlease | Relayed
BulkOpening = BlobRequest | RangeRequest | BulkOffer | RelayPlease | Relayed


# --- membership ---


class Heartbeat(Record, frozen=True, kw_only=True, tag="Heartbeat"):
    """A note every 2 s: I live, and this is how far I am."""

    name: Name
    branch: HexBranch
    round: Annotated[Round, Meta(ge=0)]
    manifest: HexDigest | None  # of the last commit this peer applied
    committed_tokens: Annotated[int, Meta(ge=0)] = 0  # on that branch: branches that meet are weighed by it
    state: Annotated[str, Meta(max_length=32, pattern=r"^[\w -]*\Z")]  # one word for people: training, syncing
    is_relayed: bool = False  # it reaches some only through others, and so owns no parts
    loss: float | None  # nats per token of the last inner steps
    tokens_per_s: Annotated[float, Meta(ge=0)]
    is_anchor: bool = False  # it keeps a state for others, trains nothing and asks for no vote


class Departure(Record, frozen=True, kw_only=True, tag="Departure"):
    """The goodbye of a process, and final: whoever said it returns as a newcomer."""

    run: HexRun
    instance: LinkId
    reason: Reason


class Farewell(Record, frozen=True, kw_only=True, tag="Farewell"):
    """A note: a Departure under its author's signature, so that it can be shown to others."""

    signed: Signed


# --- membership of more than 32 (net/membership/swim.py) ---

Incarnation = Annotated[int, Meta(ge=0, lt=1 << 53)]
Claims = Annotated[tuple[Signed, ...], Meta(max_length=MAX_NEWS)]  # Presence, Accusation, Departure


class Presence(Record, frozen=True, kw_only=True, tag="Presence"):
    """What a process says of itself for as long as it takes part, to be shown to all. It expires."""

    run: HexRun
    instance: LinkId
    incarnation: Incarnation
    name: Name
    addresses: Addresses


class Accusation(Record, frozen=True, kw_only=True, tag="Accusation"):
    """Its signer could not reach a peer, which refutes that by a Presence of a higher incarnation."""

    run: HexRun
    accused: HexPeer
    instance: LinkId
    incarnation: Incarnation


class LinkUse(Record, frozen=True, kw_only=True, tag="LinkUse"):
    """A note, when a link comes up and when it changes: what its sender wants of the link."""

    watches_all: bool  # it wants a heartbeat every 2 s, and keeps links to everybody
    is_kept: bool


class News(Record, frozen=True, kw_only=True, tag="News"):
    """A note: claims that the receiver may not have heard."""

    claims: Claims
    is_compared: bool = False  # found by anti-entropy: no news to most others


class Probing(Record, frozen=True, kw_only=True, tag="Probing"):
    """A note: say something."""

    claims: Claims


class Answering(Record, frozen=True, kw_only=True, tag="Answering"):
    """A note: this is something."""

    claims: Claims


class ReachPlease(Record, frozen=True, kw_only=True, tag="ReachPlease"):
    """A note: I cannot hear `peer`; can you?"""

    peer: HexPeer


class Reached(Record, frozen=True, kw_only=True, tag="Reached"):
    """A note: I have heard `peer` since you asked."""

    peer: HexPeer


class ViewSums(Record, frozen=True, kw_only=True, tag="ViewSums"):
    """A note: one sum over the peers of each bucket; where ours differ, tell me."""

    sums: Annotated[bytes, Meta(min_length=8 * NUM_BUCKETS, max_length=8 * NUM_BUCKETS)]


class Listed(Record, frozen=True, kw_only=True):
    peer: HexPeer
    incarnation: Incarnation


class ViewList(Record, frozen=True, kw_only=True, tag="ViewList"):
    """A note: who is present here, in some buckets. Its receiver sends what is newer; `is_answer`: and no list."""

    buckets: Annotated[tuple[Annotated[int, Meta(ge=0, lt=NUM_BUCKETS)], ...], Meta(max_length=NUM_BUCKETS)]
    listed: Annotated[tuple[Listed, ...], Meta(max_length=MAX_LISTED)]
    is_answer: bool
