"""What `stacks` has found, in words: the table, which repairs hold, whether a stack is worth more than its controls.

All differences are paired: of each held-out sequence the mean over the seeds, then mean and standard error over the
sequences.
"""

from collections.abc import Mapping, Sequence
from math import sqrt
from statistics import mean, stdev
from typing import NamedTuple

import msgspec

from benchmarks.report import table

GROUPS = ("shared", "only1", "only2")
TIE = 0.015  # nats: nearer ones are told as equal

# Rows, by the names that verdicts know them by.
SHALLOW = "shallow model, trains the ends"
M1, M2 = "m1 alone", "m2 alone"
ENSEMBLE = "CONTROL ensemble of m1 and m2, mean probability"
SOUP = "CONTROL soup: mean weights of m1 and m2"
CONTINUED = "CONTROL best single, trained on with the compute of joint"
CONTINUED_ON = "CONTROL best single, trained on with that of a loop and joint"
MONOLITH = "CONTROL monolith of 8 layers, compute of loop and joint in all"
NAIVE, RAW = "naive, post", "naive, pre"
AFTER_NEXT = "naive, post, scored on the token after next"
M1_AFTER_NEXT = "m1 alone, scored on the token after next"
CUT_FIRST = "naive, post, without m2's first layer"
CUT_LAST = "naive, post, without m1's last layer"
TWICE = "naive, post, m1 twice"
TUNED = "naive, scale tuned on dev"
PREV, PREV_STACK = "m2 after a loop from the position before, alone", "naive after a loop from the position before"
SAME, SAME_STACK = "m2 after a loop at the same position, alone", "naive after a loop at the same position"
PREV_UNSURE = "m2 after a loop from the position before where unsure, alone"
PREV_UNSURE_STACK = "naive after a loop from the position before where unsure"
SAME_UNSURE = "m2 after a loop at the same position where unsure, alone"
SAME_UNSURE_STACK = "naive after a loop at the same position where unsure"
SAME_TWICE = "m2 after a loop at the same position, twice"
LOOP_JOINT = "joint after a loop at the same position"
STITCH = "stitch: an affine map, members frozen"
ONEWAY = "one-way: m2 on frozen m1"
ONEWAY_IDENTITY = "CONTROL one-way: identity layers on frozen m1"
SAUCE, SAUCE_ALONE = "sauce: m1 under frozen m2", "m1 after sauce, alone"
TWIN = "CONTROL twin of sauce: true gradient, m2 frozen"
ONEWAY_SAUCE = "one-way, then sauce"
ONEWAY_SAUCE_ONEWAY = "one-way, sauce, one-way"
JOINT, JOINT_RAW = "joint, post", "joint, pre"
JOINT_IDENTITY = "CONTROL joint, post: m1 and identity layers"
JOINT_RAW_IDENTITY = "CONTROL joint, pre: m1 and identity layers"
JOINT_COPY = "CONTROL joint, post: m1 and its copy"
JOINT_EXITS = "joint, post, by the losses of all exits"
UP_SCALED = "CONTROL m1 depth up-scaled to 6 layers, trained on in joint's steps"
BRANCH1, BRANCH2 = "b1 alone, from one backbone with b2", "b2 alone, from one backbone with b1"
BRANCH_ENSEMBLE = "CONTROL ensemble of b1 and b2, mean probability"
BRANCH_SOUP = "CONTROL soup: mean weights of b1 and b2"
BRANCH_NAIVE = "naive, post, b1 and b2"
BRANCH_JOINT = "joint, post, b1 and b2"
BRANCH_IDENTITY = "CONTROL joint, post: b1 and identity layers"
NAMES = tuple(value for name, value in list(vars().items()) if name.isupper() and isinstance(value, str))


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """
    Args:
        losses: of each held-out sequence, nats per token, a third of them of each group.
        cost_u: of all that it took, in steps of one member.
        adds: what the uppermost member adds to the loss of the exit below it.
    """

    losses: tuple[float, ...]
    cost_u: float
    adds: float | None = None
    note: str = ""


class Seed(msgspec.Struct, frozen=True, kw_only=True):
    """What one seed has found: rows by name, in the order of the table."""

    rows: dict[str, Row]
    best: str
    """The better member alone, on dev."""
    geometry: dict[str, float]
    cpu_s: float


Seeds = Mapping[int, Seed]


class Difference(NamedTuple):
    mean: float
    error: float

    def __str__(self) -> str:
        return f"{self.mean:+.3f} ± {self.error:.3f}"


def loss(found: Seeds, name: str) -> float:
    return mean(mean(seed.rows[name].losses) for seed in found.values())


def best_single(found: Seeds) -> dict[int, str]:
    return {number: seed.best for number, seed in found.items()}


def difference(found: Seeds, name: str, other: str | Mapping[int, str]) -> Difference:
    """Return how much higher the loss of a row is than that of another.

    Args:
        other: a row of all seeds, or of each its own.
    """
    each = []
    for number, seed in found.items():
        against = other if isinstance(other, str) else other[number]
        each.append([a - b for a, b in zip(seed.rows[name].losses, seed.rows[against].losses, strict=True)])
    sequences = [mean(of) for of in zip(*each, strict=True)]
    return Difference(mean(sequences), stdev(sequences) / sqrt(len(sequences)) if len(sequences) > 1 else 0.0)


def rows(found: Seeds) -> str:
    """Return the table of all rows."""
    lines, best = [], best_single(found)
    for name in next(iter(found.values())).rows:
        each = [seed.rows[name] for seed in found.values()]
        third = len(each[0].losses) // len(GROUPS)
        parts = [mean(mean(row.losses[third * at : third * (at + 1)]) for row in each) for at in range(len(GROUPS))]
        adds = [row.adds for row in each if row.adds is not None]
        lines.append(
            (
                name + "".join(f" ({note})" for note in [", ".join(row.note for row in each)] if note.strip(", ")),
                f"{loss(found, name):.3f}",
                " / ".join(f"{mean(row.losses):.3f}" for row in each),
                str(difference(found, name, best)),
                " / ".join(f"{part:.3f}" for part in parts),
                f"{mean(adds):+.3f}" if adds else "",
                f"{mean(row.cost_u for row in each):,.0f}",
            )
        )
    head = ("configuration", "loss", "of each seed", "less best single", " / ".join(GROUPS), "upper adds", "cost, u")
    return table(head, lines)


# --- repairs ---


def repairs(found: Seeds) -> str:
    """Return which repairs of a naive stack come as far as they should."""
    best, lines = best_single(found), []
    for name, share in ((SAME_STACK, 0.8), (SAUCE, 0.7)):
        closed = [
            (_of(seed, NAIVE) - _of(seed, name)) / (_of(seed, NAIVE) - _of(seed, seed.best)) for seed in found.values()
        ]
        said = " / ".join(f"{100 * each:.0f} %" for each in closed)
        lines.append((name, f"closes {100 * share:.0f} % of the gap", said, _word(mean(closed) >= share)))
    bars = (
        (ONEWAY, M1, 0.03, "at most 0.03 above m1"),
        (LOOP_JOINT, best, -0.02, "0.02 below the best single"),
        (ONEWAY_SAUCE_ONEWAY, best, 0.0, "below the best single"),
        (JOINT_RAW, best, 0.0, "below the best single"),
    )
    for name, other, most, bar in bars:
        apart = difference(found, name, other)
        lines.append((name, bar, str(apart), _word(apart.mean <= most)))
    return table(("stack", "bar", "found", ""), lines)


def _of(seed: Seed, name: str) -> float:
    return mean(seed.rows[name].losses)


def _word(holds: bool) -> str:
    return "holds" if holds else "**missed**"


# --- usefulness ---

# Of each stack: the ensemble of its members, its identity growth, and the best single with as much compute or more.
RIVALS = {
    ONEWAY: (ENSEMBLE, ONEWAY_IDENTITY, CONTINUED),
    ONEWAY_SAUCE_ONEWAY: (ENSEMBLE, ONEWAY_IDENTITY, CONTINUED_ON),
    JOINT: (ENSEMBLE, JOINT_IDENTITY, CONTINUED),
    JOINT_EXITS: (ENSEMBLE, JOINT_IDENTITY, CONTINUED),
    JOINT_RAW: (ENSEMBLE, JOINT_RAW_IDENTITY, CONTINUED),
    LOOP_JOINT: (ENSEMBLE, JOINT_IDENTITY, CONTINUED_ON),
    BRANCH_JOINT: (BRANCH_ENSEMBLE, BRANCH_IDENTITY, CONTINUED),
}


def usefulness(found: Seeds) -> str:
    """Return whether stacks are worth more than what costs less."""
    lines = []
    for name, rivals in RIVALS.items():
        apart = [difference(found, name, other) for other in (*rivals, MONOLITH)]
        lines.append((name, *(f"{each}: {verdict(each)}" for each in apart[:3]), str(apart[3])))
    head = (
        "stack",
        "U1: less ensemble",
        "U2: less identity growth",
        "U3: less best single, trained on",
        "U4: less monolith",
    )
    return table(head, lines)


def verdict(apart: Difference) -> str:
    """Return "better" for a loss that is lower by more than chance and than what counts as a tie."""
    if abs(apart.mean) <= max(TIE, 2 * apart.error):
        return "tie"
    return "better" if apart.mean < 0 else "worse"


def claims(found: Seeds) -> str:
    """Return in a sentence what may be said."""
    won = {
        f"U{number + 1}": [
            name for name, rivals in RIVALS.items() if verdict(difference(found, name, rivals[number])) == "better"
        ]
        for number in range(3)
    }
    return "; ".join(f"{word} is met by {', '.join(names) or 'no stack'}" for word, names in won.items()) + "."


def geometry(found: Seeds) -> str:
    names: Sequence[str] = tuple(next(iter(found.values())).geometry)
    return ", ".join(f"{name} {mean(seed.geometry[name] for seed in found.values()):.2f}" for name in names)
