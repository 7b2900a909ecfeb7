"""docs/formats.md under test: every vector on the page is what the code makes.

A vector is a fenced block whose first line reads ```` ```vector NAME ````, with lines `field = value`. Add one by
writing a function below and pasting what its failure prints.
"""

import re
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from cryptography.hazmat.primitives import serialization

from weft import keys, wire
from weft.clock import VirtualClock
from weft.events import CallbackSink, EventLog, JsonlSink, LinkDown, RoundMissed, read_jsonl
from weft.ids import PeerId, Round, Tokens
from weft.rng import integers64, order_key, stream

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
    lines: list[str] = []
    log = EventLog(
        VirtualClock(),
        PeerId("ab" * 32),
        [CallbackSink(lambda entry: lines.append(msgspec.json.encode(entry).decode()))],
    )
    log.emit(LinkDown(remote=PeerId("cd" * 32), reason="reset"))
    log.emit(RoundMissed(round=Round(3), carried_tokens=Tokens(4096), reason="late"))
    return {f"line {number}": line for number, line in enumerate(lines, start=1)}


def random_stream() -> dict[str, str]:
    words = integers64(stream(7, "data", 3), 4)
    return {
        "label": repr((7, "data", 3)),
        "words": " ".join(f"{word:016x}" for word in words),
        "order key of ('run', 3, 'peer')": order_key("run", 3, "peer"),
    }


VECTORS: dict[str, Callable[[], dict[str, str]]] = {
    "record": record,
    "digest": digest,
    "signed": signed,
    "key-file": key_file,
    "event-line": event_line,
    "random-stream": random_stream,
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
