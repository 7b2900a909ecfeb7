"""Other places for what a peer tells: boards of curves, and lines of JSON, from the same events as everything else.

    tensorboard:FOLDER     files that `tensorboard --logdir FOLDER` shows
    wandb:PROJECT          a run there, by the account that `wandb login` knows
    json:FILE, json:-      each event as a line, for a collector of logs; - is standard error

Curves are of one peer: its loss, its speed, its bytes, and what all have in common. The step is the tokens that rounds
have counted, so curves of runs with other batches or peers can be laid over each other.
"""

import sys
from pathlib import Path
from typing import Any, Literal, Protocol, assert_never

import msgspec
from msgspec import UNSET

from weft.errors import ConfigError
from weft.events import (
    Entry,
    Evaluated,
    Event,
    PeerStarted,
    Preferred,
    Rewarded,
    RoundCommitted,
    RoundMissed,
    Sampled,
    Sink,
    StepDone,
)
from weft.log import JsonlSink

Figures = dict[str, float]
_Kind = Literal["tensorboard", "wandb", "json"]
_KINDS: tuple[_Kind, ...] = ("tensorboard", "wandb", "json")


class Board(Protocol):
    """Where figures go."""

    def figures(self, at: float, tokens: int, values: Figures) -> None: ...

    def text(self, at: float, tokens: int, name: str, text: str) -> None: ...

    def close(self) -> None: ...


class ScalarSink:
    """A sink that turns events into figures."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._tokens = 0  # that rounds have counted
        self._sent = self._received = 0
        self._num_missed = 0
        self._losses: list[float] = []
        self._norms: list[float] = []

    def write(self, entry: Entry) -> None:
        values = self._values(entry.event)
        if values:  # what was measured is of its own round, which may not be the newest any more
            at = int(entry.event.committed_tokens) if isinstance(entry.event, Evaluated) else self._tokens
            self._board.figures(entry.at, at, values)
        if isinstance(entry.event, Sampled):
            self._board.text(entry.at, self._tokens, "sample", entry.event.prompt + entry.event.text)

    def close(self) -> None:
        self._board.close()

    def _values(self, event: Event) -> Figures:
        match event:
            case PeerStarted(num_parameters=num):
                return {"run/parameters": float(num)}
            case StepDone(loss=loss, gradient_norm=norm):
                self._losses.append(loss)
                self._norms.append(norm)
            case RoundMissed():
                self._num_missed += 1
            case Evaluated(loss=loss, preferred=Preferred() as pairs):
                kl = {} if pairs.kl is UNSET else {"preferences/kl": pairs.kl}
                rest = {"preferences/accuracy": pairs.accuracy, "preferences/margin": pairs.margin, **kl}
                return {"loss/heldout": loss, **rest}
            case Evaluated(reward=float() as reward):
                return {"reward/heldout": reward}
            case Rewarded(reward=reward, mean_length=length):
                return {"reward/drawn": reward, "reward/length": length}
            case Evaluated(loss=loss, nats_per_byte=per_byte):
                return {"loss/heldout": loss, "loss/heldout_nats_per_byte": per_byte}
            case RoundCommitted():
                return self._commit(event)
        return {}

    def _commit(self, event: RoundCommitted) -> Figures:
        self._tokens = int(event.committed_tokens)
        self._sent += event.sent_nbytes
        self._received += event.received_nbytes
        took_s = event.work_s + event.duration_s
        values = {
            "round/number": float(event.round),
            "round/counted": float(len(event.contributors) + event.num_through),
            "round/missed": float(self._num_missed),
            "round/seconds": took_s,
            "bytes/sent": float(self._sent),
            "bytes/received": float(self._received),
        }
        if took_s > 0:
            values |= {"round/tokens_per_s": event.tokens / took_s, "round/utilisation": event.work_s / took_s}
        if self._losses:
            values["loss/train"] = sum(self._losses) / len(self._losses)
            values["loss/gradient_norm"] = sum(self._norms) / len(self._norms)
        self._losses.clear()
        self._norms.clear()
        return values


class TensorBoard:
    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(folder))

    def figures(self, at: float, tokens: int, values: Figures) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, tokens, walltime=at)

    def text(self, at: float, tokens: int, name: str, text: str) -> None:
        self._writer.add_text(name, text, tokens, walltime=at)

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    def __init__(self, project: str) -> None:
        import wandb

        self._run: Any = wandb.init(project=project)
        self._run.define_metric("*", step_metric="tokens")

    def figures(self, at: float, tokens: int, values: Figures) -> None:  # noqa: ARG002  # it takes its own time
        self._run.log({"tokens": tokens, **values})

    def text(self, at: float, tokens: int, name: str, text: str) -> None:  # noqa: ARG002  # the same
        self._run.log({"tokens": tokens, name: text})

    def close(self) -> None:
        self._run.finish()


class Lines:
    """A sink that writes events to standard error, as they stand in a log."""

    def write(self, entry: Entry) -> None:
        sys.stderr.buffer.write(msgspec.json.encode(entry) + b"\n")
        sys.stderr.buffer.flush()

    def close(self) -> None:
        pass


def make_sink(where: str) -> Sink:
    """Return the sink that `where` names.

    Raises:
        ConfigError: no such kind, or its package is not installed.
    """
    kind, place = split_place(where)
    try:
        match kind:
            case "tensorboard":
                return ScalarSink(TensorBoard(Path(place)))
            case "wandb":
                return ScalarSink(WeightsAndBiases(place))
            case "json":
                return Lines() if place == "-" else JsonlSink(Path(place))
            case _:
                assert_never(kind)
    except ImportError as error:
        raise ConfigError(f"--log {where}: {error.name} is not installed: pip install 'weft[{kind}]'.") from error
    except OSError as error:
        raise ConfigError(f"--log {where}: cannot be written: {error.strerror or error}. Name another file.") from error


def split_place(where: str) -> tuple[_Kind, str]:
    """Return what kind of sink `where` names, and its place.

    Raises:
        ConfigError: no such kind.
    """
    kind, _, place = where.partition(":")
    for known in _KINDS:
        if known == kind and place:
            return known, place
    raise ConfigError(f"--log {where}: should be tensorboard:FOLDER, wandb:PROJECT, json:FILE or json:-.")
