"""What befalls machines, and when.

[[fault]]
type = "freeze"
peer = "lab-2"        # a machine, or a kind: all of it
at_round = 3          # or at_s
lasts_s = 12.0
"""

from collections.abc import Iterable, Sequence
from typing import Annotated, Literal

from msgspec import Meta

from weft.config import Config

Name = Annotated[str, Meta(min_length=1, max_length=32, pattern=r"^[a-z][a-z0-9-]*\Z", description="of a machine")]
Mbit = Annotated[float, Meta(gt=0, description="megabits per second")]
Ms = Annotated[float, Meta(ge=0, le=60_000, description="milliseconds")]
Loss = Annotated[float, Meta(ge=0, lt=1, description="share of the packets")]
Seconds = Annotated[float, Meta(ge=0, description="seconds")]
_Factor = Annotated[float, Meta(gt=0, description="of its speed")]
_Share = Annotated[float, Meta(gt=0, le=1, description="share of those")]
_Skew = Annotated[float, Meta(description="seconds that its clock on the wall is ahead")]

LetterKind = Literal[
    "Ready",
    "Pass",
    "Collect",
    "Stuck",
    "Merged",
    "Holding",
    "Prepare",
    "Promise",
    "Propose",
    "Accept",
    "Refuse",
    "Goodbye",
    "Decision",
]


class FaultBase(Config, frozen=True, kw_only=True, tag_field="type"):
    """Something happens, at a time of the simulation or once a machine has made the outer step of a round."""

    at_s: Seconds | None = None
    at_round: Annotated[int, Meta(ge=1)] | None = None

    def __post_init__(self) -> None:
        if (self.at_s is None) == (self.at_round is None):
            raise ValueError(f"fault of {', '.join(self.named())}: give either at_s or at_round.")

    def named(self) -> tuple[str, ...]:
        """Return the machines and kinds that it names, first whose round is meant."""
        raise NotImplementedError


class PeerFault(FaultBase, frozen=True, kw_only=True):
    peer: Name  # or a kind: each machine of it, at its own moment

    def named(self) -> tuple[str, ...]:
        return (self.peer,)


class Kill(PeerFault, frozen=True, kw_only=True, tag="kill"):
    """Its process ends as by kill -9."""

    returns_after_s: Seconds | None = None  # None: never


class Stop(PeerFault, frozen=True, kw_only=True, tag="stop"):
    """Its person stops it: it says goodbye and saves."""

    returns_after_s: Seconds | None = None


class Freeze(PeerFault, frozen=True, kw_only=True, tag="freeze"):
    """Its process stands still, as by SIGSTOP or in a laptop that sleeps; what it is sent waits and comes at once."""

    lasts_s: Seconds


class Partition(FaultBase, frozen=True, kw_only=True, tag="partition"):
    """Nothing passes between machines of different sides; who is on no side reaches all."""

    sides: Annotated[tuple[tuple[Name, ...], ...], Meta(min_length=1)]  # a single one is cut off from all others
    lasts_s: Seconds

    def named(self) -> tuple[str, ...]:
        return tuple(name for side in self.sides for name in side)


class Slow(PeerFault, frozen=True, kw_only=True, tag="slow"):
    """Its machine computes slower."""

    factor: _Factor
    lasts_s: Seconds


class Line(PeerFault, frozen=True, kw_only=True, tag="line"):
    """Its line to the network is another for a while. What is not given stays."""

    up_mbit: Mbit | None = None
    down_mbit: Mbit | None = None
    delay_ms: Ms | None = None
    jitter_ms: Ms | None = None
    loss: Loss | None = None
    lasts_s: Seconds


class Skew(PeerFault, frozen=True, kw_only=True, tag="skew"):
    """Somebody sets its clock on the wall."""

    ahead_s: _Skew
    lasts_s: Seconds | None = None  # None, here and below: until the end


class Drop(PeerFault, frozen=True, kw_only=True, tag="drop"):
    """Some of what it sends is lost: what it brings to a round, for all, or letters of a round, one by one."""

    what: Literal["payloads", "letters"] = "payloads"
    kinds: tuple[LetterKind, ...] = ()  # of letters; none named: all
    share: _Share
    lasts_s: Seconds | None = None


class Corrupt(PeerFault, frozen=True, kw_only=True, tag="corrupt"):
    """Some of what it sends is damaged: blobs that it serves, or any bytes that it writes to a stream."""

    what: Literal["blobs", "bytes"] = "blobs"
    share: _Share = 1.0
    lasts_s: Seconds | None = None


class Lie(PeerFault, frozen=True, kw_only=True, tag="lie"):
    """It claims 10**18 tokens; or as an owner gives results that are no numbers, or says that it is stuck and can have
    nobody's work; or as a leader proposes nonsense.

    About rivals: as a leader it proposes one manifest to half of the members, and another to the others. About votes:
    to the leader of a later attempt it denies what it has accepted. About progress: it says that it is a million rounds
    further, and about a branch, that it stands on one that counts 10**18 tokens; it offers its state as that one's.
    """

    about: Literal["tokens", "results", "stuck", "proposals", "rivals", "votes", "progress", "branch"]
    lasts_s: Seconds | None = None


Fault = Kill | Stop | Freeze | Partition | Slow | Line | Skew | Drop | Corrupt | Lie


def parted(sides: Sequence[Sequence[str]], everybody: Iterable[str]) -> set[tuple[str, str]]:
    """Return the pairs of machines, each in ascending order, between which a partition lets nothing pass."""
    if len(sides) == 1:
        sides = [sides[0], [name for name in everybody if name not in sides[0]]]
    return {
        (min(one, other), max(one, other))
        for number, side in enumerate(sides)
        for there in sides[number + 1 :]
        for one in side
        for other in there
        if one != other
    }
