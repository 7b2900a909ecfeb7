"""A commit or another attempt as one peer saw it: the manifest, who is not counted, and why, as far as it knows."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from weft.events import AttemptStarted
from weft.ids import PeerId
from weft.sync.governance.enact import accused
from weft.sync.records.messages import Base, Manifest
from weft.sync.round import machine
from weft.sync.round.machine import Fate, Input, State, Status
from weft.sync.round.rules import leader
from weft.wire import Buffer

PAUSED = "it is paused"
RESTING = "it was not drawn for this round"
AT_WORK = "it was still at its inner steps"
LIED = "it signed two notes that contradict each other"


@dataclass(frozen=True)
class Decided:
    """A commit as this peer saw it.

    Args:
        left_out: members of the electorate that it does not count, and why, as far as this peer knows.
        fate: of what this peer brought, where it is not counted.
        taken: what it counts of this peer's neighbours in a gossip round; None: it is not here.
        weights: of these neighbours.
    """

    manifest: Manifest
    left_out: dict[PeerId, str]
    fate: Fate = "late"
    taken: Mapping[PeerId, Buffer | None] = field(default_factory=dict)
    weights: Mapping[PeerId, float] = field(default_factory=dict)


def left_out(
    base: Base, manifest: Manifest, state: State | None, statuses: Mapping[PeerId, Status]
) -> dict[PeerId, str]:
    """Return the members of the electorate that `manifest` does not count, and why.

    Args:
        state: of this peer's machine in the round that the manifest decides; None where it took no part.
    """
    counted = {each.peer for each in manifest.contributions}
    reasons = {peer: _why(base, peer, state, statuses) for peer in base.electorate if peer not in counted}
    lies = {peer: LIED for warrant in manifest.acts if (peer := accused(warrant)) in reasons}
    return {**reasons, **lies}


_BECAUSE: dict[type[Input], str] = {
    machine.Noticed: "who led is away, or came back",
    machine.TimedOut: "the one before took too long",
    machine.Received: "others follow it",
}


def attempt_started(state: State, after: Input) -> AttemptStarted:
    """Tell that a member follows another attempt now, since something happened."""
    base = state.base
    return AttemptStarted(
        branch=base.branch,
        round=base.round,
        attempt=state.attempt,
        leader=leader(base, state.attempt),
        reason=_BECAUSE.get(type(after), "the one before cannot be finished"),
    )


def _why(base: Base, peer: PeerId, state: State | None, statuses: Mapping[PeerId, Status]) -> str:
    status = statuses.get(peer)
    if state is not None and peer in state.farewells:
        return "it said goodbye"
    if status in ("gone", "suspected"):
        return f"it was {status}"
    if state is not None and peer in state.unusable:
        return "its payload could not be had or was no payload"
    if peer in base.newcomers:
        return "nobody waits for a newcomer in its first round"
    if peer in base.resting:
        return RESTING
    if state is not None and peer in state.ready:
        return "it was ready when others were planned already, or its payload could not be had"
    if state is not None and peer in state.passing:
        return PAUSED
    return "it was not ready in time" if base.charter.settings.method.wait == "all" else AT_WORK
