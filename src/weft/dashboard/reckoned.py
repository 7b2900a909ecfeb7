"""What both the terminal's view and the page's history reckon from an event."""

from weft.cost import training as cost
from weft.events import RoundCommitted, StepDone

AWAY = frozenset(("gone", "left", "stopped", "finished", "silent"))  # states of who is not here
_SMOOTHING = 0.2  # weight of the newest step in a peer's speed


def smoothed_speed(before: float, step: StepDone) -> float:
    """Return a peer's speed after one more inner step, in tokens a second; `before` 0: it is the first."""
    speed = step.num_tokens / step.duration_s if step.duration_s > 0 else 0.0
    return speed if before == 0.0 else before + _SMOOTHING * (speed - before)


def ring_nbytes(commit: RoundCommitted, num_parameters: int | None, tokens_per_step: int | None) -> int:
    """Return the bytes, both ways, that one peer would have moved with ring DDP for the tokens of a round; 0: unknown.

    Args:
        tokens_per_step: of one peer.
    """
    num_peers = len(commit.contributors) + commit.num_through
    if not (num_peers and tokens_per_step and num_parameters):
        return 0
    num_steps = round(commit.tokens / (num_peers * tokens_per_step))
    traffic = cost.ring_ddp_traffic(num_parameters, num_peers, num_steps)
    return traffic.sent_nbytes + traffic.received_nbytes


def staged_ring_nbytes(commit: RoundCommitted, num_parameters: int, tokens_per_step: int, num_peers: int) -> int:
    """Return the same of a run with stages, had each of its peers held the whole model, for the first stage's steps.

    Args:
        commit: of the first stage.
        num_peers: of all stages.
    """
    num_steps = round(commit.tokens / (max(1, len(commit.contributors)) * tokens_per_step))
    traffic = cost.ring_ddp_traffic(num_parameters, max(1, num_peers), num_steps)
    return traffic.sent_nbytes + traffic.received_nbytes
