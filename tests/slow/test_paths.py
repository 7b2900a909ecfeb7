"""The ways that two peers find to each other, in networks of their own: what `benchmarks/paths.py` measures."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HOUSE = Path(__file__).parents[2]
CANNOT = 3  # the exit code of the benchmark where no networks can be made

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("network", "way"),
    [
        ("open", "tls"),
        ("UDP blocked at a", "tls"),
        ("TCP swallowed between a and b", "iroh"),
        ("each on a cable to the third alone", "via the third"),
        ("both behind cone NATs", "via the third"),  # no hole is punched where no relay server is named
        ("both behind symmetric NATs", "via the third"),
        ("both behind cone NATs, UDP blocked", "via the third"),
        ("a reaches nothing but an HTTP proxy, b open", "tls"),
    ],
)
def test_peers_find_the_way_that_is_left(network: str, way: str) -> None:
    pytest.importorskip("iroh", reason="iroh has no wheel for this platform")
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.paths", "--only", network],
        cwd=HOUSE,
        env={**os.environ, "PYTHONPATH": f"{HOUSE / 'src'}{os.pathsep}{HOUSE}"},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    if done.returncode == CANNOT:
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.stderr
    found = [row for row in map(json.loads, done.stdout.splitlines()) if row[0] == network]
    assert [row[1] for row in found] == [way], done.stderr
    assert found[0][4] > 0.5  # megabytes per second, of 12.5 that the lines have and 2.5 that a relay gives
