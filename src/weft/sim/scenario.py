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

from collections.abc import Iterable, Iterator
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from weft.config import Config
from weft.sim.faults import Fault, Line, Loss, Mbit, Ms, Name, Seconds, Skew, Slow

MAX_MACHINES = 1024  # each keeps its events and files until the end
_LINE = ("up_mbit", "down_mbit", "delay_ms", "jitter_ms", "loss")

_Speed = Annotated[float, Meta(gt=0, description="tokens per second of training")]


class Kind(Config, frozen=True, kw_only=True):
    """Machines that are alike. They are called `name-0`, `name-1`, ...; a single one just `name`."""

    name: Name
    count: Annotated[int, Meta(ge=1, le=MAX_MACHINES)] = 1
    tokens_per_s: _Speed = 10_000.0
    up_mbit: Mbit | None = None  # None: any
    down_mbit: Mbit | None = None
    delay_ms: Ms = 10.0  # one way, to the middle of the network
    jitter_ms: Ms = 0.0
    loss: Loss = 0.0
    joins_at_s: Seconds = 0.0
    joins_over_s: Seconds = 0.0  # its machines come one after another, the last just before so long after the first
    clock_skew_s: Annotated[float, Meta(description="seconds that its clock on the wall is ahead")] = 0.0

    def names(self) -> list[str]:
        return [self.name] if self.count == 1 else [f"{self.name}-{number}" for number in range(self.count)]

    def coming(self, number: int) -> "Kind":
        """Return what machine `number` of this kind is like, with the moment at which it comes."""
        after_s = self.joins_over_s * number / self.count
        return msgspec.structs.replace(self, joins_at_s=self.joins_at_s + after_s) if after_s else self


class Scenario(Config, frozen=True, kw_only=True):
    run: Annotated[str, Meta(description="path of the run file, from the scenario's folder")]
    kind: Annotated[tuple[Kind, ...], Meta(min_length=1)]
    fault: tuple[Fault, ...] = ()
    seed: Annotated[int, Meta(ge=0)] = 0  # of keys, jitter, loss and whatever faults leave to chance
    compute: Literal["real", "cost"] = "real"  # cost: nothing is learnt, and nothing heavy computed
    limit_s: Annotated[float, Meta(gt=0, description="virtual seconds after which all stop")] = 7 * 86_400.0

    def __post_init__(self) -> None:
        names = [name for name, _ in self.machines()]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"kind: two machines are called {twice[0]}; give one of them another name.")
        if len(names) > MAX_MACHINES:
            raise ValueError(f"kind: {len(names)} machines; a scenario has at most {MAX_MACHINES}.")
        if self.kind[0].joins_at_s:
            raise ValueError("kind: the first peer makes the run, so its joins_at_s is 0.")
        for fault in self.fault:
            for name in fault.named():
                self.called(name)

    def machines(self) -> Iterator[tuple[str, Kind]]:
        """Yield each machine's name and what it is like, the maker first."""
        for kind in self.kind:
            for number, name in enumerate(kind.names()):
                yield name, kind.coming(number)

    def called(self, name: str) -> list[str]:
        """Return the machines that a fault means by `name`: a machine, or all of a kind.

        Raises:
            ValueError: there is no such machine or kind.
        """
        for kind in self.kind:
            if name == kind.name:
                return kind.names()
        known = [each for each, _ in self.machines()]
        if name not in known:
            raise ValueError(f"fault: no machine is called {name}. There are: {', '.join(known)}.")
        return [name]


def at_present(usual: Kind, in_force: Iterable[Fault]) -> Kind:
    """Return what a machine is like while faults are in force, given in the order in which they began.

    It is computed anew whenever one begins or ends, so those that overlap end in any order and leave nothing behind.
    """
    now = usual
    for fault in in_force:
        match fault:
            case Slow():
                now = msgspec.structs.replace(now, tokens_per_s=now.tokens_per_s * fault.factor)
            case Line():
                given = {name: getattr(fault, name) for name in _LINE}
                now = msgspec.structs.replace(
                    now, **{name: value for name, value in given.items() if value is not None}
                )
            case Skew():
                now = msgspec.structs.replace(now, clock_skew_s=now.clock_skew_s + fault.ahead_s)
            case _:
                pass
    return now
