"""The exception tree: what its docstring draws is what the classes are."""

import builtins
import re

import pytest

from weft import errors
from weft.errors import WeftError


def leaves_and_branches(base: type[WeftError] = WeftError) -> list[type[WeftError]]:
    return [kind for child in base.__subclasses__() for kind in (child, *leaves_and_branches(child))]


KINDS = [kind for kind in leaves_and_branches() if kind.__module__ == "weft.errors"]


def drawn() -> dict[str, tuple[str, str | None, int]]:
    """Read name -> (parent, builtin parent, exit code) out of the docstring."""
    tree: dict[str, tuple[str, str | None, int]] = {}
    above: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        match = re.match(r"^ {4}((?:│ {3}| {4})*)(?:├── |└── )(\w+)(?: \((\w+)\))?\s+(\d+)\s", line)
        if match:
            depth = len(match[1]) // 4
            above[depth:] = [match[2]]
            tree[match[2]] = (above[depth - 1] if depth else "WeftError", match[3], int(match[4]))
    return tree


def test_the_docstring_draws_every_exception() -> None:
    assert set(drawn()) == {kind.__name__ for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_the_drawing_tells_parent_builtin_and_exit_code(kind: type[WeftError]) -> None:
    parent, builtin, exit_code = drawn()[kind.__name__]
    assert kind.__bases__[0].__name__ == parent
    assert kind.exit_code == exit_code
    if builtin is not None:
        assert issubclass(kind, getattr(builtins, builtin))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_exception_is_also_a_builtin_one(kind: type[WeftError]) -> None:
    assert any(
        parent.__module__ == "builtins" and parent not in (Exception, BaseException, object) for parent in kind.__mro__
    )


def test_exit_codes_are_unique_and_leave_0_and_1_alone() -> None:
    codes = [kind.exit_code for kind in KINDS]
    assert len(set(codes)) == len(codes)
    # 126 and above mean something else to a shell; 0 is success, 1 an unexpected exception.
    assert all(2 <= code < 126 for code in codes)
    assert WeftError.exit_code == 1


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_the_message_is_what_str_shows(kind: type[WeftError]) -> None:
    assert str(kind("tried this on that; do so next")) == "tried this on that; do so next"


def test_a_remotes_fault_is_told_from_this_machines() -> None:
    assert not issubclass(errors.NetError, errors.PeerError)
    assert issubclass(errors.WireError, errors.PeerError)
    assert issubclass(errors.DeadlineExceeded, TimeoutError)
