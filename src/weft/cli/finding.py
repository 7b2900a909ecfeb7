"""One thing that `weft doctor` found.

block   weft cannot run here until it is fixed
note    weft runs, but slower, or reachable by fewer
ok      as it should be
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Finding:
    topic: str
    level: Literal["ok", "note", "block"]
    text: str
    fix: str = ""  # what to type or do
