"""Routing of texts: as in production, by an oracle that knows all, and without a look at load, in the same play.

    python -m benchmarks.serving_routes               # all three; one: `python -m benchmarks.serving_routes oracle`
    python -m benchmarks.serving_routes --machines 60 --texts 200     # smaller, into a report of its own
    python -m benchmarks.serving_routes report        # writes the report anew from reports/serving_routes.json

Machines of three kinds in six stages, of which one leaves every other second; half of those are killed. The three plays
have the same machines, lines, texts and departures. What was found before of the others is kept, and says of which
commit it is.
"""

import argparse
import gc
from collections.abc import Callable
from pathlib import Path

import msgspec

from benchmarks.report import FOLDER, commit, load, load_line, table, write
from benchmarks.rig.routes import Blind, Oracle
from weft.clock import cpu_s
from weft.sim.scenario import Lined
from weft.sim.serving.play import Served, Spans, Stage, play
from weft.sim.serving.scenario import Churn, Server, ServingScenario, Texts
from weft.texts.asking.path import Paths

STAGES, SEED = 6, 1
MACHINES, TEXTS = 300, 2000
PER_S = 0.75  # texts a second for each machine: as many as keep them busy
ENTRIES = 4
AIM_ORACLE, AIM_BLIND = 1.1, 1.5

ROUTES: dict[str, Callable[[Stage], Paths] | None] = {
    "production": None,
    "oracle": Oracle,
    "blind to load": lambda stage: Blind(stage.scenario.stages),
}

SPANS = ("routing", "50 %", "95 %", "99 %", "mean", "first: 50 %", "95 %", "99 %", "tokens/s")
ENDS = ("routing", "whole", "wrong", "failed", "after a break", "taken over", "busiest", "virtual s", "CPU s", "commit")


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    route: str
    commit: str
    cpu_s: float
    load: float | None
    served: Served


def scenario(num_machines: int, num_texts: int) -> ServingScenario:
    fast, usual = num_machines // 10, num_machines * 4 // 10
    return ServingScenario(
        stages=STAGES,
        seed=SEED,
        texts=Texts(count=num_texts, per_s=num_machines * PER_S, prompt_tokens=32, answer_tokens=32),
        entry=(Lined(name="entry", count=ENTRIES, delay_ms=5.0),),
        kind=(
            Server(name="site", count=fast, step_ms=12.0, row_ms=1.5, token_ms=0.2, delay_ms=5.0, up_mbit=500.0),
            Server(name="near", count=usual, step_ms=25.0, row_ms=4.0, spread=0.3, delay_ms=10.0, up_mbit=100.0),
            Server(
                name="far",
                count=num_machines - fast - usual,
                step_ms=25.0,
                row_ms=4.0,
                spread=0.5,
                delay_ms=30.0,
                jitter_ms=5.0,
                up_mbit=40.0,
            ),
        ),
        churn=Churn(every_s=600.0 / num_machines, returns_after_s=20.0),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", nargs="*", help=f"{', '.join(ROUTES)}, or report; none: all three")
    parser.add_argument("--machines", type=int, default=MACHINES)
    parser.add_argument("--texts", type=int, default=TEXTS)
    options = parser.parse_args()
    gc.set_threshold(200_000, 20, 50)
    name = "serving_routes" + ("" if options.machines == MACHINES else f"_{options.machines}")
    path = FOLDER / f"{name}.json"
    for route in options.what or ROUTES:
        if route in ROUTES:
            before, began_s = load(), cpu_s()
            served = play(scenario(options.machines, options.texts), make_paths=ROUTES[route])
            found = Figures(route=route, commit=commit(), cpu_s=cpu_s() - began_s, load=before, served=served)
            known = {each.route: each for each in _measured(path)} | {route: found}
            path.write_bytes(msgspec.json.encode([known[each] for each in ROUTES if each in known]))
        _report(name, _measured(path), options)


def _measured(path: Path) -> list[Figures]:
    return msgspec.json.decode(path.read_bytes(), type=list[Figures]) if path.exists() else []


def _report(name: str, found: list[Figures], options: argparse.Namespace) -> None:
    by_route = {each.route: each.served for each in found}
    command = "python -m benchmarks.serving_routes"
    if name != "serving_routes":
        command += f" --machines {options.machines} --texts {options.texts}"
    sections = [
        "Texts come by chance; prompts and answers have 32 tokens on average. All three minimise the same sum "
        "(`texts/asking/path.py`), and know other things of members: what these told up to two seconds ago, and "
        "what was sent to them since; what is true at the moment of choice; what they told, but of what waits there "
        "nothing.",
        "Milliseconds between two tokens of a text, and from asking to the first:",
        table(SPANS, [_spans(each) for each in found]),
        *_ratios(by_route),
        table(ENDS, [_ends(each) for each in found]),
        "Share of the time that machines of a kind computed, in the mean:",
        table(("routing", "site", "near", "far"), [(each.route, *_busy(each.served)) for each in found]),
        *(load_line(each.load) for each in found[:1]),
    ]
    write(name, "Routing of texts, against one that knows all and one that does not look at load", command, sections)


def _spans(found: Figures) -> tuple[object, ...]:
    served = found.served
    return found.route, *_of(served.gap), *_of(served.first)[:3], served.tokens_per_s


def _ends(found: Figures) -> tuple[object, ...]:
    served = found.served
    busiest = f"{max(machine.busy for machine in served.machines):.0%}"
    ends = (served.num_done, served.num_wrong, served.num_failed, served.num_mended, served.num_moved)
    return found.route, *ends, busiest, served.took_s, found.cpu_s, found.commit


def _of(spans: Spans | None) -> tuple[float, ...]:
    return (0.0,) * 4 if spans is None else (spans.p50, spans.p95, spans.p99, spans.mean)


def _ratios(served: dict[str, Served]) -> list[str]:
    """Say how production's routing stands to the others, as far as these were played."""
    told = []
    own = served.get("production")
    for route, aim in (("oracle", f"at most {AIM_ORACLE}"), ("blind to load", f"at most {1 / AIM_BLIND:.2f}")):
        other = served.get(route)
        if own is not None and other is not None:
            p50, p95 = (a / b for a, b in zip(_of(own.gap)[:2], _of(other.gap)[:2], strict=True))
            told.append(f"Production's gaps by those of {route}: {p50:.2f} (50 %), {p95:.2f} (95 %). The aim: {aim}.")
    return told


def _busy(served: Served) -> list[str]:
    found = []
    for kind in ("site", "near", "far"):
        shares = [machine.busy for machine in served.machines if machine.name.startswith(kind)]
        found.append(f"{sum(shares) / len(shares):.0%}")
    return found


if __name__ == "__main__":
    main()
