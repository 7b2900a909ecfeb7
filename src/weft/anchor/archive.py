"""An archive of an audited run on disk: what it takes to do any of its counted training steps again, for ever.

    archive/ 0/ begin.bin        `Begin`: the manifest that these rounds follow on
                round-12.bin     `KeptRound`: a round's certificate, and the signed works that it counts
             1/                  the same from later on, where rounds between were missed, or on another branch
             blobs/              results of rounds, lists and chunks of states, each named by its digest

Works name the states that their training steps led from and to; those that leases began with are among the blobs, as
far as they could be had. Between a round and the next, parameters follow from its results.

Nothing is removed. What is read is checked against digests and signatures by whoever uses it (`weft.launch.replays`);
reading changes nothing, so an archive may lie on a disk that cannot be written.
"""

import re
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from msgspec import UNSET, Meta

from weft.data.store import READ_ONLY, write_atomically
from weft.errors import DataError, WireError
from weft.ids import Digest, PeerId, Round, RunId, short
from weft.keys import verify
from weft.net.messages import HexDigest
from weft.peer.chain import Chain
from weft.peer.messages import NamedState
from weft.store.home import RecordFile
from weft.sync.proof import opened
from weft.sync.records.charter import Charter
from weft.sync.records.messages import Certificate, Manifest
from weft.sync.records.work import MAX_SEGMENTS, Work
from weft.wire import Buffer, Record, Signed, decode, digest, digest_of, encode, unseal

FORMAT = 1
MAX_BEGIN_NBYTES = 4 << 20
MAX_ROUND_NBYTES = 16 << 20  # a certificate, and of each of 64 works up to 16 kB and the paths of its states
_ROUND = re.compile(r"round-([0-9]{1,18})\.bin")
_HEX = re.compile(r"[0-9a-f]{64}")

_States = Annotated[tuple[NamedState, ...], Meta(max_length=MAX_SEGMENTS)]


class Begin(Record, frozen=True, kw_only=True):
    """Where rounds begin: with the run, or with a state that members gave."""

    format: Annotated[int, Meta(ge=1)] = FORMAT
    head: Manifest
    charter: Charter  # what holds after `head`, which names its digest
    opening: Signed | None = None  # `head`, by who began the run; None: it is a later one
    index: HexDigest | None = None  # of the state after `head`, among the blobs; None: the run's first


class KeptWork(Record, frozen=True, kw_only=True):
    """A counted work."""

    signed: Signed
    begins: _States = ()  # the first state of each segment, whose chunks are among the blobs; none: it was not shown
    ends: _States = ()  # the last of each

    @property
    def name(self) -> Digest:
        return digest_of(self.signed)


class KeptRound(Record, frozen=True, kw_only=True):
    certificate: Certificate
    works: Annotated[tuple[KeptWork, ...], Meta(max_length=64)] = ()  # as far as they could be had

    @property
    def manifest(self) -> Manifest:
        return self.certificate.manifest

    def work(self, name: Digest) -> KeptWork | None:
        return next((each for each in self.works if each.name == name), None)


@dataclass(frozen=True)
class Wanted:
    """What a round has counted of a peer."""

    round: Round
    peer: PeerId
    name: Digest
    payload: Digest


def counted_works(manifest: Manifest) -> list[Wanted]:
    """Return the works that a round counts, in its order."""
    return [
        Wanted(manifest.round, PeerId(each.peer), Digest(each.work), Digest(each.payload))
        for each in manifest.contributions
        if each.work is not UNSET
    ]


def opened_work(signed: Signed, wanted: Wanted) -> Work:
    """Return what a peer has signed, once it is what the round counts.

    Raises:
        WireError: it is not.
    """
    work: Work = unseal(signed, Work, verify)
    if digest_of(signed) != wanted.name or (work.peer, work.payload) != (wanted.peer, wanted.payload):
        raise WireError("it is not the work that the round counts")
    if signed.signer != wanted.peer:
        raise WireError(f"{short(signed.signer)} has signed a work of {short(wanted.peer)}")
    return work


class Blobs:
    """Files named by the digests of their bytes. None is removed, and none is held open."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def has(self, name: Digest) -> bool:
        return self._path(name).exists()

    def put(self, data: Buffer) -> Digest:
        """Keep bytes under their digest.

        Raises:
            DiskFull, DataError: they cannot be written.
        """
        name = digest(data)
        if not self.has(name):
            write_atomically(self._path(name), [data], mode=READ_ONLY)
        return name

    def read(self, name: Digest) -> bytes:
        """Return a blob.

        Raises:
            DataError: it is not here, or not what its name says.
        """
        path = self._path(name)
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            raise DataError(f"blob {short(name)} is not in {self._folder}") from None
        except OSError as error:
            raise DataError(f"cannot read {path}: {error.strerror or error}") from None
        if digest(data) != name:
            raise DataError(f"{path} is altered: it does not hold the bytes that its name says")
        return data

    def _path(self, name: Digest) -> Path:
        if not _HEX.fullmatch(name):
            raise DataError(f"{name[:80]!r} is no digest")  # it could be a path
        return self._folder / name


class Stretch:
    """Rounds that follow on each other, in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._begin: RecordFile[Begin | None] = RecordFile(folder / "begin.bin", Begin, MAX_BEGIN_NBYTES, None)

    def begin(self) -> Begin:
        """
        Raises:
            DataError: it is not whole.
        """
        found = self._begin.read()
        if found is None or found.format != FORMAT or digest_of(found.charter) != found.head.charter:
            raise DataError(f"{self._begin.path} is altered, or of another version of weft: {self._begin.damage}")
        return found

    def keep_begin(self, begin: Begin) -> None:
        self._begin.keep(begin)

    @property
    def numbers(self) -> list[int]:
        """Return the rounds of which there is a file, ascending."""
        found = (_ROUND.fullmatch(path.name) for path in (self.folder.iterdir() if self.folder.is_dir() else ()))
        return sorted(int(match[1]) for match in found if match)

    def round(self, number: int) -> KeptRound:
        """
        Raises:
            DataError: it is not here, or not whole.
        """
        path = self._path(number)
        try:
            found: KeptRound = decode(path.read_bytes(), KeptRound, max_nbytes=MAX_ROUND_NBYTES)
        except OSError as error:
            raise DataError(f"cannot read {path}: {error.strerror or error}") from None
        except WireError as error:
            raise DataError(f"{path} is altered: {error}") from None
        if found.manifest.round != number:
            raise DataError(f"{path} is altered: it is of round {found.manifest.round}")
        return found

    def keep(self, kept: KeptRound) -> None:
        """
        Raises:
            DiskFull, DataError: it cannot be written.
        """
        write_atomically(self._path(kept.manifest.round), [encode(kept)])

    def add(self, round: Round, work: KeptWork) -> None:
        """Keep a work of a round that is here, in the place of what was known of it.

        Raises:
            DiskFull, DataError: it cannot be written, or the round is not whole any more.
        """
        kept, name = self.round(round), work.name
        others = {each.name: each for each in kept.works} | {name: work}
        order = [each.name for each in counted_works(kept.manifest)]
        works = tuple(others[each] for each in order if each in others)
        self.keep(KeptRound(certificate=kept.certificate, works=works))

    def lacking(self, rounds: int) -> list[tuple[Wanted, KeptWork | None]]:
        """Return the works of the last rounds of which something is not here, and what is.

        Raises:
            DataError: a round is not whole any more.
        """
        found = list[tuple[Wanted, KeptWork | None]]()
        for kept in map(self.round, self.numbers[-rounds:]):
            for wanted in counted_works(kept.manifest):
                work = kept.work(wanted.name)
                if work is None or not work.begins:
                    found.append((wanted, work))
        return found

    def _path(self, number: int) -> Path:
        return self.folder / f"round-{number}.bin"


def stretches(folder: Path) -> list[Stretch]:
    """Return what an archive has, in the order in which it was kept."""
    numbers = sorted(int(path.name) for path in folder.glob("*") if path.name.isdecimal() and path.is_dir())
    return [Stretch(folder / str(number)) for number in numbers]


class Archive:
    """What an anchor writes. Its methods that write may run on any thread, one at a time.

    Args:
        folder: made when something is kept.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.blobs = Blobs(folder / "blobs")
        self.chain: Chain | None = None  # up to the newest round that is kept; None: nothing is
        self.stretch: Stretch | None = None  # that it writes

    def load(self, run: RunId) -> None:
        """Go on with what an earlier process kept, as far as it is whole."""
        for stretch in stretches(self.folder)[-1:]:
            try:
                begin = stretch.begin()
            except DataError:
                continue
            if begin.head.run == run and is_sound(begin, run):
                self.stretch, self.chain = stretch, Chain(begin.head, begin.charter)
                with suppress(DataError):  # members are asked again for what follows
                    deque(followed(self.chain, stretch), maxlen=0)

    @property
    def head(self) -> Manifest | None:
        return None if self.chain is None else self.chain.head

    @property
    def is_empty(self) -> bool:
        """Whether no round follows yet on where it begins."""
        return self.stretch is None or not self.stretch.numbers

    def begin(self, begin: Begin) -> None:
        """Keep rounds from here on; their state, if one is named, is among the blobs.

        Raises:
            DiskFull, DataError: it cannot be written.
        """
        known = [int(each.folder.name) for each in stretches(self.folder)]
        stretch = self.stretch
        if stretch is None or not self.is_empty:
            stretch = Stretch(self.folder / str(max(known, default=-1) + 1))
        stretch.keep_begin(begin)
        self.stretch, self.chain = stretch, Chain(begin.head, begin.charter)

    def write(self, certificate: Certificate) -> bool:
        """Keep one more round, whose results are among the blobs; return whether it is proven and follows on the last.

        Raises:
            DiskFull, DataError: it cannot be written.
        """
        if self.chain is None or self.stretch is None or not self.chain.proven(certificate):
            return False
        self.stretch.keep(KeptRound(certificate=certificate))
        return True

    def follow(self, certificate: Certificate) -> None:
        """Go on from a round that was written, on the thread that asks what is kept."""
        assert self.chain is not None
        self.chain.append(certificate)


def is_sound(begin: Begin, run: RunId) -> bool:
    """Return whether rounds begin with this run: who began it has signed that, where it is the run's first manifest."""
    if begin.opening is None:
        return begin.index is not None
    try:
        return begin.index is None and opened(run, begin.opening) == begin.head
    except WireError:
        return False


def followed(chain: Chain, stretch: Stretch) -> Iterator[KeptRound]:
    """Yield the rounds of a stretch, each once it is proven to follow on the one before; the chain is at it then.

    Raises:
        DataError: one is missing before the last, or altered.
    """
    last = max(stretch.numbers, default=0)
    while chain.head.round < last:
        kept = stretch.round(chain.head.round + 1)
        if not chain.proven(kept.certificate):
            where = stretch.folder / f"round-{kept.manifest.round}.bin"
            raise DataError(f"{where} is altered: no majority of the members before has signed it")
        chain.append(kept.certificate)
        yield kept
