"""A model in three stages behind lines of 20 ms and 100 Mbit/s: tokens a second at batch 1, beside one machine.

    python -m benchmarks.text_lines FOLDER       # of a model that has learnt something, with its tokenizer.json

Four network namespaces, each with a line of its own that a process of this benchmark lays: one asks, three compute a
stage each, over TLS. Between any two of them a round trip takes 20 ms. Beside it the whole model on one machine. Each
draws with guesses and without (`weft.engine.scheduling.guess`); `code` writes functions of Python's library again,
`prose` tells a story at temperature 0.8. All have one thread, and take turns, a text each, so that what else the
machine does hits all.

It needs root, or user namespaces with a TUN device in them, and says so where it has neither.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from benchmarks._paths_nets import sh
from benchmarks._text_forks import Forked
from benchmarks.guessing import WORKS, requests
from benchmarks.lossy import HERE, Process, isolate
from benchmarks.report import load, load_line, table, write

MBIT, RTT_S = 100, 0.02
NUM_STAGES = 3
NAMES = ("asks", *(f"stage{stage}" for stage in range(NUM_STAGES)))
ADDRESSES = {name: f"10.9.0.{number}" for number, name in enumerate(NAMES, 1)}
AIM = 0.5

Place = tuple[str, bool]  # where a text is drawn, and whether with guesses


class Found(NamedTuple):
    """Of the texts of one work."""

    tokens_per_s: list[float]
    first_s: list[float]
    texts: list[list[int]]


def turns_of(places: Sequence[Place], num: int) -> Iterator[tuple[int, Place]]:
    """Yield the number of each turn and whose it is; who comes first in one comes last in the next."""
    order = list(places)
    for number in range(num):
        yield from ((number, place) for place in order)
        order.append(order.pop(0))


def drawn(
    processes: Mapping[Place, Process], work: str, tokenizer: Tokenizer, turns: int, **options: Any
) -> dict[Place, Found]:
    found = {place: Found([], [], []) for place in processes}
    for number, place in turns_of(list(processes), turns + 1):  # the first warms up
        (wanted,) = requests(work, 1, tokenizer, number)
        drawing = wanted.drawing
        processes[place].tell(
            prompt=wanted.prompt,
            num=wanted.max_new_tokens,
            temperature=drawing.temperature,
            seed=drawing.seed[0],
            **options,
        )
        word = processes[place].hear("drawn", "failed")
        if word["event"] == "failed":
            raise RuntimeError(word["why"])
        if number:
            found[place].tokens_per_s.append(1 / word["token_s"])
            found[place].first_s.append(word["first_s"])
            found[place].texts.append(word["tokens"])
    return found


def started(stack: ExitStack, space: str | None, **options: Any) -> tuple[Process, dict[str, Any]]:
    """Return a peer, and what it says of itself.

    Args:
        space: the namespace it is in; None: this one.
    """
    process = stack.enter_context(Forked(space, options))
    return process, process.hear("started")


@contextmanager
def lines(addresses: dict[str, str], rtt_s: float) -> Iterator[Process]:
    """Make a namespace of each name, with a line to all others; yield the process that is the lines."""
    for name in addresses:
        sh(f"ip netns add {name}; ip -n {name} link set lo up")
    line = {"mbit": MBIT, "rtt_s": rtt_s, "loss": 0.0, "ends": list(addresses.items())}
    try:
        with Process([sys.executable, str(HERE / "_lossy_line.py"), json.dumps(line)]) as laid:
            laid.hear("laid")
            yield laid
    finally:
        for name in addresses:
            sh(f"ip netns del {name}")


@contextmanager
def staged(folder: Path, *, has_guesses: bool, is_never_right: bool = False) -> Iterator[Process]:
    """Yield who asks, once three others serve a stage each."""
    with ExitStack() as stack:
        known: dict[str, list[str]] = {}
        for number, name in enumerate((*NAMES[1:], NAMES[0])):
            options = {"stage": number, "role": "stage"} if number < NUM_STAGES else {"role": "asks"}
            process, word = started(
                stack,
                name,
                seed=len(NAMES) * has_guesses + number + 1,
                folder=str(folder),
                num_stages=NUM_STAGES,
                known=known,
                has_guesses=has_guesses,
                is_never_right=is_never_right,
                **options,
            )
            known = {**known, word["key"]: [each for each in word["addresses"] if ADDRESSES[name] in each]}
        yield process


@contextmanager
def alone(folder: Path, *, has_guesses: bool) -> Iterator[Process]:
    with ExitStack() as stack:
        yield started(stack, NAMES[0], role="whole", folder=str(folder), has_guesses=has_guesses)[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--isolated", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.isolated:
        isolate("text_lines")
    before, tokenizer = load(), Tokenizer.from_file(str(options.folder / "tokenizer.json"))
    found: dict[tuple[str, bool, str], Found] = {}
    with lines(ADDRESSES, RTT_S), ExitStack() as stack:
        processes = {
            (where, has_guesses): stack.enter_context(served(options.folder, has_guesses=has_guesses))
            for has_guesses in (False, True)
            for where, served in (("one machine", alone), ("three stages", staged))
        }
        for work in WORKS:
            for (where, has_guesses), here in drawn(processes, work, tokenizer, options.turns).items():
                found[where, has_guesses, work] = here
                print(where, has_guesses, work, statistics.median(here.tokens_per_s), file=sys.stderr)
    write(
        "text_lines",
        "A model in stages behind slow lines",
        "python -m benchmarks.text_lines FOLDER",
        _told(found, before, options.folder),
        [],
    )


def _told(found: dict[tuple[str, bool, str], Found], before: Any, folder: Path) -> list[str]:
    rows = []
    for work in WORKS:
        base = found["one machine", False, work]
        for (where, has_guesses, of), here in found.items():
            if of != work:
                continue
            speed = statistics.median(here.tokens_per_s)
            rows.append(
                [
                    f"{work}, {where}{', with guesses' if has_guesses else ''}",
                    speed,
                    speed / statistics.median(base.tokens_per_s),
                    statistics.median(here.first_s),
                    f"{sum(a == b for a, b in zip(here.texts, base.texts, strict=True))} of {len(base.texts)}",
                ]
            )
    header = ["", "tokens/s", "times one machine's", "first token, s", "texts alike"]
    return [
        f"{folder.name} in int8, one thread each; activations in bf16. Lines of {MBIT} Mbit/s, a round trip of "
        f"{1000 * RTT_S:.0f} ms between any two. Aim: {AIM:g} times one machine's on code, with guesses. "
        f"{load_line(before)}",
        table(header, rows),
    ]


if __name__ == "__main__":
    main()
