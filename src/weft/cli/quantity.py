"""Quantities as people write them, in the units of the settings: 20mbit, 50GB.

Letters may be of either case. Rates are bits per second, because that is how lines are sold, and powers of ten; bytes
too, and KiB, MiB, GiB and TiB are powers of two.
"""

import re

from weft.errors import ConfigError

_QUANTITY = re.compile(r"(\d+(?:\.\d+)?|\.\d+)(?:e\+?(\d{1,2}))?\s*([a-z/]*)", re.IGNORECASE)
_BITS = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_BYTES = {"b": 1.0, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12}
_BYTES |= {"kib": 2.0**10, "mib": 2.0**20, "gib": 2.0**30, "tib": 2.0**40}


def rate_bps(option: str, text: str | None) -> float | None:
    """Return a rate in bits per second: 20mbit, 1.5 gbit/s, or a plain number.

    Raises:
        ConfigError: it is none; names `option`.
    """
    return _read(option, text, _BITS, "a rate, such as 20mbit")


def nbytes(option: str, text: str | None) -> int | None:
    """Return a number of bytes: 50GB, 512 MiB, or a plain number.

    Raises:
        ConfigError: it is none; names `option`.
    """
    found = _read(option, text, _BYTES, "a number of bytes, such as 50GB")
    return None if found is None else int(found)


def _read(option: str, text: str | None, units: dict[str, float], allowed: str) -> float | None:
    if text is None:
        return None
    match = _QUANTITY.fullmatch(text.strip())
    unit = match[3].lower().removesuffix("/s") if match else ""
    if match is None or (unit and unit not in units):
        raise ConfigError(f"{option} {text[:80]}: Allowed: {allowed}; units are {', '.join(units)}.")
    return float(match[1]) * 10.0 ** int(match[2] or 0) * units.get(unit, 1.0)
