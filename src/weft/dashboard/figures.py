"""Figures as people read them: bytes, durations, counts, speeds. Pure text, no units left to guess."""

from weft.events import Working

_DECIMAL = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def nbytes(count: float) -> str:
    """Return a number of bytes in decimal units: 3.2 MB."""
    for size, prefix in _DECIMAL:
        if count >= size:
            return f"{count / size:.3g} {prefix}B" if count < 100 * size else f"{count / size:.0f} {prefix}B"
    return f"{count:.0f} B"


def rate(bps: float) -> str:
    """Return bits per second: 20 Mbit/s."""
    for size, prefix in _DECIMAL:
        if bps >= size:
            return f"{bps / size:.3g} {prefix}bit/s"
    return f"{bps:.0f} bit/s"


def amount(count: float) -> str:
    """Return a count in at most four characters and a letter: 1.2M."""
    for size, prefix in _DECIMAL:
        if count >= size:
            return f"{count / size:.3g}{prefix}" if count < 100 * size else f"{count / size:.0f}{prefix}"
    return f"{count:.0f}"


def duration(seconds: float) -> str:
    """Return minutes and seconds, or hours and minutes: 1:40, 2 h 05."""
    whole = round(seconds)
    if whole >= 48 * 3600:
        return f"{whole / 86400:.1f} days"
    if whole >= 3600:
        return f"{whole // 3600} h {whole % 3600 // 60:02d}"
    return f"{whole // 60}:{whole % 60:02d}"


def work(told: Working) -> str:
    """Return how far something has come: fetching the state: 45 % of 1.2 GB, 4.1 MB/s, 3:20 left."""

    def said(count: float) -> str:
        return nbytes(count) if told.unit == "B" else f"{amount(count)} {told.unit}"

    parts = (
        f"{100 * told.done / told.total:.0f} % of {said(told.total)}" if told.total else said(told.done),
        f"{said(told.rate)}/s" if told.rate > 0 else "",
        "" if told.left_s is None else f"{duration(told.left_s)} left",
    )
    return f"{told.what}: {', '.join(filter(None, parts))}"


def work_in_short(told: Working) -> str:
    """Return the same for a column: fetching the state 45 %."""
    return f"{told.what} {100 * told.done / told.total:.0f} %" if told.total else told.what


def ratio(more: float, less: float) -> str:
    """Return how many times `less` goes into `more`; a dash where that says nothing."""
    return f"{more / less:.3g}x" if more > 0 and less > 0 else "-"
