"""`weft plan`: what a run would take on some machines and lines, before anybody joins; or what its answers would."""

import shlex
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from dataclasses import fields as fields_of
from pathlib import Path
from typing import Annotated, Any

import typer

from weft.cli import settings
from weft.cli.home import SECTIONS, WHOLE, find_checkpoint, find_run, home_of, no_such_run
from weft.cli.options import Numbers, given, spread
from weft.config import is_in, leaves, load_tree
from weft.dashboard.logs import is_there
from weft.errors import ConfigError

_OWN = ("peers", "device", "tokens_per_s", "efficiency", "line", "up", "down", "delay", "price_per_hour")
_MONEY = ("price_per_kwh", "price_per_hour", "watts", "cluster", "cluster_size", "cluster_price")
_LINE = ("line", "up", "down", "delay")
_ONCE_TRAINED = "a run without stages is answered for once it is trained"
_TRAINING = ("peers", "tokens_per_s", "method", "every", "codec")
_TRAINED = ("peers", "method", "train.tokens", "train.batch_size", "train.schedule")  # fields of the run file
_OVERRULED = {
    "--peers": ("peers",),
    "--method": ("method",),
    "--every": ("method.every",),
    "--codec": ("method.codec", "method.reply_codec"),
}
_Rate = Annotated[
    str | None, typer.Option(metavar="RATE", help="Line of each peer: 20mbit, 1gbit.", show_default=False)
]


@dataclass(frozen=True)
class Serves:
    """Whether it is about answers."""

    serve: Annotated[
        bool,
        typer.Option(
            "--serve", help="Say how fast this machine would answer with the model, and with how many texts at a time."
        ),
    ] = False
    numbers: Annotated[Numbers, typer.Option(help="With --serve: how weights are held, as of weft serve.")] = (
        Numbers.auto
    )
    stages: Annotated[
        int | None,
        typer.Option(help="With --serve, of a model that was trained: into how many it is cut.", min=1, max=1024),
    ] = None
    share: Annotated[
        float,
        typer.Option(
            help="With --serve, of a run with stages: share of each machine that answers take while it trains.",
            min=0.01,
            max=0.99,
        ),
    ] = 0.3


@spread
def plan(
    context: typer.Context,
    serves: Serves,
    path: Annotated[
        Path,
        typer.Argument(
            metavar="RUN.TOML|RUN",
            help="Run file, run of this home, or scenario of weft simulate; with --serve also a folder, as of weft "
            "serve.",
            show_default=False,
        ),
    ],
    peers: Annotated[
        int | None, typer.Option(help="Number of peers. Default: as the run file expects.", min=1, max=4096)
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(help="Device of each peer, by name. Default: this machine, which is timed.", show_default=False),
    ] = None,
    tokens_per_s: Annotated[
        float | None, typer.Option(help="How fast each trains, if you know it.", min=1e-6, show_default=False)
    ] = None,
    efficiency: Annotated[
        float | None, typer.Option(help="Share of the device's rate that training uses.", min=0.001, max=1.0)
    ] = None,
    line: Annotated[str, typer.Option(help="Line of each peer, by name; --up, --down and --delay change it.")] = "home",
    up: _Rate = None,
    down: _Rate = None,
    delay: Annotated[
        str | None, typer.Option(metavar="TIME", help="One way to the middle of the network: 10ms.", show_default=False)
    ] = None,
    method: Annotated[
        str | None,
        typer.Option(help="ddp, fedavg, diloco or sparseloco, in place of the run file's.", show_default=False),
    ] = None,
    every: Annotated[
        int | None, typer.Option(help="Training steps in a round.", min=1, max=100_000, show_default=False)
    ] = None,
    codec: Annotated[
        str | None, typer.Option(help="fp32, bf16, fp8, int8, int4, e3m0, int2 or sign.", show_default=False)
    ] = None,
    price_per_kwh: Annotated[
        float | None, typer.Option(help="Price of power for peers.", min=0.0, show_default=False)
    ] = None,
    price_per_hour: Annotated[float, typer.Option(help="Rent of each peer's machine, if you rent it.", min=0.0)] = 0.0,
    watts: Annotated[
        float | None, typer.Option(help="Power of each peer's machine while it trains.", min=0.0, show_default=False)
    ] = None,
    cluster: Annotated[
        str | None, typer.Option(help="GPU of the data centre to compare with.", show_default=False)
    ] = None,
    cluster_size: Annotated[int | None, typer.Option(help="How many of them.", min=1, show_default=False)] = None,
    cluster_price: Annotated[
        float | None, typer.Option(help="Rent of one for an hour.", min=0.0, show_default=False)
    ] = None,
    changes: Annotated[
        list[str] | None, typer.Option("--set", metavar="FIELD=VALUE", help="Change the run file.")
    ] = None,
    details: Annotated[
        bool, typer.Option("--details", help="Say also what rounds are made of, energy, money, other methods, sources.")
    ] = False,
    is_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Say how long a run would take, its bytes, disk and memory; with --details its cost, and which method suits it."""
    if serves.serve:
        for text in _answers(context, path, serves, changes or [], is_json=is_json):
            typer.echo(text)
        return
    settings.refuse_idle(
        context, "it is about answers, and --serve is not given", *(each.name for each in fields_of(Serves))
    )
    run = _run_called(path, context)
    tree = {} if run is not None else _tree_in(path, context)
    if run is not None:
        settings.refuse_idle(context, "a run of this home is planned as it is; its run file can be changed", "changes")
    if "kind" in tree:
        settings.refuse_idle(
            context, f"{path} is a scenario, and its kinds say which machines and lines there are", *_OWN
        )
    elif device is None and tokens_per_s is None:
        device = "here"
    _check_speed(context, device, tokens_per_s)
    _check_method(context, settings.changes_of(changes or ()))
    if is_json:
        settings.refuse_idle(context, "--json prints everything", "details")
    from weft.cli.plan import question as asked

    prices = asked.Prices(price_per_kwh, cluster, cluster_size, cluster_price)
    chosen = asked.Method(method=method, every=every, codec=codec)
    if "kind" in tree:
        found = asked.scenario(path, changes or (), watts or 0.0, chosen, prices, home_of(context))
    else:
        own = asked.Own(
            device=device,
            tokens_per_s=tokens_per_s,
            efficiency=efficiency,
            watts=watts,
            price_per_hour=price_per_hour,
            line=asked.line(line, up, down, delay),
            line_name=line if (up, down) == (None, None) else "as given",
            home=home_of(context),
        )
        if run is None:
            found = asked.run(path, changes or (), peers, own, chosen, prices)
        else:
            found = asked.kept(find_checkpoint(str(run), home_of(context)), peers, own, chosen, prices)

    if found.stages > 1:
        settings.refuse_idle(context, "energy and money are not planned for runs with stages", *_MONEY)
        settings.refuse_idle(context, "a run with stages is told whole", "details")
        from weft.cli.plan import show_stages as planned_pipeline

        cut = planned_pipeline.cut(found)
        for text in [planned_pipeline.as_json(found, cut)] if is_json else planned_pipeline.lines(found, cut):
            typer.echo(text)
        return

    from weft.cli.plan.show import as_json, lines, short
    from weft.plan.forecast import forecast
    from weft.plan.methods import choose, rows

    plan = forecast(found.question)
    details = details or any(name in given(context) for name in _MONEY)  # which only they tell of
    if not (details or is_json):
        for text in short(found, plan):
            typer.echo(text)
        return
    table = rows(found.question)
    if is_json:
        typer.echo(as_json(found, plan, table, choose(table)))
    else:
        for text in lines(found, plan, table, choose(table)):
            typer.echo(text)


def _run_called(path: Path, context: typer.Context) -> Path | None:
    """Return the folder of the run of this home that is meant; None: a file is.

    Raises:
        NoSuchRun: several are called so.
    """
    is_file = path.suffix.lower() == ".toml" or (is_there(path) and not path.is_dir())
    return None if is_file else find_run(str(path), home_of(context), having=(WHOLE, SECTIONS))


def _tree_in(path: Path, context: typer.Context) -> dict[str, Any]:
    """Return what stands in a run file, or in a scenario.

    Raises:
        ConfigError: it is neither; NoSuchRun: it is nothing. What is meant for it is said.
    """
    if path.suffix.lower() == ".toml":
        return load_tree(path)
    given = str(path)
    if not is_there(path):
        raise no_such_run(given, home_of(context), "a run file")
    if not path.is_dir():
        with suppress(ConfigError):
            return load_tree(path)
    named = shlex.quote(given[:200])
    said = (
        f"{given} is no run file. If it is text of your own, weft train {named} says what that takes, before it begins."
    )
    if path.is_dir():
        said += f" If it is a model, weft plan {named} --serve says how fast it would answer."
    raise ConfigError(said)


def _answers(
    context: typer.Context, path: Path, serves: Serves, changes: Sequence[str], *, is_json: bool
) -> Iterator[str]:
    """Yield what answers of a model take, line by line."""
    refuse, typed = settings.refuse_idle, context.params
    refuse(context, "--serve times this machine, and tells no cost", "device", "efficiency", "details", *_MONEY)
    is_run_file = path.is_file() or path.suffix == ".toml"
    if is_run_file:
        refuse(context, "a run file says it: --set stages=2 changes it", "stages")
        if "kind" in _tree_in(path, context):
            raise ConfigError(f"{path} is a scenario, which trains and does not answer. Give its run file to --serve.")
    else:
        refuse(context, "the model was trained", "changes", "share", *_TRAINING)
    _check_method(context, settings.changes_of(changes))
    from weft.cli.plan import question as asked
    from weft.cli.plan import serving, show_serve
    from weft.cli.plan.show import spelt

    line = asked.line(*(typed[name] for name in _LINE))
    chosen = asked.Method(**{name: typed[name] for name in ("method", "every", "codec")})
    if is_run_file:
        model = serving.of_run_file(path, changes, home_of(context))
    else:
        model = serving.of_trained(str(path), home_of(context), serves.stages)
    if model.num_stages == 1:
        refuse(context, "the model is in one piece: nothing goes over lines", *_LINE)
        refuse(context, _ONCE_TRAINED, "share", *_TRAINING)
        for name, _ in leaves(settings.changes_of(changes)):
            if any(is_in(name, field) for field in _TRAINED):
                raise ConfigError(f"--set {name} has no effect: {_ONCE_TRAINED}. Leave it out.")
    else:
        refuse(context, "members of stages choose them", "numbers")
    told = serving.answer(model, serves.numbers, line)
    if is_run_file and model.num_stages > 1:
        speed = typed["tokens_per_s"]
        own = asked.Own(
            device=None if speed else asked.HERE,
            tokens_per_s=speed,
            efficiency=None,
            watts=None,
            price_per_hour=0.0,
            line=line,
            home=home_of(context),
        )
        trains = asked.run(path, changes, typed["peers"], own, chosen, asked.Prices(None, None, None, None))
        told = serving.with_share(told, trains, serves.share)
    yield from [spelt(serving.tree(told))] if is_json else show_serve.lines(told)


def _check_speed(context: typer.Context, device: str | None, tokens_per_s: float | None) -> None:
    if tokens_per_s is not None:
        settings.refuse_idle(context, "--tokens-per-s says how fast each trains", "efficiency")
    elif device == "here":
        settings.refuse_idle(context, "--device here times this machine", "efficiency")


def _check_method(context: typer.Context, changes: dict[str, Any]) -> None:
    """Refuse a --set that an option overrules.

    Raises:
        ConfigError: names both.
    """
    names = [name for name, _ in leaves(changes)]
    for option, fields in _OVERRULED.items():
        for name in names if option in given(context).values() else ():
            if any(is_in(name, field) for field in fields) and (option, name) != ("--method", "method.every"):
                raise ConfigError(f"--set {name} has no effect: {option} takes its place. Leave one of them out.")
