"""What is known of a run before anything happened, and how it stands: records without behaviour."""

from dataclasses import dataclass

from weft.dashboard.stages import StageNow


@dataclass(frozen=True, kw_only=True)
class About:
    """What is known of the run, as far as it is."""

    name: str | None = None
    id: str | None = None
    total_tokens: int | None = None
    tokens_per_step: int | None = None  # of one peer
    num_parameters: int | None = None
    method: str | None = None
    layers: tuple[str, ...] = ()  # of each stage, in words; empty: the run has none, as far as is known


@dataclass(frozen=True, kw_only=True)
class PeerNow:
    """A peer as it stands."""

    key: str
    name: str
    is_here: bool
    tokens_per_s: float
    round: int | None
    device: str
    software: str
    counted_tokens: int  # that rounds counted of it
    sent_nbytes: int
    received_nbytes: int
    num_missed: int
    is_heard: bool
    stages: tuple[int, ...] = ()  # that it holds, from 0


@dataclass(frozen=True, kw_only=True)
class Now:
    """How a run stands, in figures."""

    num_rounds: int
    committed_tokens: int
    total_tokens: int | None
    moved_nbytes: int
    ring_nbytes: int
    loss: float | None
    heldout: float | None
    num_events: tuple[int, ...]  # by severity
    peers: tuple[PeerNow, ...]
    stages: tuple[StageNow, ...] = ()
