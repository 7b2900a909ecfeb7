"""What one machine gives to a run at most, and the decisions that follow from it: pure, each a few lines.

    CapsConfig                            bytes, memory, cores: the table [caps] of a machine file
    is_near(moved, cap)                   whether the day's bytes are nearly spent

It does not know who measures or who acts: `guard` does.
"""

from typing import Annotated

import msgspec

from weft.config import Config

# Rounds wait for an uplink of 1 Mbit/s and give up on less (see `parts`): a member with less would carry its work for
# ever, and a download as slow would never catch up.
LEAST_BPS = 1e6
LEAST_DAY_NBYTES = 10_000_000  # heartbeats of a few members alone
NEAR = 0.9  # of a day's bytes: time to say so

_Rate = Annotated[float, msgspec.Meta(ge=LEAST_BPS, description="bits per second, over all connections together")]


class CapsConfig(Config, frozen=True, kw_only=True):
    """The most that a run may take of this machine; what is left out has no cap."""

    upload_bps: _Rate | None = None
    download_bps: _Rate | None = None
    day_nbytes: (
        Annotated[
            int, msgspec.Meta(ge=LEAST_DAY_NBYTES, description="bytes sent and received from midnight to midnight")
        ]
        | None
    ) = None
    memory_nbytes: (
        Annotated[int, msgspec.Meta(ge=1, description="bytes of main memory that the process takes")] | None
    ) = None
    vram_nbytes: Annotated[int, msgspec.Meta(ge=1, description="bytes that torch takes on the GPU")] | None = None
    cores: Annotated[int, msgspec.Meta(ge=1, le=1024, description="CPUs that the process runs on")] | None = None


class Moved(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes moved on a day of this machine's calendar: what is kept between starts."""

    day: str  # 2026-11-21
    nbytes: int


def moved_on(day: str, before: Moved | None, nbytes: int = 0) -> Moved:
    """Return what was moved on `day` with `nbytes` more; a new day begins at 0."""
    same = before.nbytes if before is not None and before.day == day else 0
    return Moved(day=day, nbytes=same + nbytes)


def is_near(moved: Moved, cap_nbytes: int) -> bool:
    return moved.nbytes >= NEAR * cap_nbytes
