"""What happens in routine, in words: of events that `notable` has no sentence for."""

from collections.abc import Callable

from weft.dashboard import figures
from weft.dashboard.stages import ordinal, prefixed
from weft.events import (
    AttemptStarted,
    CheckpointSaved,
    CountedThrough,
    DataReady,
    Evaluated,
    Event,
    LinkDown,
    LinkUp,
    MicroBatchFailed,
    PayloadOffered,
    PeerStarted,
    PeerStopped,
    RoundCommitted,
    Sampled,
    StagesSeen,
    TransportUp,
    WarmedUp,
)
from weft.ids import PeerId


def described(event: Event, name: Callable[[PeerId], str]) -> str:
    """Return what happened in routine, in words."""
    return prefixed(event, _words(event, name))


def _words(event: Event, name: Callable[[PeerId], str]) -> str:
    match event:
        case RoundCommitted():
            counted = f"{len(event.contributors) + event.num_through} counted"
            left = f", without {', '.join(map(name, event.left_out))}" if event.left_out else ""
            took_s = event.work_s + event.duration_s
            return f"round {event.round}: {counted}{left}, {event.tokens:,} tokens in {took_s:.1f} s"
        case PeerStarted():
            return f"{event.name} starts on {event.device}, {event.software}"
        case PeerStopped():
            return f"stops: {event.reason}"
        case Evaluated():
            return f"held-out loss {event.loss:.4f} after round {event.round}, {event.nats_per_byte:.4f} nats per byte"
        case Sampled():
            return f"a sample of what the model writes after round {event.round}"
        case AttemptStarted():
            return f"{name(event.leader)} leads round {event.round}, attempt {event.attempt}: {event.reason}"
        case LinkUp():
            return f"a link to {name(event.remote)} over {event.transport}"
        case LinkDown():
            return f"no link to {name(event.remote)}: {event.reason}"
        case PayloadOffered():
            return f"offers {event.tokens:,} tokens to round {event.round}, in {figures.nbytes(event.nbytes)}"
        case CountedThrough():
            return f"{event.tokens:,} tokens of it are counted in round {event.round}, through its sponsor"
        case CheckpointSaved():
            return f"saves round {event.round}, {figures.nbytes(event.nbytes)}"
        case TransportUp():
            return f"can be reached over {event.transport}"
        case WarmedUp():
            return f"ready to train after {event.duration_s:.1f} s, {event.micro_batch} samples at a time"
        case DataReady():
            return f"has the data: {event.train_tokens:,} tokens to train on, {event.heldout_tokens:,} held out"
        case StagesSeen():
            sizes = ", ".join(str(len(members)) for members in event.members)
            rates = ", ".join(figures.amount(rate) for rate in event.rates)
            waiting = ", ".join(map(str, event.waiting))
            return f"peers by stage: {sizes}; {rates} samples/s; {waiting} micro-batches wait"
        case MicroBatchFailed():
            whose = f"a micro-batch that {name(event.member)} sent"
            return f"{whose} is given up in {ordinal([event.stage], 0)}, and goes to another member: {event.reason}"
    fields = (f"{key} {getattr(event, key)}" for key in event.__struct_fields__ if key != "stage")
    return ", ".join(fields)[:200]
