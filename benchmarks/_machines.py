"""Machines of `benchmarks.rig.namespaces`, each with so much of a core: what one leaves unused makes no other faster.

    with Machines("weft-slow", 4, mbit=20, cores=0.4) as machines:
        machines.start(2, ["python", ...], ...)

A control group bounds the processor time of all threads of a machine together, in slices of 5 ms. It needs root, and
cgroups of either version with the controller `cpu`.
"""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from benchmarks.rig.namespaces import Lines

PERIOD_US = 5_000
CGROUPS = Path("/sys/fs/cgroup")


class Machines(Lines):
    """So many machines with so much of a core each."""

    def __init__(self, name: str, num: int, *, mbit: float, cores: float) -> None:
        super().__init__(name, num, mbit=mbit)
        is_second = (CGROUPS / "cgroup.controllers").exists()
        self._groups = [(CGROUPS if is_second else CGROUPS / "cpu") / f"{name}-{number}" for number in range(num)]
        quota_us = round(PERIOD_US * cores)
        self._limits = {"cpu.max": f"{quota_us} {PERIOD_US}"}
        if not is_second:
            self._limits = {"cpu.cfs_period_us": str(PERIOD_US), "cpu.cfs_quota_us": str(quota_us)}

    def __enter__(self) -> "Machines":
        self._drop()
        for group in self._groups:
            group.mkdir()
            for name, limit in self._limits.items():
                (group / name).write_text(limit)
        super().__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        self._drop()

    def command(self, number: int, words: Sequence[str]) -> list[str]:
        enter = ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(self._groups[number] / "cgroup.procs")]
        return [*enter, *super().command(number, words)]

    def _drop(self) -> None:
        for group in self._groups:
            with suppress(OSError):  # it is not there, or a process of it goes on
                group.rmdir()
