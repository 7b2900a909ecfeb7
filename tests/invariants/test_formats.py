"""docs/formats.md under test: every vector on the page is what the code makes.

A vector is a fenced block whose first line reads ```` ```vector NAME ````, with lines `field = value`. Add one by
writing a function below, or in vectors.py for what is sent and agreed on, and pasting what its failure prints.
"""

import re
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives import serialization

from invariants import vectors
from sinks import MemorySink
from weft import keys, wire
from weft.clock import VirtualClock
from weft.codec.sparse import words
from weft.data.store import DataIndex, ShardInfo, ShardStore
from weft.data.tokenizer import ByteTokenizer
from weft.events import EventLog, LinkDown, RoundMissed
from weft.ids import Attempt, Digest, PeerId, Round, Tokens, start_of
from weft.ledger.opening import is_chunk, open_chunk
from weft.ledger.tree import Tree, is_leaf
from weft.log import JsonlSink, read_jsonl
from weft.model.came_with import CameWith, Ids
from weft.model.config import ModelConfig
from weft.model.initial import initial_vector
from weft.net import ticket
from weft.peer.chain import Chain
from weft.peer.state import checkpoint
from weft.rng import integers64, order_key, stream
from weft.run.config import FrozenConfig, LoopConfig, RunConfig, TensorConfig, TrainConfig
from weft.run.genesis import read_run
from weft.run.outline import TicketAdmission
from weft.store.chunks import chunk_digests, raw, replica_digest, state_index
from weft.sync.method.presets import FedAvgConfig, spell_out
from weft.sync.method.schedule import ConstantConfig

PAGE = Path(__file__).parents[2] / "docs" / "formats.md"
SEED = bytes(range(32))


class Example(wire.Record, frozen=True, kw_only=True):
    """The record that the page describes."""

    round: int
    name: str
    weights: dict[str, float]
    blob: bytes
    parent: str | None = None


EXAMPLE = Example(round=300, name="wëft", weights={"b": 1.0, "a": -0.5}, blob=b"\x00\xff")


def record() -> dict[str, str]:
    return {"bytes": wire.encode(EXAMPLE).hex(), "digest": wire.digest_of(EXAMPLE)}


def digest() -> dict[str, str]:
    return {"empty": wire.digest(b""), "weft": wire.digest(b"weft"), "one MiB of zeros": wire.digest(bytes(1 << 20))}


def signed() -> dict[str, str]:
    sealed = wire.seal(keys.Identity.from_seed(SEED), EXAMPLE)
    return {
        "seed": SEED.hex(),
        "signer": sealed.signer,
        "message": (b"weft.signed.v1\x00Example\x00" + wire.encode(EXAMPLE)).hex(),
        "signature": sealed.signature.hex(),
        "digest of envelope": wire.digest_of(sealed),
    }


def key_file() -> dict[str, str]:
    pem = keys.Identity.from_seed(SEED).private_key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return {f"line {number}": line for number, line in enumerate(pem.decode().splitlines(), start=1)}


def event_line() -> dict[str, str]:
    memory = MemorySink()
    log = EventLog(VirtualClock(), PeerId("ab" * 32), [memory])
    log.emit(LinkDown(remote=PeerId("cd" * 32), reason="reset"))
    log.emit(RoundMissed(round=Round(3), carried_tokens=Tokens(4096), reason="late"))
    lines = [msgspec.json.encode(entry).decode() for entry in memory.entries]
    return {f"line {number}": line for number, line in enumerate(lines, start=1)}


def random_stream() -> dict[str, str]:
    words = integers64(stream(7, "data", 3), 4)
    return {
        "label": repr((7, "data", 3)),
        "words": " ".join(f"{word:016x}" for word in words),
        "order key of ('run', 3, 'peer')": order_key("run", 3, "peer"),
    }


def shard() -> ShardInfo:
    return ShardInfo(digest=wire.digest(bytes(range(40))), num_tokens=20, nbytes=40)


MODEL = ModelConfig(vocab_size=257, num_layers=1, num_heads=2, num_kv_heads=1, width=4, ffn_width=6, max_seq_len=8)


def run() -> RunConfig:
    return RunConfig(
        name="example",
        seed=7,
        model=MODEL,
        initial=Digest(initial()["digest"]),
        is_seeded=True,
        data=DataIndex(
            dtype="uint16",
            train=(shard(),),
            heldout=(shard(),),
            train_text_nbytes=20,
            heldout_text_nbytes=20,
            tokenizer=ByteTokenizer().digest,
            vocab_size=257,
        ),
        is_private=False,
        train=TrainConfig(seq_len=8, batch_size=2, tokens=Tokens(1000), schedule=ConstantConfig()),
        method=spell_out(FedAvgConfig(every=5), 4),
        admission=TicketAdmission(),
        orphan_after_s=None,
        is_strict=False,
        has_even_leases=True,
    )


def initial() -> dict[str, str]:
    vector = initial_vector(MODEL, 7)
    return {
        "seed": "7",
        "numbers": str(vector.numel()),
        "first": " ".join(number.hex() for number in vector[:3].tolist()),
        "last": " ".join(number.hex() for number in vector[-3:].tolist()),
        "digest": wire.digest(raw(vector)),
    }


def run_config() -> dict[str, str]:
    return {"bytes": wire.encode(run()).hex(), "digest": run().run}


def loop_config() -> dict[str, str]:
    config = LoopConfig(
        name="example",
        seed=7,
        initial=Digest(initial()["digest"]),
        method=spell_out(FedAvgConfig(every=5), 2),
        admission=TicketAdmission(),
        orphan_after_s=None,
        is_strict=False,
        tensors=(
            TensorConfig(name="0.weight", dtype="float32", shape=(2, 3)),
            TensorConfig(name="0.bias", dtype="bfloat16", shape=(2,)),
        ),
        frozen=(FrozenConfig(name="scale", dtype="int64", shape=(), digest=wire.digest(bytes(8))),),
        samples=1000,
        batch_size=4,
    )
    return {"bytes": wire.encode(config).hex(), "digest": config.run}


OUTER, MOMENTUM = torch.arange(262_145, dtype=torch.float32), torch.tensor([0.5, -0.0])


def state() -> dict[str, str]:
    return {
        "chunks of outer": " ".join(chunk_digests(OUTER)),
        "chunks of momentum": " ".join(chunk_digests(MOMENTUM)),
        "bytes": wire.encode(state_index({"outer": OUTER, "momentum": MOMENTUM})).hex(),
        "digest": replica_digest(OUTER, {"momentum": MOMENTUM}),
    }


def checkpoint_file() -> dict[str, str]:
    contents = checkpoint.Contents(
        software="0.1.0",
        serial=1,
        run=run().run,
        tokenizer=ByteTokenizer().digest,
        head=None,
        charter=None,
        replicated=state_index({"outer": torch.tensor([1.0, 2.0])}),
        private=state_index({}),
        counters={"uncounted_tokens": 3},
    )
    return {
        "contents": msgspec.json.encode(contents, order="sorted").decode(),
        "digest": wire.digest_of(contents),
        "header of the vectors": checkpoint._header([("outer", 2)]).hex(),
    }


def came_with() -> dict[str, str]:
    made = CameWith(files={"LICENSE": b"warp"}, ids=Ids(eos_token_id=(2, 3)))
    return {"bytes": wire.encode(made).hex(), "its digest": wire.digest_of(made)}


def patch_words() -> dict[str, str]:
    old = np.array([0x3F80, 0x0000, 0x8001, 0xC000, 0x3F81], np.uint16)
    new = np.array([0x3F81, 0x0000, 0x8005, 0xC000, 0x3F81], np.uint16)
    patch = words.encode(old, new)
    assert np.array_equal(words.decode(old, memoryview(patch)), new)
    return {"old": old.tobytes().hex(), "new": new.tobytes().hex(), "bytes": patch.hex()}


def tree() -> dict[str, str]:
    leaves = [b"a", b"b", b"c", b"d", b"e"]
    grown = Tree(leaves)
    shown = grown.path(2)
    assert is_leaf(grown.root(), b"c", shown)
    return {
        "root of a, b, c": grown.root(3),
        "root of a to e": grown.root(),
        "beside c": " ".join(each.hex() for each in shown.beside),
        "path of c": wire.encode(shown).hex(),
    }


def opening() -> dict[str, str]:
    blob = bytes(at * at % 251 for at in range(2100))
    shown = open_chunk(blob, 1)
    assert is_chunk(wire.digest(blob), len(blob), shown)
    return {"digest": wire.digest(blob), "beside": " ".join(each.hex() for each in shown.beside)}


VECTORS: dict[str, Callable[[], dict[str, str]]] = {
    "record": record,
    "digest": digest,
    "signed": signed,
    "key-file": key_file,
    "event-line": event_line,
    "random-stream": random_stream,
    "initial-vector": initial,
    "patch-words": patch_words,
    "tree": tree,
    "blob-opening": opening,
    "run-config": run_config,
    "loop-config": loop_config,
    "state": state,
    "came-with": came_with,
    "checkpoint": checkpoint_file,
    **vectors.VECTORS,
}


def vectors_on(page: str) -> dict[str, dict[str, str]]:
    found = {}
    for name, body in re.findall(r"^```vector (\S+)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL):
        assert name not in found, f"vector {name} stands twice on the page"
        found[name] = dict(line.split(" = ", 1) for line in body.splitlines())
    return found


def test_the_page_has_every_vector_and_no_other() -> None:
    assert set(vectors_on(PAGE.read_text(encoding="utf-8"))) == set(VECTORS)


@pytest.mark.parametrize("name", VECTORS)
def test_the_page_says_what_the_code_makes(name: str) -> None:
    made = VECTORS[name]()
    block = "".join(f"{field} = {value}\n" for field, value in made.items())
    assert vectors_on(PAGE.read_text(encoding="utf-8"))[name] == made, f"\n```vector {name}\n{block}```"


def test_a_page_that_says_something_else_is_found() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for name, make in VECTORS.items():
        value = list(make().values())[-1]
        assert vectors_on(page.replace(value, value[::-1]))[name] != make()


def test_the_record_on_the_page_decodes() -> None:
    assert wire.decode(bytes.fromhex(record()["bytes"]), Example) == EXAMPLE


def test_the_run_on_the_page_is_one_that_peers_accept() -> None:
    assert read_run(bytes.fromhex(run_config()["bytes"]), 1_000_000) == run()


def test_a_checkpoint_is_laid_out_as_the_page_says(tmp_path: Path) -> None:
    vector = initial_vector(MODEL, 7)
    blob = ByteTokenizer().to_bytes()
    state = checkpoint.Snapshot(config=run(), tokenizer=blob, head=None, replicated={"outer": vector})
    contents = checkpoint.save(tmp_path, state)
    names = {
        "checkpoint.json",
        "replicated-1.safetensors",
        "private-1.safetensors",
        f"run-{run().run[:16]}.bin",
        f"tokenizer-{ByteTokenizer().digest[:16]}.bin",
    }
    assert {path.name for path in tmp_path.iterdir()} == names
    tree = msgspec.json.decode((tmp_path / "checkpoint.json").read_bytes())
    assert msgspec.convert(tree["contents"], checkpoint.Contents) == contents
    assert (set(tree), tree["digest"]) == ({"contents", "digest"}, wire.digest_of(contents))
    assert (tmp_path / f"run-{run().run[:16]}.bin").read_bytes() == wire.encode(run())
    assert (tmp_path / f"tokenizer-{ByteTokenizer().digest[:16]}.bin").read_bytes() == blob
    vectors = (tmp_path / "replicated-1.safetensors").read_bytes()
    assert vectors == checkpoint._header([("outer", vector.numel())]) + vector.numpy().astype("<f4").tobytes()


def test_the_ticket_on_the_page_is_read() -> None:
    found = ticket.read(vectors.ticket()["ticket"])
    assert (found.run, found.issuer, found.secret) == (vectors.RUN, vectors.A.peer, vectors.SECRET)
    found = ticket.read(vectors.short_ticket()["at home and outside"])
    assert (found.run, found.contacts[0].peer, found.secret) == (vectors.RUN, vectors.A.peer, vectors.SECRET)
    assert "tls://192.168.1.7:4433" in found.contacts[0].addresses
    three = ticket.read(vectors.short_ticket()["three members"]).contacts
    assert [each.peer for each in three] == [start_of(peer) for peer in (vectors.A.peer, vectors.B.peer, vectors.C)]
    assert [each.addresses for each in three] == [
        ("tls://192.0.2.1:4433",),
        ("tls://192.0.2.2:4433",),
        ("tls://192.0.2.3:4434",),
    ]


def test_the_certificate_on_the_page_proves_its_manifest() -> None:
    chain = Chain(vectors.opening_manifest(), vectors.first_charter())
    certificate = vectors.signed_certificate()
    assert chain.proven(certificate)
    assert not chain.proven(msgspec.structs.replace(certificate, attempt=Attempt(1)))


def test_the_shards_on_the_page_are_those_of_its_index(tmp_path: Path) -> None:
    store = ShardStore(tmp_path)
    store.add(vectors.INDEX, Digest(vectors.shard()["name"]), bytes.fromhex(vectors.shard()["bytes"]))
    assert [info.digest for info in store.missing(vectors.INDEX)] == [vectors.INDEX.heldout[0].digest]


def test_the_key_file_on_the_page_is_an_identity(tmp_path: Path) -> None:
    path = tmp_path / "peer.pem"
    path.write_text("".join(f"{line}\n" for line in key_file().values()))
    path.chmod(0o600)
    with keys.open_identity(path) as identity:
        assert identity.peer == signed()["signer"]


def test_the_event_lines_on_the_page_are_those_of_the_log(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text("".join(f"{line}\n" for line in event_line().values()))
    entries = read_jsonl(path)
    again = JsonlSink(tmp_path / "again.jsonl")
    for entry in entries:
        again.write(entry)
    again.close()
    assert len(entries) == 2
    assert (tmp_path / "again.jsonl").read_bytes() == path.read_bytes()
