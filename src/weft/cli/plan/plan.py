"""`weft plan`: what a run would take on some machines and lines, before anybody joins."""

from pathlib import Path
from typing import Annotated, Any

import typer

from weft.cli import settings
from weft.cli.options import given
from weft.config import is_in, leaves, load_tree
from weft.errors import ConfigError

_OWN = ("peers", "device", "tokens_per_s", "efficiency", "line", "up", "down", "delay", "price_per_hour")
_MONEY = ("price_per_kwh", "price_per_hour", "watts", "cluster", "cluster_size", "cluster_price")
_OVERRULED = {
    "--peers": ("peers",),
    "--method": ("method",),
    "--every": ("method.every",),
    "--codec": ("method.codec", "method.reply_codec"),
}
_Rate = Annotated[
    str | None, typer.Option(metavar="RATE", help="Line of each peer: 20mbit, 1gbit.", show_default=False)
]


def plan(
    context: typer.Context,
    path: Annotated[
        Path, typer.Argument(metavar="RUN.TOML", help="Run file, or scenario of weft simulate.", show_default=False)
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
    tree = load_tree(path)
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
        found = asked.scenario(path, changes or (), watts or 0.0, chosen, prices)
    else:
        own = asked.Own(
            device=device,
            tokens_per_s=tokens_per_s,
            efficiency=efficiency,
            watts=watts,
            price_per_hour=price_per_hour,
            line=asked.line(line, up, down, delay),
            line_name=line if (up, down) == (None, None) else "as given",
        )
        found = asked.run(path, changes or (), peers, own, chosen, prices)

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
