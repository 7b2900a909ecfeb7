"""`weft anchor` needs no torch: neither what it imports nor what it asks for."""

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from charters import charter
from unit.cli.small import Weft
from weft.cli.run.anchor import known

PROGRAM = """
import sys
sys.modules["torch"] = None  # as if it were not installed
import weft.launch.anchor, weft.launch.session, weft.cli.run.anchor, weft.cli.screen.screen, weft.cli.process
from weft.cli import settings
settings.machine_settings(None, {"caps.upload_bps": 2e6})
loaded = [name for name in sys.modules if name.split(".")[0] in ("torch", "jaxtyping")]
print(sorted(loaded))
"""


def test_an_anchor_loads_no_torch() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "['torch']"  # that it is not there


@pytest.mark.parametrize("until", ["20rounds", "5Mtokens"])
def test_an_anchor_contributes_nothing_after_which_it_could_leave(weft: Weft, until: str) -> None:
    from unit.cli.test_bad_input import a_ticket, refused

    assert "contributes no rounds" in refused(weft, 2, "--until", "anchor", a_ticket(), "--until", until)


def test_an_anchor_is_offered_no_share_to_leave_after(weft: Weft) -> None:
    from unit.cli.test_bad_input import a_ticket, refused

    told = refused(weft, 2, "--until", "anchor", a_ticket(), "--until", "soon")
    assert "a duration (2h, 90min)" in told
    assert "20rounds" not in told + weft("anchor", "--help").out
    assert "20rounds" in weft("join", "--help").out


def test_an_anchor_shows_the_run_as_it_was_amended() -> None:
    outline: Any = SimpleNamespace(name="notes", total_tokens=320, tokens_per_step=32)
    assert known(outline, None).total_tokens == 320
    now = known(outline, charter(tokens=640))
    assert (now.name, now.total_tokens, now.tokens_per_step) == ("notes", 640, 8)
