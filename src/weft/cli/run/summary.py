"""How a run ended, as a person reads it: held-out loss, sample, bytes, digest, checkpoint, what to try next.

It knows the digest of this peer's model alone: no message tells that of another, only the round it has reached.
"""

import math
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import UNSET

from weft.cli.home import CHECKPOINT_FILE
from weft.cli.model.generate import excerpt
from weft.cli.screen.draw import ring
from weft.dashboard import figures
from weft.dashboard.stages import layers_of, ordinal
from weft.dashboard.view import Line, View
from weft.events import Evaluated
from weft.ids import several, short

if TYPE_CHECKING:
    from weft.peer.peer import Outcome
    from weft.run.config import Genesis

INDENT = " " * 13
STAGE = "stage-"  # folders of a peer's sections begin so
_ENDS_AT = "train.schedule.total_tokens"
_WIDTH = 80  # columns
_WHAT_LOSS = "loss on the text that was held out of training; lower is better"


@dataclass(frozen=True, kw_only=True)
class Begun:
    """What a run was begun with on this machine, as it was typed.

    Args:
        source: its text or run file; empty: neither was.
        key: None: one of the home's.
    """

    source: str = ""
    is_text: bool = False
    key: Path | None = None


def summary(
    outcome: "Outcome",
    view: View,
    command: str,
    begun: Begun = Begun(),
    num_members: int = 1,
    before: Evaluated | None = None,
) -> str:
    """Return the text for the end of a run.

    Args:
        view: adds the bytes that ring DDP would have moved, and the others.
        command: `weft`, with --home where it is not the default one.
        num_members: that hold the run.
        before: what was measured of what the run began with; None: it began with nothing learnt, or nobody has.
    """
    if not outcome.replica:
        return _of_nothing(outcome, command)
    lines = [
        "",
        f"run {outcome.run.name}: {outcome.reason} after {outcome.committed_tokens:,} tokens, round {outcome.round}",
    ]
    if outcome.nats_per_byte is not None and outcome.loss is not None:
        per_byte = outcome.nats_per_byte
        is_known = math.isfinite(per_byte)
        own = figures.nats_per_byte(per_byte) if is_known else figures.nats(outcome.loss)
        is_of_answers = outcome.preferred is not None or outcome.reward is not None
        told = figures.heldout(outcome.loss, None, outcome.preferred, outcome.reward) if is_of_answers else own
        lines.append(f"held-out     {told}")
        if before is not None:
            first = before.nats_per_byte if is_known else before.loss
            was = f"{first:.4f}" if before.reward is UNSET else figures.heldout_of(before)
            lines.append(f"{INDENT}before the first round it was {was}")
            if round(per_byte if is_known else outcome.loss, 4) > round(first, 4):
                lines += _worse(outcome)
        if outcome.reward is None:
            lines.append(f"{INDENT}{_WHAT_LOSS}")
        if is_known and outcome.loss != per_byte:
            lines.append(f"{INDENT}{figures.nats(outcome.loss)}, for this tokenizer only")
        lines += measured(view, outcome.run)
    lines.append(f"bytes        {_moved(outcome)}")
    if view.ring_nbytes:
        lines.append(f"{INDENT}{ring(view)}")
    lines.append(f"model        {outcome.replica}")
    section = section_of(outcome)
    if section:
        lines.append(f"{INDENT}digest of {section}; all who hold that section have the same")
        lines.append(f"{INDENT}after the same round")
    others = sorted((view.name(peer), peer) for peer in view.lines if peer != outcome.peer)
    if others and not section:
        lines.append(f"{INDENT}digest of this peer's; all peers have the same after the same round")
    is_complete = outcome.reason == "complete"
    lines += [f"{INDENT}{name}: {_ending(view.lines[peer], is_complete=is_complete)}" for name, peer in others]
    if not is_complete and any(view.lines[peer].state != "left" for _, peer in others):
        lines.append(
            "tickets      that name only this machine lead nowhere until it runs again: `weft ticket` on another"
        )
    if _is_untrained(outcome) and not (outcome.checkpoint / CHECKPOINT_FILE).exists():
        return "\n".join([*lines, "nothing was trained, and nothing is saved; to begin: the same command again"])
    lines.append(beside("checkpoint", outcome.checkpoint))
    is_part = outcome.checkpoint.parent.name.startswith(STAGE)
    if is_part:
        lines.append(f"{INDENT}of {section} only: it cannot write text or be exported")
    if outcome.successor is not None:
        from weft.launch.peer import where

        lines.append(where(outcome.run.run, outcome.successor))
    if outcome.sample:
        from weft.run.genesis import on_corpus

        lines += [
            "",
            "it writes",
            "",
            excerpt(on_corpus(outcome.run).train.sample_prompt + outcome.sample.rstrip()),
            "",
        ]
    run = short(outcome.run.run)
    if not _is_untrained(outcome):
        lines.append(gather_next(command, run) if is_part else try_next(command, run, _prompt(outcome)))
    lines += _longer(outcome, command, begun, num_members) if is_complete else _goes_on(outcome, command, begun)
    return "\n".join(lines)


def _is_untrained(outcome: "Outcome") -> bool:
    """Return whether the model is what its seed made of it: of no use to anybody."""
    from weft.run.genesis import on_corpus

    return not outcome.committed_tokens and on_corpus(outcome.run).is_seeded


def _prompt(outcome: "Outcome") -> str:
    from weft.run.genesis import on_corpus

    return on_corpus(outcome.run).train.sample_prompt


def _worse(outcome: "Outcome") -> list[str]:
    """Return that a run has made worse what it began with, and what to try."""
    from weft.run.genesis import on_corpus

    lower = on_corpus(outcome.run).train.schedule.lr / 3
    so_far = "is worse now" if outcome.reason == "complete" else "is worse so far"
    return [
        f"{INDENT}so the model {so_far}. Try another run after the old one, with",
        f"{INDENT}more text, or a lower rate: --set train.schedule.lr={lower:.1g}",
    ]


def _goes_on(outcome: "Outcome", command: str, begun: Begun) -> list[str]:
    """Return how the run is trained on from here."""
    from weft.run.genesis import on_corpus

    if outcome.successor is not None:
        return []
    if on_corpus(outcome.run).is_private:
        return ["to go on with the run: the same command again"]
    key = "" if begun.key is None else f" --key {shlex.quote(str(begun.key))}"
    return ["to go on with the run", f"  {command} train {short(outcome.run.run)}{key}"]


def _longer(outcome: "Outcome", command: str, begun: Begun, num_members: int) -> list[str]:
    """Return how a complete run is trained longer, or on more text, where a person may."""
    from weft.run.genesis import on_corpus
    from weft.run.staged import StagedConfig
    from weft.sync.method.schedule import ConstantConfig

    run, after = short(outcome.run.run), f"--after {short(outcome.run.run)}"
    if outcome.successor is not None or outcome.checkpoint.parent.name.startswith(STAGE):
        return []
    if num_members > 1:
        return [
            f"to train longer: {num_members} members hold run {run}, and none may change it alone.",
            "Begin another with what it has learnt, which they can join",
            f"  {command} train {begun.source or 'FILE'} {after}",
        ]
    lines = ["to train longer, or on more text"]
    if begun.is_text:
        lines.append(
            f"  {command} train {begun.source} --go-on --length {figures.amount(2 * outcome.committed_tokens)}tokens"
        )
    elif begun.source and not isinstance(outcome.run, StagedConfig) and not on_corpus(outcome.run).stewards:
        ends = "" if isinstance(on_corpus(outcome.run).train.schedule, ConstantConfig) else f" and {_ENDS_AT}"
        lines.append(f"  {command} train {begun.source} --go-on   with train.tokens{ends} raised in it")
    return [*lines, f"  {command} train MORE.txt {after}"]


def _moved(outcome: "Outcome") -> str:
    sent, received = map(figures.nbytes, (outcome.sent_nbytes, outcome.received_nbytes))
    return f"{sent} sent, {received} received since this start"


def _of_nothing(outcome: "Outcome", command: str) -> str:
    """Return the end of who held no part of the model this time; some may lie here from before."""
    from weft.store.home import PeerFolder

    lines = [
        "",
        f"run {outcome.run.name}: {outcome.reason}; this peer trained nothing this time",
        f"bytes        {_moved(outcome)}",
    ]
    run = short(outcome.run.run)
    if (outcome.checkpoint / CHECKPOINT_FILE).exists():  # the whole model, put together before
        lines += [beside("checkpoint", outcome.checkpoint), try_next(command, run, _prompt(outcome))]
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


def measured(view: View, run: "Genesis | None" = None) -> list[str]:
    """Return a line that says when, and on how much text, the last held-out loss was measured.

    Args:
        run: that it is of; None: nobody asks whether that was all of the text.
    """
    from weft.data.assign import num_windows
    from weft.run.config import RunConfig

    if view.evaluated is None:
        return []
    at, num = view.evaluated.round, several(view.evaluated.num_tokens, view.loss_of)
    is_all = (
        isinstance(run, RunConfig)
        and num_windows(run.data.num_tokens("heldout"), run.train.seq_len) <= run.train.evaluate_windows
    )
    return [f"{INDENT}at round {at}, on {num}{'' if is_all else '; weft eval takes all held-out text'}"]


def beside(title: str, path: Path | str) -> str:
    """Return a path behind its title; one that is too long for that has a line of its own."""
    line = f"{title:<12} {path}"
    return line if len(line) <= _WIDTH else f"{title}\n{path}"


def _ending(line: Line, *, is_complete: bool) -> str:
    if is_complete and line.state in {"finishing", "finished"}:
        return "finished"
    return f"{line.state or 'silent'}{'' if line.round is None else f', last heard of at round {line.round}'}"


def try_next(command: str, checkpoint: str, prompt: str = "") -> str:
    """Return what a person may do with a checkpoint.

    Args:
        command: `weft` with the options that lead to it.
        prompt: what a text of the run's begins with.
    """
    quoted = f'"{prompt}"' if not set(prompt) & set('"$`\\!%') else shlex.quote(prompt)
    return "\n".join(
        (
            "try next",
            f"  {command} generate {checkpoint}{f' {quoted}' if prompt else ''}",
            f"  {command} eval {checkpoint}",
            f"  {command} export {checkpoint} my-model",
            f"  {command} serve {checkpoint}  # to chat: http://127.0.0.1:8000/, or: weft chat",
        )
    )
