"""Texts of 3 and 12 stages behind lines of 100 ms and 100 Mbit/s: weft's ring beside Petals' way, and a member killed.

    python -m benchmarks.text_hops               # half an hour
    python -m benchmarks.text_hops FOLDER        # guesses, too: of a model that has learnt something, and its tokenizer

Each member of a stage, and each that asks, is a process in a network namespace with a line of its own that another
process lays; a round trip between any two takes 100 ms. The model is small and was never trained. Beside weft's ring
stand two clients that go other ways with the same members and the same messages (`_text_star`): `star`, where each
member answers the client, as Petals goes, and `chain`, where the last one answers it, as Petals was meant to go. They
take turns.

What a hop takes beside computing is measured on loopback. The member of the middle of three stages is killed in the
middle of a text, where another serves the stage, too.

It needs root, or user namespaces with a TUN device in them, and says so where it has neither.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from benchmarks import text_lines
from benchmarks.lossy import Process, isolate
from benchmarks.report import load, load_line, table, write
from benchmarks.text_lines import MBIT, lines, started

RTT_S = 0.1
NUM_STAGES = (3, 12)
WAYS = {"ring": "asks", "star": "star", "chain": "chain"}  # and the role of who asks
TOLD_AS = {"ring": "weft", "star": "star, as Petals goes", "chain": "chain, as Petals was meant to"}
WIDTH, NUM_TOKENS = 1024, 32
HOP_S = 1e-3  # that a hop may take
HOP_CPU_S, OVERHEAD_NBYTES, FORMULA = 0.5e-3, 64, 0.9
TIMES_STAR = {3: 1.4, 12: 1.7}
NEWS_S = 3.0  # by then all have told of themselves
IDLE_S = 10.0  # in which it is counted what they tell

KILLED_STAGE, KILLED_AT, KILLED_PROMPT, KILLED_TOKENS = 1, 16, 64, 48
KILLED = {"ring": "asks", "star": "star", "asit": "star as it is"}
KILLED_AS = {"ring": "weft", "star": "star, mended as its open change #523 has it", "asit": "star, as Petals is"}


class Crew:
    """Members of stages, and those that ask, each a process.

    Args:
        addresses: of namespaces; None: all are in this one.
        options: of all.
    """

    def __init__(self, stack: ExitStack, addresses: dict[str, str] | None, **options: Any) -> None:
        self._stack, self._addresses, self._options = stack, addresses, options
        self._known: dict[str, tuple[str, list[str]]] = {}  # keys and addresses, by name
        self._seeds: dict[str, int] = {}
        self.members: dict[str, Process] = {}
        self.askers: dict[str, Process] = {}

    def add_member(self, name: str, stage: int) -> None:
        self.members[name] = self._started(name, role="stage", stage=stage)

    def add_asker(self, name: str, role: str) -> None:
        self.askers[name] = self._started(name, role=role)

    def _started(self, name: str, **options: Any) -> Process:
        seed = self._seeds.setdefault(name, len(self._seeds) + 1)
        space, address = (None, "127.0.0.1") if self._addresses is None else (name, self._addresses[name])
        options = {**self._options, **options, "host": address, "seed": seed, "has_guesses": False}
        known = dict(each for other, each in self._known.items() if other != name)
        process, word = started(self._stack, space, known=known, **options)
        self._known[name] = word["key"], word["addresses"]
        return process

    def told(self) -> dict[str, dict[str, Any]]:
        """Return what each has computed so far."""
        everybody = {**self.members, **self.askers}
        for process in everybody.values():
            process.tell(do="tell")
        return {name: process.hear("told") for name, process in everybody.items()}


def shape(num_stages: int) -> dict[str, Any]:
    return {
        "vocab_size": 256,
        "num_layers": num_stages,
        "num_heads": 8,
        "num_kv_heads": 8,
        "width": WIDTH,
        "ffn_width": WIDTH,
        "max_seq_len": 512,
        "is_tied": False,
    }


@contextmanager
def crew_of(num_stages: int, addresses: dict[str, str] | None, ways: Sequence[str]) -> Iterator[Crew]:
    with ExitStack() as stack:
        crew = Crew(stack, addresses, shape=shape(num_stages), num_stages=num_stages, codec="int8")
        for stage in range(num_stages):
            crew.add_member(f"stage{stage}", stage)
        for way in ways:
            crew.add_asker(way, WAYS[way])
        time.sleep(NEWS_S)
        yield crew


def spaces(*names: str) -> dict[str, str]:
    return {name: f"10.9.0.{number}" for number, name in enumerate(names, 1)}


# --- tokens a second, and what a hop takes ---


class Turn(NamedTuple):
    """One text.

    Args:
        computed_s: in all sections, a token.
        cpu_s: of all processes, a token, without computing.
        nbytes: of all packets, a token.
        hop_nbytes: of those from a member to the next with activations, a token.
    """

    token_s: float
    computed_s: float
    cpu_s: float
    nbytes: float
    hop_nbytes: float
    tokens: list[int]


Bytes = dict[tuple[str, str], float]  # from whom, to whom


def turn(crew: Crew, way: str, number: int, num_tokens: int, laid: Process | None, idle_per_s: Bytes) -> Turn:
    """Draw a text.

    Args:
        idle_per_s: bytes a second while nothing is drawn, which do not count.
    """
    before, counted, began = crew.told(), _counted(laid), time.monotonic()
    asker = crew.askers[way]
    asker.tell(prompt=[number + 1], num=num_tokens, temperature=1.0, seed=number)
    word = asker.hear("drawn", "failed")
    if word["event"] == "failed":
        raise RuntimeError(word["why"])
    now, took_s, after = _counted(laid), time.monotonic() - began, crew.told()
    used = {name: {key: value - before[name][key] for key, value in _numbers(after[name])} for name in after}
    members = [used[name] for name in crew.members]
    cpu_s = sum(each["cpu_s"] - each["its_cpu_s"] for each in members) + used[way]["cpu_s"]
    pairs = {pair: each - counted.get(pair, 0) - took_s * idle_per_s.get(pair, 0) for pair, each in now.items()}
    onward = [pairs.get((f"stage{stage}", f"stage{stage + 1}"), 0) for stage in range(len(members) - 1)]
    return Turn(
        token_s=word["token_s"],
        computed_s=sum(each["wall_s"] for each in members) / num_tokens,
        cpu_s=cpu_s / num_tokens,
        nbytes=sum(pairs.values()) / num_tokens,
        hop_nbytes=sum(onward) / len(onward) / num_tokens,
        tokens=word["tokens"],
    )


def _numbers(told: dict[str, Any]) -> list[tuple[str, float]]:
    return [(key, value) for key, value in told.items() if key != "event"]


def _counted(laid: Process | None) -> Bytes:
    if laid is None:
        return {}
    laid.tell()
    return {(a, b): nbytes for a, b, nbytes in laid.hear("counted")["nbytes"]}


def turns(
    num_stages: int, num_turns: int, num_tokens: int, ways: Sequence[str], *, has_lines: bool
) -> dict[str, list[Turn]]:
    """Return the texts of each way, which take turns."""
    found: dict[str, list[Turn]] = {way: [] for way in ways}
    names = [*(f"stage{stage}" for stage in range(num_stages)), *ways]
    with ExitStack() as stack:
        addresses = spaces(*names) if has_lines else None
        laid = None if addresses is None else stack.enter_context(lines(addresses, RTT_S))
        crew = stack.enter_context(crew_of(num_stages, addresses, ways))
        before = _counted(laid)
        time.sleep(IDLE_S if has_lines else 0.0)
        idle_per_s = {pair: (each - before.get(pair, 0)) / IDLE_S for pair, each in _counted(laid).items()}
        for number in range(num_turns + 1):  # the first warms up
            for way in ways if number % 2 else reversed(ways):
                here = turn(crew, way, number, num_tokens if number else 4, laid, idle_per_s)
                print(num_stages, way, "lines" if has_lines else "loopback", here[:-1], file=sys.stderr, flush=True)
                if number:
                    found[way].append(here)
    return found


# --- a member is killed ---


class Kill(NamedTuple):
    """What came after one.

    Args:
        pause_s: until the next token came; None: none did.
        usual_s: between two tokens, else.
        why: no token came.
    """

    pause_s: float | None
    usual_s: float
    is_whole: bool
    why: str


def kills(num_turns: int) -> dict[str, list[Kill]]:
    """Kill the member that computes the middle stage of a text; a second one serves it, too."""
    found: dict[str, list[Kill]] = {name: [] for name in KILLED}
    options: dict[str, Any] = {"shape": shape(3), "num_stages": 3, "kind": "exact", "codec": "fp32"}
    names = [f"stage{stage}" for stage in range(3)] + ["spare", *KILLED]
    addresses = spaces(*names)
    with ExitStack() as stack:
        stack.enter_context(lines(addresses, RTT_S))
        whole, _ = started(stack, None, role="whole", has_guesses=False, **options)
        crew = Crew(stack, addresses, **options)
        for stage in range(3):
            crew.add_member(f"stage{stage}", stage)
        crew.add_member("spare", KILLED_STAGE)
        for name, role in KILLED.items():
            crew.add_asker(name, role)
        for number in range(num_turns):
            for name in KILLED:
                time.sleep(NEWS_S)
                here = _killed(crew, crew.askers[name], whole, number)
                print(name, here, file=sys.stderr, flush=True)
                found[name].append(here)
    return found


def _killed(crew: Crew, asker: Process, whole: Process, number: int) -> Kill:
    prompt = [(7 * at + number) % 256 for at in range(KILLED_PROMPT)]
    order: dict[str, Any] = {"prompt": prompt, "num": KILLED_TOKENS, "temperature": 1.0, "seed": number}
    whole.tell(**order)
    expected = whole.hear("drawn")["tokens"]
    before = crew.told()
    asker.tell(**order)
    while (word := asker.hear("token", "failed"))["event"] == "token" and word["num"] < KILLED_AT:
        pass
    if word["event"] == "failed":
        raise RuntimeError(word["why"])
    victim = ""
    for name in (f"stage{KILLED_STAGE}", "spare"):
        crew.members[name].tell(do="tell")
        if crew.members[name].hear("told")["num"] > before[name]["num"]:
            victim = name
    crew.members[victim].kill()
    word = asker.hear("drawn", "failed")
    crew.add_member(victim, KILLED_STAGE)
    if word["event"] == "failed":
        return Kill(None, 0.0, False, word["why"])
    usual_s = word["token_s"] - (word["gap_s"] - word["token_s"]) / (len(word["tokens"]) - 2)
    return Kill(word["gap_s"], usual_s, word["tokens"] == expected, "")


# --- guesses ---


def guessed(folder: Path, num_turns: int) -> list[list[object]]:
    """Return tokens a second with guesses and without, of code, of prose, and where no guess is ever right."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    works = {"code": {}, "prose": {}, "prose, no guess ever right": {"is_never_right": True}}
    found: dict[tuple[str, bool], text_lines.Found] = {}
    with lines(text_lines.ADDRESSES, RTT_S):
        for has_guesses, is_never_right in ((False, False), (True, False), (True, True)):
            with text_lines.staged(folder, has_guesses=has_guesses, is_never_right=is_never_right) as process:
                for work, options in works.items():
                    if has_guesses and is_never_right != bool(options):
                        continue
                    kind = work.partition(",")[0]
                    place = ("three stages", has_guesses)
                    here = text_lines.drawn({place: process}, kind, tokenizer, num_turns, **options)[place]
                    print(work, has_guesses, here.tokens_per_s, file=sys.stderr, flush=True)
                    found[work, has_guesses] = here
    rows = list[list[object]]()
    for work in works:
        without, with_them = found[work, False], found[work, True]
        each = zip(with_them.tokens_per_s, without.tokens_per_s, strict=True)
        rows.append(
            [
                work,
                statistics.median(without.tokens_per_s),
                statistics.median(with_them.tokens_per_s),
                statistics.median(a / b for a, b in each),
                f"{sum(a == b for a, b in zip(with_them.texts, without.texts, strict=True))} of {num_turns}",
            ]
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--parts", default="lines,loopback,kills,guesses", help="which; less than all writes no report")
    parser.add_argument("--stages", default=",".join(map(str, NUM_STAGES)))
    parser.add_argument("--isolated", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.isolated:
        isolate("text_hops")
    before, parts = load(), options.parts.split(",")
    sections = list[str]()
    everywhere = [int(each) for each in options.stages.split(",")]
    if "lines" in parts:
        found = {num: turns(num, options.turns, NUM_TOKENS, tuple(WAYS), has_lines=True) for num in everywhere}
        sections += _lines_told(found)
    if "loopback" in parts:
        found = {num: turns(num, options.turns, 8 * NUM_TOKENS, ("ring",), has_lines=False) for num in everywhere}
        sections += _hops_told(found)
    if "kills" in parts:
        sections += _kills_told(kills(options.turns))
    if "guesses" in parts and options.folder is not None:
        sections += _guesses_told(options.folder.name, guessed(options.folder, options.turns))
    if parts != parser.get_default("parts").split(",") or options.stages != parser.get_default("stages"):
        print("\n\n".join(sections))
        return
    write(
        "text_hops",
        "Texts in stages behind lines of 100 ms",
        f"python -m benchmarks.text_hops{'' if options.folder is None else ' FOLDER'}",
        [*sections, load_line(before)],
    )


def _lines_told(found: dict[int, dict[str, list[Turn]]]) -> list[str]:
    rows = list[list[object]]()
    for num, ways in found.items():
        star = ways["star"]
        for way, here in ways.items():
            computed_s = statistics.median(each.computed_s for each in here)
            formula = 1 / ((num + 1) * RTT_S / 2 + computed_s + num * HOP_S)
            speed = statistics.median(1 / each.token_s for each in here)
            trips = {"ring": num, "star": 2 * num, "chain": num + 1}[way]
            rows.append(
                [
                    f"{num} stages, {TOLD_AS[way]}",
                    trips,
                    speed,
                    statistics.median(a.token_s / b.token_s for a, b in zip(star, here, strict=True)),
                    1000 * computed_s,
                    speed / formula,
                    statistics.median(each.nbytes for each in here),
                    f"{sum(a.tokens == b.tokens for a, b in zip(here, ways['ring'], strict=True))} of {len(here)}",
                ]
            )
    header = [
        "",
        "trips one way a token",
        "tokens/s",
        "times the star",
        "computing, ms a token",
        "share of the formula",
        "bytes on lines, a token",
        "texts alike",
    ]
    goals = ", ".join(f"{times} at {num} stages" for num, times in TIMES_STAR.items())
    overheads = ", ".join(
        f"{statistics.median(each.hop_nbytes for each in ways['ring']):,.0f} at {num} stages"
        for num, ways in found.items()
    )
    return [
        "## Tokens a second",
        f"Lines of {MBIT} Mbit/s, a round trip of {1000 * RTT_S:.0f} ms between any two; one text at a time, "
        f"{NUM_TOKENS} tokens. A layer of width {WIDTH} a stage, int8, activations in int8, one thread each. Goals: "
        f"weft's ring {goals} times the star; {FORMULA} of 1 / ((S + 1) RTT / 2 + computing + S x 1 ms), the formula, "
        "which reckons with a trip more than the ring has.",
        table(header, rows),
        f"From a member of the ring to the next {overheads} bytes of packets a token: {WIDTH} of activations, their "
        f"scales, the record, TLS, TCP, IP, acknowledgements, not what members tell of themselves. Goal: {WIDTH} + "
        f"{OVERHEAD_NBYTES}.",
    ]


def _hops_told(found: dict[int, dict[str, list[Turn]]]) -> list[str]:
    rows = list[list[object]]()
    for num, ways in found.items():
        here = ways["ring"]
        rows.append(
            [
                f"{num} stages",
                statistics.median(1 / each.token_s for each in here),
                statistics.median(1000 * each.computed_s / num for each in here),
                statistics.median(1000 * (each.token_s - each.computed_s) / num for each in here),
                statistics.median(1000 * each.cpu_s / num for each in here),
            ]
        )
    header = ["", "tokens/s", "computing, ms a stage", "wall beside it, ms a hop", "CPU beside it, ms a hop"]
    return [
        "## A hop",
        f"The same on loopback, without lines, {8 * NUM_TOKENS} tokens. CPU is of all processes, whoever asks among "
        f"them. Goals: {1000 * HOP_S:g} ms of wall, {1000 * HOP_CPU_S:g} ms of CPU.",
        table(header, rows),
    ]


def _kills_told(found: dict[str, list[Kill]]) -> list[str]:
    rows = list[list[object]]()
    for name, here in found.items():
        went_on = [each for each in here if each.pause_s is not None]
        rows.append(
            [
                KILLED_AS[name],
                f"{sum(each.is_whole for each in here)} of {len(here)}",
                statistics.median(each.pause_s or 0.0 for each in went_on) if went_on else "none came",
                statistics.median(each.usual_s for each in went_on) if went_on else "",
                "; ".join(sorted({each.why for each in here if each.why})),
            ]
        )
    header = ["", "texts whole", "s to the next token", "s a token before", "else"]
    return [
        "## A member is killed",
        f"SIGKILL for the member of the middle one of three stages at token {KILLED_AT} of {KILLED_TOKENS}, after a "
        f"prompt of {KILLED_PROMPT}; another serves the stage, too. Exact numbers, activations in fp32, the same "
        "lines. Whole is a text that is one machine's to the last token. Petals' client keeps what it sent to a stage, "
        "opens another server and sends it again; but the new session's position is 0, which it asserts not to be "
        "(22afba6; v2.2.0 asserts another consequence of it), and it tries again without end; here five times.",
        table(header, rows),
    ]


def _guesses_told(name: str, rows: list[list[object]]) -> list[str]:
    header = ["", "tokens/s without guesses", "with guesses", "times as fast", "texts alike"]
    return [
        "## Guesses",
        f"{name} in int8 in three stages, activations in bf16, the same lines (`text_lines` tells of the texts). Where "
        "no guess is ever right, what is guessed is a token that is forbidden. Goals: 2 times as fast on code; 0.97 "
        "where no guess is right.",
        table(header, rows),
    ]


if __name__ == "__main__":
    main()
