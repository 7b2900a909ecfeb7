"""The demo from an empty folder to an exported model: prepares, follows the peers, judges how they ended.

It fails if a peer failed or if the replicas differ. A demo that was stopped goes on when it is started again.
"""

import os
import shutil
import signal
import sys
import threading
import tomllib
from concurrent.futures import Future
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec

from weft.cli.demo import ngram_baseline
from weft.cli.demo.ngram_baseline import ORDER
from weft.cli.demo.swarm import DEVICE, PeerFailed, Swarm
from weft.cli.home import command_for
from weft.cli.model.generate import excerpt
from weft.cli.model.trained import Trained, open_trained
from weft.cli.plan import speed_here as here
from weft.cli.plan.speed_here import tokens_in
from weft.cli.run.running import Report
from weft.cli.run.summary import INDENT, beside, measured, try_next
from weft.cli.screen.draw import ring
from weft.cli.screen.screen import Screen, make_screen
from weft.cli.terminal import tell, terminal_width, wrapped
from weft.clock import SystemClock, Wish
from weft.config import dump, from_tree, load_tree
from weft.dashboard import figures
from weft.dashboard.view import About, View
from weft.data.tokenizer import ByteTokenizer
from weft.errors import CheckpointError, ConfigError, DeadlineExceeded
from weft.ids import RunId, several, short
from weft.run.config import RunFile
from weft.run.genesis import resolve
from weft.store.home import Home

_RUN_FILE = "demo.toml"
_TEXT = "the source code of Python's standard library, byte by byte"
_LOOK_EVERY_S = 0.25
_SILENCE_S = 300.0  # without one line from any peer, something is stuck
_INTERRUPTED = 130
_WAIT_S = 600.0  # for the n-gram model, which had all of the training's time


@dataclass(frozen=True)
class Wishes:
    """What the command line asks for."""

    num_peers: int | None  # None: as many as the recipe has
    minutes: float | None
    tokens: int | None
    is_fresh: bool
    is_quiet: bool


def run_demo(folder: Path, wishes: Wishes) -> int:
    """Run the demo in `folder` and return the exit code.

    Raises:
        WeftError: the folder is another's, or a peer failed.
    """
    run_file = prepare(folder, wishes)
    names = _names(run_file)
    swarm = Swarm(folder, names, here.threads_of(len(names)))
    screen = make_screen(is_quiet=wishes.is_quiet)
    finished = finished_run(swarm)
    train = run_file.train
    known = About(name=run_file.name, total_tokens=train.tokens, tokens_per_step=train.batch_size * train.seq_len)
    screen.start(known, run_file.peers if finished is None else 1)
    follower = Follower(swarm, screen)
    try:
        follower.watch_signals()
        run = swarm.start(folder / _RUN_FILE) if finished is None else swarm.take_up(finished)
        score: Future[float] = ngram_baseline.start(Home(swarm.home), run)
        follower.follow()
    except PeerFailed:
        if not follower.is_stopped:  # else it was stopped before it could say anything
            raise
    finally:
        screen.close()
        swarm.end()
    if follower.is_stopped:
        width = terminal_width() if sys.stdout.isatty() else None
        print(wrapped(f"stopped; weft demo {folder} goes on from here, and --fresh starts over", width))  # noqa: T201
        return 0
    return finish(folder, swarm, screen.view, score)


# --- before ---


def _names(run_file: RunFile) -> tuple[str, ...]:
    return tuple(f"peer {number}" for number in range(1, run_file.peers + 1))


def prepare(folder: Path, wishes: Wishes) -> RunFile:
    """Make the folder and its run file, or take up what an earlier demo left.

    Raises:
        ConfigError: the folder holds something else, or another demo than the one that is wished for.
    """
    path = folder / _RUN_FILE
    if folder.exists() and any(folder.iterdir()) and not path.exists():
        raise ConfigError(f"{folder} is not empty and holds no demo of weft. Name another folder: weft demo FOLDER.")
    if wishes.is_fresh and folder.exists():
        shutil.rmtree(folder)
    if path.exists():
        if (wishes.num_peers, wishes.tokens, wishes.minutes) != (None, None, None):
            raise ConfigError(
                f"{folder} already holds a demo; its length and its number of peers are fixed. Leave --tokens, "
                "--minutes and --peers out to go on with it, or add --fresh to start over."
            )
        kept: RunFile = from_tree(load_tree(path), RunFile, where=str(path))
        if finished_run(Swarm(folder, _names(kept), 1)) is None:
            peers = several(kept.peers, "peer")
            tell(f"going on with the demo in {folder}: its {peers} come back where they stopped; --fresh starts over")
        else:
            tell(f"the demo in {folder} is complete: this is how it ended; --fresh starts over")
        return kept
    run_file = _described(wishes)
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(dump(run_file), encoding="utf-8")
    what = f"{several(run_file.peers, 'peer')} on this machine, which train one model on {_TEXT}"
    tell(f"starting {what}; everything is kept in {folder}")
    return run_file


def _described(wishes: Wishes) -> RunFile:
    tree = tomllib.loads((files("weft") / "recipes" / _RUN_FILE).read_text(encoding="utf-8"))
    if wishes.num_peers is not None:
        tree["peers"] = wishes.num_peers
    run_file: RunFile = from_tree(tree, RunFile, where=_RUN_FILE)
    tokens = wishes.tokens
    if tokens is None and wishes.minutes is not None:
        model = resolve(run_file, ByteTokenizer(), Path())
        found = here.measure(model, run_file.train, run_file.peers, on=DEVICE)
        tokens = tokens_in(run_file, 60 * wishes.minutes, found.tokens_per_s)
        speed = f"{found.tokens_per_s:,.0f} tokens/s by each of {several(run_file.peers, 'peer')} ({found.name})"
        tell(
            f"measured {speed}; together they train on about {tokens:,} tokens in "
            f"{several(f'{wishes.minutes:g}', 'minute')}"
        )
    if tokens is None:
        return run_file
    scaled: RunFile = from_tree(with_tokens(tree, tokens), RunFile, where=_RUN_FILE)
    return scaled


def with_tokens(tree: dict[str, Any], tokens: int) -> dict[str, Any]:
    """Return a run file's tree for another number of tokens, its schedule stretched or shortened alike."""
    train: dict[str, Any] = tree["train"]
    schedule = {
        name: round(value * tokens / train["tokens"]) if name.endswith("_tokens") else value
        for name, value in train["schedule"].items()
    }
    return {**tree, "train": {**train, "tokens": tokens, "schedule": schedule}}


# --- meanwhile ---


class Follower:
    """Shows what the peers log until all have ended; passes signals on."""

    def __init__(self, swarm: Swarm, screen: Screen) -> None:
        self.is_stopped = False
        self._swarm = swarm
        self._screen = screen
        self._clock = SystemClock()
        self._began = self._clock.wall()
        self._wish = Wish(self._clock)

    def watch_signals(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)

    def follow(self) -> None:
        """
        Raises:
            PeerFailed: a peer ended with an error.
            DeadlineExceeded: nobody logged anything for minutes.
        """
        heard_at = self._clock.now()
        pause = threading.Event()
        while self._swarm.is_running:
            if self._show():
                heard_at = self._clock.now()
            elif self._clock.now() - heard_at > _SILENCE_S:
                raise DeadlineExceeded(
                    f"no peer logged anything for {_SILENCE_S:.0f} s. Their logs are in {self._swarm.home / 'runs'}."
                )
            if not self.is_stopped:
                self._swarm.check()
            pause.wait(_LOOK_EVERY_S)
        self._show()
        if not self.is_stopped:
            self._swarm.check()

    def _show(self) -> bool:
        news = self._swarm.news()
        before = [entry for entry in news if entry.at < self._began]
        if before:  # in an earlier start of this demo
            self._screen.take(before)
        for entry in news[len(before) :]:
            self._screen.write(entry)
        return bool(news)

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        if self._wish.is_again():
            self._screen.close()
            self._swarm.kill()
            os._exit(_INTERRUPTED)
        if self.is_stopped:
            return
        self.is_stopped = True
        tell("stopping: the peers say goodbye and save")
        self._swarm.stop()


# --- after: are the replicas one, how good is the model, what did it cost ---


def finish(folder: Path, swarm: Swarm, view: View, score: "Future[float]") -> int:
    """Print how the demo ended, export the model, and return the exit code: 0 if all replicas are one.

    Raises:
        CheckpointError: a peer has not said how it ended.
    """
    reports = {name: read_report(swarm.report(name)) for name in swarm.names}
    first = next(iter(reports.values()))
    lines = ["", *judge(first, view, score.result(_WAIT_S)), "", "replicas"]
    lines += [f"  {name}  {report.replica}" for name, report in reports.items()]
    digests = {report.replica for report in reports.values()}
    is_one = len(digests) == 1
    lines.append(
        f"  all {len(reports)} are equal, bit for bit"
        if is_one
        else f"  they differ: {len(digests)} different models, and there should be one"
    )
    print("\n".join(lines))  # noqa: T201
    if not is_one:
        return 1
    trained = open_trained(first.checkpoint, swarm.home)
    exported = export(trained, folder / "export")
    prompt = trained.run.train.sample_prompt if trained.run is not None else ""
    if first.sample:
        print(f"\nit writes\n\n{excerpt(prompt + first.sample.rstrip())}\n")  # noqa: T201
    print(  # noqa: T201
        f"{beside('checkpoint', first.checkpoint)}\n{beside('exported', exported)}\nto load it with transformers\n"
        f'  AutoModelForCausalLM.from_pretrained("{exported}")\n\n'
        f"{try_next(command_for(swarm.home), short(first.run), prompt)}"
    )
    return 0


def finished_run(swarm: Swarm) -> RunId | None:
    """Return the run that all peers have brought to its end earlier, or None."""
    try:
        reports = [read_report(swarm.report(name)) for name in swarm.names]
    except CheckpointError:
        return None
    return RunId(reports[0].run) if all(report.reason == "complete" for report in reports) else None


def judge(report: Report, view: View, ngram: float) -> list[str]:
    """Return the lines about quality and cost."""
    lines = [f"{report.reason} after {report.committed_tokens:,} tokens in {several(report.round, 'round')}"]
    if report.nats_per_byte is not None:
        verdict = "better" if report.nats_per_byte < ngram else "not better yet: train longer"
        lines += [
            f"held-out     {figures.nats_per_byte(report.nats_per_byte)}",
            *measured(view),
            f"{INDENT}an order-{ORDER} n-gram model of the same text has {ngram:.4f}:",
            f"{INDENT}this model is {verdict}",
        ]
    sent, received = figures.nbytes(view.sent_nbytes), figures.nbytes(view.received_nbytes)
    arrived = "as much received" if received == sent else f"{received} received"
    lines.append(f"bytes        {sent} sent by all peers together, {arrived}")
    lines.append(f"{INDENT}{ring(view)}")
    return lines


def read_report(path: Path) -> Report:
    """
    Raises:
        CheckpointError: there is none, or half of one.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=Report)
    except (OSError, msgspec.DecodeError) as error:
        raise CheckpointError(f"{path} does not say how the peer ended: {error}. See the log beside it.") from error


def export(trained: Trained, target: Path) -> Path:
    """Write the model as a Hugging Face folder, in place of one that an earlier demo wrote."""
    if not target.exists():
        trained.export(target)
    return target
