"""Figures as people read them: bytes, durations, counts, speeds; and what views reckon from an event."""

import math
from collections.abc import Mapping

from msgspec import UNSET, UnsetType

from weft.cost import training as cost
from weft.events import Evaluated, Preferred, RoundCommitted, StepDone, Working

_DECIMAL = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def nbytes(count: float) -> str:
    """Return a number of bytes in decimal units: 3.2 MB."""
    return f"{_scaled(count, ' ')}B"


def rate(bps: float) -> str:
    """Return bits per second: 20 Mbit/s."""
    return f"{_scaled(bps, ' ')}bit/s"


def amount(count: float) -> str:
    """Return a count in at most four characters and a letter: 1.2M."""
    return _scaled(count)


def _scaled(count: float, gap: str = "") -> str:
    for size, prefix in _DECIMAL:
        if count >= size:
            return f"{count / size:.3g}{gap}{prefix}" if count < 100 * size else f"{count / size:.0f}{gap}{prefix}"
    return f"{count:.0f}{gap}"


def duration(seconds: float) -> str:
    """Return minutes and seconds, or hours and minutes: 1:40, 2 h 05."""
    whole = round(seconds)
    if whole >= 48 * 3600:
        return f"{whole / 86400:.1f} days"
    if whole >= 3600:
        return f"{whole // 3600} h {whole % 3600 // 60:02d}"
    return f"{whole // 60}:{whole % 60:02d}"


def seconds(count: float) -> str:
    """Return a duration as people say it, however short: 0.64 s, 97 s, 12 min, 3.2 h."""
    if count < 120:
        return f"{count:.2g} s" if count < 9.95 else f"{count:.0f} s"
    return f"{count / 60:.0f} min" if count < 7200 else f"{count / 3600:.3g} h"


def work(told: Working) -> str:
    """Return how far something has come: fetching the state: 45 % of 1.2 GB, 4.1 MB/s, 3:20 left."""

    def said(count: float) -> str:
        if told.unit == "B":
            return nbytes(count)
        number = _three(count) if 0 < count < LEAST_WHOLE else amount(count)
        return f"{number} {told.unit.removesuffix('s') if number == '1' else told.unit}"

    parts = (
        f"{percent(told.done, told.total)} of {said(told.total)}" if told.total else said(told.done),
        f"{said(told.rate)}/s" if told.rate > 0 else "",
        "" if told.left_s is None else f"{duration(told.left_s)} left",
    )
    return f"{told.what}: {', '.join(filter(None, parts))}"


def work_in_short(told: Working) -> str:
    """Return the same for a column: fetching the state 45 %."""
    return f"{told.what} {percent(told.done, told.total)}" if told.total else told.what


def by_place(taken: Mapping[str, int]) -> str:
    """Return memory by place: 1.2 GB, 3.4 GB on cuda:0."""
    return ", ".join(f"{nbytes(num)}{'' if place == 'cpu' else f' on {place}'}" for place, num in taken.items())


def percent(done: float, total: float) -> str:
    """Return the share that is done, rounded down: 100 % is all of it, and there is no more."""
    return f"{min(100, math.floor(100 * done / total))} %"


def tokens(committed: int, total: int) -> str:
    """Return how much of a run is done: 3.03M of 4.51M tokens (67 %). The last round may count more than was wanted."""
    counted = amount(committed) if committed >= total else f"{amount(committed)} of {amount(total)}"
    return f"{counted} tokens ({percent(committed, total)})"


def ratio(more: float, less: float) -> str:
    """Return how many times `less` goes into `more`; a dash where that says nothing."""
    return f"{_three(more / less)}x" if more > 0 and less > 0 else "-"


def times(more: float, less: float) -> str:
    """Return the same behind a figure: ", 26.7 times as much"; nothing where it says nothing."""
    return f", {_three(more / less)} times as much" if more > 0 and less > 0 else ""


def _three(number: float) -> str:
    """Return a number with three digits that count: 0.0123, 26.7, 1,230."""
    return f"{float(f'{number:.3g}'):,.12g}"


def per(of: str) -> str:
    """Return what a loss is in: nats per token, nats per pair; of answers that are drawn, what their rewards lack."""
    return "below the best reward" if of == "answer" else f"nats per {of}"


def nats(loss: float, of: str = "token") -> str:
    """Return a loss in nats, and of a token its perplexity: 2.2840 nats per token (perplexity 9.82)."""
    if of != "token":
        return f"{loss:.4f} {per(of)}"
    perplexity = f" (perplexity {_three(math.exp(loss))})" if loss < MOST_SPELLED else ""
    return f"{loss:.4f} nats per token{perplexity}"


def nats_per_byte(per_byte: float) -> str:
    """Return the same per byte, in nats and bits: 2.2840 nats per byte (3.2951 bits)."""
    return f"{per_byte:.4f} nats per byte ({per_byte / math.log(2):.4f} bits)"


def preferred(loss: float, found: Preferred) -> str:
    """Return what a model makes of pairs of answers: 0.5012 nats per pair, 71.5 % of the pairs right, margin 0.42."""
    kl = "" if found.kl is UNSET else f", {_three(found.kl)} nats per token from where it began"
    right = f"{100 * found.accuracy:.1f} % of the pairs right"
    return f"{loss:.4f} nats per pair, {right}, margin {_three(found.margin)}{kl}"


def heldout(
    loss: float,
    per_byte: float | None,
    pairs: Preferred | UnsetType | None = None,
    reward: float | UnsetType | None = None,
) -> str:
    """Return a held-out loss per byte, which compares across tokenizers, and per token where that is another number;
    per token alone where the bytes of the text are not known.

    Args:
        pairs: what was found of pairs of answers, where it is their loss.
        reward: of answers to tasks, where it is theirs.
    """
    if reward is not None and reward is not UNSET:
        return f"mean reward {reward:.3f} of 1"
    if pairs:
        return preferred(loss, pairs)
    if per_byte is None or not math.isfinite(per_byte):
        return nats(loss)
    return nats_per_byte(per_byte) + ("" if loss == per_byte else f"; {nats(loss)}")


def heldout_of(told: Evaluated) -> str:
    """Return what `heldout` says of an evaluation."""
    return heldout(told.loss, told.nats_per_byte, told.preferred, told.reward)


def brief(told: Evaluated) -> str:
    """Return a held-out loss in its most comparable unit."""
    if told.preferred or not math.isfinite(told.nats_per_byte):
        return heldout_of(told)
    return nats_per_byte(told.nats_per_byte)


MOST_SPELLED = 40.0  # nats, whose perplexity is a number that says something
LEAST_WHOLE = 10.0  # below it a rate has digits after the point: 0.4 steps/s are not none
WAS = "was "  # before the last state of who is heard of no more: whoever told of it has stopped
_AWAY = frozenset(("gone", "left", "stopped", "finished", "silent"))


def is_away(state: str) -> bool:
    """Return whether who is in a state is not here."""
    return state in _AWAY or state.startswith(WAS)


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
