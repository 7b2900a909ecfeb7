"""What auditors seal before they are shown what a worker came to, and whether they open it. It judges no worker.

    sealed      seal = H(salt | state | auditor), of the state that the auditor's own steps came to: told to all
    opened      salt and state, once the worker has shown its own
    false       something else is opened than was sealed, or two things were sealed
    silent      nothing is opened within `ROUNDS` and `SECONDS`

So nobody can wait for a worker's word and repeat it. Each peer knows this by itself, of what it was told: of a seal
that it has not heard it finds nothing.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Annotated, NamedTuple

from msgspec import Meta

from weft.ids import Digest, PeerId, Round
from weft.net.messages import HexDigest, HexRun
from weft.wire import Record, digest

# Both over: three times a worker's patience, in which an auditor may ask again, and once more for what it fetches.
ROUNDS, SECONDS = 16, 120.0
MAX_SEALS = 64  # of one auditor that are remembered


class Sealed(Record, frozen=True, kw_only=True):
    """What an auditor signs before it is shown what a worker came to."""

    run: HexRun
    work: HexDigest  # the signed `Work`
    before: Annotated[int, Meta(ge=0, le=1 << 53)]  # number of the state that the steps begin with
    seal: HexDigest


class Salt(Record, frozen=True, kw_only=True):
    """What an auditor signs for itself: a number that nobody else can make, and the same after a restart."""

    run: HexRun
    work: HexDigest
    before: int


def seal_of(salt: Digest, state: Digest, auditor: PeerId) -> Digest:
    """Return the seal of a state that an auditor has come to."""
    return digest(bytes.fromhex(salt) + bytes.fromhex(state) + bytes.fromhex(auditor))


class Place(NamedTuple):
    """What one auditor has looked at."""

    auditor: PeerId
    work: Digest
    before: int


@dataclass
class _Told:
    """
    Args:
        seal: that was told, or that what was opened comes to, whichever came first.
        is_false: it is found already.
    """

    seal: Digest
    round: Round
    at: float
    is_opened: bool = False
    is_false: bool = False


class Seals:
    """Of all auditors, as far as one peer has heard them."""

    def __init__(self) -> None:
        self._told = dict[Place, _Told]()  # oldest first

    def known(self, place: Place) -> Digest | None:
        """Return what was sealed of it first."""
        told = self._told.get(place)
        return None if told is None else told.seal

    def is_opened(self, place: Place) -> bool:
        told = self._told.get(place)
        return told is not None and told.is_opened

    def is_over(self, place: Place) -> bool:
        """Return whether it was opened, or is known to be false."""
        told = self._told.get(place)
        return told is not None and (told.is_opened or told.is_false)

    def sealed(self, place: Place, seal: Digest, round: Round, now: float) -> bool:
        """Note a seal; return False, once, where it is another than before."""
        told = self._told.get(place)
        if told is None:
            if sum(each.auditor == place.auditor for each in self._told) < MAX_SEALS:
                self._told[place] = _Told(seal, round, now)
            return True
        is_found = told.seal != seal and not told.is_false
        told.is_false |= is_found
        return not is_found

    def opened(self, place: Place, state: Digest, salt: Digest, round: Round, now: float) -> bool:
        """Note what is opened, be it before its seal has come; return False, once, where it is not what was sealed."""
        is_right = self.sealed(place, seal_of(salt, state, place.auditor), round, now)
        if (told := self._told.get(place)) is not None:
            told.is_opened = True
        return is_right

    def silent(self, members: Collection[PeerId], round: Round, now: float) -> list[Place]:
        """Forget what is of long ago; return what nobody has opened of it who is a member still."""
        old = [place for place, told in self._told.items() if round - told.round > ROUNDS and now - told.at > SECONDS]
        found = [place for place in old if not self.is_over(place) and place.auditor in members]
        for place in old:
            del self._told[place]
        return found
