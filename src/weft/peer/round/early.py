"""Letters that came before what they belong to: of the next round, and of a plan that has not come yet.

A plan names everybody's payload, part by part: with 32 members it has 70 kB. On its leader's slow line some members
have it a second before others, and an owner that is quick tells its result to members that do not know the plan. The
round machine ignores such a letter, as it may; here it waits until the plan is there.

It does not know what letters decide.
"""

from collections.abc import Collection

from weft.ids import PeerId
from weft.sync.records.messages import AnyRoundMessage, Base, Collect, Merged, RoundNote
from weft.wire import Signed

NUM_KEPT = 4  # letters of the next round, of one sender
NUM_OTHERS = 8  # senders that are no members: the next round may count them in

Told = tuple[PeerId, Signed, AnyRoundMessage]


class Early:
    def __init__(self) -> None:
        self._next: list[tuple[PeerId, Signed, RoundNote]] = []
        self._merged: dict[tuple[PeerId, int], tuple[Signed, Merged]] = {}  # by owner and part

    def keep_for_next(self, sender: PeerId, signed: Signed, note: RoundNote, members: Collection[PeerId]) -> None:
        """Keep a letter of the round after this one; its sender's oldest makes room, never another member's.

        Args:
            members: of this round.
        """
        mine = [each for each in self._next if each[0] == sender]
        if len(mine) >= NUM_KEPT:
            self._next.remove(mine[0])
        others = list(dict.fromkeys(each[0] for each in self._next if each[0] not in members))
        if sender not in members and sender not in others and len(others) >= NUM_OTHERS:
            self._next = [each for each in self._next if each[0] != others[0]]
        self._next.append((sender, signed, note))

    def begin(self) -> list[tuple[PeerId, Signed, RoundNote]]:
        """Begin another round: return what was kept for the next one, and forget plans that have not come."""
        kept, self._next = self._next, []
        self._merged.clear()
        return kept

    def is_kept(self, base: Base, plan: Collect | None, sender: PeerId, signed: Signed, message: object) -> bool:
        """Keep the result of a plan that is still to come, an owner's latest of a part; return whether it is one."""
        if not isinstance(message, Merged) or message.part >= base.num_parts or not _is_newer(message, plan):
            return False
        known = self._merged.get((sender, message.part))
        if _is_newer(message, None if known is None else known[1]):
            self._merged[sender, message.part] = signed, message
        return True

    def of_plan(self, plan: Collect) -> list[Told]:
        """Return the results kept for a plan that has come, and forget those of plans before it."""
        found: list[Told] = []
        for (sender, part), (signed, merged) in sorted(self._merged.items(), key=lambda item: item[0]):
            if not _is_newer(merged, plan):
                del self._merged[sender, part]
                found.append((sender, signed, merged))
        return found


def _is_newer(merged: Merged, than: Collect | Merged | None) -> bool:
    return than is None or (merged.attempt, merged.revision) > (than.attempt, than.revision)
