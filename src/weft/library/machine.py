"""What a machine brings to a run that Python code founds or joins: its home, identity, settings."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType

from weft.errors import ConfigError
from weft.events import Sink
from weft.launch.session import Options
from weft.library.given import config_of, require_kind
from weft.library.home import default_home
from weft.run.machine import PeerConfig
from weft.store.home import Home


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
                    f"machine: {name}: {given_path} is no path yet; give Path({str(given_path)!r}).expanduser()."
                )
        given = PeerConfig() if self.settings is None else self.settings
        settings = config_of(given, PeerConfig, "machine: settings")
        home = Home(default_home() if self.home is None else Path(self.home).absolute())
        key = None if self.key is None else Path(self.key)
        return Options(home=home, key=key, settings=settings, sinks=tuple(self.sinks))


def show_ticket(ticket: str) -> None:
    """Print how others join."""
    sys.stderr.write(f"weft: others join with ticket={ticket!r}\n")
