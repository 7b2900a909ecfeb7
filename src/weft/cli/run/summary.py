"""How a run ended, as a person reads it: held-out loss, sample, bytes, digest, checkpoint, what to try next.

It knows the digest of this peer's replica alone: no message tells that of another, only the round it has reached.
"""

import math
from pathlib import Path
from typing import TYPE_CHECKING

from weft.cli.model.generate import excerpt
from weft.cli.screen.draw import ring
from weft.dashboard import figures
from weft.dashboard.stages import layers_of, ordinal
from weft.dashboard.view import Line, View
from weft.ids import short

if TYPE_CHECKING:
    from weft.peer.peer import Outcome

INDENT = " " * 13
STAGE = "stage-"  # folders of a peer's sections begin so
_WIDTH = 80  # columns


def summary(outcome: "Outcome", view: View, command: str) -> str:
    """Return the text for the end of a run.

    Args:
        view: adds the bytes that ring DDP would have moved, and the others.
        command: `weft`, with --home where it is not the default one.
    """
    if not outcome.replica:
        return _of_nothing(outcome, command)
    lines = [
        "",
        f"run {outcome.run.name}: {outcome.reason} after {outcome.committed_tokens:,} tokens, round {outcome.round}",
    ]
    if outcome.nats_per_byte is not None and outcome.loss is not None:
        lines.append(f"held-out     {figures.nats(outcome.loss)}")
        if math.isfinite(outcome.nats_per_byte):
            lines.append(f"{INDENT}{figures.nats_per_byte(outcome.nats_per_byte)}")
        lines += measured(view)
    lines.append(
        f"bytes        {figures.nbytes(outcome.sent_nbytes)} sent, {figures.nbytes(outcome.received_nbytes)} received"
    )
    if view.ring_nbytes:
        lines.append(f"{INDENT}{ring(view)}")
    lines.append(f"replica      {outcome.replica}")
    section = section_of(outcome)
    if section:
        lines.append(f"{INDENT}of {section}; all who hold that section have the same one after the same round")
    others = sorted((view.name(peer), peer) for peer in view.lines if peer != outcome.peer)
    if others and not section:
        lines.append(f"{INDENT}of this peer; all peers have the same one after the same round")
    is_complete = outcome.reason == "complete"
    lines += [f"{INDENT}{name}: {_ending(view.lines[peer], is_complete=is_complete)}" for name, peer in others]
    if not is_complete and any(view.lines[peer].state != "left" for _, peer in others):
        lines.append("tickets      that name only this machine lead nowhere now: run `weft ticket` on another")
    lines.append(beside("checkpoint", outcome.checkpoint))
    is_part = outcome.checkpoint.parent.name.startswith(STAGE)
    if is_part:
        lines.append(f"{INDENT}of {section} only: it cannot write text or be exported")
    if outcome.successor is not None:
        from weft.launch.peer import where

        lines.append(where(outcome.run.run, outcome.successor))
    if outcome.sample:
        from weft.run.genesis import on_corpus

        lines += ["", excerpt(on_corpus(outcome.run).train.sample_prompt + outcome.sample.rstrip()), ""]
    run = short(outcome.run.run)
    lines.append(gather_next(command, run) if is_part else try_next(command, run))
    return "\n".join(lines)


def _of_nothing(outcome: "Outcome", command: str) -> str:
    """Return the end of who held no part of the model this time; some may lie here from before."""
    from weft.store.home import CHECKPOINT_FILE, PeerFolder

    moved = f"{figures.nbytes(outcome.sent_nbytes)} sent, {figures.nbytes(outcome.received_nbytes)} received"
    lines = [
        "",
        f"run {outcome.run.name}: {outcome.reason}; this peer trained nothing this time",
        f"bytes        {moved}",
    ]
    run = short(outcome.run.run)
    if (outcome.checkpoint / CHECKPOINT_FILE).exists():  # the whole model, put together before
        lines += [beside("checkpoint", outcome.checkpoint), try_next(command, run)]
    elif PeerFolder(outcome.checkpoint.parent).stages:
        lines.append(gather_next(command, run))
    return "\n".join(lines)


def section_of(outcome: "Outcome") -> str:
    """Return which part of the model the replica is, in words: stage 2 of 3, layers 4-6. Empty: all of it."""
    from weft.run.staged import StagedConfig  # needs torch, for which other verbs should not wait

    if not isinstance(outcome.run, StagedConfig):
        return ""
    name = outcome.checkpoint.parent.name
    if not name.startswith(STAGE):  # the whole model was put together beside it
        return "a section"
    stage = int(name.removeprefix(STAGE))
    return f"{ordinal([stage], outcome.run.stages)}, {layers_of(outcome.run.cuts)[stage]}"


def gather_next(command: str, run: str) -> str:
    """Return what a person may do with a run of which each peer holds a section.

    Args:
        run: the first digits of its name.
    """
    ticket, here = f"{command} gather -", f"{command} gather {run}"
    width = max(len(ticket), len(here))
    return "\n".join(
        (
            "try next, for the whole model",
            f"  {ticket:<{width}}   from members, while they run",
            f"  {here:<{width}}   if all its sections are on this machine",
        )
    )


def measured(view: View) -> list[str]:
    """Return a line that says when, and on how much text, the last held-out loss was measured."""
    if view.evaluated is None:
        return []
    at, num_tokens = view.evaluated.round, view.evaluated.num_tokens
    return [f"{INDENT}at round {at}, on {num_tokens:,} tokens; weft eval takes all held-out text"]


def beside(title: str, path: Path | str) -> str:
    """Return a path behind its title; one that is too long for that has a line of its own."""
    line = f"{title:<12} {path}"
    return line if len(line) <= _WIDTH else f"{title}\n{path}"


def _ending(line: Line, *, is_complete: bool) -> str:
    if is_complete and line.state in {"finishing", "finished"}:
        return "finished"
    return f"{line.state or 'silent'}{'' if line.round is None else f', last heard of at round {line.round}'}"


def try_next(command: str, checkpoint: str) -> str:
    """Return what a person may do with a checkpoint; `command` is `weft` with the options that lead to it."""
    return "\n".join(
        (
            "try next",
            f'  {command} generate {checkpoint} "def "',
            f"  {command} eval {checkpoint}",
            f"  {command} export {checkpoint} my-model",
            f"  {command} serve {checkpoint}  # talk to it in a browser, or from any program of the OpenAI API",
        )
    )
