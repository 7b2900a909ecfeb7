"""How a person's command reaches a peer that runs on the same machine: two small files in the peer's folder.

    weft pause        writes `wish`: the word, and a fresh number
    the peer          looks twice a second, takes the file away, does what it says, and writes `answer`: number, words
    weft pause        reads the answer, or says after a while that there is none

No socket is opened: whoever may write into the folder, its owner, may ask. Files work on every system and have no
longest path. A wish that belongs to another user is not done, nor one that an earlier process left.
"""

import asyncio
import os
from contextlib import suppress
from typing import Literal

import msgspec

from weft.data.store import write_atomically
from weft.errors import DataError, DiskFull
from weft.launch.guard import Guarded
from weft.store.home import PeerFolder

LOOK_S = 0.5
ASKED = "on request"  # the reason of a pause that a person asked for
MAX_NBYTES = 4096

Word = Literal["pause", "resume"]


class Wish(msgspec.Struct, frozen=True, kw_only=True):
    word: Word
    number: str


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    number: str
    text: str


class Control:
    """Does what is asked of one peer."""

    def __init__(self, folder: PeerFolder, peer: Guarded) -> None:
        self._folder = folder
        self._peer = peer

    async def watch(self) -> None:
        """Look for wishes until cancelled."""
        take_wish(self._folder)  # of before this process
        while True:
            await asyncio.sleep(LOOK_S)
            wish = take_wish(self._folder)
            if wish is not None:
                text = await self._do(wish)
                with suppress(DiskFull, DataError):
                    write_atomically(self._folder.answer, [msgspec.json.encode(Answer(number=wish.number, text=text))])

    async def _do(self, wish: Wish) -> str:
        pausing = self._peer.pausing
        if pausing is None:
            return "an anchor trains nothing: there is nothing to pause"
        match wish.word:
            case "pause":
                pausing.want(ASKED)
                await pausing.settled()
                return "paused: the device is free; the peer stays a member, votes and follows"
            case "resume":
                pausing.want_no_more(ASKED)
                await pausing.settled()
                if pausing.reasons:
                    return f"still paused: {', '.join(pausing.reasons)}"
                return "warming up, then training again" if pausing.is_away else "training again"


def put_wish(folder: PeerFolder, wish: Wish) -> None:
    """Ask the peer of `folder`.

    Raises:
        DataError, DiskFull: the folder cannot be written.
    """
    write_atomically(folder.wish, [msgspec.json.encode(wish)])


def take_wish(folder: PeerFolder) -> Wish | None:
    """Return what is asked, and take it away; None: nothing is, or nothing that its owner has written."""
    path = folder.wish
    try:
        status = path.stat()
        data = path.read_bytes() if status.st_size <= MAX_NBYTES else b""
        path.unlink()
    except OSError:
        return None
    if hasattr(os, "getuid") and status.st_uid not in (os.getuid(), 0):
        return None
    with suppress(msgspec.DecodeError):
        return msgspec.json.decode(data, type=Wish)
    return None


def read_answer(folder: PeerFolder, number: str) -> str | None:
    """Return what the peer says to the wish of this number; None: nothing yet."""
    with suppress(OSError, msgspec.DecodeError):
        answer = msgspec.json.decode(folder.answer.read_bytes(), type=Answer)
        return answer.text if answer.number == number else None
    return None
