"""What was merged and decided since the last checkpoint, on disk: so that not even all who die at once lose a commit.

    journal/ 12-RESULT'S DIGEST    the bytes of a result of round 12, before this peer tells that it holds them
             12.bin                the certificate of round 12, as soon as it is decided

Who was killed makes these outer steps again after its checkpoint. What was accepted and not decided it serves, so that
whoever leads next can have it decided. A checkpoint makes what is before it superfluous.

Nothing is flushed, for a round would wait for it: what is written outlives the process, and not the power of a machine
that fails together with all others.

Failure:
- there is no room, or the folder cannot be written: nothing is kept until the next checkpoint, and it can be asked why.
- what is read is not what its name says: it is ignored, with all rounds after it.
"""

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from weft import wire
from weft.errors import DiskFull, WireError
from weft.ids import Digest, Round
from weft.store.pool import Pool
from weft.sync.records.messages import Certificate

FULL_NBYTES = 512 << 20  # then a checkpoint is due, and where a state is larger, at twice that
_RESULT = re.compile(r"([0-9]{1,18})-([0-9a-f]{64})")
_ROUND = re.compile(r"([0-9]{1,18})\.bin")


class Journal:
    """
    Args:
        is_on: False: nothing is written, for its owner wants no checkpoint but at the end.
        memory: for what is read.
    """

    def __init__(self, folder: Path, *, is_on: bool = True, memory: Pool | None = None) -> None:
        self._folder = folder
        self._memory = memory or Pool(0)
        self._is_wanted = self._is_on = is_on
        self._failure: str | None = None
        self._nbytes: int | None = None  # None: nobody has looked since files were removed

    def take_failure(self) -> str | None:
        """Return, once, why nothing is kept. What is written is written by any thread; events are not."""
        failure, self._failure = self._failure, None
        return failure

    def keep(self, round: Round, result: Digest, data: wire.Buffer) -> None:
        self._write(f"{round}-{result}", data)

    def decide(self, certificate: Certificate) -> None:
        self._write(f"{certificate.manifest.round}.bin", wire.encode(certificate))

    def rounds(self) -> Iterator[Certificate]:
        """Yield what was decided, in order, as far as it can be read."""
        for number, path in sorted(self._found(_ROUND)):
            try:
                certificate: Certificate = wire.decode(path.read_bytes(), Certificate)
            except (OSError, WireError):
                return
            if certificate.manifest.round == number:
                yield certificate

    def result(self, round: Round, result: Digest) -> memoryview | None:
        """Return a result, if it is here and whole."""
        path, filled = self._folder / f"{round}-{result}", 0
        with suppress(OSError), path.open("rb", buffering=0) as file:
            data = self._room(path.stat().st_size)
            while filled < len(data) and (count := file.readinto(data[filled:])):
                filled += count
            return data if filled == len(data) and wire.digest(data) == result else None
        return None

    def _room(self, nbytes: int) -> memoryview:
        try:
            return self._memory.block(nbytes)
        except DiskFull:  # where memory lies in files: what was decided matters more
            return Pool(0).block(nbytes)

    @property
    def nbytes(self) -> int:
        """How large it is."""
        if self._nbytes is None:
            self._nbytes = 0
            for _, path in (*self._found(_ROUND), *self._found(_RESULT)):
                with suppress(OSError):
                    self._nbytes += path.stat().st_size
        return self._nbytes

    def forget(self, until: Round) -> None:
        """Remove what a checkpoint after round `until` makes superfluous, and write again: that found room."""
        self._is_on = self._is_wanted
        for number, path in (*self._found(_ROUND), *self._found(_RESULT)):
            if number <= until:
                with suppress(OSError):
                    path.unlink()
        self._nbytes = None

    def _found(self, pattern: re.Pattern[str]) -> list[tuple[int, Path]]:
        if not self._folder.is_dir():
            return []
        matched = ((pattern.fullmatch(path.name), path) for path in self._folder.iterdir())
        return [(int(match[1]), path) for match, path in matched if match is not None]

    def _write(self, name: str, data: wire.Buffer) -> None:
        if not self._is_on:
            return
        part = self._folder / f".part-{name}"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            part.write_bytes(data)
            os.replace(part, self._folder / name)
            if self._nbytes is not None:
                self._nbytes += len(memoryview(data).cast("B"))
        except OSError as error:
            self._is_on = False
            with suppress(OSError):
                part.unlink(missing_ok=True)
            why = error.strerror or error
            self._failure = f"what is decided until the next checkpoint is not kept: cannot write {self._folder}: {why}"
