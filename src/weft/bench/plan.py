"""What is compared: methods, each with a grid of settings, on equal data, for equally many inner steps of every peer.

    run = "run.toml"
    steps = [500]

    [[kind]]
    name = "peer"
    count = 4
    up_mbit = 20.0

    [[row]]
    name = "diloco"
    method = { type = "diloco" }
    grid = [{ "method.every" = [10, 50], "train.schedule.lr" = [2e-3, 4e-3] }]

Each table of a row's grid stands for all combinations of its values; the row's points are those of all its tables.
What a row may change is its method and how inner steps are made. Data, model, batch, peers and length are the plan's,
so that losses can be compared: a row that would change them is refused, as is a length that its rounds do not divide.
"""

import copy
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from weft.config import Config, from_tree, replace_field
from weft.errors import ConfigError
from weft.pipeline.placement import num_first
from weft.run.config import FolderModel, RunConfig, RunFile, SpaceModel
from weft.sim.scenario import Kind, Scenario
from weft.sync.method.presets import spell_out
from weft.wire import digest_of

FORMAT = 1  # raised when a point of equal settings would be measured otherwise
MAX_POINTS = 6  # of a row's grid: rows that were searched longer than others look better than they are
NAME_LENGTH = 16  # hexadecimal digits of a digest: 64 bits

# What a row may change, besides its method.
TUNED = ("method", "train.schedule", "train.optimizer", "train.clip")

Values = dict[str, Any]  # by dotted field of a run file

_Seeds = Annotated[
    tuple[Annotated[int, Meta(ge=0, le=(1 << 63) - 1)], ...],
    Meta(min_length=1, description="of weights, data, keys and luck"),
]
_Steps = Annotated[
    tuple[Annotated[int, Meta(ge=1)], ...],
    Meta(min_length=1, description="training steps of each peer; one run for each"),
]


class BenchRow(Config, frozen=True, kw_only=True):
    name: Annotated[str, Meta(min_length=1, max_length=40, pattern=r"^[\w .,+()-]+\Z")]
    method: Annotated[dict[str, Any], Meta(description="the run file's table of that name")]
    set: Annotated[Values, Meta(description="other fields of the run file, dotted")] = msgspec.field(
        default_factory=dict
    )
    grid: Annotated[tuple[dict[str, tuple[Any, ...]], ...], Meta(min_length=1)] = ({},)
    seeds: _Seeds | None = None  # None: the plan's
    steps: _Steps | None = None  # None: the plan's

    def values(self) -> Iterator[Values]:
        """Yield what each point of the grid sets."""
        for table in self.grid:
            for combination in itertools.product(*table.values()):
                yield dict(zip(table, combination, strict=True))

    def __post_init__(self) -> None:
        num = sum(1 for _ in self.values())
        if not 1 <= num <= MAX_POINTS:
            raise ValueError(f"row {self.name}: a grid of {num} points; a row has 1 to {MAX_POINTS}.")
        for dotted in [*self.set, *(dotted for table in self.grid for dotted in table)]:
            if not any(dotted == field or dotted.startswith(f"{field}.") for field in TUNED):
                raise ValueError(
                    f"row {self.name}: {dotted} is equal for all rows, or losses could not be compared. A row may set "
                    f"fields of {', '.join(TUNED)}."
                )


class Bench(Config, frozen=True, kw_only=True):
    """A plan: the run that all rows share, the machines that play it, and the rows. The first row is the yardstick."""

    run: Annotated[str, Meta(description="path of the run file, from the plan's folder")]
    kind: Annotated[tuple[Kind, ...], Meta(min_length=1)]
    row: Annotated[tuple[BenchRow, ...], Meta(min_length=1)]
    seeds: _Seeds = (0,)
    steps: _Steps | None = None
    tokens: Annotated[tuple[Annotated[int, Meta(ge=1)], ...], Meta(min_length=1)] | None = None  # committed, of all
    warmup: Annotated[float, Meta(ge=0, le=1, description="share of a run's tokens")] = 0.05

    @property
    def num_peers(self) -> int:
        return sum(kind.count for kind in self.kind)

    def __post_init__(self) -> None:
        names = [row.name for row in self.row]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"row: two rows are called {twice[0]}; give one of them another name.")
        if (self.steps is None) == (self.tokens is None):
            raise ValueError("a plan needs either steps, of each peer, or tokens, of all together.")
        Scenario(run=self.run, kind=self.kind)  # machines that none could have are refused in its words
        if late := [kind.name for kind in self.kind if kind.joins_at_s or kind.joins_over_s]:
            raise ValueError(f"kind {late[0]}: all machines of a plan are there from the start; leave joins_* out.")


@dataclass(frozen=True)
class Point:
    """One run: a row with one choice of its grid, a seed and a length.

    Args:
        values: what the grid has chosen, by dotted field.
        steps: inner steps of each peer.
    """

    row: str
    values: Values
    seed: int
    steps: int
    run_file: RunFile


class _Question(msgspec.Struct, frozen=True, kw_only=True):
    """All that the outcome of a point follows from."""

    format: int
    run: RunConfig
    kinds: tuple[Kind, ...]


def points_of(bench: Bench, tree: Mapping[str, Any], where: str) -> tuple[Point, ...]:
    """Return the points of a plan, row by row.

    Args:
        tree: the run file, as TOML has it.
        where: its name, for errors.

    Raises:
        ConfigError: names the row, and what in it cannot be run.
    """
    base: RunFile = from_tree(dict(tree), RunFile, where=where)
    has_learnt = isinstance(base.model, FolderModel) or (isinstance(base.model, SpaceModel) and base.model.member)
    if has_learnt or base.is_private:
        raise ConfigError(
            f"{where}: a bench compares only runs that make their weights from the seed and share their data."
        )
    found: list[Point] = []
    for row in bench.row:
        for steps, seed in itertools.product(row.steps or _lengths(bench, base), row.seeds or bench.seeds):
            shared = _shared(bench, base, tree, seed, steps)
            found += [
                Point(row.name, values, seed, steps, _run_file(row, values, shared, steps)) for values in row.values()
            ]
    return tuple(found)


def config_of(point: Point, sealed: RunConfig) -> RunConfig:
    """Return what the peers of a point share.

    Args:
        sealed: of any point with the same seed.
    """
    run_file = point.run_file
    return msgspec.structs.replace(
        sealed,
        train=run_file.train,
        method=spell_out(run_file.method, run_file.peers),
        has_even_leases=run_file.has_even_leases,
    )


def name_of(point: Point, bench: Bench, sealed: RunConfig) -> str:
    """Return the digest of all that the outcome follows from, cut: no path, and nothing that changes nothing.

    Args:
        sealed: as for `config_of`.
    """
    question = _Question(format=FORMAT, run=config_of(point, sealed), kinds=bench.kind)
    return digest_of(question)[:NAME_LENGTH]


def names_of(points: tuple[Point, ...], bench: Bench, sealed: Mapping[int, RunConfig]) -> dict[str, Point]:
    """Return the points by name.

    Args:
        sealed: by seed.

    Raises:
        ConfigError: two of them are the same run.
    """
    found: dict[str, Point] = {}
    for point in points:
        name = name_of(point, bench, sealed[point.seed])
        if name in found:
            raise ConfigError(
                f"row {point.row}: with {_shown(point.values)} it is the same run as row {found[name].row} with "
                f"{_shown(found[name].values)}. Leave one of them out."
            )
        found[name] = point
    return found


def _lengths(bench: Bench, base: RunFile) -> tuple[int, ...]:
    if bench.steps is not None:
        return bench.steps
    together = num_first(bench.num_peers, base.stages) * base.train.batch_size * base.train.seq_len
    for tokens in bench.tokens or ():
        if tokens % together:
            raise ConfigError(
                f"tokens: {tokens} are no whole number of training steps; one of all peers takes {together}."
            )
    return tuple(tokens // together for tokens in bench.tokens or ())


def _shared(bench: Bench, base: RunFile, tree: Mapping[str, Any], seed: int, steps: int) -> dict[str, Any]:
    """Return the run file as all rows have it, of one seed and length."""
    shared = copy.deepcopy(dict(tree))
    tokens = steps * num_first(bench.num_peers, base.stages) * base.train.batch_size * base.train.seq_len
    shared |= {"seed": seed, "peers": bench.num_peers, "has_even_leases": True}
    shared["train"]["tokens"] = tokens
    schedule = shared["train"]["schedule"]
    schedule["warmup_tokens"] = round(bench.warmup * tokens)
    if schedule["type"] != "constant":
        schedule["total_tokens"] = tokens
    return shared


def _run_file(row: BenchRow, values: Values, shared: Mapping[str, Any], steps: int) -> RunFile:
    where = f"row {row.name}"
    tree = copy.deepcopy({**shared, "method": row.method})
    for dotted, value in {**row.set, **values}.items():
        replace_field(tree, dotted, copy.deepcopy(value))
    for name in ("warmup_tokens", "total_tokens"):  # of a whole schedule that a row brings, as of the others'
        if name in shared["train"]["schedule"] and tree["train"]["schedule"].get("type") != "constant":
            tree["train"]["schedule"].setdefault(name, shared["train"]["schedule"][name])
    run_file: RunFile = from_tree(tree, RunFile, where=where)
    every = spell_out(run_file.method, run_file.peers).every
    if steps % every:
        raise ConfigError(
            f"{where}: {steps} training steps are not a whole number of rounds of {every}, so it would train longer "
            f"than others; choose method.every so that it divides {steps}."
        )
    return run_file


def _shown(values: Values) -> str:
    return msgspec.json.encode(values).decode() if values else "nothing"
