"""Options and fields of a machine's settings that would change nothing: refused, or named in one line."""

from pathlib import Path
from typing import Any

import pytest

from weft.cli.settings import Hardware, Here, machine_settings
from weft.errors import ConfigError

OPTIONS: dict[str, tuple[str, Any]] = {
    "name": ("--name", "me"),
    "tls.host": ("--host", "127.0.0.1"),
    "tls.port": ("--port", 7077),
    "check": ("--check", 3),
    "caps.upload_bps": ("--up", 2e7),
    "caps.download_bps": ("--down", 2e7),
    "caps.day_nbytes": ("--per-day", 10**9),
    "threads": ("--threads", 2),
    "caps.memory_nbytes": ("--memory", 10**9),
    "caps.vram_nbytes": ("--vram", 10**9),
    "caps.cores": ("--cores", 1),
    "caps.hours": ("--hours", ["22:00-07:00"]),
    "is_blocking": ("--blocking", True),
    "is_drawing_only": ("--draw-only", True),
    "code": ("--code", ["judge.py"]),
    "has_lan": ("--lan", True),
}
# What has no effect where the other settings are these.
SITUATIONS: dict[str, tuple[dict[str, Any], set[str]]] = {
    "as it is": ({}, set()),
    "iroh alone": ({"transports": ["iroh"]}, {"tls.host", "tls.port"}),
    "tls alone": ({"transports": ["tls"]}, set()),
    "on the CPU": ({"device": "cpu"}, {"caps.vram_nbytes"}),
    "on a GPU": ({"device": "cuda"}, set()),
    "on Apple's GPU": ({"device": "mps"}, set()),
}


def test_every_option_is_in_the_table() -> None:
    fields = {**Here().fields(), **Hardware().fields(), "is_blocking": None, "is_drawing_only": None}
    assert set(OPTIONS) == set(fields) - {"transports", "device"}


@pytest.mark.parametrize("situation", SITUATIONS)
@pytest.mark.parametrize("field", OPTIONS)
def test_an_option_takes_effect_or_is_refused(field: str, situation: str) -> None:
    given, idle = SITUATIONS[situation]
    option, value = OPTIONS[field]
    if field not in idle:
        machine_settings(None, {**given, field: value})
    else:
        with pytest.raises(ConfigError, match=rf"^{option} has no effect: .*Leave it out\.$"):
            machine_settings(None, {**given, field: value})


def test_hours_are_times_of_day_and_a_duration_is_shown_its_own_option() -> None:
    with pytest.raises(ConfigError, match=r"--hours .*22:00-07:00.*--until 2h"):
        machine_settings(None, {"caps.hours": ["2h"]})


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('transports = ["tls"]\n[iroh]\nport = 5\n', "iroh is not among the transports: iroh.port"),
        ('transports = ["iroh"]\n[tls]\nport = 5\nhost = "x"\n', "tls is not among the transports: tls.host, tls.port"),
        ('[tls]\nproxy_user = "me"\n', "no proxy is named: tls.proxy_user"),
        (
            'device = "cpu"\n[caps]\nvram_nbytes = 5\n',
            "device is cpu, which has no memory of its own: caps.vram_nbytes",
        ),
        ('device = "cpu"\n[tls]\nport = 5\n', ""),
    ],
)
def test_a_field_without_effect_is_named(
    text: str, named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "m.toml").write_text(text)
    machine_settings(tmp_path / "m.toml", {})
    said = capsys.readouterr().err
    assert said == (f"{tmp_path / 'm.toml'}: these have no effect here, since {named}\n" if named else "")


def test_code_that_a_machine_file_names_lies_where_the_file_is(tmp_path: Path) -> None:
    (tmp_path / "m.toml").write_text('code = ["judge.py", "/else/where.py"]\n')
    assert machine_settings(tmp_path / "m.toml", {}).code == (str(tmp_path / "judge.py"), "/else/where.py")


def test_an_anchor_names_what_is_of_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "m.toml").write_text('device = "cpu"\nthreads = 2\n[caps]\nupload_bps = 2e7\n')
    machine_settings(tmp_path / "m.toml", {}, use="anchor")
    said = capsys.readouterr().err
    assert "device" in said
    assert "threads" in said
    assert "upload_bps" not in said
