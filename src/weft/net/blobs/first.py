"""What the first of several peers delivers."""

from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

from weft.errors import NetError, PeerError, Refused
from weft.ids import PeerId

T = TypeVar("T")


async def first_of(peers: Iterable[PeerId], ask: Callable[[PeerId], Awaitable[T]], what: str) -> T:
    """Return what `ask` returns of the first of `peers`, asked one after the other, that delivers it.

    Raises:
        PeerError: none did; says what each answered.
    """
    failures = []
    for peer in peers:
        try:
            return await ask(peer)
        except (PeerError, NetError, Refused) as error:
            failures.append(str(error))
    raise PeerError(f"nobody delivered {what}: {'; '.join(failures) or 'nobody is linked that could'}")
