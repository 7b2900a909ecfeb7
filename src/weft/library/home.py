"""Where a process works that was told no home: the folder for a program's data on this platform.

The only file that asks the platform for a default.
"""

from pathlib import Path

import platformdirs


def default_home() -> Path:
    """Return the folder; it need not exist."""
    return Path(platformdirs.user_data_dir("weft", appauthor=False))
