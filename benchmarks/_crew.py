"""Processes that do something together on a word, and what it costs them.

    with Crew("gloo", commands) as crew:
        answers = crew.ask([{"do": "round"}] * 4)     # each gets one line of JSON and answers with one
        crew.cpu_s()

A crew's CPU time is that of its processes and all theirs (daemons included).
"""

import json
import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import TracebackType
from typing import Any, TextIO

import psutil

ANSWER_S = 120.0


class Crew:
    """Child processes that answer lines of JSON on their standard streams.

    Args:
        commands: one command line per process.
        log: takes their standard error.
    """

    def __init__(self, commands: Sequence[Sequence[str]], env: Mapping[str, str], log: TextIO) -> None:
        self._children = [
            subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, bufsize=1, env=dict(env)
            )
            for command in commands
        ]
        self._pool = ThreadPoolExecutor(len(commands))

    def ask(self, questions: Sequence[Mapping[str, Any]], *, only: Sequence[int] | None = None) -> list[dict[str, Any]]:
        """Send each child its line, all at once, and return their answers.

        Args:
            only: the children asked, by number; None: all.

        Raises:
            RuntimeError: a child ended, or did not answer in time.
        """
        children = self._children if only is None else [self._children[number] for number in only]
        for child, question in zip(children, questions, strict=True):
            assert child.stdin is not None
            child.stdin.write(json.dumps(question) + "\n")
        answers = [self._pool.submit(self._answer, child) for child in children]
        try:
            return [answer.result(ANSWER_S) for answer in answers]
        except TimeoutError:
            raise RuntimeError(f"a child did not answer {questions[0]} within {ANSWER_S:g} s") from None

    def cpu_s(self) -> float:
        """Return the CPU-seconds that all processes of the crew have used."""
        return sum(self.each_cpu_s())

    def each_cpu_s(self) -> list[float]:
        """Return the CPU-seconds of each child, with those of its children."""
        return [used_s(child.pid) for child in self._children]

    def __enter__(self) -> "Crew":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        family = [each for child in self._children for each in _family(child.pid)]
        for child in self._children:
            with suppress(OSError):
                child.stdin.close()  # type: ignore[union-attr]
        psutil.wait_procs(family, timeout=5.0)
        for process in family:  # daemons outlive who started them
            with suppress(psutil.NoSuchProcess):
                process.kill()
        for child in self._children:
            child.wait()
            child.stdout.close()  # type: ignore[union-attr]
        self._pool.shutdown()

    @staticmethod
    def _answer(child: "subprocess.Popen[str]") -> dict[str, Any]:
        assert child.stdout is not None
        while line := child.stdout.readline():
            if line.startswith("{"):  # libraries print too
                answer: dict[str, Any] = json.loads(line)
                return answer
        raise RuntimeError(f"a child ended: {child.args!r}")


def used_s(pid: int) -> float:
    """Return the CPU-seconds of a process, with those of its children; none of one that is gone."""
    return sum(map(_used_s, _family(pid)))


def _family(pid: int) -> list[psutil.Process]:
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _used_s(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return float(times.user + times.system)
