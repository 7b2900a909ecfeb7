"""Along which members a text has come: whom, with whose weights, and where others took over."""

from dataclasses import dataclass, replace
from typing import Any

from weft.ids import PeerId, short

MAX_MENDS = 64  # of one text that are told, the last ones; and changes of its weights


@dataclass(frozen=True)
class Mend:
    """Another member of a stage went on with a text.

    Args:
        num_drawn: tokens that were there by then.
        why: the one before was left: a word of `messages.Why`, or "parted", "silent", "declined", "unread".
        pause_s: between the last token before and the first one after; None: none has come yet, or nobody wanted any.
    """

    stage: int
    before: PeerId
    member: PeerId
    num_drawn: int
    why: str
    pause_s: float | None = None


class Course:
    """Whom a text has come by so far, with the weights after which round, and where others took over."""

    def __init__(self) -> None:
        self.peers: tuple[PeerId, ...] = ()
        self.rounds: list[tuple[int, int]] = []  # a round, and how many tokens were drawn before with others
        self.mends: list[Mend] = []
        self.num_mends = 0
        self.num_changes = 0
        self._why: str | None = None
        self._since_s: float | None = None  # nothing has come
        self._is_awaited = False  # a token after the last mends

    def stopped(self, why: str, now: float) -> None:
        """Its members do not go on. What came first is the cause of all that follows until others do."""
        if self.peers and self._why is None:
            self._why = why
            is_unread = why == "unread"  # a rest is no pause of the members'
            self._since_s = None if is_unread else now if self._since_s is None else self._since_s

    def runs(self, peers: tuple[PeerId, ...], round: int, num_drawn: int) -> bool:
        """All members of a path have taken it; return whether anything is new of it."""
        why, self._why = self._why or "parted", None
        before, self.peers = self.peers or peers, peers
        changed = [(stage, a, b) for stage, (a, b) in enumerate(zip(before, peers, strict=True)) if a != b]
        self.mends += [Mend(stage, a, b, num_drawn, why) for stage, a, b in changed]
        self.num_mends += len(changed)
        self._is_awaited = self._is_awaited or bool(changed)
        is_first = not self.rounds
        is_other = is_first or self.rounds[-1][0] != round
        if is_other:
            self.rounds = [each for each in self.rounds if each[1] < num_drawn] + [(round, num_drawn)]
        del self.mends[:-MAX_MENDS], self.rounds[:-MAX_MENDS]
        is_new = is_other or bool(changed)
        self.num_changes += is_new
        return is_new

    def came(self, now: float) -> None:
        """A token has come."""
        if self._is_awaited and self._since_s is not None:
            pause_s = now - self._since_s
            self.mends = [
                replace(each, pause_s=pause_s) if each.pause_s is None and each.why != "unread" else each
                for each in self.mends
            ]
            self.num_changes += 1
        self._is_awaited, self._since_s = False, now

    def tree(self) -> dict[str, Any]:
        """Return it as programs are told: stages count from 1, members are named by the first digits of their keys."""
        mends = [
            {
                "stage": each.stage + 1,
                "before": short(each.before),
                "member": short(each.member),
                "after_tokens": each.num_drawn,
                "why": each.why,
                "pause_s": None if each.pause_s is None else round(each.pause_s, 3),
            }
            for each in self.mends
        ]
        return {
            "members": [short(peer) for peer in self.peers],
            "rounds": [{"round": each, "after_tokens": num} for each, num in self.rounds],
            "mends": mends,
            "num_mends": self.num_mends,
        }
