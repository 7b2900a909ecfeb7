"""What is given to `weft.Sync`, its `step` and `weft.train`: looked at before a home or a network is touched.

Structs of msgspec check what is read, not what a program writes; so what a program wrote is checked as a file would be.
"""

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar, get_args

import msgspec
from torch import Tensor, distributed

from weft.config import from_tree, load, said, told_idle
from weft.errors import ConfigError
from weft.events import Sink
from weft.launch.kept import Wish
from weft.launch.session import IN_PYTHON, Options
from weft.library.home import default_home
from weft.run.machine import PeerConfig, Use, without_effect
from weft.store.home import Home

C = TypeVar("C", bound=msgspec.Struct)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What this machine brings; it changes nothing that others would see."""

    home: Path | str | None = None  # folder of identities and checkpoints; None: where `weft` keeps them
    key: Path | str | None = None  # identity file; None: the first of the home that is free
    settings: PeerConfig | Path | str | None = None  # or a TOML file, as of `weft train --machine`; None: defaults
    sinks: Sequence[Sink] = ()  # told of every event

    def options(self) -> Options:
        """
        Raises:
            ConfigError: the settings, or their file; a field of another type.
        """
        for name in ("home", "key"):
            given_path = getattr(self, name)
            require_kind(given_path, (str, Path, NoneType), f"machine: {name}", "a path, or None")
            if str(given_path).startswith("~"):  # would be a folder of that name: only a shell, or Python, knows whose
                raise ConfigError(
                    f"machine: {name}: {given_path} is not a path yet; give Path({str(given_path)!r}).expanduser()."
                )
        given = PeerConfig() if self.settings is None else self.settings
        settings = config_of(given, PeerConfig, "machine: settings")
        home = Home(default_home() if self.home is None else Path(self.home).absolute())
        key = None if self.key is None else Path(self.key)
        return Options(home=home, key=key, settings=settings, sinks=tuple(self.sinks), names=IN_PYTHON)


def show_ticket(ticket: str) -> None:
    """Print how others join."""
    sys.stderr.write(f"weft: others join with ticket={ticket!r}\n")


def show_terms(terms: str) -> None:
    """Print what joining costs."""
    sys.stderr.write(f"weft: {terms}\n")


def config_of(given: Any, kind: type[C], what: str) -> C:
    """Return `given`, or the TOML file that it is a path of, once every field is one that `kind` allows.

    Args:
        what: it is, in errors: "config".

    Raises:
        ConfigError: it is something else, or a field is out of its range; says which.
    """
    if isinstance(given, str | Path):
        return load(Path(given), kind)
    if not isinstance(given, kind):
        raise ConfigError(
            f"{what} is {given!r:.80}, of type {type(given).__name__}. Allowed: a {kind.__name__}, or the path of a "
            "TOML file."
        )
    try:
        tree = msgspec.to_builtins(given)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{what}: a field is of no kind that {kind.__name__} has: {error}.") from None
    return from_tree(tree, kind, where=what)


def require_kind(given: Any, kinds: type | tuple[type, ...], what: str, allowed: str) -> None:
    """
    Raises:
        ConfigError: `given` is none of `kinds`.
    """
    if not isinstance(given, kinds):
        raise ConfigError(f"{what} is {given!r:.80}, of type {type(given).__name__}. Allowed: {allowed}.")


def require_wish(wish: Any) -> None:
    """
    Raises:
        ConfigError: none of those there are.
    """
    if wish not in get_args(Wish):
        allowed = " or ".join(f'"{each}"' for each in get_args(Wish))
        raise ConfigError(f"wish is {wish!r:.80}. Allowed: {allowed}.")


def notes_on(settings: PeerConfig, use: Use, ticket: str | None, wait_for: int, wish: Wish) -> Iterator[str]:
    """Yield, in a line each, which arguments and settings change nothing here."""
    idle = {"wait_for": wait_for != 1, "wish": wish != "ask"}
    if ticket is not None and any(idle.values()):
        names = ", ".join(name for name, is_given in idle.items() if is_given)
        yield f"these have no effect here, since a ticket joins its run: {names}"
    yield from told_idle("machine: settings", said(settings), without_effect(settings, use))


def require_members(wait_for: Any) -> None:
    """
    Raises:
        ConfigError: no number of peers that a run could wait for.
    """
    if not isinstance(wait_for, int) or isinstance(wait_for, bool) or wait_for < 1:
        raise ConfigError(
            f"wait_for is {wait_for!r:.80}. Allowed: a whole number of peers, this one included: 1 or more."
        )


def require_one_process() -> None:
    """Refuse a process that holds its model together with others: they would not be told what a round came to.

    Raises:
        ConfigError: torch.distributed has more than one rank.
    """
    if not distributed.is_available() or not distributed.is_initialized() or distributed.get_world_size() <= 1:
        return
    rank, num = distributed.get_rank(), distributed.get_world_size()
    raise ConfigError(
        f"this process is rank {rank} of {num} of torch.distributed, as with DistributedDataParallel or FSDP. "
        "weft.Sync would write what members agree on into this rank's model only, and the ranks would differ. Start "
        "one process per GPU without torch.distributed, each with a weft.Sync of its own: each is a member."
    )


def whole(num_samples: Any) -> int:
    """Return it as a number, from whatever counts samples.

    Raises:
        ConfigError: it counts nothing, or not whole ones.
    """
    try:
        number = int(num_samples)
        if number == num_samples:
            return number
    except (TypeError, ValueError, OverflowError, RuntimeError):
        pass
    what = f"num_samples is {num_samples!r:.80}, of type {type(num_samples).__name__}"
    raise ConfigError(f"step: {what}. Allowed: a whole number, or None.")


def shown(loss: float | Tensor | None) -> float:
    """Return a loss as a number that can be shown; NaN: there is none.

    Raises:
        ConfigError: it is no number, or several.
    """
    if loss is None:
        return math.nan
    try:
        number = float(loss.detach() if isinstance(loss, Tensor) else loss)
    except (TypeError, ValueError, RuntimeError):
        what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"{loss!r:.80}"
        raise ConfigError(f"step: loss is {what}. Allowed: one number, of any kind, or None.") from None
    return number if math.isfinite(number) else math.nan
