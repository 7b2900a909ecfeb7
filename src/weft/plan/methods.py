"""Which method suits a run: each row of the table, timed, with what rare outer steps cost in loss beside it.

The fastest by tokens alone would always be the one that hardly ever synchronises, so rows are ranked by the time to the
loss that data-parallel training reaches on the run's tokens (`Pace.same_loss_s`). Rows of which that is not known, or
that leave fewer than `MIN_ROUNDS` outer steps, are shown and never chosen.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from weft.codec.config import Bf16Config, CodecConfig, RandomKConfig, TopKConfig
from weft.plan.forecast import Pace, pace_of
from weft.plan.loss import MIN_ROUNDS
from weft.plan.question import Question
from weft.run.trust import AuditedTrust
from weft.sync.method.choices import Choices, LowRankConfig, NesterovConfig, SignSgdConfig
from weft.sync.method.presets import DdpConfig, DiLoCoConfig, FedAvgConfig, spell_out

EVERY = (10, 30, 100, 300)
CLOSE = 1.02  # within so much of the best, the row with the fewest inner steps between outer ones is chosen


@dataclass(frozen=True, kw_only=True)
class Row:
    name: str
    choices: Choices
    pace: Pace
    is_asked: bool  # the run's own
    objection: str = ""  # why it is not chosen


def rows(question: Question) -> list[Row]:
    """Return the run's own method and those of the table, timed."""
    asked = _row(question, question.choices, is_asked=True)
    others = [choices for choices in _table(question.num_peers) if name_of(choices) != asked.name]
    return [asked, *(_row(question, choices, is_asked=False) for choices in others)]


def choose(table: list[Row]) -> Row:
    """Return the row with the shortest time to the loss; where all are objected to, the run's own."""
    known = [row for row in table if not row.objection and row.pace.same_loss_s is not None]
    if not known:
        return next(row for row in table if row.is_asked)
    least_s = min(row.pace.same_loss_s or 0.0 for row in known)
    close = [row for row in known if (row.pace.same_loss_s or 0.0) <= CLOSE * least_s]
    return min(close, key=lambda row: (row.choices.every, not row.is_asked, row.pace.same_loss_s))


def _kind(choices: Choices) -> str:
    match choices:
        case Choices(send="weights"):
            return "dpsgd"
        case Choices(send="difference"):
            return "choco"
        case Choices(send="delta+weights"):
            return "noloco"
        case Choices(apply=SignSgdConfig()):
            return "demo"
        case Choices(send="gradient", basis=LowRankConfig()):
            return "powersgd"
        case Choices(send="gradient"):
            return "ddp"
        case Choices(wait="ready"):
            return "async-diloco"
        case Choices(tune=tune) if tune:
            return "auto"
        case Choices(error="local"):
            return "cocktail"
        case Choices(is_streaming=True):
            return "streaming"
        case Choices(merge="senders_mean"):
            return "sparseloco"
        case Choices(basis="visible"):
            return "pulse"
        case Choices(apply=NesterovConfig()):
            return "diloco"
        case _:
            return "fedavg"


def name_of(choices: Choices) -> str:
    """Return what a method is called in a table."""
    kind = _kind(choices)
    if not choices.sends_gradient:
        kind += f" H={choices.every * choices.fragments}"
    reply = choices.reply_codec
    return f"{kind} {codec_name(choices.codec)}" + ("" if reply in (None, choices.codec) else f"/{codec_name(reply)}")


def codec_name(codec: CodecConfig | None) -> str:
    if codec is None:
        return ""
    kind = str(type(codec).__struct_config__.tag)
    return f"{kind} {codec.kept} {codec.values}" if isinstance(codec, TopKConfig | RandomKConfig) else kind


def _table(num_peers: int) -> Iterator[Choices]:
    yield spell_out(DdpConfig(), num_peers)
    yield spell_out(FedAvgConfig(), num_peers)
    for every in EVERY:
        yield spell_out(DiLoCoConfig(every=every), num_peers)
    yield spell_out(DiLoCoConfig(every=30, codec=Bf16Config()), num_peers)


def _row(question: Question, choices: Choices, *, is_asked: bool) -> Row:
    asked = replace(question, choices=choices)
    pace = pace_of(asked)
    objection = _objection(choices, pace)
    if isinstance(question.trust, AuditedTrust) and asked.audits is None:
        objection = "members cannot audit each other"
    return Row(name=name_of(choices), choices=choices, pace=pace, is_asked=is_asked, objection=objection)


def _objection(choices: Choices, pace: Pace) -> str:
    if pace.penalty is None:
        return "its loss was not published"
    if not choices.sends_gradient and pace.num_rounds < MIN_ROUNDS:
        return f"too few rounds: {pace.num_rounds}"
    if pace.penalty.more_tokens is None:
        return "no number of tokens makes up for its loss"
    return ""
