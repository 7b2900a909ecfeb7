"""What `weft doctor` finds, and that one broken check does not end the examination."""

import json
import os
import platform
import socket
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from unit.cli.small import Weft
from weft.cli.doctor import findings
from weft.cli.doctor.findings import Finding
from weft.cli.doctor.fit import models
from weft.clock import SystemClock
from weft.net.transport.tls import TlsConfig
from weft.run.machine import PeerConfig


@pytest.fixture(autouse=True)
def no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time nothing: half a second for a step, so that only the smallest model is tried."""
    monkeypatch.setattr("weft.cli.doctor.fit.usual_s", lambda _step, **_how: 0.5)


def only(found: "list[Finding]") -> Finding:
    (finding,) = found
    return finding


def test_this_machine_can_run_weft(weft: Weft) -> None:
    answer = weft("doctor")
    assert answer.code == 0, answer.out
    for topic in ("platform", "python", "memory", "disk", "clock", "network", "iroh", "torch", "models", "pace"):
        assert topic in answer.out


def test_a_finding_that_blocks_comes_with_its_fix_and_an_exit_code(weft: Weft) -> None:
    with socket.create_server(("", 0)) as taken:
        answer = weft("doctor", "--port", taken.getsockname()[1])
    assert answer.code == 1
    assert "BLOCK" in answer.out
    assert "1 of these keeps weft from running here." in answer.out
    assert answer.out.count("--port 0") == 1


def test_the_address_of_the_machine_file_is_tried_and_the_option_beats_it(weft: Weft, tmp_path: Path) -> None:
    machine = tmp_path / "machine.toml"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        machine.write_text(f'[tls]\nhost = "127.0.0.1"\nport = {taken.getsockname()[1]}\n')
        answer = weft("doctor", "--machine", machine)
        assert answer.code == 1
        assert str(taken.getsockname()[1]) in answer.out
        assert weft("doctor", "--machine", machine, "--port", 0).code == 0
    machine.write_text('[tls]\nhost = "192.0.2.7"\n')
    answer = weft("doctor", "--machine", machine)
    assert answer.code == 1
    assert "host of [tls]" in answer.out


def test_programs_get_one_object_with_names_that_stay(weft: Weft) -> None:
    answer = weft("doctor", "--json")
    told = json.loads(answer.out)
    assert (answer.code, told["exit_code"], told["format"], told["is_blocked"]) == (0, 0, 1, False)
    assert set(told) == {"format", "is_blocked", "exit_code", "findings"}
    assert all(set(each) == {"topic", "level", "text", "fix", "facts"} for each in told["findings"])
    page = (Path(__file__).parents[4] / "docs" / "doctor.md").read_text()
    assert all(f"`{each['topic']}`" in page for each in told["findings"])
    with socket.create_server(("", 0)) as taken:
        answer = weft("doctor", "--json", "--port", taken.getsockname()[1])
    told = json.loads(answer.out)
    assert (answer.code, told["exit_code"], told["is_blocked"]) == (1, 1, True)
    (blocking,) = [each for each in told["findings"] if each["level"] == "block"]
    assert blocking["topic"] == "network"
    assert "--port 0" in blocking["fix"]


def test_a_check_that_breaks_is_a_finding(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def broken() -> object:
        raise OSError("odd")

    monkeypatch.setattr(findings, "check_memory", broken)
    found = list(findings.examine(tmp_path, TlsConfig(), lambda: models(PeerConfig())))
    assert Finding("memory", "note", "could not be checked: OSError: odd") in found
    assert found[-1].topic == "pace"


@pytest.mark.parametrize(
    ("release", "fix"),
    [("5.15.90.1-microsoft-standard-WSL2", "networkingMode=mirrored"), ("4.4.0-19041-Microsoft", "--set-version")],
)
def test_windows_subsystem_is_told_apart(monkeypatch: pytest.MonkeyPatch, release: str, fix: str) -> None:
    monkeypatch.setattr(platform, "release", lambda: release)
    assert fix in only(list(findings.check_platform())).fix


@pytest.mark.parametrize(("version", "level"), [((3, 10), "block"), ((3, 12), "ok"), ((3, 14), "block")])
def test_other_pythons_block(version: tuple[int, int], level: str) -> None:
    assert only(list(findings.check_python(version))).level == level


def test_little_memory_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1 << 28, total=1 << 33))
    assert only(list(findings.check_memory())).level == "block"


def test_a_containers_bound_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=8 << 30, total=16 << 30))
    monkeypatch.setattr(findings, "host_free_nbytes", lambda: 1 << 28)
    finding = only(list(findings.check_memory()))
    assert finding.level == "block"
    assert "container" in finding.text


def test_a_home_that_cannot_be_written_blocks(tmp_path: Path) -> None:
    assert only(list(findings.check_disk(tmp_path / "new"))).level == "ok"
    assert only(list(findings.check_disk(Path("/proc/none")))).level == "block" or not os.path.isdir("/proc")


def test_few_open_files_block(monkeypatch: pytest.MonkeyPatch) -> None:
    import resource

    monkeypatch.setattr(resource, "getrlimit", lambda _which: (64, 8192))
    assert only(list(findings.check_files())).fix == "run: ulimit -n 4096"


def test_a_disk_with_another_clock_is_noted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(findings, "_file_time", lambda _folder: SystemClock().wall() + 60)
    assert "off" in only(list(findings.check_clock(tmp_path))).text


def test_a_card_that_torch_cannot_use_comes_with_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(findings, "_nvidia_card", lambda: "NVIDIA H200")
    for cuda, fix in ((None, "torch"), ("13.0", "driver")):
        monkeypatch.setattr(torch.version, "cuda", cuda)
        found = [each for each in findings.check_torch() if each.topic == "gpu"]
        assert only(found).level == "note"
        assert "H200" in only(found).text
        assert fix in only(found).fix


@pytest.mark.parametrize(("compiled", "level"), [(["sm_80", "sm_90"], "ok"), (["sm_50", "sm_60"], "note")])
def test_a_build_without_code_for_the_card_is_noted(
    monkeypatch: pytest.MonkeyPatch, compiled: list[str], level: str
) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: compiled)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _number: "H200")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _number: (9, 0))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _number: (1, 2))
    assert only(list(findings._check_cuda("torch"))).level == level


def test_a_text_is_no_ticket_and_it_is_said_who_tells_of_it(weft: Weft, run_path: Path) -> None:
    said = weft("doctor", run_path.parent / "text.txt")
    assert said.code == 2
    assert "is a file, and weft doctor takes a run file (.toml) or a ticket" in said.err
    assert f"weft train {run_path.parent / 'text.txt'}" in " ".join(said.err.split())
    assert "is a folder" in weft("doctor", run_path.parent).err
