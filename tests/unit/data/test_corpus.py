"""Sources: what is read, in which order, on which side it lands, and how each kind of bad input is named."""

import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from weft.config import from_tree
from weft.data import corpus, documents, files
from weft.data.corpus import CorpusConfig, DatasetSource, JsonlSource, ParquetSource, StdlibSource, TextSource
from weft.errors import ConfigError, DataError


def sides(source: corpus.TextualSource, base: Path, fraction: float = 0.05) -> dict[str, list[str]]:
    result: dict[str, list[str]] = {"train": [], "heldout": []}
    for side, text in corpus.split(source, base, fraction):
        result[side].append(text)
    return result


def write_many(folder: Path, count: int) -> TextSource:
    folder.mkdir()
    for number in range(count):
        (folder / f"{number:04}.txt").write_text(f"document {number}\n")
    return TextSource(paths=("texts",))


# --- the standard library ---


def test_the_standard_library_is_source_without_tests_or_packages() -> None:
    names = [document.name for document in corpus.documents(StdlibSource(), Path())]
    assert names == sorted(names)
    assert {"argparse.py", "json/decoder.py", "asyncio/tasks.py"} <= set(names)
    parts = {part for name in names for part in name.split("/")}
    assert parts.isdisjoint({"site-packages", "test", "tests", "idle_test", "encodings", "__pycache__"})
    assert not any(name.startswith("_sysconfigdata") for name in names)


def test_a_twentieth_of_the_standard_library_is_held_out() -> None:
    split = sides(StdlibSource(), Path())
    train, heldout = (sum(map(len, split[side])) for side in ("train", "heldout"))
    assert train > 5_000_000
    assert 0.02 < heldout / (train + heldout) < 0.1
    assert set(split["train"]).isdisjoint(split["heldout"])


# --- which side ---


def test_the_side_of_a_document_does_not_depend_on_the_others(tmp_path: Path) -> None:
    source = write_many(tmp_path / "texts", 400)
    before = sides(source, tmp_path)
    assert 8 <= len(before["heldout"]) <= 35
    (tmp_path / "texts" / "zzzz.txt").write_text("one more")
    after = sides(source, tmp_path)
    assert set(before["heldout"]) <= set(after["heldout"])
    assert set(before["train"]) <= set(after["train"])


def test_the_side_of_a_document_does_not_depend_on_where_the_folder_lies(tmp_path: Path) -> None:
    write_many(tmp_path / "texts", 100)
    expected = sides(TextSource(paths=("texts",)), tmp_path)
    for path, base in (
        (str(tmp_path / "texts"), Path("/")),
        ("texts/*.txt", tmp_path),
        ("**/*.txt", tmp_path / "texts"),
    ):
        assert sides(TextSource(paths=(path,)), base) == expected


@pytest.mark.parametrize("count", [20, 25])
def test_one_document_is_held_out_even_if_no_hash_says_so(tmp_path: Path, count: int) -> None:
    (tmp_path / "texts").mkdir()
    names = [name for name in map("{:04}.txt".format, range(100)) if corpus.rank(name) >= 0.05][:count]
    for name in names:
        (tmp_path / "texts" / name).write_text(name)
    split = sides(TextSource(paths=("texts",)), tmp_path)
    assert split["heldout"] == [min(names[:20], key=corpus.rank)]
    assert len(split["train"]) == count - 1


def test_files_of_one_name_are_told_apart(tmp_path: Path) -> None:
    paths = [tmp_path / f"{number:02}" / "text.txt" for number in range(60)]
    for path in paths:
        path.parent.mkdir()
        path.write_text(str(path))
    for named in (paths, [path.parent for path in paths]):
        split = sides(TextSource(paths=tuple(map(str, named))), tmp_path)
        assert 1 <= len(split["heldout"]) <= 12
        assert len(split["train"]) == 60 - len(split["heldout"])


def test_of_no_share_nothing_is_held_out(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / name).write_text(f"text of {name}")
    source = TextSource(paths=("a", "b", "c"))
    assert list(corpus.split(source, tmp_path, 0.0)) == [("train", f"text of {name}") for name in "abc"]


def test_an_empty_document_is_never_the_one_that_is_held_out(tmp_path: Path) -> None:
    source = write_many(tmp_path / "texts", 25)
    names = sorted(path.name for path in (tmp_path / "texts").iterdir())
    lowest = min(names[:20], key=corpus.rank)
    (tmp_path / "texts" / lowest).write_text("")
    split = sides(source, tmp_path)
    assert len(split["heldout"]) >= 1
    assert len(split["train"]) + len(split["heldout"]) == 24


def test_one_document_is_cut_at_its_end_as_nanogpt_does(tmp_path: Path) -> None:
    text = "".join(chr(97 + number % 26) for number in range(1115))
    (tmp_path / "input.txt").write_text(text)
    split = sides(TextSource(paths=("input.txt",)), tmp_path, 0.1)
    assert split == {"train": [text[: int(1115 * 0.9)]], "heldout": [text[int(1115 * 0.9) :]]}


def test_few_documents_are_each_cut_at_their_end(tmp_path: Path) -> None:
    split = sides(write_many(tmp_path / "texts", 9), tmp_path, 0.1)
    assert split["train"] == ["document "] * 9
    assert split["heldout"] == [f"{number}\n" for number in range(9)]


# --- text ---


def test_files_folders_and_globs_are_read_once_in_order_of_name(tmp_path: Path) -> None:
    for name in ("b/2.txt", "b/1.txt", "a.txt", "c/x.md", "c/deep/y.md", "c/.hidden", ".git/config"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    source = TextSource(paths=("b", "a.txt", "b/1.txt", "c/../b/2.txt", "c/**/*.md", str(tmp_path / "c")))
    assert [document.text for document in corpus.documents(source, tmp_path)] == [
        "b/1.txt",
        "b/2.txt",
        "a.txt",
        "c/deep/y.md",
        "c/x.md",
    ]


def test_a_folder_whose_name_looks_like_a_glob_is_read(tmp_path: Path) -> None:
    base = tmp_path / "runs [1]"
    (base / "texts").mkdir(parents=True)
    (base / "texts" / "a.txt").write_text("here")
    for path in ("texts", "texts/*.txt", "texts/a.txt"):
        assert [document.text for document in corpus.documents(TextSource(paths=(path,)), base)] == ["here"]


def test_a_byte_order_mark_is_no_text_and_line_ends_are_kept(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbffirst\r\nsecond\n")
    assert [d.text for d in corpus.documents(TextSource(paths=("a.txt",)), tmp_path)] == ["first\r\nsecond\n"]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("absent.txt", r"absent\.txt: no such file or folder"),
        ("nothing/*.txt", r"nothing/\*\.txt: no files there"),
        ("hollow", "hollow: no files there"),
        ("latin.txt", r"latin\.txt: not UTF-8 text: byte 4 is 0xe9"),
        ("empty.txt", "corpus is empty"),
    ],
)
def test_text_that_cannot_be_used_is_named(tmp_path: Path, path: str, message: str) -> None:
    (tmp_path / "hollow").mkdir()
    (tmp_path / "latin.txt").write_bytes("café".encode("latin-1"))
    (tmp_path / "empty.txt").write_bytes(b"")
    with pytest.raises(DataError, match=message):
        list(corpus.split(TextSource(paths=(path,)), tmp_path, 0.05))


# --- jsonl ---


def test_jsonl_gives_a_document_per_line(tmp_path: Path) -> None:
    lines = [{"text": f"line {number}", "id": number} for number in range(30)]
    (tmp_path / "a.jsonl").write_bytes(b"\n\n".join(map(msgspec.json.encode, lines)))
    found = list(corpus.documents(JsonlSource(paths=(".",)), tmp_path))
    assert [document.text for document in found] == [f"line {number}" for number in range(30)]
    assert len({document.name for document in found}) == 30


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "cut', r"a\.jsonl, line 2: not a JSON object"),
        (b"[1]", r"a\.jsonl, line 2: not a JSON object"),
        (b'{"messages": [], "id": "xyz"}', r'These are conversations: \[data.source\] type = "conversations"'),
        (b'{"body": "x", "a": 1}', r"it has a, body\. Name the one to read: --set data\.source\.field=body\."),
        (b'{"a": "id", "b": "a longer text", "c": [1, 2, 3, 4, 5, 6, 7, 8, 9]}', r"--set data\.source\.field=b\."),
        (b'{"a": 1}', "no field 'text'; it has a\\.$"),
        (b'{"text": 7}', "line 2: field 'text' holds no text"),
        (b'{"text": "\xff"}', "line 2: "),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: bytes, message: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "good"}\n' + line + b"\n")
    with pytest.raises(DataError, match=message):
        list(corpus.documents(JsonlSource(paths=("a.jsonl",)), tmp_path))


# --- parquet ---


def test_parquet_gives_a_document_per_row_and_nulls_are_not_split(tmp_path: Path) -> None:
    table = pa.table({"body": [f"row {number}" if number % 7 else None for number in range(1000)], "n": range(1000)})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=300)
    found = list(corpus.documents(ParquetSource(paths=("*.parquet",), column="body"), tmp_path))
    assert [document.text for document in found] == [f"row {number}" if number % 7 else "" for number in range(1000)]
    assert found[1].name == "a.parquet:2"
    assert len(sides(ParquetSource(paths=("*.parquet",), column="body"), tmp_path)["train"]) < 1000 - 1000 // 7


def test_a_bad_parquet_file_is_named(tmp_path: Path) -> None:
    pq.write_table(pa.table({"n": [1, 2]}), tmp_path / "a.parquet")
    (tmp_path / "b.parquet").write_bytes(b"PAR1 no more")
    with pytest.raises(DataError, match=r"a\.parquet: no column 'text'; it has n"):
        list(corpus.documents(ParquetSource(paths=("a.parquet",)), tmp_path))
    with pytest.raises(DataError, match=r"a\.parquet: column 'n' holds int64, not text"):
        list(corpus.documents(ParquetSource(paths=("a.parquet",), column="n"), tmp_path))
    with pytest.raises(DataError, match=r"b\.parquet: cannot be read"):
        list(corpus.documents(ParquetSource(paths=("b.parquet",)), tmp_path))


# --- datasets ---


def fake_datasets(rows: list[dict[str, Any]] | Exception) -> types.ModuleType:
    module = types.ModuleType("datasets")

    def load_dataset(name: str, subset: str | None, **settings: object) -> Iterator[dict[str, Any]]:
        assert (name, subset, settings) == ("some/set", None, {"split": "train", "revision": None, "streaming": True})
        if isinstance(rows, Exception):
            raise rows
        return iter(rows)

    module.load_dataset = load_dataset  # type: ignore[attr-defined]
    return module


def test_a_dataset_is_streamed_up_to_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", fake_datasets([{"text": str(number)} for number in range(50)]))
    found = list(corpus.documents(DatasetSource(name="some/set", max_documents=30), Path()))
    assert [document.text for document in found] == [str(number) for number in range(30)]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"body": "x"}], "some/set has no column 'text'; it has body"),
        ([{"text": 3}], "row 1: column 'text' holds int, not text"),
        (FileNotFoundError("gone"), "cannot read dataset some/set .*gone"),
    ],
)
def test_a_dataset_that_cannot_be_used_is_named(monkeypatch: pytest.MonkeyPatch, rows: Any, message: str) -> None:
    monkeypatch.setitem(sys.modules, "datasets", fake_datasets(rows))
    with pytest.raises(DataError, match=message):
        list(corpus.documents(DatasetSource(name="some/set"), Path()))


def test_without_the_library_a_dataset_source_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"pip install \"weft\[datasets\]\""):
        list(corpus.documents(DatasetSource(name="some/set"), Path()))


# --- config ---


def test_a_run_file_names_its_source_by_type() -> None:
    assert from_tree({}, CorpusConfig, where="run.toml").source == StdlibSource()
    tree = {"source": {"type": "jsonl", "paths": ["a.jsonl"], "field": "body"}, "heldout_fraction": 0.1}
    config = from_tree(tree, CorpusConfig, where="run.toml")
    assert config == CorpusConfig(source=JsonlSource(paths=("a.jsonl",), field="body"), heldout_fraction=0.1)


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"source": {"type": "csv"}}, "run.toml: source"),
        ({"source": {"type": "text"}}, "paths"),
        ({"source": {"type": "text", "paths": []}}, r"source\.paths"),
        ({"source": {"type": "text", "paths": ["a"], "field": "x"}}, "field.*Allowed here: paths"),
        ({"heldout_fraction": 0}, "heldout_fraction"),
    ],
)
def test_settings_that_cannot_be_are_named(tree: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_tree(tree, CorpusConfig, where="run.toml")


def test_an_unreadable_standard_library_file_is_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "good.py").write_text("pass")
    (tmp_path / "bad.py").write_bytes(b"\xff\xfe")
    monkeypatch.setattr(files.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    assert [document.name for document in documents.stdlib_documents()] == ["good.py"]
    monkeypatch.setattr(files.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path / "python311.zip")})
    with pytest.raises(DataError, match=r"no standard library source in .*python311\.zip"):
        list(documents.stdlib_documents())


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        (["a.txt"], TextSource),
        (["a.jsonl", "b.ndjson.gz", "C.JSON"], JsonlSource),
        (["a.parquet", "b.ARROW"], ParquetSource),
        (["a.md", "package.json"], TextSource),
        (["LICENSE", "a.py"], TextSource),
    ],
)
def test_files_are_read_as_their_names_say(names: list[str], kind: type, tmp_path: Path) -> None:
    for name in names:
        (tmp_path / name).write_bytes(b"")
    assert corpus.source_of(["."], tmp_path) == kind(paths=(".",))
    assert corpus.source_of(names, tmp_path) == kind(paths=tuple(names))


@pytest.mark.parametrize("names", [["a.txt", "b.jsonl"], ["a.jsonl", "b.parquet"], ["a.txt", "b.parquet", "c.json"]])
def test_a_mixture_is_refused(names: list[str], tmp_path: Path) -> None:
    for name in names:
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(DataError, match="Name one kind at a time: text, JSON lines or tables"):
        corpus.source_of(["."], tmp_path)
