"""What the code sends and agrees on, of fixed inputs: a function per vector of docs/formats.md, for test_formats.py.

Keys come from the seeds 00 01 ... 1f (A) and 20 21 ... 3f (B). A record is shown as JSON with sorted keys where its
bytes would be long; its digest, of the canonical bytes, then stands beside it.
"""

import math
import struct
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import msgspec
import numpy as np
import torch

from tickets import body_of, signed_ticket
from weft import wire
from weft.anchor.archive import Begin, KeptRound, KeptWork
from weft.chat.grammar import FormWanted
from weft.codec.blocks import Blocks
from weft.codec.build import build
from weft.codec.codec import Codec
from weft.codec.config import (
    E3m0Config,
    Fp8Config,
    Int2Config,
    Int4Config,
    Int8Config,
    NonzeroConfig,
    RandomKConfig,
    SignConfig,
    TopKConfig,
)
from weft.codec.dense import Bf16, Fp32
from weft.codec.quantize import Int8
from weft.compose.experts.clusters import Clusters
from weft.compose.experts.tfidf import Tfidf
from weft.compose.paths.levels import LevelsConfig
from weft.compose.paths.routing import made
from weft.compose.space import Space
from weft.data.assign import leases, windows_at
from weft.data.rows import Packer, words
from weft.data.store import DataIndex, ShardInfo, ShardStore
from weft.data.tokenizer import ByteTokenizer, CharTokenizer
from weft.engine.draw import Drawing, bits_of, draw, gumbel
from weft.engine.fingerprint import fingerprint
from weft.ids import Attempt, BranchId, Digest, Round, RunId, Tokens
from weft.keys import Identity
from weft.ledger.tree import Tree, root_of_tops
from weft.model.config import ModelConfig
from weft.net.admission import ByTicket
from weft.net.lan import beacon_key, seal_beacon
from weft.net.link.handshake import prove
from weft.net.messages import BlobHeader, BlobRequest, Call, Contact, Hello, RangeRequest
from weft.net.ticket import issue
from weft.net.transport.frame import encode_frame
from weft.net.transport.tls_certificate import make_certificate
from weft.net.transport.tls_handshake import Challenge, ClientProof, Welcome, preamble
from weft.peer.chain import genesis, open_branch
from weft.peer.messages import NamedState, StateRequest, WorkAnswer, WorkRequest
from weft.store.journal import Votes
from weft.sync.governance import enact, read_lie
from weft.sync.merge.reduce import Coding, Merger
from weft.sync.method.choices import Choices, InnerSgdConfig, SgdConfig
from weft.sync.method.schedule import ConstantConfig
from weft.sync.records import quarantine
from weft.sync.records.acts import Act, Amend, Ballot, FalsePassage, Finding, Rewind, RewindBallot, Warrant
from weft.sync.records.charter import AuditTerms, Charter, ExactTerms, GradientTerms, PassageTerms, Settings
from weft.sync.records.counters import with_false, with_taken_out
from weft.sync.records.index import StateIndex, VectorIndex
from weft.sync.records.messages import (
    Accept,
    Certificate,
    Contribution,
    HeldWork,
    Manifest,
    PartResult,
    Promise,
    RoundNote,
    Stake,
    counted,
    entry_of,
    header_of,
    next_base,
    past_after,
)
from weft.sync.records.parts import cut
from weft.sync.records.work import MadeStep, Segment, Work
from weft.sync.round.groups import Offer, record_of
from weft.sync.round.rules import Durable, leader
from weft.sync.round.shares import claim_of, weighed
from weft.texts.chain import chain_of, joined, key_of
from weft.texts.messages import OpenSequence, RowsOfText, TextRows, TokenDrawn, drawn_how, id_of
from weft.texts.receipts.receipt import Receipt, ReceiptHeader, record_digest, row_digest, rows_digest, weights_digest
from weft.verify.draw import Draw, drawn
from weft.verify.evidence.operations import program_of, prove_operation, tree_of
from weft.verify.evidence.program.evaluate import named, taken
from weft.verify.evidence.records import Ground, ShownState
from weft.verify.evidence.steps import prove_step
from weft.verify.passages import Passage
from weft.verify.seals import Salt, Sealed, seal_of

Vector = dict[str, str]

SEED = bytes(range(32))
A = Identity.from_seed(SEED)
B = Identity.from_seed(bytes(range(32, 64)))
C = Identity.from_seed(bytes(range(64, 96))).peer
SECRET = bytes(range(16))
TEXT = (5, 6, 7)  # tokens
NONCE = bytes(range(64, 96))
RUN = RunId(wire.digest(b"run"))
QUOTA = 2  # samples that each member trains on in a round


def shown(record: msgspec.Struct) -> Vector:
    return {"json": msgspec.json.encode(record, order="sorted").decode(), "digest": wire.digest_of(record)}


# --- of a text ---


def text() -> Vector:
    name, key = id_of(A.peer, SECRET), key_of(SECRET, round=8)
    chain = chain_of(key, TEXT)
    ids = b"".join(token.to_bytes(4, "little") for token in TEXT[1:])
    rows = RowsOfText(sequence=name, attempt=2, start=1, chain=joined(chain[1:]), data=ids)
    drawn = TokenDrawn(sequence=name, attempt=2, place=3, chain=chain[-1], token=300, logprob=-0.5)
    return {
        "name": name.hex(),
        "key of the chain": key.hex(),
        "chain": " ".join(each.hex() for each in chain),
        "two rows to stage 1": wire.encode(TextRows(stage=1, rows=(rows,))).hex(),
        "token 300": wire.encode(drawn).hex(),
    }


def opened_by_a() -> OpenSequence:
    key = key_of(SECRET, round=8)
    return OpenSequence(
        sequence=id_of(A.peer, SECRET),
        secret=SECRET,
        attempt=2,
        stage=0,
        round=8,
        inward=C,
        onward=B.peer,
        most=64,
        places=(0, 1, 2, 3),
        chain=joined(chain_of(key, TEXT)),
        key=key,
        drawing=drawn_how(Drawing(temperature=0.5, seed=SEED)),
        tokens=b"",
        num_prompt=3,
        stop_ids=(0,),
    )


def text_opened() -> Vector:
    return shown(opened_by_a())


def text_formed() -> Vector:
    form = FormWanted(schema={"type": "boolean"}, ends=(0,)).to_json()
    tokens = b"".join(token.to_bytes(4, "little") for token in TEXT)
    call = msgspec.structs.replace(opened_by_a(), stage=1, inward=B.peer, onward=C, key=None, tokens=tokens, form=form)
    return {"form": form.decode(), "digest": wire.digest_of(call)}


def draw_of_token() -> Vector:
    drawing, logits = Drawing(temperature=0.5, seed=SEED), np.array([1.0, 0.0, -1.0, 1.5])
    bits = bits_of(SEED, 3, len(logits))
    return {
        "bits": " ".join(f"{each:016x}" for each in bits),
        "noise": " ".join(f"{each:.12f}" for each in gumbel(bits)),
        "tokens at 3 to 10": " ".join(str(draw(logits, drawing, place).token) for place in range(3, 11)),
    }


def receipt() -> Vector:
    header = ReceiptHeader(
        sequence=bytes(range(16)),
        attempt=0,
        stage=1,
        round=8,
        weights=weights_digest(bytes(4)),
        numbers="exact",
        inward=B.peer,
        onward=C,
    )
    given = [np.array([1.0, -2.5], "<f4").tobytes(), np.array([0.0, 3.0], "<f4").tobytes()]
    made = np.array([[0.5, 300.0], [-1.0, 0.25]], "<f4")
    signed = Receipt(
        header=record_digest(header),
        start=64,
        num=2,
        given=rows_digest(map(row_digest, given)),
        made=rows_digest(row_digest(row.tobytes()) for row in made),
        fingerprint=fingerprint(made[1]),
        previous=record_digest(header),
    )
    wide = np.zeros(300, dtype=np.float32)
    wide[[2, 299]] = 1.0, -70_000.0
    return {
        "header": wire.encode(header).hex(),
        "weights of one number 0.0": header.weights.hex(),
        "row 1.0 -2.5": row_digest(given[0]).hex(),
        "bytes": wire.encode(signed).hex(),
        "signature of A": wire.seal(A, signed).signature.hex(),
        "fingerprint of 300 numbers": fingerprint(wide).hex(),
    }


# --- on a stream ---


def frame() -> Vector:
    call = Call(number=3, method="StateRequest", deadline_s=10.0, body=wire.encode(StateRequest(run=RUN)))
    return {
        "of the bytes of weft": encode_frame(b"weft").hex(),
        "of a call": encode_frame(wire.encode(call)).hex(),
        "digest of the call": wire.digest_of(call),
    }


def blob_request() -> Vector:
    return {
        "request": encode_frame(wire.encode(BlobRequest(digest=wire.digest(b"weft")))).hex(),
        "answer, 4 bytes": encode_frame(wire.encode(BlobHeader(nbytes=4))).hex() + b"weft".hex(),
        "answer, not here": encode_frame(wire.encode(BlobHeader(nbytes=None))).hex(),
        "request of the last two bytes": encode_frame(
            wire.encode(RangeRequest(digest=wire.digest(b"weft"), begin=2, end=4))
        ).hex(),
        "answer to that": encode_frame(wire.encode(BlobHeader(nbytes=4))).hex() + b"ft".hex(),
    }


def tls_handshake() -> Vector:
    certificate = make_certificate(A)
    named = wire.digest(certificate)
    proof = wire.seal(B, ClientProof(certificate=named, nonce=NONCE, lane="control"))
    return {
        "preamble, control": preamble("control").hex(),
        "preamble, bulk": preamble("bulk").hex(),
        "certificate of A": certificate.hex(),
        "its digest": named,
        "challenge": encode_frame(wire.encode(Challenge(nonce=NONCE))).hex(),
        "what B signs": (b"weft.signed.v1\x00ClientProof\x00" + proof.body).hex(),
        "its signature": proof.signature.hex(),
        "welcome": encode_frame(wire.encode(Welcome(peer=B.peer))).hex(),
        "digest of the proof's frame": wire.digest(encode_frame(wire.encode(proof))),
    }


def admission() -> Vector:
    proof = prove(ByTicket(secret=SECRET), RUN, B.peer, A.peer)
    hello = Hello(
        version=1,
        run=RUN,
        name="b",
        proof=proof,
        addresses=("tls://192.0.2.2:4433",),
        link=bytes(8),
        instance=bytes([1] * 8),
    )
    return {"secret": SECRET.hex(), "proof of B to A": proof.hex(), "hello": wire.encode(hello).hex()}


def short_ticket() -> Vector:
    home = f"iroh://{A.peer}?addr=198.51.100.7:4434&addr=192.168.1.7:4434&relay=https://relay.example"
    everywhere = ("tls://198.51.100.7:4433", "tls://192.168.1.7:4433", "tls://127.0.0.1:4433", home)
    named = ("tls://a.example:443", f"iroh://{A.peer}?addr=[2001:db8::7]:4434")
    return {
        "at home and outside": issue(RUN, [Contact(peer=A.peer, name="a", addresses=everywhere)], SECRET),
        "by a name, no secret": issue(RUN, [Contact(peer=A.peer, name="a", addresses=named)], None),
        "three members": issue(
            RUN,
            [
                Contact(peer=peer, name="", addresses=(f"tls://192.0.2.{number}:{4433 + number // 3}",))
                for number, peer in enumerate((A.peer, B.peer, C), 1)
            ],
            SECRET,
        ),
    }


def ticket() -> Vector:
    contacts = [Contact(peer=A.peer, name="a", addresses=("tls://192.0.2.1:4433",))]
    body = body_of(A, RUN, contacts, SECRET)
    return {
        "body": wire.encode(body).hex(),
        "signature": wire.seal(A, body).signature.hex(),
        "ticket": signed_ticket(A, RUN, contacts, SECRET),
    }


def beacon() -> Vector:
    member = Contact(peer=A.peer, name="a", addresses=("tls://192.168.1.7:4433",))
    key = beacon_key(RUN, SECRET)
    return {
        "key": key.hex(),
        "asks": seal_beacon(key, NONCE[:12], member, asks=True).hex(),
        "tells": seal_beacon(key, NONCE[:12], member, asks=False).hex(),
    }


# --- data ---


def shard_of(text: str) -> bytes:
    return np.append(ByteTokenizer().encode(text), 256).astype("<u2").tobytes()


def info_of(text: str) -> ShardInfo:
    data = shard_of(text)
    return ShardInfo(digest=wire.digest(data), num_tokens=len(data) // 2, nbytes=len(data))


TRAIN, HELDOUT = "weft and warp", "woof"
INDEX = DataIndex(
    dtype="uint16",
    train=(info_of(TRAIN),),
    heldout=(info_of(HELDOUT * 3),),
    train_text_nbytes=len(TRAIN),
    heldout_text_nbytes=3 * len(HELDOUT),
    tokenizer=ByteTokenizer().digest,
    vocab_size=257,
)


def tokenizer() -> Vector:
    return {
        "of bytes": ByteTokenizer().to_bytes().hex(),
        "its digest": ByteTokenizer().digest,
        "of the characters a, b, é": CharTokenizer.of(["éba"]).to_bytes().hex(),
    }


def shard_of_rows() -> Vector:
    texts = (([7, 8, 9, 10], [0, 0, 1, 1]), ([11, 12, 13], [0, 1, 0]), ([14, 15], [0, 1]))
    packer, rows = Packer(8, 256), list[np.ndarray]()
    for ids, is_trained in texts:
        rows += packer.add(words(np.array(ids, np.uint32), np.array(is_trained, bool)))
    data = np.concatenate([*rows, *packer.finish()]).astype("<u4").tobytes()
    return {"bytes": data.hex(), "name": wire.digest(data)}


def shard() -> Vector:
    with tempfile.TemporaryDirectory() as folder:
        store = ShardStore(Path(folder))
        name = store.put(shard_of(TRAIN))
        return {"bytes": (Path(folder) / name).read_bytes().hex(), "name": name}


def data_index() -> Vector:
    return shown(INDEX)


# --- a round ---

PARTS = cut(8192, (1, 1))


def payload(peer: Identity, part: int) -> bytes:
    sign = 1.0 if peer is A else -0.5
    return bytes(Blocks(Int8(), 256).encode(torch.full((len(PARTS[part]),), sign * (part + 1))))


def contribution(peer: Identity, tokens: int) -> Contribution:
    parts = tuple(wire.digest(payload(peer, part)) for part in range(len(PARTS)))
    return Contribution(peer=peer.peer, tokens=Tokens(tokens), parts=parts)


def result_of(part: int) -> Digest:
    merger = Merger(len(PARTS[part]), Coding(Blocks(Int8(), 256), Blocks(Int8(), 256)))
    for peer, weight in sorted(((A, 32), (B, 16)), key=lambda pair: pair[0].peer):
        merger.add(weight, payload(peer, part))
    return merger.result().digest


def first_charter() -> Charter:
    method = Choices(every=QUOTA, send="delta", apply=SgdConfig(lr=1.0), codec=Int8Config())
    settings = Settings(tokens=1000, seq_len=8, batch_size=1, schedule=ConstantConfig(lr=0.01), method=method)
    return Charter(stewards=(B.peer,), serials=(0,), settings=settings, max_seq_len=16)


@cache
def opening_manifest() -> Manifest:
    base = genesis(RUN, A.peer, first_charter())
    return open_branch(base, [A.peer, B.peer], A.peer, base.branch)


@cache
def second_manifest() -> Manifest:
    base = next_base(opening_manifest(), first_charter())
    members = base.electorate
    leased, cursor = leases(base.cursor, dict.fromkeys(members, base.quota))
    return Manifest(
        run=base.run,
        branch=base.branch,
        round=base.round,
        attempt=Attempt(0),
        leader=leader(base, Attempt(0)),
        previous=base.previous,
        contributions=tuple(
            sorted(map(counted, (contribution(A, 16), contribution(B, 16))), key=lambda each: each.peer)
        ),
        parts=tuple(PartResult(owner=owner, result=result_of(part)) for part, owner in enumerate(members)),
        members=members,
        uplinks=base.uplinks,
        joined=(),
        left=(),
        leases=leased,
        cursor=cursor,
        committed_tokens=Tokens(32),
        acts=(),
        charter=wire.digest_of(first_charter()),
    )


def opening() -> Vector:
    return shown(opening_manifest())


def manifest() -> Vector:
    return shown(second_manifest())


def entry() -> Vector:
    recorded = msgspec.structs.replace(first_charter(), is_recorded=True)
    start = genesis(RUN, A.peer, recorded)
    first = open_branch(start, [A.peer, B.peer], A.peer, start.branch)
    base, plain = next_base(first, recorded), second_manifest()
    held = entry_of(base, plain.contributions)
    assert held is not msgspec.UNSET
    manifest = msgspec.structs.replace(
        plain, previous=base.previous, charter=wire.digest_of(recorded), uncounted=base.uncounted, entry=held
    )
    tops = past_after(manifest, held)
    return {
        "json": shown(held)["json"],
        "manifest's digest": wire.digest_of(manifest),
        "header": header_of(manifest, held).pack().hex(),
        "past after it": tops.hex(),
        "its root": root_of_tops(2, tops),
    }


STATES = [wire.digest(b"state %d" % number) for number in range(4)]


def signed_work() -> wire.Signed:
    head = opening_manifest()
    done = Work(
        run=RUN,
        branch=head.branch,
        round=Round(1),
        peer=A.peer,
        segments=(Segment(head=wire.digest_of(head), round=Round(0), holder=A.peer, num_steps=3),),
        follows=None,
        num_before=0,
        trace=Tree(map(bytes.fromhex, STATES)).root(),
        payload=wire.digest(b"payload"),
        tokens=Tokens(24),
        error=None,
        left=None,
    )
    return wire.seal(A, done)


def work() -> Vector:
    signed, after = signed_work(), second_manifest()
    draw = Draw(run=RUN, branch=after.branch, round=after.round, manifest=wire.digest_of(after))
    ticket = wire.seal(B, draw)
    number = drawn(ticket.signature, wire.digest_of(signed), 1.0, 2, 3)
    return {
        "body": signed.body.hex(),
        "signature of A": signed.signature.hex(),
        "signature of B's draw": ticket.signature.hex(),
        "steps": "none" if number is None else str(number),
        "digest of the signed work": wire.digest_of(signed),
    }


def audit_seal() -> Vector:
    work, state = wire.digest(b"the signed work"), wire.digest(b"state 2")
    salt = wire.digest(wire.seal(B, Salt(run=RUN, work=work, before=1)).signature)
    signed = wire.seal(B, Sealed(run=RUN, work=work, before=1, seal=seal_of(salt, state, B.peer)))
    return {"state": state, "salt": salt, "body": signed.body.hex(), "signature of B": signed.signature.hex()}


def archive() -> Vector:
    head, tree = opening_manifest(), Tree(map(bytes.fromhex, STATES))
    begin = Begin(head=head, charter=first_charter(), opening=wire.seal(A, head))
    ends = [NamedState(state=STATES[at], path=tree.path(at)) for at in (0, 3)]
    kept = KeptWork(signed=signed_work(), begins=(ends[0],), ends=(ends[1],))
    round = KeptRound(certificate=signed_certificate(), works=(kept,))
    request = WorkRequest(work=kept.name, keeps_all=True)
    return {
        "digest of begin": wire.digest_of(begin),
        "nbytes of the round": str(len(wire.encode(round))),
        "its digest": wire.digest_of(round),
        "state of begins": wire.encode(ends[0]).hex(),
        "request": wire.encode(request).hex(),
        "digest of the answer": wire.digest_of(WorkAnswer(is_here=True, begins=kept.begins, ends=kept.ends)),
    }


def steward_act() -> wire.Signed:
    return wire.seal(B, Act(run=RUN, serial=1, deed=Amend(reason="it diverges", every=4)))


def group() -> Vector:
    base = next_base(opening_manifest(), first_charter())
    payload = wire.digest(b"payload")
    stakes = [Stake(peer=C, tokens=Tokens(16), samples=1), Stake(peer=A.peer, tokens=Tokens(32), samples=2)]
    record = record_of(base, A.peer, stakes, [payload, Digest("")])
    offer = Offer(
        run=base.run, branch=base.branch, round=base.round, sponsor=A.peer, tokens=16, payload=payload, tokens_per_s=8.0
    )
    claim = msgspec.json.encode(claim_of(record, first_charter()), order="sorted").decode()
    of_offer = {f"offer's {name}": value for name, value in shown(offer).items()}
    return {**shown(record), "claim": claim, **of_offer}


def charter() -> Vector:
    return shown(first_charter())


def act() -> Vector:
    signed, base = steward_act(), next_base(opening_manifest(), first_charter())
    after = enact(base.charter, base.body, (Warrant(letters=(signed,)),)).charter
    return {
        "body": signed.body.hex(),
        "signature of B": signed.signature.hex(),
        "digest of the charter after it": wire.digest_of(after),
    }


def ballot() -> Vector:
    signed = wire.seal(A, Ballot(run=RUN, peer=B.peer, serial=1, reason="it sends noise"))
    return {"body": signed.body.hex(), "signature of A": signed.signature.hex()}


def rewound() -> Vector:
    start = msgspec.structs.replace(first_charter(), audits=AuditTerms(rate=0.25, trace_every=1))
    base = msgspec.structs.replace(next_base(second_manifest(), start), round=Round(3), electorate=(A.peer, B.peer))
    to = Rewind(
        round=Round(1), manifest=wire.digest_of(second_manifest()), state=wire.digest(b"a state"), reason="it diverges"
    )
    cast = tuple(wire.seal(each, RewindBallot(run=RUN, rewind=to)) for each in sorted((A, B), key=lambda one: one.peer))
    after = enact(start, base.body, (Warrant(letters=cast),)).charter
    return {
        "body": cast[0].body.hex(),
        f"signature of {'A' if cast[0].signer == A.peer else 'B'}": cast[0].signature.hex(),
        "rewound": msgspec.json.encode(after.rewound, order="sorted").decode(),
        "digest of the charter after it": wire.digest_of(after),
    }


def false_work() -> Vector:
    base, second = next_base(opening_manifest(), first_charter()), second_manifest()
    found = weighed(base, second, opening_manifest().leases, B.peer)
    assert found is not None
    verdict = Finding(
        run=RUN, peer=B.peer, round=second.round, work=wire.digest(b"work"), before=0, outcome="differs", weighed=found
    )
    charter = with_false(first_charter(), B.peer, second.round, found)
    after = with_taken_out(msgspec.structs.replace(base, round=Round(3), charter=charter), charter, (B.peer,))
    assert after is not None
    return {
        "body": wire.seal(A, verdict).body.hex(),
        "signature of A": wire.seal(A, verdict).signature.hex(),
        "false_works": msgspec.json.encode(charter.false_works, order="sorted").decode(),
        "digest of the charter after round 3 has taken it out": wire.digest_of(after),
    }


def quarantined() -> Vector:
    terms = AuditTerms(rate=0.25, trace_every=1, quarantine=3)
    start = msgspec.structs.replace(first_charter(), audits=terms)
    base = next_base(opening_manifest(), start)
    joined = quarantine.after(start, Round(1), base.electorate, (B.peer,))
    held = HeldWork(peer=B.peer, work=wire.digest(b"work"))
    waits = quarantine.after(joined, Round(2), base.electorate, (), (), (held,))
    verdict = Finding(run=RUN, peer=B.peer, round=Round(2), work=held.work, before=0, outcome="equal")
    found = Warrant(letters=(wire.seal(A, verdict),))
    cleared = enact(waits, msgspec.structs.replace(base, charter=waits).body, (found,)).charter
    return {
        "audits": msgspec.json.encode(terms, order="sorted").decode(),
        "held": msgspec.json.encode((held,), order="sorted").decode(),
        "quarantined": msgspec.json.encode(cleared.quarantined, order="sorted").decode(),
        "digest of the charter after it was cleared": wire.digest_of(cleared),
    }


def false_passage() -> Vector:
    """A has computed a micro-batch again that B, of the last of two stages, says to have computed."""
    x, dx, tokens = (wire.digest(name.encode()) for name in ("x", "dx", "tokens"))
    passage = Passage(
        run=RUN,
        head=wire.digest(b"manifest"),
        stage=1,
        origin=A.peer,
        number=7,
        attempt=0,
        round=3,
        step=0,
        num_samples=2,
        sender=A.peer,
        tokens=tokens,
        given=x,
        gradient=dx,
        loss=2.5,
    )
    signed = wire.seal(B, passage)
    found = wire.seal(A, FalsePassage(run=RUN, peer=B.peer, round=Round(3), passage=signed, why="it is not"))
    return {
        "passages": msgspec.json.encode(PassageTerms(rate=0.25), order="sorted").decode(),
        "passage": msgspec.json.encode(passage, order="sorted").decode(),
        "its body": signed.body.hex(),
        "signature of B": signed.signature.hex(),
        "digest of A's letter": wire.digest_of(found),
        "signature of A": found.signature.hex(),
    }


def contradiction() -> Vector:
    base = next_base(opening_manifest(), first_charter())
    denied = RoundNote(branch=BranchId(RUN), round=base.round, message=Promise(attempt=Attempt(1), accepted=None))
    lie = Warrant(letters=(wire.seal(A, vote_note()), wire.seal(A, denied)))
    return {
        "nbytes": str(len(wire.encode(lie))),
        "digest": wire.digest_of(lie),
        "digest of the charter after it": wire.digest_of(enact(base.charter, base.body, (lie,)).charter),
    }


def evidence() -> Vector:
    """A says that a step of SGD at rate 0.01, along a gradient of ones, has left three parameters where they were."""
    exact = ExactTerms(optimizer=InnerSgdConfig(), clip=2.0, num_decayed=0)
    charter = msgspec.structs.replace(first_charter(), audits=AuditTerms(rate=0.1, trace_every=1, exact=exact))
    head = msgspec.structs.replace(second_manifest(), charter=wire.digest_of(charter))
    stays, ones = (np.array(each, np.float32) for each in ([1, 2, 3], [1, 1, 1]))
    state, gradient = (
        wire.encode(
            StateIndex(vectors=(VectorIndex(name=name, num=3, chunks=(wire.digest(vector.astype("<f4").tobytes()),)),))
        )
        for name, vector in (("local", stays), ("gradient", ones))
    )
    trace = Tree(2 * [bytes.fromhex(wire.digest(state))])
    segment = Segment(head=wire.digest_of(head), round=head.round, holder=A.peer, num_steps=1)
    of_work = msgspec.structs.replace(
        wire.claimed(signed_work(), Work), round=Round(2), segments=(segment,), trace=trace.root(), tokens=Tokens(8)
    )
    signed = wire.seal(A, of_work)
    made = MadeStep(run=RUN, work=wire.digest_of(signed), before=0, gradient=wire.digest(gradient), norm=math.sqrt(3.0))
    ground = Ground(manifest=head, charter=charter)
    states = tuple(ShownState(index=state, path=trace.path(number)) for number in (0, 1))
    of_step = prove_step(of_work, made, ground, states, gradient, ({"local": stays}, {"local": stays}), ones)  # type: ignore[arg-type]
    lie = Warrant(letters=(signed, wire.seal(A, made)), shown=wire.encode(of_step))
    base = msgspec.structs.replace(next_base(second_manifest(), charter), electorate=(A.peer, B.peer))
    return {
        "step's body": lie.letters[1].body.hex(),
        "signature of A": lie.letters[1].signature.hex(),
        "nbytes": str(len(wire.encode(lie))),
        "digest": wire.digest_of(lie),
        "lie": read_lie(lie).what,
        "digest of the charter after it": wire.digest_of(enact(charter, base.body, (lie,)).charter),
    }


def gradient() -> Vector:
    """A says that a step's first word is another than the one that it was leased."""
    model = ModelConfig(
        vocab_size=8, num_layers=1, num_heads=2, num_kv_heads=1, width=4, ffn_width=3, max_seq_len=8, is_tied=True
    )
    raw = (np.arange(100) * 5 % 8).astype("<u2").tobytes()
    train = (ShardInfo(digest=wire.digest(raw), num_tokens=100, nbytes=len(raw)),)
    data = msgspec.structs.replace(INDEX, dtype="uint16", train=train, vocab_size=8)
    of_gradient = GradientTerms(model=model, micro_batch=1, seed=7, data=wire.digest_of(data))
    exact = ExactTerms(optimizer=InnerSgdConfig(), clip=2.0, num_decayed=0, gradient=of_gradient)
    charter = msgspec.structs.replace(first_charter(), audits=AuditTerms(rate=0.1, trace_every=1, exact=exact))
    head = msgspec.structs.replace(second_manifest(), charter=wire.digest_of(charter))
    found = program_of(charter)
    local = ((np.arange(found.num_parameters) * 37 % 29 - 14) / np.float32(16)).astype(np.float32)
    position = next(lease.start for lease in head.leases if lease.peer == A.peer)
    window = int(windows_at(np.array([position]), 12, 7)[0])
    words = np.frombuffer(raw, "<u2")[8 * window : 8 * window + 9].astype(np.uint32)
    lied = words.copy()
    lied[0] ^= 1
    honest, names = named(found, local, words[None]), named(found, local, lied[None])
    chunk = wire.digest(local.astype("<f4").tobytes())
    state = wire.encode(StateIndex(vectors=(VectorIndex(name="local", num=len(local), chunks=(chunk,)),)))
    trace = Tree(2 * [bytes.fromhex(wire.digest(state))])
    segment = Segment(head=wire.digest_of(head), round=head.round, holder=A.peer, num_steps=1)
    of_work = msgspec.structs.replace(
        wire.claimed(signed_work(), Work), round=Round(2), segments=(segment,), trace=trace.root(), tokens=Tokens(8)
    )
    signed = wire.seal(A, of_work)
    (length,) = taken(found, local, lied[None], [len(names) - 1]).values()
    made = MadeStep(
        run=RUN,
        work=wire.digest_of(signed),
        before=0,
        gradient=names[found.gradient],
        norm=float(length[0]),
        operations=tree_of(names).root(),
    )
    before, ground = ShownState(index=state, path=trace.path(0)), Ground(manifest=head, charter=charter)
    false, right, shards = lied.view(np.float32), {0: words}, {train[0].digest: raw}
    word = prove_operation(of_work, made, ground, before, local, names, 0, false, right, data, shards.get)
    lie = Warrant(letters=(signed, wire.seal(A, made)), shown=wire.encode(word))
    return {
        "exact": msgspec.json.encode(exact, order="sorted").decode(),
        "operations": str(len(names)),
        "last operations": ", ".join(each.name for each in found.operations[-3:]),
        "root over them, of the leased words": tree_of(honest).root(),
        "gradient": honest[found.gradient],
        "step's body": lie.letters[1].body.hex(),
        "nbytes": str(len(wire.encode(lie))),
        "digest": wire.digest_of(lie),
        "lie": read_lie(lie).what,
    }


def round_note() -> Vector:
    note = vote_note()
    return {"bytes": wire.encode(note).hex(), "signature of A": wire.seal(A, note).signature.hex()}


def vote_note() -> RoundNote:
    second = second_manifest()
    accept = Accept(attempt=Attempt(0), manifest=wire.digest_of(second))
    return RoundNote(branch=BranchId(RUN), round=second.round, message=accept)


def signed_certificate() -> Certificate:
    votes = sorted((wire.seal(peer, vote_note()) for peer in (A, B)), key=lambda vote: vote.signer)
    return Certificate(attempt=Attempt(0), manifest=second_manifest(), votes=tuple(votes), farewells=())


def certificate() -> Vector:
    made = signed_certificate()
    return {"nbytes": str(len(wire.encode(made))), "digest": wire.digest_of(made)}


def path_router() -> Vector:
    weights, biases = np.array([[1.0, -0.5, 2.0], [0.0, 0.25, 3.0]]), np.array([0.5, -1.0])
    levels = LevelsConfig(levels=(2, 1))
    return shown(made("softmax", levels, Digest("ab" * 32), weights, biases).record)


def written(slot: bytes) -> str:
    """Return a slot without the zeros behind its record."""
    (length,) = struct.unpack_from("<Q", slot, 8)
    return slot[: 80 + length].hex()


def promises() -> Vector:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "durable.bin"
        kept = Votes(path)
        kept.write(Durable(base=next_base(opening_manifest(), first_charter())))
        first = path.read_bytes()
        kept.write(Durable(base=next_base(opening_manifest(), first_charter()), promised=Attempt(1)))
        both = path.read_bytes()
        kept.close()
    return {
        "file": str(len(first)),
        "slot 1 after one write": written(first[len(first) // 2 :]),
        "slot 0 after two": written(both),
        "digest of the file after two": wire.digest(both),
    }


# --- tensors as bytes ---

NUMBERS = [0.0, 1.0, -2.5, 1 / 3, 1e-3, -127.0, 3.0e38, -1.0e-45]


def codec_fp32() -> Vector:
    return encoded(Fp32(), NUMBERS)


def codec_bf16() -> Vector:
    return encoded(Bf16(), [*NUMBERS, 3.4e38])


def codec_int8() -> Vector:
    numbers = [*([0.0] * 32), *(0.01 * place for place in range(-16, 16)), 1.0, -1 / 3]
    return encoded(Blocks(Int8(), 32), numbers)


def ramp() -> list[float]:
    return [*(0.05 * place for place in range(-16, 16)), 1.0, -1 / 3]


def codec_fp8() -> Vector:
    return encoded(build(Fp8Config(block=32)), ramp())


def codec_int4() -> Vector:
    return encoded(build(Int4Config(block=32)), ramp())


def codec_e3m0() -> Vector:
    return encoded(build(E3m0Config(block=32)), ramp())


def codec_int2() -> Vector:
    return encoded(build(Int2Config(block=32)), ramp())


def codec_sign() -> Vector:
    return encoded(build(SignConfig(block=32)), ramp())


def codec_nonzero() -> Vector:
    numbers = [0.0] * 41
    numbers[3], numbers[19], numbers[40] = 1.0, -0.5, 1 / 3
    return encoded(build(NonzeroConfig()), numbers)


def codec_top_k() -> Vector:
    return encoded(build(TopKConfig(kept=1024)), [*ramp()[:9], -0.8])


def codec_random_k() -> Vector:
    return encoded(build(RandomKConfig(kept=1024, values="bf16"), round=7), ramp()[:10])


def encoded(chosen: Codec, numbers: list[float]) -> Vector:
    vector = torch.tensor(numbers, dtype=torch.float32)
    data = bytes(chosen.encode(vector))
    again = chosen.decode(data, len(numbers)).numpy().astype("<f4").tobytes()
    return {"numbers": vector.numpy().astype("<f4").tobytes().hex(), "bytes": data.hex(), "decoded": again.hex()}


# --- of members that are put together ---


def space() -> Vector:
    rows = torch.tensor([[1.0, -1.0], [0.5, 2.0], [0.0, 0.0]])
    found = Space(rows, torch.ones(2), 2 * rows, 1e-5, ByteTokenizer().digest)
    return {"record": wire.encode(found.record).hex(), "digest": found.digest}


def clusters() -> Vector:
    tfidf = Tfidf(("anchor", "pear"), np.array([1.0, 1.5], np.float32), np.array([[1.0], [-0.5]], np.float32))
    found = Clusters(tfidf, np.array([[0.25], [-2.0]], np.float32))
    return {"record": wire.encode(found.record).hex(), "digest": found.digest}


VECTORS: dict[str, Callable[[], Vector]] = {
    "text": text,
    "text-opened": text_opened,
    "text-formed": text_formed,
    "draw": draw_of_token,
    "receipt": receipt,
    "frame": frame,
    "blob": blob_request,
    "tls": tls_handshake,
    "admission": admission,
    "short-ticket": short_ticket,
    "ticket": ticket,
    "beacon": beacon,
    "tokenizer": tokenizer,
    "shard": shard,
    "shard-of-rows": shard_of_rows,
    "data-index": data_index,
    "opening": opening,
    "manifest": manifest,
    "entry": entry,
    "work": work,
    "audit-seal": audit_seal,
    "archive": archive,
    "space": space,
    "clusters": clusters,
    "group": group,
    "charter": charter,
    "act": act,
    "ballot": ballot,
    "false-work": false_work,
    "rewind": rewound,
    "false-passage": false_passage,
    "quarantine": quarantined,
    "contradiction": contradiction,
    "evidence": evidence,
    "gradient": gradient,
    "round-note": round_note,
    "certificate": certificate,
    "path-router": path_router,
    "promises": promises,
    "codec-fp32": codec_fp32,
    "codec-bf16": codec_bf16,
    "codec-int8": codec_int8,
    "codec-fp8": codec_fp8,
    "codec-int4": codec_int4,
    "codec-e3m0": codec_e3m0,
    "codec-int2": codec_int2,
    "codec-sign": codec_sign,
    "codec-top-k": codec_top_k,
    "codec-nonzero": codec_nonzero,
    "codec-random-k": codec_random_k,
}
