"""The pause of a peer that holds stages.

It does not know who wants it.
"""

from collections.abc import Callable, Iterable

from weft.stages.step.membership import Membership


class Pausings:
    """The pause of all that a peer holds, as one."""

    def __init__(self, members: Callable[[], Iterable[Membership]], tell: Callable[[], None]) -> None:
        self._members = members
        self._tell = tell
        self._reasons: list[str] = []

    def want(self, reason: str) -> None:
        self._reasons.append(reason)
        for member in self._members():
            member.peer.pausing.want(reason)
        self._tell()

    def want_no_more(self, reason: str) -> None:
        self._reasons = [each for each in self._reasons if each != reason]
        for member in self._members():
            member.peer.pausing.want_no_more(reason)

    def take_over(self, member: Membership) -> None:
        """Let what has come to be held pause, too, where this peer is paused."""
        for reason in self._reasons:
            member.peer.pausing.want(reason)

    async def settled(self) -> None:
        for member in list(self._members()):
            await member.peer.pausing.settled()
        self._tell()

    @property
    def is_away(self) -> bool:
        return any(member.peer.pausing.is_away for member in self._members())

    @property
    def reasons(self) -> tuple[str, ...]:
        return tuple(self._reasons)
