"""Files that people and public tools make, one of each form, and what a corpus should make of them.

A form is what is written into a folder, the source that names it, and either the texts that should come out (the empty
ones left out) or a pattern of the refusal.
"""

import bz2
import codecs
import gzip
import json
import lzma
import os
import pickle
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.feather as feather
import pyarrow.parquet as pq

from weft.data.corpus import JsonlSource, ParquetSource, TextSource

Write = Callable[[Path], None]
TEXTS = ["the quick brown fox", "jumps over\nthe lazy dog", "Zoë → naïve 😀 \u2028 tail", "a\0zero"]
PLAIN = [text for text in TEXTS if "\0" not in text]
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 12345\n"
HTML = b"\n<!DOCTYPE html>\n<html><head><title>404</title></head></html>\n"
DAMAGED = r" The packed file is cut short or damaged: copy or download it again\."
CUT_SHORT = f"cannot be read: Compressed file ended before the end-of-stream marker was reached\\.{DAMAGED}"


@dataclass(frozen=True)
class Form:
    """One file or several, and what should come of them: `texts`, or a refusal that `refused` matches."""

    name: str
    write: Write
    source: TextSource | JsonlSource | ParquetSource
    texts: list[str] | None = None
    refused: str | None = None


def forms() -> Iterator[Form]:
    yield from _text_forms()
    yield from _jsonl_forms()
    yield from _table_forms()


def _zstd(data: bytes) -> bytes:
    return bytes(pa.Codec("zstd").compress(data, asbytes=True))


PACKED: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": _zstd,
}
ENCODED: dict[str, Callable[[str], bytes]] = {
    "utf-8": str.encode,
    "utf-8 with a mark": lambda text: codecs.BOM_UTF8 + text.encode(),
    "utf-16-le with a mark": lambda text: codecs.BOM_UTF16_LE + text.encode("utf-16-le"),
    "utf-16-be with a mark": lambda text: codecs.BOM_UTF16_BE + text.encode("utf-16-be"),
    "utf-32-le with a mark": lambda text: codecs.BOM_UTF32_LE + text.encode("utf-32-le"),
}


def _file(name: str, data: bytes) -> Write:
    return lambda folder: _put(folder / name, data)


def _files(**contents: bytes) -> Write:
    """Return what writes files; a double underscore in a name stands for a dot, three for a slash."""

    def write(folder: Path) -> None:
        for name, data in contents.items():
            _put(folder / name.replace("___", "/").replace("__", "."), data)

    return write


def _put(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


# --- text ---


def _text_forms() -> Iterator[Form]:
    here, text = TextSource(paths=(".",)), PLAIN[2]
    for ending, pack in PACKED.items():
        for encoding, encode in ENCODED.items():
            yield Form(f"text {encoding}{ending}", _file(f"a.txt{ending}", pack(encode(text))), here, [text])
    plain = text.encode()
    loaded: dict[str, tuple[Write, list[str]]] = {
        "packed under a plain name": (_file("a.txt", gzip.compress(plain)), [text]),
        "two gzip members": (_file("a.gz", gzip.compress(b"one ") + gzip.compress(b"two")), ["one two"]),
        "two zstd frames": (_file("a.zst", _zstd(b"one ") + _zstd(b"two")), ["one two"]),
        "two xz streams": (_file("a.xz", lzma.compress(b"one ") + lzma.compress(b"two")), ["one two"]),
        "a skippable zstd frame behind": (_file("a.zst", _zstd(b"one") + b"\x50\x2a\x4d\x18\x04\0\0\0abcd"), ["one"]),
        "lines end as on Windows": (_file("a.txt", b"one\r\ntwo\r\n"), ["one\r\ntwo\r\n"]),
        "lines end as on an old Mac": (_file("a.txt", b"one\rtwo\r"), ["one\rtwo\r"]),
        "a zero byte in text": (_file("a.txt", b"one\0 and two"), ["one\0 and two"]),
        "blank": (_file("a.txt", b" \n\t\n"), [" \n\t\n"]),
        "an empty file among others": (_files(a__txt=b"", b__txt=b"two"), ["two"]),
        "a page of HTML": (_file("a.html", HTML), [HTML.decode()]),
        "begins as bzip2 and is text": (_file("a.txt", b"BZh is how it begins"), ["BZh is how it begins"]),
        "letters of any case, spaces, no ending": (
            _files(A__TXT=b"1", **{"b c": b"2", "ü": b"3", "LICENSE": b"4"}),
            ["1", "4", "2", "3"],
        ),
        "hidden files and folders": (_files(a__txt=b"1", __git___x=b"no", __DS_Store=b"\0\1"), ["1"]),
        "deep folders": (_files(a___b___c___d__txt=b"1"), ["1"]),
        "a link to a file": (_then(_files(a__txt=b"1"), lambda at: (at / "b.md").symlink_to("a.txt")), ["1"]),
    }
    for name, (write, texts) in loaded.items():
        yield Form(f"text, {name}", write, here, texts)
    tar, packed = BytesIO(), BytesIO()
    with tarfile.open(fileobj=tar, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("a.txt"))
    with zipfile.ZipFile(packed, "w") as archive_of_zip:
        archive_of_zip.writestr("a.txt", "hello")
    pictures = {"png": b"\x89PNG\r\n\x1a\n\0\0", "jpg": b"\xff\xd8\xff\xe0\0\x10JFIF"}
    refused: dict[str, tuple[bytes, str]] = {
        "Latin-1": ("café".encode("latin-1"), r"not UTF-8 text: byte 4 is 0xe9\. Convert the file"),
        "cut inside a letter": ("é".encode()[:1], r"not UTF-8 text: byte 1 is 0xc3"),
        "UTF-16 without a mark": (
            "hello there".encode("utf-16-le"),
            "are zero, as in UTF-16 without a byte order mark",
        ),
        "UTF-16 of odd length": (codecs.BOM_UTF16_LE + b"abc", "not UTF-16-LE text"),
        "gzip cut short": (gzip.compress(plain * 9)[:-9], CUT_SHORT),
        "gzip damaged": (gzip.compress(plain)[:12] + b"\xff\xff\xff", f"cannot be read.*{DAMAGED}"),
        "bzip2 cut short": (bz2.compress(plain)[:-9], CUT_SHORT),
        "xz cut short": (lzma.compress(plain)[:-9], CUT_SHORT),
        "xz damaged": (lzma.compress(plain)[:20] + b"\xff" * 30, f"cannot be read.*{DAMAGED}"),
        "zstd cut short": (_zstd(plain * 9)[:-5], f"cannot be read: Truncated compressed stream.*{DAMAGED}"),
        "a pointer of Git LFS": (LFS, r"is a Git LFS pointer, not the file itself: run `git lfs pull`"),
        "zip": (packed.getvalue(), "is a zip archive: unpack it first"),
        "tar": (tar.getvalue(), "is a tar archive: unpack it first"),
        "tar in gzip": (gzip.compress(tar.getvalue()), "is a tar archive: unpack it first"),
        "PDF": (b"%PDF-1.7\n%\xe2\xe3", "is a PDF document: convert it to text first"),
        "pickle": (pickle.dumps([1, 2], protocol=4), "is a Python pickle"),
        "Parquet": (b"PAR1" + b"\0" * 40, "is a Parquet file"),
        "SQLite": (b"SQLite format 3\0" + b"\0" * 40, "is an SQLite database"),
        **{name: (data, "is an image") for name, data in pictures.items()},
        "nothing but an empty file": (b"", "the corpus is empty"),
        "nothing but a mark": (codecs.BOM_UTF8, "the corpus is empty"),
    }
    for name, (data, message) in refused.items():
        yield Form(f"text, {name}", _file("a.txt", data), here, refused=message)
    mixed = _files(d___a__txt=b"good", d___sub___x__pyc=b"\x80")
    advice = r"name the text files alone with a glob such as 'd/\*\*/\*\.txt'"
    yield Form("text, a program among text", mixed, TextSource(paths=("d",)), refused=advice)
    yield Form("text, the advice taken", mixed, TextSource(paths=("d/**/*.txt",)), ["good"])
    pipe = _then(_files(), lambda at: os.mkfifo(at / "p"))
    yield Form("text, a pipe", pipe, TextSource(paths=("p",)), refused="is a pipe or a device, not a file")
    broken = _then(_files(a__txt=b"1"), lambda at: (at / "b.txt").symlink_to("gone.txt"))
    yield Form("text, a link to nothing", broken, here, refused=r"is a link to gone\.txt, which is not there")
    yield Form("text, no such file", _files(), TextSource(paths=("a.txt",)), refused="no such file or folder")
    yield Form("text, an empty folder", _files(), here, refused="no files there")


def _then(first: Write, second: Callable[[Path], object]) -> Write:
    def write(folder: Path) -> None:
        first(folder)
        second(folder)

    return write


# --- JSON ---


def _jsonl_forms() -> Iterator[Form]:
    here = JsonlSource(paths=(".",))
    lines = "\n".join(json.dumps({"id": 7, "text": text}, ensure_ascii=False) for text in TEXTS)
    for ending, pack in PACKED.items():
        for encoding, encode in ENCODED.items():
            yield Form(f"jsonl {encoding}{ending}", _file(f"a.jsonl{ending}", pack(encode(lines))), here, TEXTS)
    objects = [{"text": text} for text in TEXTS]
    good = b'{"text": "good"}'
    for name in ("a.ndjson", "a.json", "A.JSONL", "a.Json"):
        yield Form(f"jsonl in {name}", _file(name, lines.encode()), here, TEXTS)
    loaded: dict[str, tuple[bytes, list[str]]] = {
        "a name in capitals, packed": (gzip.compress(lines.encode()), TEXTS),
        "lines end as on Windows": (lines.replace("\n", "\r\n").encode() + b"\r\n", TEXTS),
        "lines end as on an old Mac": (lines.replace("\n", "\r").encode() + b"\r", TEXTS),
        "blank lines, tabs and spaces": (b"\n \t\n  " + good + b" \n\n\n", ["good"]),
        "one array": (json.dumps(objects).encode(), TEXTS),
        "one array, printed pretty": (json.dumps(objects, indent=2).encode(), TEXTS),
        "one array after a mark": (codecs.BOM_UTF8 + json.dumps(objects).encode(), TEXTS),
        "NaN, Infinity and -Infinity elsewhere": (b'{"a": [NaN, Infinity, -Infinity], "text": "fine"}', ["fine"]),
        "half a surrogate pair elsewhere": (rb'{"id": "\ud83d", "text": "fine"}', ["fine"]),
        "a whole surrogate pair": (rb'{"text": "\ud83d\ude00"}', ["😀"]),
        "a number of 400 digits elsewhere": (b'{"n": ' + b"9" * 400 + b', "text": "fine"}', ["fine"]),
        "1e999 elsewhere": (b'{"n": 1e999, "text": "fine"}', ["fine"]),
        "null text": (good + b'\n{"text": null}', ["good"]),
        "empty text": (good + b'\n{"text": ""}', ["good"]),
        "a key twice": (b'{"text": "no", "text": "yes"}', ["yes"]),
        "escapes": (rb'{"text": "\u0000\t\"\\\/\u00e9"}', ['\0\t"\\/é']),
        "bytes that are no text elsewhere": (b'{"id": "\xff", "text": "fine"}', ["fine"]),
        "900 brackets elsewhere": (b'{"m": ' + b"[" * 900 + b"]" * 900 + b', "text": "fine"}', ["fine"]),
    }
    for name, (data, texts) in loaded.items():
        yield Form(f"jsonl, {name}", _file("B.JSONL.GZ" if "capitals" in name else "a.jsonl", data), here, texts)
    nested = json.dumps({"message": {"content": "hello", "n": 1}, "a.b": "dotted", "gone": None}).encode()
    inner: dict[str, tuple[str, list[str] | None, str | None]] = {
        "a field of an object": ("message.content", ["hello"], None),
        "a name with a dot": ("a.b", ["dotted"], None),
        "an object": (
            "message",
            None,
            r"holds no text: it is an object\. Name one of its fields, such as message\.content",
        ),
        "no such inner field": ("message.role", None, r"no field 'message\.role'; it has content, n"),
        "through a text": ("a.b.c", None, r"no field 'a\.b\.c'"),
        "through a number": ("message.n.x", None, "leads through what is not an object: it is a number"),
    }
    for name, (field, texts_or_none, message) in inner.items():
        source = JsonlSource(paths=(".",), field=field)
        yield Form(f"jsonl, {name}", _file("a.jsonl", nested), source, texts_or_none, message)
    through_null = nested.replace(b'"a.b"', b'"ab"') + b'\n{"message": null}'
    yield Form(
        "jsonl, through null",
        _file("a.jsonl", through_null),
        JsonlSource(paths=(".",), field="message.content"),
        ["hello"],
    )
    deep = b"[" * 1200 + b"]" * 1200
    refused: dict[str, tuple[bytes, str]] = {
        "1200 brackets elsewhere": (b'{"m": ' + deep + b', "text": "x"}', "line 2: .*nested too deep"),
        "1200 brackets in the field": (b'{"text": ' + deep + b"}", "line 2: .*nested too deep"),
        "990 braces": (b'{"a":' * 990 + b"1" + b"}" * 990, "line 2: "),
        "an object over several lines": (
            json.dumps({"text": "x"}, indent=1).encode(),
            "line 2: .* Write one object per line",
        ),
        "an object cut short": (b'{"text": "x', "line 2: not a JSON object"),
        "a trailing comma": (b'{"text": "x",}', "line 2: not a JSON object"),
        "single quotes": (b"{'text': 'x'}", "line 2: not a JSON object"),
        "two objects on a line": (good + good, "line 2: not a JSON object"),
        "a comment": (b"// no", "line 2: not a JSON object"),
        "no such field": (b'{"body": "x"}', "line 2: no field 'text'; it has body"),
        "an empty object": (b"{}", "line 2: no field 'text'; it has none"),
        "a number": (b'{"text": 7}', "line 2: field 'text' holds no text: it is a number"),
        "a list": (b'{"text": ["x"]}', "line 2: field 'text' holds no text: it is a list"),
        "half a surrogate pair": (rb'{"text": "\ud83d"}', "line 2: field 'text' holds half a surrogate pair"),
        "bytes that are no text": (b'{"text": "\xff"}', "line 2: "),
        "an array in a line": (b"[1]", "line 2: not a JSON object: it is a list"),
    }
    for name, (data, message) in refused.items():
        yield Form(
            f"jsonl, {name}", _file("a.jsonl", good + b"\n" + data + b"\n"), here, refused=r"a\.jsonl, " + message
        )
    whole: dict[str, tuple[bytes, str]] = {
        "an array of texts": (b'["x", "y"]', "item 1: not a JSON object: it is text"),
        "an array cut short": (b'[{"text": "x"},', "starts like a JSON array, but is not one"),
        "an empty array": (b"[]", "the corpus is empty"),
        "an empty file": (b"", "the corpus is empty"),
        "nothing but a mark": (codecs.BOM_UTF16_LE, "the corpus is empty"),
        "UTF-16 without a mark": ('{"text": "x"}'.encode("utf-16-le"), "line 1: not a JSON object"),
        "UTF-16 of odd length": (codecs.BOM_UTF16_LE + b"abc", "is not UTF-16-LE text"),
        "gzip cut short": (gzip.compress(good * 9)[:-9], CUT_SHORT),
        "zstd damaged": (_zstd(good * 99)[:20] + b"\xff" * 30, "cannot be read"),
        "a pointer of Git LFS": (LFS, "is a Git LFS pointer"),
        "a page of HTML": (HTML, "is an HTML page, perhaps an error that a download saved"),
        "Parquet": (b"PAR1" + b"\0" * 40, "is a Parquet file"),
        "zip": (b"PK\x03\x04" + b"\0" * 40, "is a zip archive"),
    }
    for name, (data, message) in whole.items():
        yield Form(f"jsonl, {name}", _file("a.jsonl", data), here, refused=message)
    two = _files(a__jsonl=good, b__jsonl=codecs.BOM_UTF8 + good)
    yield Form("jsonl, a mark in the second file", two, here, ["good", "good"])
    yield Form(
        "jsonl, a mark in an empty file", _files(a__jsonl=good, b__jsonl=codecs.BOM_UTF8 + b"\n"), here, ["good"]
    )
    pipe = _then(_files(), lambda at: os.mkfifo(at / "p"))
    yield Form("jsonl, a pipe", pipe, JsonlSource(paths=("p",)), refused="is a pipe or a device, not a file")


# --- tables ---


def _table_forms() -> Iterator[Form]:
    texts: list[str | None] = [*TEXTS, None, *TEXTS]
    found = TEXTS + TEXTS
    here = ParquetSource(paths=(".",))
    plain = pa.array(texts)
    as_bytes = pa.array([None if text is None else text.encode() for text in texts])
    layouts: dict[str, Any] = {
        "string": plain,
        "large_string": plain.cast(pa.large_string()),
        "string_view": plain.cast(pa.string_view()),
        "categories": plain.dictionary_encode(),
        "categories of large_string": plain.cast(pa.large_string()).dictionary_encode(),
        "binary": as_bytes,
        "large_binary": as_bytes.cast(pa.large_binary()),
        "binary_view": as_bytes.cast(pa.binary_view()),
        "several chunks": pa.chunked_array([plain.slice(0, 3), plain.slice(3)]),
    }
    for name, array in layouts.items():
        table = pa.table({"id": range(len(texts)), "text": array})
        yield Form(f"parquet of {name}", _parquet(table), here, found)
        yield Form(f"arrow of {name}", _arrow(table), here, found)
    table = pa.table({"text": plain})
    yield Form("arrow of runs", _arrow(pa.table({"text": pc.run_end_encode(plain)})), here, found)
    yield Form(
        "parquet without Arrow's schema",
        _parquet(pa.table({"text": layouts["categories"]}), store_schema=False),
        here,
        found,
    )
    for codec in ("none", "snappy", "gzip", "brotli", "zstd", "lz4"):
        yield Form(f"parquet packed with {codec}", _parquet(table, compression=codec), here, found)
    yield Form("parquet of many row groups", _parquet(table, row_group_size=2), here, found)
    yield Form("parquet with data pages of version 2", _parquet(table, data_page_version="2.0"), here, found)
    yield Form("parquet without dictionary pages", _parquet(table, use_dictionary=False), here, found)
    yield Form("parquet in capitals", _parquet(table, name="A.PARQUET"), here, found)
    yield Form("arrow, as a stream", _arrow(table, kind="stream"), here, found)
    yield Form(
        "arrow, categories as a stream", _arrow(pa.table({"text": layouts["categories"]}), kind="stream"), here, found
    )
    for packing in ("uncompressed", "lz4", "zstd"):
        yield Form(f"feather, {packing}", _feather(table, packing), here, found)
    values = pa.array(['{"a": 1}', "[2]"])
    as_json = pa.ExtensionArray.from_storage(pa.json_(pa.string()), values)
    yield Form("parquet of arrow.json", _parquet(pa.table({"text": as_json})), here, ['{"a": 1}', "[2]"])
    yield Form("arrow of arrow.json", _arrow(pa.table({"text": as_json})), here, ['{"a": 1}', "[2]"])
    message = pa.array([{"role": "user", "content": "hello"}, None, {"role": "user", "content": None}])
    inside = ParquetSource(paths=(".",), column="message.content")
    yield Form("parquet, a field of a struct", _parquet(pa.table({"message": message})), inside, ["hello"])
    yield Form("arrow, a field of a struct", _arrow(pa.table({"message": message})), inside, ["hello"])
    deeper = pa.array([{"b": {"c": "hello"}}, {"b": None}])
    yield Form(
        "parquet, two structs deep",
        _parquet(pa.table({"a": deeper})),
        ParquetSource(paths=(".",), column="a.b.c"),
        ["hello"],
    )
    dotted = pa.table({"a.b": ["x"], "n": [1]})
    yield Form("parquet, a name with a dot", _parquet(dotted), ParquetSource(paths=(".",), column="a.b"), ["x"])
    others = pa.Table.from_arrays([pa.array(["x"]), pa.array([1]), pa.array([2])], names=["text", "n", "n"])
    yield Form("parquet, other columns of one name", _parquet(others), here, ["x"])
    bad = pa.array([b"ok", b"caf\xe9"]).view(pa.string())
    half = pa.array([b"ok", b"\xed\xa0\x80"]).view(pa.string())
    twice = pa.Table.from_arrays([plain, plain], names=["text", "text"])
    refused: dict[str, tuple[Any, str]] = {
        "two columns of one name": (twice, "2 columns are named 'text'. Rename or drop all but one"),
        "bytes that are no text": (pa.table({"text": bad}), "row 2: .* not UTF-8 text: byte 4 is 0xe9"),
        "half a surrogate pair": (pa.table({"text": half}), "row 2: .* not UTF-8 text: byte 1 is 0xed"),
        "another column": (pa.table({"body": plain}), "no column 'text'; it has body"),
        "numbers": (pa.table({"text": [1, 2]}), "holds int64, not text"),
        "categories of numbers": (pa.table({"text": pa.array([1, 2]).dictionary_encode()}), "holds int64, not text"),
        "times": (pa.table({"text": pa.array([1], pa.timestamp("s"))}), r"holds timestamp\[m?s\], not text"),
        "lists": (pa.table({"text": [["a"], ["b"]]}), "not text. Join each list into one text"),
        "a struct": (
            pa.table({"text": [{"a": "x", "b": "y"}]}),
            r"holds a struct, not text. Name one of its fields: text\.a, text\.b",
        ),
        "nothing but null": (pa.table({"text": pa.array([None, None])}), "the corpus is empty"),
        "no rows": (pa.table({"text": pa.array([], pa.string())}), "the corpus is empty"),
        "no columns": (pa.table({}), "no column 'text'"),
    }
    for name, (content, message_of) in refused.items():
        yield Form(f"parquet, {name}", _parquet(content), here, refused=message_of)
        yield Form(f"arrow, {name}", _arrow(content), here, refused=message_of)
    plain_dictionary = pa.table({"text": bad})
    yield Form(
        "parquet, bytes that are no text, without dictionary pages",
        _parquet(plain_dictionary, use_dictionary=False),
        here,
        refused="row 2: .* not UTF-8 text",
    )
    buffer = BytesIO()
    pq.write_table(table, buffer)
    whole = buffer.getvalue()
    files: dict[str, tuple[bytes, str]] = {
        "cut short": (whole[: len(whole) // 2], "cannot be read"),
        "damaged": (whole[:20] + b"\xff" * 60 + whole[80:], "cannot be read"),
        "empty": (b"", "is not a Parquet, Arrow or Feather file"),
        "packed with gzip": (gzip.compress(whole), "is compressed with gzip"),
        "CSV": (b"text\nhello\n", "is not a Parquet, Arrow or Feather file"),
        "a pointer of Git LFS": (LFS, "is a Git LFS pointer"),
        "a page of HTML": (HTML, "is an HTML page"),
        "Arrow cut short": (b"ARROW1\0\0" + b"\1" * 9, "cannot be read"),
        "a stream cut short": (b"\xff\xff\xff\xff\x10\0\0\0", "cannot be read"),
    }
    for name, (data, message_of) in files.items():
        yield Form(f"parquet, {name}", _file("a.parquet", data), here, refused=message_of)


def _parquet(table: Any, *, name: str = "a.parquet", **settings: Any) -> Write:
    return lambda folder: pq.write_table(table, folder / name, **settings)


def _arrow(table: Any, *, kind: str = "file") -> Write:
    def write(folder: Path) -> None:
        make = pa.ipc.new_file if kind == "file" else pa.ipc.new_stream
        with pa.OSFile(str(folder / "a.arrow"), "wb") as out, make(out, table.schema) as writer:
            writer.write_table(table)

    return write


def _feather(table: Any, packing: str) -> Write:
    return lambda folder: feather.write_feather(table, str(folder / "a.feather"), compression=packing)
