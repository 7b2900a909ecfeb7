"""Names of the package that are looked up where they are first used: `import weft` loads neither torch nor a network.

    weft.Sync, weft.SyncConfig, weft.Machine, weft.extend        docs/library.md
    weft.train, weft.Chart, weft.Run                             docs/notebook.md

Each stands here with the module that it comes from.
"""

from importlib import import_module
from typing import Any

_PLACES = {
    "extend": ("weft.library.extension", "extend"),
    "Chart": ("weft.dashboard.chart", "Chart"),
    "Machine": ("weft.library.given", "Machine"),
    "Run": ("weft.dashboard.run", "Run"),
    "Sync": ("weft.library.sync", "Sync"),
    "SyncConfig": ("weft.run.config", "SyncConfig"),
    "train": ("weft.library.train", "train"),
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'weft' has no attribute {name!r}")
    module, attribute = _PLACES[name]
    return getattr(import_module(module), attribute)
