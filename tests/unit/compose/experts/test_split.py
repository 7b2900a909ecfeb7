"""Documents sorted into files: each once, under its name, and held out where a run of the whole corpus holds it out."""

import json
from pathlib import Path

import pytest

from unit.compose.experts.texts import KINDS, documents, kind_of
from weft.compose.experts import split as module
from weft.compose.experts.split import file_of, find_clusters, read_clusters, sided, split_documents
from weft.data import corpus
from weft.data.corpus import JsonlSource, TextSource
from weft.data.documents import Document
from weft.errors import ConfigError, DataError, WireError

FRACTION = 0.1
SOURCE = TextSource(paths=("texts",))


@pytest.fixture
def base(tmp_path: Path) -> Path:
    for document in documents(20):
        file = tmp_path / "texts" / document.name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(document.text)
    (tmp_path / "texts" / "empty").write_text("")
    return tmp_path


def lines(file: Path) -> list[Document]:
    return [Document(**json.loads(line)) for line in file.read_text("utf-8").splitlines()]


def test_every_document_is_in_one_file_with_its_name_on_the_side_a_run_has_it_on(base: Path) -> None:
    clusters = find_clusters(SOURCE, base, FRACTION, 3, seed=1)
    told = split_documents(SOURCE, base, FRACTION, clusters, base / "out")
    found = dict[str, tuple[str, str]]()
    for cluster in range(3):
        for side in ("train", "heldout"):
            for document in lines(base / "out" / file_of(cluster, side)):
                assert document.name not in found
                found[document.name] = side, document.text
    whole = {document.name: document.text for document in corpus.documents(SOURCE, base) if document.text}
    assert {name: text for name, (_, text) in found.items()} == whole
    expected = sorted(corpus.split(SOURCE, base, FRACTION))
    assert sorted(found.values()) == expected
    assert {side for side, _ in expected} == {"train", "heldout"}
    assert sum(each.train.num_documents + each.heldout.num_documents for each in told.clusters) == len(whole)
    assert sum(each.train.nbytes + each.heldout.nbytes for each in told.clusters) == sum(map(len, whole.values()))


def test_where_nothing_is_held_out_all_is_trained_on(base: Path) -> None:
    told = split_documents(SOURCE, base, 0.0, find_clusters(SOURCE, base, 0.0, 3, seed=1), base / "out")
    assert sum(each.train.num_documents for each in told.clusters) == len(documents(20))
    assert not any(each.heldout.num_documents for each in told.clusters)
    with pytest.raises(ConfigError, match="the share of documents"):
        next(sided(SOURCE, base, 1e-320))
    (base / "none").mkdir()
    (base / "none" / "empty").write_text("")
    with pytest.raises(DataError, match="no text"):
        next(sided(TextSource(paths=("none",)), base, 0.0))


def test_a_file_holds_one_kind_and_a_run_reads_it(base: Path) -> None:
    clusters = find_clusters(SOURCE, base, FRACTION, 3, seed=1)
    told = split_documents(SOURCE, base, FRACTION, clusters, base / "out")
    for cluster in range(3):
        kinds = {kind_of(document.name) for document in lines(base / "out" / file_of(cluster, "train"))}
        assert len(kinds) == 1
        assert set(told.clusters[cluster].words) >= set(KINDS[kinds.pop()])
        source = JsonlSource(paths=(f"out/{file_of(cluster, 'train')}",))
        assert [each.text for each in corpus.documents(source, base)] == [
            each.text for each in lines(base / "out" / file_of(cluster, "train"))
        ]
    assert read_clusters(base / "out").digest == clusters.digest == told.digest
    assert json.loads((base / "out" / "clusters.json").read_bytes())["digest"] == clusters.digest


def test_others_sort_documents_of_their_own_by_the_same_clusters(base: Path) -> None:
    split_documents(SOURCE, base, FRACTION, find_clusters(SOURCE, base, FRACTION, 3, seed=1), base / "out")
    theirs = read_clusters(base / "out")
    (base / "own").mkdir()
    for document in documents(10, seed=7):
        (base / "own" / document.name.replace("/", "-")).write_text(document.text)
    split_documents(TextSource(paths=("own",)), base, FRACTION, theirs, base / "own_out")
    of_kind = {kind: set[int]() for kind in KINDS}
    for folder, sign in (("out", "/"), ("own_out", "-")):
        for cluster in range(3):
            for document in lines(base / folder / file_of(cluster, "train")):
                of_kind[document.name.split(sign)[0]].add(cluster)
    assert [len(clusters) for clusters in of_kind.values()] == [1, 1, 1]


def test_clusters_are_found_by_what_is_trained_on_alone(base: Path) -> None:
    before = find_clusters(SOURCE, base, FRACTION, 3, seed=1)
    heldout = next(document.name for side, document in sided(SOURCE, base, FRACTION) if side == "heldout")
    (base / "texts" / heldout).write_text("zebra " * 500 + "giraffe " * 500)
    assert find_clusters(SOURCE, base, FRACTION, 3, seed=1).digest == before.digest


def test_of_few_documents_each_is_cut_as_a_run_cuts_it(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    for number in range(3):
        (tmp_path / "texts" / f"{number}.txt").write_text("word " * 100)
    found = list(sided(SOURCE, tmp_path, FRACTION))
    assert [(side, document.text) for side, document in found] == list(corpus.split(SOURCE, tmp_path, FRACTION))
    assert [(side, document.name) for side, document in found] == [
        (side, f"{number}.txt") for number in range(3) for side in ("train", "heldout")
    ]


def test_blocks_change_nothing(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clusters = find_clusters(SOURCE, base, FRACTION, 3, seed=1)
    split_documents(SOURCE, base, FRACTION, clusters, base / "one")
    monkeypatch.setattr(module, "_BLOCK_LETTERS", 1000)
    split_documents(SOURCE, base, FRACTION, clusters, base / "many")
    for file in (base / "one").iterdir():
        assert file.read_bytes() == (base / "many" / file.name).read_bytes()


def test_a_folder_that_is_taken_stays_as_it_was(base: Path) -> None:
    clusters = find_clusters(SOURCE, base, FRACTION, 3, seed=1)
    with pytest.raises(ConfigError, match="overwrites no folder"):
        split_documents(SOURCE, base, FRACTION, clusters, base / "texts")


def test_a_file_that_holds_no_clusters_is_refused(tmp_path: Path) -> None:
    (tmp_path / "clusters.bin").write_bytes(b"clusters")
    with pytest.raises(WireError, match="ClustersRecord"):
        read_clusters(tmp_path)
