"""What is simulated of serving: the machines of each stage, who asks, how many texts come when, and what befalls whom.

    stages = 3

    [texts]
    count = 200
    per_s = 4.0

    [[kind]]
    name = "home"
    count = 12

A machine holds one stage. Those of a kind without a `stage` of their own are dealt out to all stages in turn.
"""

import math
from collections.abc import Iterator
from itertools import cycle
from typing import Annotated, Self

import msgspec
from msgspec import Meta

from weft.config import Config
from weft.engine.scheduling.pages import PAGE
from weft.ids import several
from weft.rng import stream
from weft.sim.scenario import Coming, Fault, Kill, Line, Lined, Seconds, Slow, Stop, called, machines, refuse_namesakes

LONGEST = 8  # times the mean: no prompt or answer is longer

_Count = Annotated[int, Meta(ge=1, le=1_000_000)]
_Mean = Annotated[int, Meta(ge=1, le=65_536, description="tokens, the mean")]
_Ms = Annotated[float, Meta(ge=0, le=60_000, description="milliseconds")]
_Step = Annotated[float, Meta(gt=0, le=60_000, description="milliseconds")]
_Share = Annotated[float, Meta(ge=0, le=1, description="share")]

ServingFault = Kill | Stop | Slow | Line


class Texts(Config, frozen=True, kw_only=True):
    """They come by chance, independent of each other; lengths are exponentially distributed, `LONGEST` times the mean
    at most."""

    count: _Count
    per_s: Annotated[float, Meta(gt=0, description="texts per second, on average")]
    prompt_tokens: _Mean = 128
    answer_tokens: _Mean = 64
    row_nbytes: Annotated[int, Meta(ge=1, le=131_072, description="bytes of a token from stage to stage")] = 4096


class Churn(Config, frozen=True, kw_only=True):
    """Machines that leave by chance, each time another one."""

    every_s: Annotated[float, Meta(gt=0, description="seconds from one departure to the next, on average")]
    killed: _Share = 0.5  # of those that leave; the others say goodbye
    returns_after_s: Seconds = 60.0


class Server(Coming, frozen=True, kw_only=True):
    """Machines that are alike but for their speed. A step takes step_ms + row_ms for each row that draws, and token_ms
    for each token of a prompt."""

    stage: Annotated[int, Meta(ge=1, le=256)] | None = None
    step_ms: _Step = 20.0
    row_ms: _Ms = 2.0
    token_ms: _Ms = 0.5
    spread: Annotated[float, Meta(ge=0, le=3, description="of the logarithm of a machine's speed")] = 0.0
    room_tokens: Annotated[int, Meta(ge=PAGE, description="of all texts that it holds")] = 65_536

    def under(self, fault: Fault) -> Self:
        return self.faster(fault.factor) if isinstance(fault, Slow) else super().under(fault)

    def faster(self, factor: float) -> Self:
        return msgspec.structs.replace(
            self, step_ms=self.step_ms / factor, row_ms=self.row_ms / factor, token_ms=self.token_ms / factor
        )


class ServingScenario(Config, frozen=True, kw_only=True):
    stages: Annotated[int, Meta(ge=1, le=256)]
    texts: Texts
    kind: Annotated[tuple[Server, ...], Meta(min_length=1)]
    entry: Annotated[tuple[Lined, ...], Meta(min_length=1)] = (Lined(name="entry"),)
    churn: Churn | None = None
    fault: tuple[ServingFault, ...] = ()
    seed: Annotated[int, Meta(ge=0)] = 0  # of keys, speeds, texts, jitter and loss
    limit_s: Annotated[float, Meta(gt=0, description="virtual seconds after which all stop")] = 86_400.0

    def __post_init__(self) -> None:
        refuse_namesakes((*self.kind, *self.entry))
        for fault in self.fault:
            if fault.at_s is None:
                raise ValueError(f"fault of {fault.named()[0]}: where texts are served there are no rounds; give at_s.")
            called(self.kind, fault.named()[0])
        for kind in self.kind:
            if kind.stage is not None and kind.stage > self.stages:
                raise ValueError(f"kind {kind.name}: stage is {kind.stage}, of {several(self.stages, 'stage')}.")
        missing = set(range(self.stages)) - {stage for _, _, stage in self.servers()}
        if missing:
            named = ", ".join(str(stage + 1) for stage in sorted(missing))
            raise ValueError(f"kind: nobody holds stage {named}; add machines, or leave out their stage.")

    def servers(self) -> Iterator[tuple[str, Server, int]]:
        """Yield each machine's name, what it is like, and the stage that it holds, from 0."""
        turns = cycle(range(self.stages))
        for name, kind in machines(self.kind):
            stage = next(turns) if kind.stage is None else kind.stage - 1
            luck = stream(self.seed, "speed", name)
            yield name, kind.faster(math.exp(kind.spread * luck.standard_normal())) if kind.spread else kind, stage

    def askers(self) -> list[str]:
        return [name for kind in self.entry for name in kind.names()]
