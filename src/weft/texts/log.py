"""Rows of numbers by their place in a text: what came in and waits, and what came out, kept for who needs it again.

A log of what was sent on is 1/4 to 1/32 of the keys and values that were computed with it, and lets a member's place be
taken by another that computes one section again (docs/adr/0065-a-log-of-activations.md).
"""

from collections import OrderedDict, deque


class Strip:
    """Rows of one text, without gaps.

    Args:
        row_nbytes: of each.
    """

    def __init__(self, row_nbytes: int, start: int = 0) -> None:
        self._row_nbytes = row_nbytes
        self._parts: deque[tuple[int, bytes]] = deque()  # where each begins
        self.start = self.stop = start
        self.nbytes = 0

    def add(self, start: int, data: bytes) -> None:
        """Put rows at their place; what was there, and behind it, is dropped."""
        self.cut(start)
        if start != self.stop:  # what is between was never here
            self.forget(self.stop)
            self.start = self.stop = start
        self._parts.append((start, data))
        self.stop += len(data) // self._row_nbytes
        self.nbytes += len(data)

    def part(self, start: int, stop: int) -> bytes:
        """Return the rows from a place to a place, as far as they are here."""
        found = []
        for at, data in reversed(self._parts):  # what came last is wanted most, and a part is as short as a row
            end = at + len(data) // self._row_nbytes
            if end <= start:
                break
            low, high = max(start, at), min(stop, end)
            if low < high:
                found.append(data[(low - at) * self._row_nbytes : (high - at) * self._row_nbytes])
        return found[0] if len(found) == 1 else b"".join(reversed(found))

    def cut(self, stop: int) -> None:
        """Drop the rows from a place on."""
        while self._parts and self.stop > stop:
            at, data = self._parts.pop()
            self.nbytes -= len(data)
            self.stop = at
            if at < stop:
                kept = data[: (stop - at) * self._row_nbytes]
                self._parts.append((at, kept))
                self.nbytes += len(kept)
                self.stop = stop
        if not self._parts:
            self.start = self.stop = min(self.stop, stop)

    def forget(self, until: int) -> None:
        """Drop the rows before a place: in whole parts, so some of them may stay."""
        while self._parts and self._end_of_first <= until:
            _, data = self._parts.popleft()
            self.nbytes -= len(data)
        self.start = self._parts[0][0] if self._parts else self.stop

    @property
    def num_parts(self) -> int:
        return len(self._parts)

    def forget_some(self) -> None:
        """Drop the oldest part."""
        if self._parts:
            self.forget(self._end_of_first)

    @property
    def _end_of_first(self) -> int:
        at, data = self._parts[0]
        return at + len(data) // self._row_nbytes


class Log:
    """What came out, of all texts: at most `most_nbytes`, or what came last, which is about to be sent. Who was silent
    longest loses first, its beginning first.

    Args:
        row_nbytes: of each row.
    """

    def __init__(self, row_nbytes: int, most_nbytes: int) -> None:
        self._row_nbytes, self._most_nbytes = row_nbytes, most_nbytes
        self._strips: OrderedDict[bytes, Strip] = OrderedDict()  # by text; silent longest first
        self.nbytes = 0

    def add(self, text: bytes, start: int, data: bytes) -> list[tuple[bytes, int]]:
        """Keep rows; return which texts lost theirs before which place for it."""
        strip = self._strips.setdefault(text, Strip(self._row_nbytes, start))
        self._strips.move_to_end(text)
        self.nbytes -= strip.nbytes
        strip.add(start, data)
        self.nbytes += strip.nbytes
        return self._forgotten(text)

    def part(self, text: bytes, start: int, stop: int) -> bytes:
        strip = self._strips.get(text)
        return b"" if strip is None else strip.part(start, stop)

    def cut(self, text: bytes, stop: int) -> None:
        if (strip := self._strips.get(text)) is not None:
            self.nbytes -= strip.nbytes
            strip.cut(stop)
            self.nbytes += strip.nbytes

    def drop(self, text: bytes) -> None:
        if (strip := self._strips.pop(text, None)) is not None:
            self.nbytes -= strip.nbytes

    def _forgotten(self, newest: bytes) -> list[tuple[bytes, int]]:
        lost = dict[bytes, int]()
        while self.nbytes > self._most_nbytes:
            texts = self._strips.items()
            text, strip = next((each for each in texts if each[1].num_parts > (each[0] == newest)), (b"", None))
            if strip is None:
                break
            self.nbytes -= strip.nbytes
            strip.forget_some()
            self.nbytes += strip.nbytes
            lost[text] = strip.start
        return list(lost.items())
