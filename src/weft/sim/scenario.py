"""What is simulated: a run, the machines that take part, their links, and what befalls them when.

    run = "nano.toml"

    [[kind]]
    name = "lab"
    count = 4
    up_mbit = 100.0

    [[fault]]
    type = "kill"
    peer = "lab-2"
    at_round = 3
    returns_after_s = 30.0

The first peer of the first kind is the run's maker. Two peers are as far apart as both are from the middle: delays add
up, as do jitters, and a packet gets through if neither end loses it.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import reduce
from typing import Annotated, Literal, Self, TypeVar

import msgspec
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

_LINE = ("up_mbit", "down_mbit", "delay_ms", "jitter_ms", "loss")

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

    def __post_init__(self) -> None:
        super().__post_init__()
        if all(getattr(self, name) is None for name in _LINE):
            raise ValueError(f"fault of {self.peer}: its line does not change; give one of {', '.join(_LINE)}.")


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

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kinds and self.what != "letters":
            raise ValueError(f'fault of {self.peer}: kinds are of letters; set what = "letters", or leave them out.')


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


Way = Literal[
    "none",
    "noise",
    "upwards",
    "half the steps",
    "half a batch",
    "one other sample",
    "other text",
    "slower",
    "new optimizer",
    "false moments",
]
OF_OPTIMIZERS: frozenset[Way] = frozenset({"new optimizer", "false moments"})  # what has none cannot lie about it


class Cheat(PeerFault, frozen=True, kw_only=True, tag="cheat"):
    """Some of its training steps are not those that it claims: it makes none and moves nothing (`none`), or by chance
    (`noise`); steps up the gradient; leaves every second step out; trains on half of each batch, on one other sample,
    on text that it likes; at a learning rate one hundredth lower; begins with a new optimizer, or leaves a false one.
    """

    work: Way
    share: _Share = 1.0  # of its steps
    lasts_s: Seconds | None = None


class Audits(PeerFault, frozen=True, kw_only=True, tag="audits"):
    """It does not audit as it is drawn to: makes none of the others' steps again (`lazy`), or none of those that this
    fault names (`collude`); says of everybody that its steps differ (`accuse`); or shows auditors nothing (`deaf`)."""

    how: Literal["lazy", "collude", "accuse", "deaf"]
    lasts_s: Seconds | None = None


def audits_how(in_force: Iterable[object]) -> set[str]:
    """Return in which ways a machine does not audit while these faults are in force."""
    return {fault.how for fault in in_force if isinstance(fault, Audits)}


Fault = Kill | Stop | Freeze | Partition | Slow | Line | Skew | Drop | Corrupt | Lie | Cheat | Audits


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


MAX_MACHINES = 1024  # each keeps its events and files until the end
_Speed = Annotated[float, Meta(gt=0, description="tokens per second of training")]


class Lined(Config, frozen=True, kw_only=True):
    """Machines with alike lines. They are called `name-0`, `name-1`, ...; a single one just `name`."""

    name: Name
    count: Annotated[int, Meta(ge=1, le=MAX_MACHINES)] = 1
    up_mbit: Mbit | None = None  # None: any
    down_mbit: Mbit | None = None
    delay_ms: Ms = 10.0  # one way, to the middle of the network
    jitter_ms: Ms = 0.0
    loss: Loss = 0.0

    def names(self) -> list[str]:
        return [self.name] if self.count == 1 else [f"{self.name}-{number}" for number in range(self.count)]


class Coming(Lined, frozen=True, kw_only=True):
    """Machines that may come later."""

    joins_at_s: Seconds = 0.0
    joins_over_s: Seconds = 0.0  # its machines come one after another, the last just before so long after the first

    def __post_init__(self) -> None:
        if self.joins_over_s and self.count == 1:
            raise ValueError(f"kind {self.name}: a single machine comes at joins_at_s; leave joins_over_s out.")

    def coming(self, number: int) -> Self:
        """Return what machine `number` of this kind is like, with the moment at which it comes."""
        after_s = self.joins_over_s * number / self.count
        return msgspec.structs.replace(self, joins_at_s=self.joins_at_s + after_s) if after_s else self

    def under(self, fault: Fault) -> Self:
        """Return what such a machine is like while a fault is in force."""
        if not isinstance(fault, Line):
            return self
        given = {name: getattr(fault, name) for name in _LINE}
        return msgspec.structs.replace(self, **{name: value for name, value in given.items() if value is not None})


class Kind(Coming, frozen=True, kw_only=True):
    """Machines that are alike."""

    tokens_per_s: _Speed = 10_000.0
    clock_skew_s: Annotated[float, Meta(description="seconds that its clock on the wall is ahead")] = 0.0

    def under(self, fault: Fault) -> Self:
        match fault:
            case Slow():
                return msgspec.structs.replace(self, tokens_per_s=self.tokens_per_s * fault.factor)
            case Skew():
                return msgspec.structs.replace(self, clock_skew_s=self.clock_skew_s + fault.ahead_s)
            case _:
                return super().under(fault)


class Scenario(Config, frozen=True, kw_only=True):
    run: Annotated[str, Meta(description="path of the run file, from the scenario's folder")]
    kind: Annotated[tuple[Kind, ...], Meta(min_length=1)]
    fault: tuple[Fault, ...] = ()
    seed: Annotated[int, Meta(ge=0)] = 0  # of keys, jitter, loss and whatever faults leave to chance
    compute: Literal["real", "cost"] = "real"  # cost: nothing is learnt, and nothing heavy computed
    limit_s: Annotated[float, Meta(gt=0, description="virtual seconds after which all stop")] = 7 * 86_400.0

    def __post_init__(self) -> None:
        refuse_namesakes(self.kind)
        if self.kind[0].joins_at_s:
            raise ValueError("kind: the first peer makes the run, so its joins_at_s is 0.")
        for fault in self.fault:
            for name in fault.named():
                self.called(name)

    def machines(self) -> Iterator[tuple[str, Kind]]:
        """Yield each machine's name and what it is like, the maker first."""
        return machines(self.kind)

    def called(self, name: str) -> list[str]:
        return called(self.kind, name)


def refuse_namesakes(kinds: Sequence[Lined]) -> None:
    """
    Raises:
        ValueError: two machines have one name, or there are too many.
    """
    names = [name for kind in kinds for name in kind.names()]
    twice = sorted(name for name, num in Counter(names).items() if num > 1)
    if twice:
        raise ValueError(f"kind: two machines are called {twice[0]}; give one of them another name.")
    if len(names) > MAX_MACHINES:
        raise ValueError(f"kind: {len(names)} machines; a scenario has at most {MAX_MACHINES}.")


K = TypeVar("K", bound=Coming)


def machines(kinds: Sequence[K]) -> Iterator[tuple[str, K]]:
    """Yield each machine's name and what it is like."""
    for kind in kinds:
        for number, name in enumerate(kind.names()):
            yield name, kind.coming(number)


def called(kinds: Sequence[Lined], name: str) -> list[str]:
    """Return the machines that a fault means by `name`: a machine, or all of a kind.

    Raises:
        ValueError: there is no such machine or kind.
    """
    for kind in kinds:
        if name == kind.name:
            return kind.names()
    known = [each for kind in kinds for each in kind.names()]
    if name not in known:
        raise ValueError(f"fault: no machine is called {name}. There are: {', '.join(known)}.")
    return [name]


def at_present(usual: K, in_force: Iterable[Fault]) -> K:
    """Return what a machine is like while faults are in force, given in the order in which they began.

    It is computed anew whenever one begins or ends, so those that overlap end in any order and leave nothing behind.
    """
    return reduce(lambda now, fault: now.under(fault), in_force, usual)
