"""What an anchor keeps of a run on its disk: one whole state, and what was committed since, as bytes.

    anchored/ state.bin            `Kept`: the manifest that the state belongs to, and the digest of its index
              blobs/               the index, the state's chunks, and results, each named by its digest
              round-12.bin         the certificate of a round after that state

A new state is put beside the old one, chunk by chunk; what both have in common is there already, also after a crash.
Once all of it is on disk `state.bin` is replaced, and only then is what nobody names any more removed. What is read is
checked against its digest, certificates against the votes that prove them.
"""

import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from weft import wire
from weft.errors import DataError, WireError
from weft.ids import Digest
from weft.net.messages import HexDigest
from weft.net.multi_source import Blob
from weft.peer.chain import Chain
from weft.store.home import BlobStore, RecordFile
from weft.sync.records import rewinds
from weft.sync.records.charter import Charter
from weft.sync.records.index import MAX_INDEX_NBYTES, StateIndex
from weft.sync.records.messages import Certificate, Manifest

FORMAT = 1
MAX_STATE_NBYTES = 4 << 20
_ROUND = re.compile(r"round-([0-9]{1,18})\.bin")


class Kept(wire.Record, frozen=True, kw_only=True):
    format: Annotated[int, Meta(ge=1)] = FORMAT
    head: Manifest
    charter: Charter  # what holds after `head`, which names its digest
    index: HexDigest


class Anchored:
    """The kept state and what follows on it."""

    def __init__(self, folder: Path) -> None:
        self.kept: Kept | None = None
        self.chain: Chain | None = None  # its head is the newest manifest whose state can be had from here
        self.state_nbytes = 0
        self.results_nbytes = 0  # of the rounds since
        self._folder = folder
        self._file: RecordFile[Kept | None] = RecordFile(folder / "state.bin", Kept, MAX_STATE_NBYTES, None)
        self._blobs = BlobStore(folder / "blobs")
        self._since: list[Certificate] = []
        self._state_names: set[Digest] = set()

    @property
    def num_since(self) -> int:
        """Rounds committed since the state."""
        return len(self._since)

    @property
    def has_gone_back(self) -> bool:
        """Whether one of these goes back to parameters that the state and results do not lead to."""
        return any(rewinds.decided(each.manifest) is not None for each in self._since)

    def load(self) -> None:
        """Take up what an earlier process kept, as far as it is whole."""
        with suppress(OSError, WireError, DataError):
            kept = self._file.read()
            if kept is None or kept.format != FORMAT or wire.digest_of(kept.charter) != kept.head.charter:
                return
            index = self.index(kept.index)
            if index is not None and not self.missing(index):
                self._follow_from(kept, index)
                for certificate in self._read_rounds():
                    self.append(certificate)  # unless it follows on nothing here: left of an earlier state

    def has(self, digest: Digest) -> bool:
        """Return whether a blob is here and whole."""
        try:
            return self._blobs.open(digest) is not None
        except DataError:
            return False

    def put(self, data: wire.Buffer) -> Digest:
        """Keep a chunk, an index or a result.

        Raises:
            DiskFull, DataError: it cannot be written.
        """
        return self._blobs.put(data)

    def index(self, digest: Digest) -> StateIndex | None:
        """Return an index that is here.

        Raises:
            WireError: the blob is none.
        """
        data = self._blobs.read(digest, MAX_INDEX_NBYTES)
        return None if data is None else wire.decode(data, StateIndex, max_nbytes=MAX_INDEX_NBYTES)

    def lookup(self, digest: Digest) -> wire.Buffer | None:
        """Return what others may fetch: what the kept state and the rounds since name."""
        return self._blobs.open(digest) if digest in self._named() and self.has(digest) else None

    def make_room(self, coming: set[Digest]) -> None:
        """Remove what is neither named by what is kept nor `coming`: left of states that did not come whole."""
        self._blobs.keep_only(self._named() | coming)

    def missing(self, index: StateIndex) -> list[Blob]:
        """Return the chunks of a state that are not here."""
        places = index.places()
        return [Blob(digest=name, nbytes=each[0].nbytes) for name, each in places.items() if not self.has(name)]

    def replace(self, head: Manifest, charter: Charter, index: Digest) -> None:
        """Take a state that is here, chunks and index, in the place of the one before, and drop what belongs to that.

        Raises:
            DataError: it is not whole.
            DiskFull: no room; the one before stays.
        """
        found = self.index(index)
        if found is None or self.missing(found):
            raise DataError(f"the state after round {head.round} is not whole in {self._folder}")
        kept = Kept(head=head, charter=charter, index=index)
        self._file.keep(kept)
        later = [each for each in self._since if each.manifest.round > head.round]
        self._follow_from(kept, found)
        for certificate in later:
            if not self.append(certificate):
                break
        rounds = {each.manifest.round for each in self._since}
        for path in self._folder.iterdir():
            match = _ROUND.fullmatch(path.name)
            if match is not None and int(match[1]) not in rounds:
                with suppress(OSError):  # what cannot be removed stays, and is left out when it is read
                    path.unlink()
        self._blobs.keep_only(self._named())

    def append(self, certificate: Certificate) -> bool:
        """Follow one more round; return whether it is proven, follows on the last, and its results are here.

        Raises:
            DiskFull, DataError: it cannot be written.
        """
        if not self.write(certificate):
            return False
        self.follow(certificate)
        return True

    def write(self, certificate: Certificate) -> bool:
        """Put one more round on the disk, on any thread; return what `append` does. Then it may be followed.

        Raises:
            DiskFull, DataError: it cannot be written.
        """
        chain, results = self.chain, _results(certificate)
        if chain is None or not chain.proven(certificate) or not all(self.has(digest) for digest in results):
            return False
        file = _round_file(self._folder / f"round-{certificate.manifest.round}.bin")
        file.read()
        file.keep(certificate)
        return True

    def follow(self, certificate: Certificate) -> None:
        """Go on from a round that was written, on the thread that asks what is kept."""
        assert self.chain is not None
        self.chain.append(certificate)
        self._since.append(certificate)
        self.results_nbytes += sum(len(self._blobs.open(digest) or b"") for digest in _results(certificate))

    def close(self) -> None:
        self._blobs.close()

    def _follow_from(self, kept: Kept, index: StateIndex) -> None:
        # What is named comes first: it is asked for on another thread, and only where a state is kept.
        self._state_names = {kept.index, *index.places()}
        self.state_nbytes, self.results_nbytes, self._since = index.nbytes, 0, []
        self.kept, self.chain = kept, Chain(kept.head, kept.charter)

    def _named(self) -> set[Digest]:
        if self.kept is None:
            return set()
        return self._state_names.union(*(_results(each) for each in self._since))

    def _read_rounds(self) -> Iterator[Certificate]:
        found = {int(match[1]): path for path in self._folder.iterdir() if (match := _ROUND.fullmatch(path.name))}
        for _, path in sorted(found.items()):
            if (certificate := _round_file(path).read()) is not None:
                yield certificate


def _round_file(path: Path) -> RecordFile[Certificate | None]:
    return RecordFile(path, Certificate, wire.MAX_RECORD_NBYTES, None)


def _results(certificate: Certificate) -> set[Digest]:
    return {part.result for part in certificate.manifest.parts}
