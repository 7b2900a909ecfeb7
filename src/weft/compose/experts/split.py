"""Documents sorted into clusters: a file of JSON lines for each expert to train on, and beside it what is held out.

    documents ──weft's rule──► training ──nearest centre──► cluster-000.jsonl          {"name": ..., "text": ...}
                          └──► held out ──nearest centre──► cluster-000.heldout.jsonl
                                                            clusters.bin               the record that found them
                                                            clusters.json              what is in each, to read

Held out is what a run of the whole corpus holds out (`weft.data.corpus.split`), by names that stay in the files. So an
expert is never trained on what the whole is judged by, whichever of the two its run reads. A run of a cluster's file
cuts from it what it holds out itself: its lines are documents of another name there.

Documents are read one after the other, and some 4 MiB of letters are held at a time.
"""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import IO

import msgspec

from weft import wire
from weft.compose.experts import clusters as clustering
from weft.compose.experts.clusters import Clusters, clustered
from weft.compose.experts.tfidf import SAMPLE, learnt, sampled
from weft.data.corpus import Split, TextualSource, documents, split
from weft.data.documents import Document
from weft.errors import ConfigError
from weft.ids import Digest
from weft.model.weights import whole_folder, write_json

CLUSTERS, TOLD = "clusters.bin", "clusters.json"
_BLOCK_LETTERS = 1 << 22
LEAST_HELDOUT = 1e-6  # of documents, where any are held out
_NUM_WORDS = 12  # that a person is shown of each cluster

Sided = tuple[Split, Document]


class Amount(msgspec.Struct):
    """How much text is on one side of a cluster."""

    num_documents: int = 0
    nbytes: int = 0


class Cluster(msgspec.Struct):
    """What is in a cluster.

    Args:
        words: that count most in it.
    """

    train: Amount
    heldout: Amount
    words: tuple[str, ...]


class Told(msgspec.Struct):
    """What clusters.json says.

    Args:
        digest: of the record in clusters.bin.
    """

    digest: Digest
    heldout_fraction: float
    clusters: list[Cluster]


def file_of(cluster: int, side: Split) -> str:
    """Return the name of a cluster's file."""
    return f"cluster-{cluster:03}{'.heldout' * (side == 'heldout')}.jsonl"


def sided(source: TextualSource, base: Path, heldout_fraction: float) -> Iterator[Sided]:
    """Yield documents, or the two parts of each where a source has few, with the side that a run has them on.

    The source is read twice, side by side.

    Raises:
        ConfigError: no such share can be held out.
        DataError: as `weft.data.corpus.split`.
    """
    if heldout_fraction and not LEAST_HELDOUT <= heldout_fraction < 1:
        raise ConfigError(
            f"--heldout {heldout_fraction}: the share of documents that are held out is 0, or {LEAST_HELDOUT} or more."
        )
    pieces = split(source, base, heldout_fraction)
    for document in documents(source, base):
        num_left = len(document.text)
        while num_left:
            side, text = next(pieces)
            num_left -= len(text)
            yield side, Document(document.name, text)
    next(pieces, None)  # of no text at all it says so


def find_clusters(
    source: TextualSource, base: Path, heldout_fraction: float, num: int, seed: int, sample: int = SAMPLE
) -> Clusters:
    """Return clusters of what is trained on: made once, by one, for all who have documents of their own.

    Args:
        num: of clusters.
        seed: of the sample and of all that is drawn.
        sample: documents that they are found by, at most.

    Raises:
        ConfigError: as `sided`.
        DataError: as `sided`, or too few documents.
    """
    trained = (document for side, document in sided(source, base, heldout_fraction) if side == "train")
    texts = [document.text for document in sampled(trained, sample, seed)]
    tfidf = learnt(texts, seed)
    return clustered(tfidf, tfidf.vectors(texts), num, seed)


def split_documents(
    source: TextualSource, base: Path, heldout_fraction: float, clusters: Clusters, folder: Path
) -> Told:
    """Write a folder of files, a pair for each cluster; return what is in them.

    Raises:
        ConfigError: as `sided`; or the folder is taken, or cannot be written.
        DataError: as `sided`.
        DiskFull: no room; nothing is left behind.
    """
    found = [Cluster(Amount(), Amount(), words) for words in clusters.words(_NUM_WORDS)]
    told = Told(clusters.digest, heldout_fraction, found)
    encoder = msgspec.json.Encoder()
    with whole_folder(folder, last=CLUSTERS) as partial:
        with ExitStack() as stack:
            files: dict[tuple[int, Split], IO[bytes]] = {
                (cluster, side): stack.enter_context((partial / file_of(cluster, side)).open("wb"))
                for cluster in range(clusters.num)
                for side in ("train", "heldout")
            }
            for block in _blocks(sided(source, base, heldout_fraction)):
                nearest = clusters.nearest([document.text for _, document in block])
                for cluster, (side, document) in zip(nearest.tolist(), block, strict=True):
                    files[cluster, side].write(encoder.encode(document) + b"\n")
                    amount: Amount = getattr(found[cluster], side)
                    amount.num_documents += 1
                    amount.nbytes += len(document.text.encode())
        write_json(partial / TOLD, told)
        (partial / CLUSTERS).write_bytes(wire.encode(clusters.record))
    return told


def read_clusters(folder: Path) -> Clusters:
    """Return the clusters of a folder that `split_documents` wrote.

    Raises:
        WireError: its file holds no such record.
        OSError: it cannot be read.
    """
    return clustering.decode((folder / CLUSTERS).read_bytes())


def _blocks(documents: Iterable[Sided]) -> Iterator[list[Sided]]:
    """Yield documents by as many as have `_BLOCK_LETTERS`: what is held at a time is bounded by one more."""
    block, num_letters = list[Sided](), 0
    for each in documents:
        block.append(each)
        num_letters += len(each[1].text)
        if num_letters >= _BLOCK_LETTERS:
            yield block
            block, num_letters = [], 0
    if block:
        yield block
