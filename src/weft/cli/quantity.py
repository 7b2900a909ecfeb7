"""Quantities as people write them, in the units of the settings: 20mbit, 50GB.

Letters may be of either case. Rates are bits per second, because that is how lines are sold, and powers of ten; bytes
too, and KiB, MiB, GiB and TiB are powers of two. What may mean bytes per second (20MB/s, 20MBps) is no rate.
"""

import re
from collections.abc import Mapping

from weft.errors import ConfigError

_QUANTITY = re.compile(r"(\d+(?:\.\d+)?|\.\d+)(?:e\+?(\d{1,2}))?\s*([a-z/]*)", re.IGNORECASE)
_BITS = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_SPELLINGS = ("bit", "bit/s", "bitps", "bps")
_RATES = {unit.replace("bit", each): size for unit, size in _BITS.items() for each in _SPELLINGS}
_LEAST_BARE_BPS = 1e5  # no line is slower, and as megabits nobody has as many: 20 is meant as 20mbit, perhaps
_BYTES = {"b": 1.0, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12}
_BYTES |= {"kib": 2.0**10, "mib": 2.0**20, "gib": 2.0**30, "tib": 2.0**40}


def rate_bps(option: str, text: str | None) -> float | None:
    """Return a rate in bits per second: 20mbit, 1.5 gbit/s, 800kbps, or a plain number that is no small one.

    Raises:
        ConfigError: it is none; names `option`.
    """
    if text is None:
        return None
    match = _match(text, _RATES)
    found = 0.0 if match is None or match[3].endswith("Bps") else _value(match, _RATES)
    if match is None or found <= 0:
        raise ConfigError(
            f"{option} {text[:80]}: Allowed: a rate above 0, such as 20mbit; units are {', '.join(_BITS)}."
        )
    if not match[3] and found < _LEAST_BARE_BPS:
        raise ConfigError(
            f"{option} {text[:80]}: a number without a unit is bits per second, which would be next to nothing. Write "
            f"{found:g}mbit if you mean megabits; units are {', '.join(_BITS)}."
        )
    return found


def nbytes(option: str, text: str | None) -> int | None:
    """Return a number of bytes: 50GB, 512 MiB, or a plain number.

    Raises:
        ConfigError: it is none; names `option`.
    """
    if text is None:
        return None
    match = _match(text, _BYTES)
    if match is None:
        raise ConfigError(
            f"{option} {text[:80]}: Allowed: a number of bytes, such as 50GB; units are {', '.join(_BYTES)}."
        )
    return int(_value(match, _BYTES))


def _match(text: str, units: Mapping[str, float]) -> re.Match[str] | None:
    match = _QUANTITY.fullmatch(text.strip())
    return None if match is None or (match[3] and match[3].lower() not in units) else match


def _value(match: re.Match[str], units: Mapping[str, float]) -> float:
    return float(match[1]) * 10.0 ** int(match[2] or 0) * units.get(match[3].lower(), 1.0)
