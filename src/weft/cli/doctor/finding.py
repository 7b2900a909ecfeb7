"""One thing that `weft doctor` found.

block   weft cannot run here until it is fixed
note    weft runs, but slower, or reachable by fewer
ok      as it should be
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Fact = str | float | bool | None | list[str]


@dataclass(frozen=True)
class Finding:
    topic: str
    level: Literal["ok", "note", "block"]
    text: str
    fix: str = ""  # what to type or do
    facts: Mapping[str, Fact] = field(default_factory=dict)  # the same for programs: docs/doctor.md lists the names
