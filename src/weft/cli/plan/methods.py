"""`weft methods`: the methods that a run file can name, side by side."""

from typing import Annotated

import typer


def methods(name: Annotated[str | None, typer.Argument(help="Show everything about this method.")] = None) -> None:
    """Print what each method sends, what it tolerates, and when to pick it."""
    from weft.errors import ConfigError
    from weft.plan.catalogue import CATALOGUE, MODEL, PEERS, RING_BITS, table

    heading, *rows = table()
    if name == "custom":
        typer.echo(_custom())
        return
    if name is not None:
        found = [row for row in rows if row[0] == name]
        if not found:
            names = ", ".join(each.name for each in CATALOGUE)
            raise ConfigError(f"there is no method {name!r}. There are {names}; and custom, which names each choice.")
        width = max(map(len, heading))
        for title, cell in zip(heading, found[0], strict=True):
            typer.echo(f"{title:<{width}}  {cell}")
        return
    short = ("method", "every", "bits", "pick it where")
    columns = [heading.index(title) for title in short]
    widths = [max(len(row[column]) for row in (heading, *rows)) for column in columns]
    for row in (heading, *rows):
        typer.echo("  ".join(f"{row[column]:<{width}}" for column, width in zip(columns, widths, strict=True)).rstrip())
    typer.echo(
        f"\nbits: that a peer sends, and receives, for each parameter and training step; of a model of the size "
        f"{MODEL}, among {PEERS}. Data-parallel training in bf16: up to {RING_BITS}.\n"
        "`weft methods NAME` says more; docs/methods.md explains them, docs/run_file.md has their settings."
    )


def _custom() -> str:
    """Return what there is to know of the method that is no row of the table."""
    from msgspec.structs import fields

    from weft.sync.method.choices import Choices

    needed = [field.name for field in fields(Choices) if field.required]
    others = [field.name for field in fields(Choices) if not field.required]
    return (
        f'[method] type = "custom" needs {", ".join(needed)}, and may set {", ".join(others)}.\n'
        "docs/run_file.md says what each may be; docs/methods.md has an example."
    )
