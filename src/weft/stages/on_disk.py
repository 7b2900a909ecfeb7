"""Which stages' states lie on this machine's disk, and of which rounds; a checkpoint is read again once it has changed.

A copy that was kept for others (`backup`) is told from what this peer held itself: nothing private is in it.
"""

from collections.abc import Mapping
from contextlib import suppress

from weft.errors import CheckpointError
from weft.peer.state.checkpoint import Contents, read_contents
from weft.store.home import CHECKPOINT_FILE, PeerFolder
from weft.sync.records.messages import Manifest


class StagesOnDisk:
    """
    Args:
        folder: of one peer and the whole run.
    """

    def __init__(self, folder: PeerFolder) -> None:
        self._folder = folder
        self._read: dict[int, tuple[int, Contents]] = {}  # when it was written, and what it says

    @property
    def rounds(self) -> dict[int, int]:
        """Return the rounds of all states that are kept, by stage."""
        return {stage: _round(contents) for stage, contents in self._contents().items()}

    @property
    def own(self) -> dict[int, int]:
        """Return those of the states that this peer held itself."""
        return {stage: _round(contents) for stage, contents in self._contents().items() if not is_copy(contents)}

    def has_counted(self, num_tokens: int) -> bool:
        """Return whether so much is trained, as a state that this peer held has it."""
        own = [contents.head for contents in self._contents().values() if not is_copy(contents)]
        return any(head is not None and head.committed_tokens >= num_tokens for head in own)

    def with_held(self, heads: Mapping[int, Manifest | None]) -> dict[int, int]:
        """Return the rounds of all that is kept; of stages that are held now, how far they are.

        Args:
            heads: of the states that are held.
        """
        found = self.rounds
        return found | {stage: int(head.round) for stage, head in heads.items() if head is not None and stage in found}

    def _contents(self) -> dict[int, Contents]:
        found = {}
        for stage in self._folder.stages:
            folder = self._folder.stage(stage).checkpoint
            with suppress(CheckpointError, OSError):  # half-written, or gone
                changed_at = (folder / CHECKPOINT_FILE).stat().st_mtime_ns
                before = self._read.get(stage)
                if before is None or before[0] != changed_at:
                    before = self._read[stage] = changed_at, read_contents(folder)
                found[stage] = before[1]
        return found


def is_copy(contents: Contents) -> bool:
    """Return whether a checkpoint of a stage was kept for others: not even how far its peer had come is in it."""
    return not contents.counters


def _round(contents: Contents) -> int:
    return 0 if contents.head is None else int(contents.head.round)
