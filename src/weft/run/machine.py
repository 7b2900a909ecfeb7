"""What one machine gives to a run (`PeerConfig`): device, threads, transports, caps, and what follows from these.

It stays on its machine and is read without torch, which an anchor does not have.

    CapsConfig                            bytes, memory, cores, hours: the table [caps] of a machine file
    is_open(hours, minute)                whether this minute of the day is within the hours
    is_near(moved, cap)                   whether the day's bytes are nearly spent
"""

import re
from collections.abc import Sequence
from datetime import datetime
from typing import Annotated, Literal

import msgspec

from weft.config import Config
from weft.errors import ConfigError
from weft.net.blobs.relay import RelayConfig
from weft.net.transport.iroh import IrohConfig
from weft.net.transport.tls import TlsConfig

# Rounds wait for an uplink of 1 Mbit/s and give up on less (see `parts`): a member with less would carry its work for
# ever, and a download as slow would never catch up.
LEAST_BPS = 1e6
LEAST_DAY_NBYTES = 10_000_000  # heartbeats of a few members alone
NEAR = 0.9  # of a day's bytes: time to say so
DAY_MIN = 24 * 60

_HOURS = re.compile(r"([01]?\d|2[0-3]):([0-5]\d)-([01]?\d|2[0-4]):([0-5]\d)")

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
    hours: Annotated[
        tuple[str, ...],
        msgspec.Meta(max_length=24, description='local times at which it trains, such as "22:00-07:00"'),
    ] = ()

    def __post_init__(self) -> None:
        for text in self.hours:
            span(text)


def span(text: str) -> tuple[int, int]:
    """Return the minutes of the day at which a range begins and ends: "22:00-07:00" passes midnight.

    Raises:
        ConfigError: it is no such range.
    """
    match = _HOURS.fullmatch(text.strip())
    begin, end = (int(match[1]) * 60 + int(match[2]), int(match[3]) * 60 + int(match[4])) if match else (0, 0)
    if match is None or begin == end or end > DAY_MIN:
        raise ConfigError(
            f"hours: {text[:40]!r} says no times of day, from and to. Write 22:00-07:00 to train at night only."
        )
    return begin, end % DAY_MIN


def is_open(hours: Sequence[str], minute: int) -> bool:
    """Return whether `minute` of the day, from 0, lies in one of the ranges; where there is none, always."""
    spans = [span(text) for text in hours]
    within = (begin <= minute < end if begin < end else minute >= begin or minute < end for begin, end in spans)
    return not spans or any(within)


def opens_at(hours: Sequence[str], minute: int) -> int:
    """Return the minute of the day at which the next range begins."""
    return min((span(text)[0] for text in hours), key=lambda begin: (begin - minute) % DAY_MIN)


def clock_face(minute: int) -> str:
    """Return a minute of the day as people read it: 07:05."""
    return f"{minute // 60:02d}:{minute % 60:02d}"


def minute_of(local: datetime) -> int:
    return local.hour * 60 + local.minute


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


class PeerConfig(Config, frozen=True, kw_only=True):
    """What this machine gives to a run. It stays here."""

    name: Annotated[str, msgspec.Meta(max_length=64, pattern=r"^[\w .@()+-]*\Z")] = ""
    device: Annotated[str, msgspec.Meta(pattern=r"^(auto|cpu|mps|cuda(:\d+)?)\Z", description="where torch runs")] = (
        "auto"
    )
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Of matrix products in the inner loop; auto: bf16 on a GPU that has it, else fp32."""
    base_numbers: Literal["auto", "fp32", "bf16", "int8", "nf4"] = "auto"
    """Of matrices that an adapter goes beside, in this machine's memory; auto: fp32, or on a GPU bf16 where they came
    so. int8 and nf4 take an eighth and a quarter of fp32, and change what is computed."""
    micro_batch: Annotated[int, msgspec.Meta(ge=0, description="samples at a time; 0: as many as fit")] = 0
    threads: Annotated[
        int, msgspec.Meta(ge=0, le=1024, description="threads of torch on the CPU; 0: its own choice")
    ] = 0
    is_compiled: bool = False
    has_recompute: bool = False
    max_parameters: Annotated[int, msgspec.Meta(ge=1, description="larger models are refused")] = 20_000_000_000
    transports: Annotated[tuple[Literal["tls", "iroh", "via"], ...], msgspec.Meta(min_length=1)] = (
        "tls",
        "iroh",
        "via",
    )
    tls: TlsConfig = TlsConfig()
    iroh: IrohConfig = IrohConfig()
    relay: RelayConfig = RelayConfig()
    has_lan: bool = False
    """Look for members in the local network, and be found there by those that look, too (`weft.net.lan`)."""
    checkpoint_every_s: Annotated[float, msgspec.Meta(ge=0, description="seconds; 0: at the end only")] = 60.0
    is_blocking: bool = False
    """Where its line is slower than the run it joins, ask members to wait until it is in."""
    max_blocked_s: Annotated[float, msgspec.Meta(ge=0, le=86_400, description="seconds; 0: it waits for nobody")] = (
        600.0
    )
    """As long this machine waits for one newcomer that asks for it, at most."""
    serve_nbytes: Annotated[
        int, msgspec.Meta(ge=0, description="bytes for conversations, of each stage that this peer holds; 0: none")
    ] = 0
    """Draw text for whoever asks the run's members, beside training."""
    serve_share: Annotated[
        float, msgspec.Meta(gt=0, le=1, description="of the device while this peer trains; 1: training is not regarded")
    ] = 0.3
    """What conversations may take of the device while this peer trains; all of it while training rests."""
    is_drawing_only: bool = False
    """Of a run that learns from rewards: draw answers for members that train, and train nothing."""
    check: Annotated[int, msgspec.Meta(ge=0, le=64, description="leases; 0: none")] = 3
    """Of a run whose members audit each other: make so many leases of others again before the first contribution."""
    keep: Literal["newest", "all"] = "newest"
    """Of an anchor: the newest state; or, of an audited run, all that it takes to do its training steps again."""
    code: Annotated[
        tuple[str, ...], msgspec.Meta(max_length=16, description="files of Python that call weft.extend")
    ] = ()
    caps: CapsConfig = CapsConfig()

    def __post_init__(self) -> None:
        if set(self.transports) == {"via"}:
            raise ConfigError("transports names only via, which needs links of tls or iroh: add one of them.")

    @property
    def num_threads(self) -> int:
        """Threads of torch on the CPU, as many as the cores it may use at most; 0: its own choice."""
        return min(self.threads or self.caps.cores, self.caps.cores) if self.caps.cores else self.threads


Use = Literal["training", "whole", "site", "stage", "loop", "anchor", "visit"]
"""What a machine's settings are for: a peer of a run that is not known yet; of a whole model, in one process or in
several; of a stage; or that trains in a loop of its person's own; an anchor; or a process that looks, fetches or acts,
and ends."""

_OF_DEVICE = (
    "device",
    "precision",
    "base_numbers",
    "micro_batch",
    "threads",
    "is_compiled",
    "has_recompute",
    "caps.vram_nbytes",
)
_OF_SERVING = ("serve_nbytes", "serve_share")
_OF_TRAINING = ("check", "caps.hours", "is_blocking", "max_blocked_s", "checkpoint_every_s", "is_drawing_only", "code")
_OF_STAYING = (*_OF_TRAINING, *_OF_SERVING)
_OF_LIMITS = ("caps.memory_nbytes", "caps.cores")
_OF_WAYS = ("transports", "tls", "iroh")
_IDLE: dict[Use, tuple[tuple[str, ...], str]] = {
    "training": ((), ""),
    "whole": ((), ""),
    "site": (_OF_SERVING, "several processes hold the model, and none has all of it; a checkpoint has (weft serve)"),
    "stage": (
        ("micro_batch", "is_compiled"),
        "the run has stages, and its run file sets the micro-batch for all peers (pipeline)",
    ),
    "loop": (
        (*_OF_DEVICE, "caps.cores", "is_drawing_only", "code", *_OF_SERVING),
        "your own loop decides where and how it trains",
    ),
    "anchor": ((*_OF_DEVICE, *_OF_STAYING), "this peer does not train"),
    "visit": ((*_OF_DEVICE, *_OF_STAYING, *_OF_LIMITS), "this process takes no part in the run"),
}


def without_effect(settings: PeerConfig, use: Use = "training") -> dict[str, str]:
    """Return the fields and sections that change nothing beside the others, dotted, each with the reason."""
    found = {name: f"{name} is not among the transports" for name in ("tls", "iroh") if name not in settings.transports}
    if not settings.tls.proxy:
        found |= dict.fromkeys(("tls.proxy_user", "tls.proxy_password"), "no proxy is named")
    if not settings.serve_nbytes:
        found["serve_share"] = "serve_nbytes is 0: this peer draws no text"
    if settings.device == "cpu":
        found["caps.vram_nbytes"] = "device is cpu, which has no memory of its own"
    if use not in ("training", "anchor"):
        found["keep"] = "this peer is no anchor"
    if use in ("site", "stage", "loop"):
        found["check"] = "members of such a run do not audit each other"
    if not settings.relay.is_on:
        others = (f"relay.{name}" for name in RelayConfig.__struct_fields__ if name != "is_on")
        found |= dict.fromkeys(others, "relay.is_on is false")
    fields, reason = _IDLE[use]
    return dict.fromkeys(fields, reason) | {name: why for name, why in found.items() if name not in fields}
