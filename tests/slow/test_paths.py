"""The ways that two peers find to each other, and what is said of them, in networks of their own."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from weft.errors import Unreachable

HOUSE = Path(__file__).parents[2]
CANNOT = 3  # the exit code of the benchmark where no networks can be made

# What `weft doctor -` says of the ways, and of where members see this machine.
WAY = ("ok", "there is a way into the run")
NO_UDP = ("note", "UDP does not get through, but TCP does")
NO_TCP = ("note", "TCP does not get through, but iroh (UDP) does")
ITS_OWN = ("ok", "which is its own: no router translates it")
TRANSLATED = ("note", "which is not its own: a router translates its addresses (NAT)")

pytestmark = pytest.mark.slow


def found_in(network: str) -> dict[str, Any]:
    """Return what the benchmark finds in one network."""
    pytest.importorskip("iroh", reason="iroh has no wheel for this platform")
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.paths", "--only", network],
        cwd=HOUSE,
        env={**os.environ, "PYTHONPATH": f"{HOUSE / 'src'}{os.pathsep}{HOUSE}"},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    if done.returncode == CANNOT:
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.stderr
    (found,) = [each for each in map(json.loads, done.stdout.splitlines()) if each["network"] == network]
    return dict(found)


def says(found: dict[str, Any], topic: str, expected: tuple[str, str]) -> bool:
    level, text = expected
    return found["doctor"][topic]["level"] == level and text in found["doctor"][topic]["text"]


@pytest.mark.parametrize(
    ("network", "way", "ways", "place"),
    [
        ("open", "tls", WAY, ITS_OWN),
        ("UDP blocked at a", "tls", NO_UDP, ITS_OWN),
        ("TCP swallowed at a", "iroh", NO_TCP, ITS_OWN),
        ("TCP swallowed between a and b", "iroh", WAY, ITS_OWN),
        ("each on a cable to the third alone", "via the third", WAY, ITS_OWN),
        ("a behind a cone NAT, b open", "tls", WAY, TRANSLATED),
        # No hole is punched where no relay server is named.
        ("both behind cone NATs", "via the third", WAY, TRANSLATED),
        ("both behind symmetric NATs", "via the third", WAY, TRANSLATED),
        ("both behind two cone NATs", "via the third", WAY, TRANSLATED),
        ("both behind cone NATs, UDP blocked", "via the third", NO_UDP, TRANSLATED),
        ("a reaches nothing but an HTTP proxy, b open", "tls", NO_UDP, TRANSLATED),
    ],
)
def test_peers_find_the_way_that_is_left_and_the_doctor_says_it(
    network: str, way: str, ways: tuple[str, str], place: tuple[str, str]
) -> None:
    found = found_in(network)
    assert found["way"] == way
    assert found["megabytes_per_s"] > 0.5  # of 12.5 that the lines have and 2.5 that a relay gives
    assert found["doctor"]["exit"] == 0, found["doctor"]
    assert says(found, "ways", ways), found["doctor"]
    assert says(found, "place", place), found["doctor"]


@pytest.mark.parametrize(
    ("network", "reason", "fix"),
    [
        ("nobody open: a and the third behind cone NATs", "its router lets nobody in", "make one member reachable"),
        ("a reaches nothing but an HTTP proxy, which it is not told of", "drops what is sent", "proxy in [tls]"),
    ],
)
def test_where_there_is_no_way_join_and_the_doctor_say_so_in_the_same_words(
    network: str, reason: str, fix: str
) -> None:
    found = found_in(network)
    ways, said = found["doctor"]["ways"], found["join"]["said"]
    assert found["join"]["exit"] == found["doctor"]["exit"] == Unreachable.exit_code
    assert ways["level"] == "block"
    assert reason in ways["text"]
    assert fix in ways["fix"]
    assert re.match(r"weft: nobody answered\. Tried [0-9a-f]{8}: ", said)  # a ticket has no room for names
    for words in ("TLS over TCP to ", "iroh over UDP to ", "no answer within", ways["text"][1:], ways["fix"][1:]):
        assert words in said
    assert "://" not in said  # no raw address
    assert "fresh ticket" not in said or "if all have left" in said.lower()
