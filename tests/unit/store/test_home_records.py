"""One record in a file: what is kept is read, and what is damaged holds nothing."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from weft.errors import DataError
from weft.store.home import RecordFile
from weft.wire import Record, encode


class Kept(Record, frozen=True, kw_only=True):
    number: int


class Plain(msgspec.Struct, frozen=True, kw_only=True):
    number: int


EMPTY = {Kept: Kept(number=0), Plain: Plain(number=0)}


def file_of(kind: Any, path: Path, **options: Any) -> RecordFile[Any]:
    return RecordFile(path, kind, 1000, EMPTY[kind], **options)


@pytest.mark.parametrize(("kind", "is_synced"), [(Kept, True), (Plain, True), (Plain, False)])
def test_what_is_kept_is_there_for_the_next_process(tmp_path: Path, kind: Any, is_synced: bool) -> None:
    path = tmp_path / "a folder" / "file"
    file = file_of(kind, path, is_synced=is_synced)
    assert (file.read(), file.damage) == (EMPTY[kind], "")
    for number in (1, 2):
        file.keep(kind(number=number))
        assert file_of(kind, path).read() == kind(number=number)
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def test_a_record_lies_there_as_its_canonical_bytes_and_anything_else_as_json(tmp_path: Path) -> None:
    for kind in (Kept, Plain):
        file_of(kind, tmp_path / kind.__name__).keep(kind(number=7))
    assert (tmp_path / "Kept").read_bytes() == encode(Kept(number=7))
    assert (tmp_path / "Plain").read_bytes() == b'{"number":7}'


@pytest.mark.parametrize("data", [b"", b"nothing of ours", b'{"number":"7"}', b'{"number":' + b"7" * 1000 + b"}"])
@pytest.mark.parametrize("kind", [Kept, Plain])
def test_a_damaged_file_holds_nothing_and_says_why(tmp_path: Path, kind: Any, data: bytes) -> None:
    path = tmp_path / "file"
    path.write_bytes(data)
    file = file_of(kind, path)
    assert file.read() == EMPTY[kind]
    assert file.damage
    file.keep(kind(number=3))
    assert file_of(kind, path).read() == kind(number=3)


def test_what_is_there_already_is_not_written_again(tmp_path: Path) -> None:
    path = tmp_path / "file"
    file_of(Kept, path).keep(EMPTY[Kept])
    assert not path.exists()
    file_of(Kept, path).keep(Kept(number=1))
    file = file_of(Kept, path)
    file.read()
    path.unlink()
    file.keep(Kept(number=1))
    assert not path.exists()


def test_where_it_cannot_be_written_the_one_before_stays(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    file = file_of(Kept, tmp_path / "file" / "inner")
    with pytest.raises(DataError):
        file.keep(Kept(number=1))
    assert file.read() == EMPTY[Kept]
