"""Reads what people and other programs wrote: text, JSON and TOML, with or without a byte order mark; addresses.

Notepad and PowerShell put a byte order mark before UTF-8, and write UTF-16. Python writes NaN and half surrogate pairs
into JSON. Somebody's file may hold brackets nested so deep that a parser gives up. And a file that should be one thing
often is another, which `what_else` names: a page of HTML that a download saved, a pointer of Git LFS.
"""

import codecs
import json
import tomllib
from typing import Any
from urllib.parse import SplitResult, urlsplit

# Far beyond what anybody writes by hand, far below where Python's own recursion ends.
MAX_DEPTH = 100

# The longer marks first: that of UTF-16 begins that of UTF-32.
_MARKS = {
    codecs.BOM_UTF8: "utf-8",
    codecs.BOM_UTF32_LE: "utf-32-le",
    codecs.BOM_UTF32_BE: "utf-32-be",
    codecs.BOM_UTF16_LE: "utf-16-le",
    codecs.BOM_UTF16_BE: "utf-16-be",
}
GZIP, ZSTD, XZ = b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"\xfd7zXZ\x00"  # how what they pack begins
_TAR_MAGIC = slice(257, 262)
_SIGNATURES = {
    b"PAR1": "a Parquet file",
    b"ARROW1": "an Arrow file",
    b"FEA1": "a Feather file",
    b"PK\x03\x04": "a zip archive: unpack it first",
    b"7z\xbc\xaf\x27\x1c": "a 7z archive: unpack it first",
    b"Rar!\x1a\x07": "a RAR archive: unpack it first",
    GZIP: "compressed with gzip",
    ZSTD: "compressed with zstd",
    XZ: "compressed with xz",
    b"%PDF-": "a PDF document: convert it to text first",
    b"SQLite format 3\x00": "an SQLite database",
    b"\x89PNG": "an image",
    b"\xff\xd8\xff": "an image",
    b"\x7fELF": "a program",
    **{bytes((0x80, protocol)): "a Python pickle" for protocol in range(2, 6)},
}
# What a head must be long enough for `what_else` to see.
HEAD_NBYTES = 512


def encoding_of(head: bytes) -> tuple[str, int]:
    """Return the encoding that a byte order mark at the start names, else UTF-8, and the bytes of the mark."""
    return next(((name, len(mark)) for mark, name in _MARKS.items() if head.startswith(mark)), ("utf-8", 0))


def text_of(data: bytes) -> str:
    """Return the text of `data` without its byte order mark.

    Raises:
        UnicodeDecodeError: it is not in the encoding that its mark names, or not in UTF-8 where it has none.
    """
    encoding, num_skipped = encoding_of(data)
    return data[num_skipped:].decode(encoding)


def json_of(data: bytes) -> Any:
    """Return the JSON value in `data`, in the reading of Python's own module: NaN and Infinity are numbers.

    Raises:
        ValueError: it is not JSON, not text, or nested too deep.
    """
    try:
        return json.loads(text_of(data))
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start + 1} is not {error.encoding.upper()} text") from None
    except RecursionError:
        raise ValueError("brackets are nested too deep to be read") from None


def toml_of(data: bytes | str) -> dict[str, Any]:
    """Return the table in `data`.

    Raises:
        ValueError: it is not TOML, not text, or nested deeper than `MAX_DEPTH`.
    """
    try:
        tree = tomllib.loads(text_of(data) if isinstance(data, bytes) else data)
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start + 1} is not {error.encoding.upper()} text") from None
    except RecursionError:
        raise ValueError(f"brackets are nested deeper than {MAX_DEPTH}") from None
    level: list[Any] = [tree]
    for _ in range(MAX_DEPTH):
        level = [inner for each in level for inner in _inside(each)]
    if level:
        raise ValueError(f"brackets or dotted names are nested deeper than {MAX_DEPTH}")
    return tree


def what_else(head: bytes, *, is_page_text: bool = False) -> str | None:
    """Return what a file that begins with `head` is, where it is none of text, JSON or TOML; None where it may be one.

    Args:
        is_page_text: take a page of HTML as the text that it is.
    """
    if head.startswith(b"version https://git-lfs.github.com/spec/"):
        return "a Git LFS pointer, not the file itself: run `git lfs pull` in its folder"
    if not is_page_text and text_of_head(head).lstrip()[:20].lower().startswith(("<!doctype html", "<html")):
        return "an HTML page, perhaps an error that a download saved: download it again"
    if head[_TAR_MAGIC] == b"ustar":
        return "a tar archive: unpack it first"
    return next((name for magic, name in _SIGNATURES.items() if head.startswith(magic)), None)


def text_of_head(head: bytes) -> str:
    """Return the text at the start of `head`, whatever is no text in it left out."""
    encoding, num_skipped = encoding_of(head)
    return head[num_skipped:].decode(encoding, errors="ignore")


def _inside(tree: Any) -> list[Any]:
    if isinstance(tree, dict):
        return list(tree.values())
    return tree if isinstance(tree, list) else []


def server_address(text: str) -> SplitResult | None:
    """Return the parts of a server's address, of http where it names no scheme; None: it is none, or holds more."""
    parts = urlsplit(text if "://" in text else f"http://{text}")
    try:
        host, _ = parts.hostname, parts.port
    except ValueError:  # the port is none
        return None
    is_plain = parts.username is None and not parts.query and not parts.fragment
    return parts if parts.scheme in ("http", "https") and host and is_plain and text.isprintable() else None
