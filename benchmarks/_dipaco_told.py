"""What `dipaco` has found, in words: the table of a setup, what is sent, what the paper claims and what is seen.

All differences are paired: of each held-out document the mean over the seeds that both rows have. Their standard error
counts files of text and not documents, for the documents of one file are alike: with d of a document, n of them in all
and G files,

    error^2 = G / (G - 1)  sum over files of (sum over its documents of (d - mean))^2 / n^2

Several seeds tell beside it what each has found, for the text says nothing of how far another seed would move it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import nan, sqrt
from statistics import mean

import numpy as np
from numpy.typing import NDArray

from benchmarks.report import table

Losses = dict[str, list[float]]  # of held-out documents, by domain, nats per token

PATH_SIZED, PATH_SIZED_ON = "dense, a path's size and steps", "dense, a path's size, the compute of all paths"
DEEP = "dense, the parameters of all paths, a path's steps"
DEEP_ON = "dense, the parameters and the compute of all paths"
AS_IS, ANEW, KILLED = "as it is", "documents assigned anew", "the same, one path killed and taken over"


def once(branch: str) -> str:
    return f"paths, {branch}, routed once"


def often(branch: str, every: int) -> str:
    return f"paths, {branch}, routed every {every} tokens"


@dataclass(frozen=True, kw_only=True)
class Row:
    """What a model comes to.

    Args:
        losses: of each held-out document, by domain.
        num_steps: of a path's size and batch, all together, in compute.
        read_again: share of the tokens, where the path changes: of a reader that keeps what one path has read, and of
            one that keeps what all have.
    """

    setup: str
    seed: int
    name: str
    losses: Losses
    num_parameters: int  # that read a token
    num_steps: float
    cpu_s: float
    read_again: tuple[float, float] = (0.0, 0.0)
    note: str = ""

    @property
    def all_losses(self) -> NDArray[np.float64]:
        return np.array([loss for each in self.losses.values() for loss in each])


Rows = Mapping[str, Sequence[Row]]  # of a setup, by name, one for each seed


def rows_of(setup: str, rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Return the rows of a setup by name, seeds in order."""
    found = dict[str, list[Row]]()
    for row in sorted((row for row in rows if row.setup == setup), key=lambda row: row.seed):  # as they were made
        found.setdefault(row.name, []).append(row)
    return found


def error_by_file(differences: NDArray[np.float64], files: Sequence[int]) -> float:
    """Return the standard error of the mean of differences whose files these are; not a number where all are of one."""
    _, places = np.unique(np.asarray(files), return_inverse=True)
    num = int(places.max()) + 1
    if num < 2:
        return nan
    sums = np.bincount(places, weights=differences - differences.mean())
    return sqrt(num / (num - 1) * float((sums**2).sum())) / len(differences)


def against(mine: Sequence[Row], others: Sequence[Row], files: Sequence[int]) -> str:
    """Return how much higher the loss of a row is than another's, in the seeds that both have; "-" where there is none.

    Args:
        mine, others: one for each seed.
        files: of each held-out document its file.
    """
    pairs = [(one, other) for one in mine for other in others if one.seed == other.seed]
    each = [one.all_losses - other.all_losses for one, other in pairs if one.losses and other.losses]
    if not each:
        return "-"
    apart = np.mean(each, axis=0)
    told = f"{apart.mean():+.4f} ± {error_by_file(apart, files):.4f}"
    return told + (f" ({' / '.join(f'{seed.mean():+.4f}' for seed in each)})" if len(each) > 1 else "")


def of_models(rows: Rows, files: Sequence[int]) -> str:
    """Return the table of all models."""
    header = ["model", "loss", "against a path's size and steps", "parameters that read a token", "compute in steps"]
    lines = []
    for name, mine in rows.items():
        has_losses, again = all(row.losses for row in mine), mine[0].read_again
        lines.append(
            [
                name,
                f"{mean(float(row.all_losses.mean()) for row in mine):.4f}" if has_losses else "-",
                against(mine, rows.get(PATH_SIZED, ()), files),
                mine[0].num_parameters,
                round(mean(row.num_steps for row in mine)),
                " / ".join(f"{100 * share:.0f} %" for share in again) if any(again) else "",
                mean(row.cpu_s for row in mine),
                " / ".join(row.note for row in mine if row.note),
            ]
        )
    return table([*header, "read again", "CPU s", ""], lines)


def by_domain(rows: Rows) -> str:
    shown = {name: mine for name, mine in rows.items() if "half time" not in name and all(row.losses for row in mine)}
    names = list(next(iter(shown.values()))[0].losses) if shown else []
    lines = [
        [name, *(f"{mean(float(np.mean(row.losses[domain])) for row in mine):.3f}" for domain in names)]
        for name, mine in shown.items()
    ]
    return table(["loss by domain", *names], lines)


def of_seeds(rows: Rows) -> str:
    """Say of which seeds a setup is, and what its errors leave out."""
    seeds = sorted({row.seed for mine in rows.values() for row in mine})
    if len(seeds) == 1:
        return (
            f"One seed ({seeds[0]}): errors are of the held-out text, by file. How far another seed would move a "
            "figure, they do not say; `--seeds 3` does."
        )
    return (
        f"Seeds {', '.join(map(str, seeds))}: means over them, and in brackets what each has found. Errors are of the "
        "held-out text, by file; how far seeds lie apart is not in them."
    )


# --- the paper ---

CLAIMS = """
The paper: 256 paths of 150M parameters, C4, 88,000 steps of 512 windows of 1,024 tokens; perplexities of its table 3,
as others quote it. Here: 4 and 16 paths of 1M parameters, a few hundred steps. So the figures cannot be the same; signs
could.
""".strip()


def claims(setups: Mapping[str, Rows], files: Sequence[int], every: int) -> str:
    """Return what the paper claims, and what is seen, side by side.

    Args:
        every: tokens after which a text is routed again.
    """
    anew, found = often(ANEW, every), []
    for setup, rows in setups.items():
        for claim, paper, one, other in (
            ("better than dense of a path's size and steps", "yes", anew, PATH_SIZED),
            ("as good as dense of many more parameters, in as many steps", "11.38 to 11.41 (1.3B): -0.003", anew, DEEP),
            ("against dense of a path's size with the compute of all", "not told", anew, PATH_SIZED_ON),
            ("against dense of as many parameters with the compute of all", "not told", anew, DEEP_ON),
            (f"routed every {every} tokens rather than once", "11.38 to 12.39: -0.085", anew, once(ANEW)),
            ("documents assigned by loss rather than by k-means", "better", once(ANEW), once(AS_IS)),
            ("one path killed and taken over", "no harm told of", often(KILLED, every), anew),
        ):
            if one in rows and other in rows:
                found.append([setup, claim, paper, against(rows[one], rows[other], files)])
    return table(["setup", "claim", "the paper, nats", "here, nats"], found)
