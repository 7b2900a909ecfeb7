"""A process whose standard streams are closed, full or let go of: it works, or ends with the code a shell expects."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import weft as package
from unit.cli.small import RUN, TEXT

pytestmark = pytest.mark.full  # each starts weft once or twice

WEFT = f"{sys.executable} -m weft"


def shell(command: str, home: Path, **more: str) -> subprocess.CompletedProcess[str]:
    """Run a line of bash in which `$W` is weft."""
    environment = {**os.environ, "W": WEFT, "WEFT_HOME": str(home), **more}
    return subprocess.run(
        ["bash", "-c", command], env=environment, timeout=120, capture_output=True, text=True, check=False, cwd=home
    )


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams_do_not_matter_to_who_needs_none(closed: str, tmp_path: Path) -> None:
    done = shell(f"$W keys new --help {closed}", tmp_path)
    assert done.returncode == 0
    assert not (tmp_path / "errors").exists()


def test_what_is_said_where_standard_error_is_closed_reaches_no_file(tmp_path: Path) -> None:
    done = shell("$W keys new mine.pem 2>&- >&-", tmp_path)
    assert done.returncode == 0
    assert (tmp_path / "mine.pem").read_text().endswith("-----END PRIVATE KEY-----\n")


def test_a_full_standard_output_is_said(tmp_path: Path) -> None:
    done = shell("$W --version > /dev/full", tmp_path)
    assert done.returncode == 1
    assert done.stderr == "weft: cannot write to standard output: No space left on device. The answer is cut short.\n"


def test_a_full_standard_error_changes_nothing(tmp_path: Path) -> None:
    assert shell("$W inspect - </dev/null 2>/dev/full", tmp_path).returncode == 15
    assert shell("$W --version 2>/dev/full", tmp_path).stdout == f"weft {package.__version__}\n"


def test_a_reader_that_leaves_ends_it_as_shells_do(tmp_path: Path) -> None:
    done = shell("$W --version | true; echo ${PIPESTATUS[0]}", tmp_path)
    assert done.stdout == "141\n"
    assert done.stderr == ""


@pytest.mark.parametrize("given", ["<&-", "</dev/null"])
def test_a_ticket_from_an_empty_standard_input_is_asked_for(given: str, tmp_path: Path) -> None:
    done = shell(f"$W inspect - {given}", tmp_path)
    assert done.returncode == 15
    assert done.stderr.startswith("weft: standard input is empty or closed")


@pytest.mark.parametrize(
    "as_written",
    [
        "cat",
        "{ printf '\\xef\\xbb\\xbf'; cat; }",
        "iconv -t utf-16",
        "iconv -t utf-16be | { printf '\\xfe\\xff'; cat; }",
    ],
)
def test_a_ticket_may_come_in_what_powershell_writes(as_written: str, tmp_path: Path) -> None:
    done = shell(f"printf 'weft1abc\\n' | {as_written} | $W inspect -", tmp_path)
    assert done.returncode == 15
    assert "cut short: it has 3 letters after weft" in done.stderr


def test_a_folder_that_is_gone_is_said(tmp_path: Path) -> None:
    done = shell("mkdir gone; cd gone; rmdir ../gone; $W keys list", tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("weft: the folder in which weft was started is gone")


@pytest.mark.full
def test_a_run_trains_and_exports_without_standard_streams(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(RUN)
    (tmp_path / "text.txt").write_text(TEXT)
    options = "--host 127.0.0.1 --port 0 --transports tls --device cpu --threads 1"
    done = shell(f"$W train run.toml {options} <&- >&- 2>&-; echo $?; $W export last out 2>&-", tmp_path)
    assert done.stdout.splitlines()[0] == "0"
    assert (tmp_path / "out" / "model.safetensors").exists()
