"""What SWIM's machine knows, hears and says: the words of net/membership/swim.py, which says what it does with them."""

import msgspec

from weft.ids import PeerId
from weft.net.membership import broadcasts
from weft.net.membership import members as table
from weft.net.membership.full_mesh import (
    Forgotten,
    Full,
    Gone,
    Heard,
    Left,
    LinkLost,
    New,
    Recovered,
    Redial,
    RedialFailed,
    Stalled,
    Suspected,
    Tick,
)
from weft.net.membership.members import Claim, Lives, Members, Proof


class _Frozen(msgspec.Struct, frozen=True):
    pass


class Tie(_Frozen, frozen=True):
    """How the other side of a link uses it."""

    watches_all: bool
    is_kept: bool


class Probe(_Frozen, frozen=True):
    sent_at: float
    asked_at: float | None = None


class IndirectProbe(_Frozen, frozen=True):
    """To reach a peer for others."""

    since: float
    askers: tuple[PeerId, ...]


class State(_Frozen, frozen=True, kw_only=True):
    """Nothing in it is ever changed in place."""

    members: Members
    secret: bytes  # 32 bytes that nobody else knows
    is_active: bool = False
    log: broadcasts.Log = broadcasts.Log()
    links: dict[PeerId, Tie | None] = {}  # None: it has not said yet
    kept: tuple[PeerId, ...] = ()  # of few links
    probes: dict[PeerId, Probe] = {}
    indirect: dict[PeerId, IndirectProbe] = {}
    lap: tuple[PeerId, ...] = ()  # still to be pinged
    num_laps: int = 0
    strain: int = 0
    num_news: int = 0  # since members were last compared
    is_unlinked: bool = True  # the links have to be chosen among all present: one of those kept is there no more
    come: tuple[PeerId, ...] = ()  # since the links were chosen
    probe_at: float = 0.0
    spread_at: float = 0.0
    compare_at: float = 0.0
    relink_at: float = 0.0
    revive_at: float = 30.0
    sweep_at: float = 0.0
    renew_at: float = table.RENEW_S
    ticked_at: float | None = None
    judges_from: float = 0.0


# --- inputs, besides Tick, Heard, LinkLost and RedialFailed ---


class Linked(_Frozen, frozen=True):
    """A link came up."""

    peer: PeerId


class Tied(_Frozen, frozen=True):
    peer: PeerId
    tie: Tie


class Told(_Frozen, frozen=True):
    """Claims whose signatures hold came from `sender`, or from this process itself (None)."""

    sender: PeerId | None
    claims: tuple[Claim, ...]
    is_compared: bool = False  # found by anti-entropy: to the others it is no news


class Pinged(_Frozen, frozen=True):
    peer: PeerId


class HelpAsked(_Frozen, frozen=True):
    """`peer` asks whether `target` can be reached."""

    peer: PeerId
    target: PeerId


class Helped(_Frozen, frozen=True):
    """`peer` has heard `target` since it was asked."""

    peer: PeerId
    target: PeerId


class Silent(_Frozen, frozen=True):
    """Whoever watches all has not heard `peer` for too long."""

    peer: PeerId


class Watch(_Frozen, frozen=True):
    """From now on few links are kept, or all. `present`: who is alive or suspected so far; `gone`: who is gone."""

    is_active: bool
    present: frozenset[PeerId] = frozenset()
    gone: frozenset[PeerId] = frozenset()


Input = Tick | Heard | LinkLost | RedialFailed | Linked | Tied | Told | Pinged | HelpAsked | Helped | Silent | Watch


# --- outputs, besides those about members ---


class Ping(_Frozen, frozen=True):
    peer: PeerId
    news: tuple[Proof, ...]


class Answer(_Frozen, frozen=True):
    """`peer` has pinged."""

    peer: PeerId
    news: tuple[Proof, ...]


class Tell(_Frozen, frozen=True):
    peer: PeerId
    news: tuple[Proof, ...]


class AskHelp(_Frozen, frozen=True):
    peer: PeerId
    target: PeerId


class Help(_Frozen, frozen=True):
    """Tell `peer` that `target` was heard."""

    peer: PeerId
    target: PeerId


class SignLife(_Frozen, frozen=True):
    """Sign that this process lives, and say so by `Told`."""

    incarnation: int


class SignAccusation(_Frozen, frozen=True):
    life: Lives


class Compare(_Frozen, frozen=True):
    """Compare members with `peer`."""

    peer: PeerId


class Revive(_Frozen, frozen=True):
    """Try whether `peer`, which is gone, can be reached again; None: anybody who was known once and is forgotten."""

    peer: PeerId | None


class Keep(_Frozen, frozen=True):
    """Keep links to `peers`, and let others go."""

    peers: tuple[PeerId, ...]


Change = New | Suspected | Recovered | Gone | Left | Forgotten | Full
Output = (
    Stalled
    | Redial
    | Ping
    | Answer
    | Tell
    | AskHelp
    | Help
    | SignLife
    | SignAccusation
    | Compare
    | Revive
    | Keep
    | Change
)
Outputs = tuple[Output, ...]
