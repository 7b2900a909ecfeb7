"""A sink for tests that look at what was emitted."""

from weft.events import Entry


class MemorySink:
    """Keeps entries in a list."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []

    def write(self, entry: Entry) -> None:
        self.entries.append(entry)

    def close(self) -> None:
        pass
