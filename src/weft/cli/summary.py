"""How a run ended, as a person reads it: held-out loss, sample, bytes, digest, checkpoint, what to try next.

It knows the digest of this peer's replica alone: no message tells that of another, only the round it has reached.
"""

from typing import TYPE_CHECKING

from weft.cli import figures
from weft.cli.generate import legible
from weft.cli.view import View
from weft.ids import short

if TYPE_CHECKING:
    from weft.peer.peer import Outcome


def summary(outcome: "Outcome", view: View, command: str) -> str:
    """Return the text for the end of a run.

    Args:
        view: adds the bytes that ring DDP would have moved, and the others.
        command: `weft`, with --home where it is not the default one.
    """
    lines = [
        f"\nrun {outcome.run.name}: {outcome.reason} after {outcome.committed_tokens:,} tokens, round {outcome.round}"
    ]
    if outcome.nats_per_byte is not None and outcome.loss is not None:
        lines.append(f"held-out     {outcome.loss:.4f} nats per token, {outcome.nats_per_byte:.4f} nats per byte")
    used = outcome.sent_nbytes + outcome.received_nbytes
    bytes_line = (
        f"bytes        {figures.nbytes(outcome.sent_nbytes)} sent, {figures.nbytes(outcome.received_nbytes)} received"
    )
    if view.ring_nbytes:
        ring = f"{figures.nbytes(view.ring_nbytes)}, {figures.ratio(view.ring_nbytes, used)} as much"
        bytes_line += f"; bf16 ring DDP: {ring}"
    lines.append(bytes_line)
    lines.append(f"replica      {outcome.replica}")
    others = sorted((view.name(peer), line) for peer, line in view.lines.items() if peer != outcome.peer)
    if others:
        lines.append("             this peer's; each of the others prints its own, the same one after the same round")
    for name, line in others:
        told = "" if line.round is None else f", last heard of at round {line.round}"
        lines.append(f"             {name}: {line.state or 'silent'}{told}")
    lines.append(f"checkpoint   {outcome.checkpoint}")
    if outcome.sample:
        lines += ["", legible(outcome.run.train.sample_prompt + outcome.sample.rstrip()), ""]
    lines.append(try_next(command, short(outcome.run.run)))
    return "\n".join(lines)


def try_next(command: str, checkpoint: str) -> str:
    """Return what a person may do with a checkpoint; `command` is `weft` with the options that lead to it."""
    return "\n".join(
        (
            "try next",
            f'  {command} generate {checkpoint} "def "',
            f"  {command} eval {checkpoint}",
            f"  {command} export {checkpoint} my-model",
        )
    )
