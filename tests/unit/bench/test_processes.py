"""Whoever waits for a benchmark's process hears that it has ended."""

import sys

import pytest
from benchmarks.lossy import Process


def test_who_waits_for_a_process_that_has_ended_is_told_so() -> None:
    with Process([sys.executable, "-c", 'print(\'{"event": "up"}\')']) as process:
        assert process.hear("up") == {"event": "up"}
        with pytest.raises(RuntimeError, match="has ended"):
            process.hear("done")
