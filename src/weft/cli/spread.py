"""Options that several commands share: fields of a dataclass, which a command takes as one value.

@dataclass(frozen=True)
class Stay:
    until: Annotated[str | None, typer.Option(help="Leave at a time.")] = None

@spread
def train(context: typer.Context, stay: Stay) -> None: ...        # weft train --until 07:00
"""

import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from functools import wraps
from typing import Any

Command = Callable[..., None]


def spread(command: Command) -> Command:
    """Return `command` with each field of its dataclass parameters as an option of its own, in order."""
    own = inspect.signature(command).parameters.values()
    kinds = ((each.name, each.annotation) for each in own)
    groups = {name: kind for name, kind in kinds if isinstance(kind, type) and is_dataclass(kind)}

    @wraps(command)
    def with_options(**given: Any) -> None:
        for name, group in groups.items():
            given[name] = group(**{field.name: given.pop(field.name) for field in fields(group)})
        command(**given)

    shown = [each for one in own for each in (_options(groups[one.name]) if one.name in groups else [_by_name(one)])]
    with_options.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
    return with_options


def _options(group: type[Any]) -> list[inspect.Parameter]:
    return [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if field.default is MISSING else field.default,
            annotation=field.type,
        )
        for field in fields(group)
    ]


def _by_name(parameter: inspect.Parameter) -> inspect.Parameter:
    return parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
