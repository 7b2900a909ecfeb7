"""Machines and lines that are known by name: what `profiles.toml` says of them."""

import tomllib
from collections.abc import Sequence
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from typing import Annotated, Literal, TypeVar

from msgspec import Meta

from weft.config import Config, from_tree
from weft.errors import ConfigError

_Positive = Annotated[float, Meta(gt=0)]
_Name = Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9-]*\Z")]


class Device(Config, frozen=True, kw_only=True):
    """What trains. The units are in the names, and in the head of the file."""

    name: _Name
    kind: Literal["gpu", "cpu"]
    capability: tuple[int, int] | None = None  # of NVIDIA's
    precision: Literal["fp32", "bf16"]  # what `peer.device.choose` takes there
    tflops: _Positive
    memory_gb: _Positive
    bandwidth_gbs: _Positive
    watts: _Positive
    price_per_hour: _Positive | None = None
    price_source: str = ""
    source: str
    read: str = ""
    remembered: tuple[str, ...] = ()


class NamedLine(Config, frozen=True, kw_only=True):
    """A line to the middle of the network."""

    name: _Name
    up_mbit: _Positive | None = None  # None: any
    down_mbit: _Positive | None = None
    delay_ms: Annotated[float, Meta(ge=0)]
    is_one_machine: bool = False
    source: str
    read: str = ""


class Defaults(Config, frozen=True, kw_only=True):
    """What is assumed where nobody says otherwise, each with where it comes from."""

    gpu_efficiency: Annotated[float, Meta(gt=0, le=1)]
    gpu_efficiency_source: str
    cpu_efficiency: Annotated[float, Meta(gt=0, le=1)]
    cpu_efficiency_source: str
    price_per_kwh: _Positive
    price_per_kwh_source: str
    host_watts: _Positive
    host_watts_source: str
    idle_share: Annotated[float, Meta(ge=0, le=1)]
    idle_share_source: str
    cluster_device: str
    cluster_size: Annotated[int, Meta(ge=1)]
    cluster_watts: _Positive
    cluster_watts_source: str
    cluster_pue: Annotated[float, Meta(ge=1)]
    cluster_pue_source: str
    cluster_fabric_gbit: _Positive
    cluster_fabric_source: str


class ReplicaRow(Config, frozen=True, kw_only=True):
    """Losses of one model size: data-parallel, and DiLoCo by number of replicas."""

    parameters: int
    plain: float
    diloco: tuple[float, ...]


class Replicas(Config, frozen=True, kw_only=True):
    source: str
    counts: tuple[int, ...]
    growth: float
    row: tuple[ReplicaRow, ...]


class Steps(Config, frozen=True, kw_only=True):
    source: str
    two: float
    more: float
    measured_every: int
    last_every: int


class Profiles(Config, frozen=True, kw_only=True):
    defaults: Defaults
    device: tuple[Device, ...]
    line: tuple[NamedLine, ...]
    replicas: Replicas
    steps: Steps


Named = TypeVar("Named", Device, NamedLine)


@cache
def known() -> Profiles:
    """Return what the package's file says."""
    text = (files("weft") / "plan" / "profiles.toml").read_text(encoding="utf-8")
    found: Profiles = from_tree(tomllib.loads(text), Profiles, where="profiles.toml")
    return found


def device(name: str) -> Device:
    """Return the device called `name`.

    Raises:
        ConfigError: there is none; names those there are.
    """
    hint = "or `here` for this machine, or give --tokens-per-s, which needs no device"
    return _called(name, known().device, "--device", hint)


def line(name: str) -> NamedLine:
    """Return the line called `name`.

    Raises:
        ConfigError: there is none; names those there are.
    """
    return _called(name, known().line, "--line", "or give --up, --down and --delay")


def _called(name: str, there: Sequence[Named], option: str, hint: str) -> Named:
    found = {each.name: each for each in there}
    if name not in found:
        raise ConfigError(
            f"{option} {name[:60]}: not known{_meant(name, list(found))} Known: {', '.join(found)}; {hint}."
        )
    return found[name]


def _meant(name: str, names: Sequence[str]) -> str:
    close = get_close_matches(name.lower().replace("_", "-").replace(" ", ""), names, 1, 0.5)
    return f"; is {close[0]} meant?" if close else "."
