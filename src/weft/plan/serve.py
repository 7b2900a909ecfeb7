"""How fast a model answers, whole or in stages, added up from what this machine takes for one layer and for a head.

    a step of n texts           L (layer(n) + n (c - PAGE) look)  +  head(n)  +  n draw
    a piece of m tokens         L (layer(m) + m s read_look), the last with head(1) + draw
    the first token             all pieces of a prompt one after the other
    a token of a ring           S steps, S hops, (S - 1) n x / bps

    L layers; c tokens that each text looks at, in whole pages; s that lie before a piece
    x bytes of a token between two stages
    layer, head, draw, look, read_look    timed (`Timed`); `look` is of a token more that is looked at, in one layer

What bounds a step is the largest of its parts: weights that are read from memory, or arithmetic (Williams et al.,
"Roofline", 2009); keys and values that are looked at; drawing; and the rest, many small operations each of which has to
be begun. Of a ring it is the line, where more than half of the time is spent on it.

In a ring texts travel in groups of n. A token takes `cycle(n)`, a stage is busy for `step(n)` of it with each group; so
B texts make at most

    max over n of   min(B / cycle(n),  share n / max step(n))

Groups form by themselves: who comes to a busy member goes on with all others that wait there.
"""

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from weft.engine.load import NUMBER_NBYTES, num_multiplied
from weft.engine.numbers import Kind
from weft.engine.scheduling.pages import PAGE, num_pages
from weft.engine.scheduling.schedule import QUANTUM
from weft.model.config import ModelConfig
from weft.model.sections import Section, sections, whole
from weft.plan.split import Link
from weft.texts.messages import MAX_INLINE_NBYTES

PIECE = QUANTUM  # tokens of a prompt that are read in a step, where nobody draws
HOP_S = 1e-3  # what a member takes to hand rows on: the most that it may, by the aims of serving in stages
OPEN_HOPS = 2  # a call, and its answer
FETCH_HOPS = 3  # of bytes that are too many for a note: it names them, they are asked for, they come
MOST_TEXTS = 64  # in a step

Bound = Literal["weights", "arithmetic", "keys and values", "drawing", "small operations", "line"]
Points = tuple[tuple[int, float], ...]  # rows, and seconds; rows ascend


@dataclass(frozen=True, kw_only=True)
class Timed:
    """What a machine takes, with one kind of numbers.

    Args:
        layer_s: one layer, by rows; texts have one page.
        head_s: norm and head, by texts.
        draw_s: of one token, once there are logits.
        look_s: of one layer, for a text that draws, each token more that it looks at.
        read_look_s: of one layer, for a token that is read, each token before its piece.
        bandwidth: bytes a second that are read from memory.
        rates: operations a second of products of many rows, by kind.
    """

    kind: Kind
    layer_s: Points
    head_s: Points
    draw_s: float
    look_s: float
    read_look_s: float
    bandwidth: float
    rates: Mapping[Kind, float]


@dataclass(frozen=True, kw_only=True)
class Stage:
    """What one machine computes: a model, or a section."""

    num_layers: int
    has_head: bool
    read_nbytes: int  # of weights, by each step
    num_multiplied: int


@dataclass(frozen=True, kw_only=True)
class Step:
    """The seconds of a step, and of its parts, which may overlap."""

    total_s: float
    weights_s: float = 0.0
    arithmetic_s: float = 0.0
    look_s: float = 0.0
    draw_s: float = 0.0

    @property
    def bound(self) -> Bound:
        products_s = max(self.weights_s, self.arithmetic_s)
        parts: dict[Bound, float] = {
            "weights" if self.weights_s >= self.arithmetic_s else "arithmetic": products_s,
            "keys and values": self.look_s,
            "drawing": self.draw_s,
            "small operations": self.total_s - products_s - self.look_s - self.draw_s,
        }
        return max(parts, key=lambda name: parts[name])

    def __add__(self, other: "Step") -> "Step":
        return Step(
            total_s=self.total_s + other.total_s,
            weights_s=self.weights_s + other.weights_s,
            arithmetic_s=self.arithmetic_s + other.arithmetic_s,
            look_s=self.look_s + other.look_s,
            draw_s=self.draw_s + other.draw_s,
        )


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Of `num_texts` that are drawn at a time: all of them together."""

    num_texts: int
    tokens_per_s: float
    bound: Bound


def seconds_at(points: Points, num: float) -> float:
    """Return the seconds of so many rows: on the line between two points, and on that of the last two beyond them."""
    rows = [each for each, _ in points]
    at = min(max(1, bisect_left(rows, num)), len(points) - 1)
    if num <= rows[0] or len(points) == 1:
        return points[0][1]
    (before, before_s), (after, after_s) = points[at - 1], points[at]
    return max(0.0, before_s + (num - before) * (after_s - before_s) / (after - before))


def stages_of(config: ModelConfig, kind: Kind, num: int = 1) -> tuple[Stage, ...]:
    """Return what the members of a model in so many stages compute; of one, the whole model.

    Raises:
        ConfigError: more stages than layers.
    """
    return tuple(_stage(config, kind, each) for each in (sections(config, num) if num > 1 else (whole(config),)))


def _stage(config: ModelConfig, kind: Kind, section: Section) -> Stage:
    num = num_multiplied(config, section)
    return Stage(
        num_layers=len(section.layers),
        has_head=section.is_last,
        read_nbytes=num * NUMBER_NBYTES[kind],
        num_multiplied=num,
    )


def draws(timed: Timed, stage: Stage, num_texts: int, context: int) -> Step:
    """Return a step in which each text draws a token.

    Args:
        context: tokens that each looks at.
    """
    looked_at = num_pages(context) * PAGE  # all of a page that is begun
    look_s = stage.num_layers * num_texts * (looked_at - PAGE) * timed.look_s
    head_s, draw_s = (seconds_at(timed.head_s, num_texts), num_texts * timed.draw_s) if stage.has_head else (0.0, 0.0)
    return Step(
        total_s=stage.num_layers * seconds_at(timed.layer_s, num_texts) + look_s + head_s + draw_s,
        weights_s=stage.read_nbytes / timed.bandwidth,
        arithmetic_s=2 * num_texts * stage.num_multiplied / timed.rates[timed.kind],
        look_s=look_s,
        draw_s=draw_s,
    )


def read_s(timed: Timed, stage: Stage, num_tokens: int, start: int, *, is_last: bool) -> float:
    """Return the seconds of a step that reads a piece of one prompt.

    Args:
        start: tokens before it.
        is_last: of the prompt: the first token is drawn.
    """
    layer_s = seconds_at(timed.layer_s, num_tokens) + num_tokens * start * timed.read_look_s
    drawn_s = seconds_at(timed.head_s, 1) + timed.draw_s if is_last and stage.has_head else 0.0
    return stage.num_layers * layer_s + drawn_s


def speed(timed: Timed, stage: Stage, num_texts: int, context: int) -> Speed:
    """Return how fast one machine draws so many texts at a time.

    More than `MOST_TEXTS` take turns.
    """
    step = draws(timed, stage, min(num_texts, MOST_TEXTS), context)
    return Speed(num_texts=num_texts, tokens_per_s=min(num_texts, MOST_TEXTS) / step.total_s, bound=step.bound)


def pieces(num_prompt: int) -> Iterator[tuple[int, int]]:
    """Yield where each piece of a prompt begins, and how many tokens it has."""
    for start in range(0, num_prompt, PIECE):
        yield start, min(PIECE, num_prompt - start)


def first_token_s(timed: Timed, stage: Stage, num_prompt: int) -> float:
    """Return how long it takes to read a prompt and draw one token, with nobody else there."""
    return sum(read_s(timed, stage, num, start, is_last=start + num == num_prompt) for start, num in pieces(num_prompt))


# --- in stages ---


def ring_speed(
    timed: Timed, stages: Sequence[Stage], link: Link, row_nbytes: int, num_texts: int, context: int, share: float = 1.0
) -> Speed:
    """Return how fast members that are alike, one of each stage, draw so many texts at a time.

    Args:
        link: between any two of them.
        row_nbytes: of a token's activations, encoded.
        share: of each machine's time that may be spent on it.
    """
    found = list[Speed]()
    for num in range(1, min(num_texts, MOST_TEXTS) + 1):
        steps = [draws(timed, stage, num, context) for stage in stages]
        row_s = 8 * num * row_nbytes / link.bps
        line_s = len(stages) * (link.rtt_s / 2 + HOP_S) + (len(stages) - 1) * row_s
        all_steps = sum(steps[1:], steps[0])
        cycle_s = all_steps.total_s + line_s
        busy_s = max(step.total_s for step in steps) / share
        slowest = max(busy_s, row_s)
        bound: Bound = all_steps.bound
        if row_s > busy_s or (line_s > cycle_s / 2 and num_texts / cycle_s < num / slowest):
            bound = "line"
        each = min(num_texts / cycle_s, num / slowest)
        found.append(Speed(num_texts=num_texts, tokens_per_s=each, bound=bound))
    return max(found, key=lambda speed: speed.tokens_per_s)


def ring_first_token_s(timed: Timed, stages: Sequence[Stage], link: Link, row_nbytes: int, num_prompt: int) -> float:
    """Return how long the first token takes from who asks and back, with nobody else there.

    All members open the text first, and say so. A stage reads a piece while the one before reads the next. A piece's
    rows are fetched where a note does not hold them.
    """
    hop_s = link.rtt_s / 2 + HOP_S
    there_s = [OPEN_HOPS * hop_s + hop_s for _ in pieces(num_prompt)]  # when each piece is at a stage
    for number, stage in enumerate(stages):
        read_until_s = sent_until_s = 0.0
        for at, (start, num) in enumerate(pieces(num_prompt)):
            took_s = read_s(timed, stage, num, start, is_last=start + num == num_prompt)
            read_until_s = max(read_until_s, there_s[at]) + took_s
            nbytes = num * row_nbytes if number < len(stages) - 1 else 0
            sent_until_s = max(sent_until_s, read_until_s) + 8 * nbytes / link.bps
            there_s[at] = sent_until_s + (FETCH_HOPS if nbytes > MAX_INLINE_NBYTES else 1) * hop_s
    return there_s[-1]
