"""What is simulated: a run, the machines that take part, their links, and what befalls them when.

    run = "nano.toml"

    [[group]]
    name = "lab"
    count = 4
    up_mbit = 100.0

    [[fault]]
    type = "kill"
    peer = "lab-2"
    at_round = 3
    returns_after_s = 30.0

The first peer of the first group is the run's maker. Two peers are as far apart as both are from the middle: delays add
up, as do jitters, and a packet gets through if neither end loses it.

It does not know how any of it is played.
"""

from collections.abc import Iterator
from typing import Annotated

import msgspec
from msgspec import Meta

from weft.config import Config

MAX_PEERS = 32  # of one run, so far

_Name = Annotated[str, Meta(min_length=1, max_length=32, pattern=r"^[a-z][a-z0-9-]*\Z", description="of a machine")]
_Mbit = Annotated[float, Meta(gt=0, description="megabits per second")]
_Ms = Annotated[float, Meta(ge=0, le=60_000, description="milliseconds")]
_Loss = Annotated[float, Meta(ge=0, lt=1, description="share of the packets")]
_Seconds = Annotated[float, Meta(ge=0, description="seconds")]
_Factor = Annotated[float, Meta(gt=0, description="of its speed")]


class Group(Config, frozen=True, kw_only=True):
    """Machines that are alike. They are called `name-0`, `name-1`, ...; a single one just `name`."""

    name: _Name
    count: Annotated[int, Meta(ge=1, le=MAX_PEERS)] = 1
    tokens_per_s: Annotated[float, Meta(gt=0, description="of training")] = 10_000.0
    up_mbit: _Mbit | None = None  # None: any
    down_mbit: _Mbit | None = None
    delay_ms: _Ms = 10.0  # one way, to the middle of the network
    jitter_ms: _Ms = 0.0
    loss: _Loss = 0.0
    joins_at_s: _Seconds = 0.0
    clock_skew_s: Annotated[float, Meta(description="seconds that its clock on the wall is ahead")] = 0.0

    def names(self) -> list[str]:
        return [self.name] if self.count == 1 else [f"{self.name}-{number}" for number in range(self.count)]


class FaultBase(Config, frozen=True, kw_only=True, tag_field="type"):
    """Something happens to a peer, at a time of the simulation or once it has made the outer step of a round."""

    peer: _Name
    at_s: _Seconds | None = None
    at_round: Annotated[int, Meta(ge=1)] | None = None

    def __post_init__(self) -> None:
        if (self.at_s is None) == (self.at_round is None):
            raise ValueError(f"fault of {self.peer}: give either at_s or at_round.")


class Kill(FaultBase, frozen=True, kw_only=True, tag="kill"):
    """Its process ends as by kill -9."""

    returns_after_s: _Seconds | None = None  # None: never


class Stop(FaultBase, frozen=True, kw_only=True, tag="stop"):
    """Its person stops it: it says goodbye and saves."""

    returns_after_s: _Seconds | None = None


class Cut(FaultBase, frozen=True, kw_only=True, tag="cut"):
    """Nothing passes between it, or it and its companions, and all others."""

    companions: tuple[_Name, ...] = ()
    lasts_s: _Seconds


class Slow(FaultBase, frozen=True, kw_only=True, tag="slow"):
    """Its machine computes slower."""

    factor: _Factor
    lasts_s: _Seconds


class Line(FaultBase, frozen=True, kw_only=True, tag="line"):
    """Its line to the network is another for a while. What is not given stays."""

    up_mbit: _Mbit | None = None
    down_mbit: _Mbit | None = None
    delay_ms: _Ms | None = None
    jitter_ms: _Ms | None = None
    loss: _Loss | None = None
    lasts_s: _Seconds


Fault = Kill | Stop | Cut | Slow | Line


class Scenario(Config, frozen=True, kw_only=True):
    run: Annotated[str, Meta(description="path of the run file, from the scenario's folder")]
    group: Annotated[tuple[Group, ...], Meta(min_length=1)]
    fault: tuple[Fault, ...] = ()
    seed: Annotated[int, Meta(ge=0)] = 0  # of keys, jitter and loss
    limit_s: Annotated[float, Meta(gt=0, description="virtual seconds after which all stop")] = 7 * 86_400.0

    def __post_init__(self) -> None:
        names = [name for name, _ in self.machines()]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"group: two machines are called {twice[0]}; give one of them another name.")
        if len(names) > MAX_PEERS:
            raise ValueError(f"group: {len(names)} peers; at most {MAX_PEERS} take part in a run.")
        if self.group[0].joins_at_s:
            raise ValueError("group: the first peer makes the run, so its joins_at_s is 0.")
        for fault in self.fault:
            unknown = {fault.peer, *(fault.companions if isinstance(fault, Cut) else ())} - set(names)
            if unknown:
                raise ValueError(f"fault: no machine is called {min(unknown)}. There are: {', '.join(names)}.")

    def machines(self) -> Iterator[tuple[str, Group]]:
        """Yield each machine's name and what it is like, the maker first."""
        for group in self.group:
            for name in group.names():
                yield name, group


def changed(group: Group, line: Line) -> Group:
    """Return what a machine is like while its line is another."""
    given = {name: getattr(line, name) for name in ("up_mbit", "down_mbit", "delay_ms", "jitter_ms", "loss")}
    return msgspec.structs.replace(group, **{name: value for name, value in given.items() if value is not None})
