"""Options that commands share reach them as one value, and are shown as each command's own."""

from dataclasses import dataclass
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from weft.cli.options import spread


@dataclass(frozen=True)
class Place:
    town: Annotated[str, typer.Option(help="Where.")]
    streets: Annotated[list[str] | None, typer.Option("--street", help="Again for more.")] = None


@dataclass(frozen=True)
class When:
    hour: int = 7


@pytest.fixture
def taken() -> list[object]:
    return []


@pytest.fixture
def app(taken: list[object]) -> typer.Typer:
    app = typer.Typer(rich_markup_mode=None)

    @app.command()
    @spread
    def meet(context: typer.Context, who: str, *, place: Place, when: When, loud: bool = False) -> None:
        """Meet somebody."""
        taken.append((context.info_name, who, place, when, loud))

    return app


def test_fields_of_several_groups_reach_the_command_beside_its_own(app: typer.Typer, taken: list[object]) -> None:
    words = ["ann", "--town", "Ulm", "--street", "a", "--street", "b", "--hour", "9", "--loud"]
    assert CliRunner().invoke(app, words).exit_code == 0
    assert taken == [("meet", "ann", Place("Ulm", ["a", "b"]), When(9), True)]


def test_what_is_not_given_is_the_groups_default(app: typer.Typer, taken: list[object]) -> None:
    assert CliRunner().invoke(app, ["ann", "--town", "Ulm"]).exit_code == 0
    assert taken == [("meet", "ann", Place("Ulm"), When(), False)]


def test_a_field_without_default_must_be_given(app: typer.Typer, taken: list[object]) -> None:
    result = CliRunner().invoke(app, ["ann"])
    assert result.exit_code == 2
    assert "--town" in result.output
    assert taken == []


def test_the_help_is_the_commands_and_names_no_group(app: typer.Typer) -> None:
    shown = CliRunner().invoke(app, ["--help"]).output
    assert "Meet somebody." in shown
    assert all(option in shown for option in ("--town", "--street", "--hour", "--loud"))
    assert "--place" not in shown
