"""Rates and bytes as people type them."""

import pytest

from weft.cli import options
from weft.cli.run.join import capped
from weft.errors import ConfigError
from weft.run.machine import CapsConfig


@pytest.mark.parametrize(
    ("text", "bps"),
    [
        ("20mbit", 20e6),
        ("1.5 Gbit/s", 1.5e9),
        ("800kbit", 8e5),
        ("64bit", 64.0),
        ("20mbps", 20e6),
        ("20 MBPS", 20e6),
        ("500kbps", 5e5),
        ("3mbitps", 3e6),
        ("9bps", 9.0),
        ("2e6", 2e6),
        ("100000", 1e5),
    ],
)
def test_a_rate_is_bits_per_second(text: str, bps: float) -> None:
    assert options.rate_bps("--up", text) == bps


@pytest.mark.parametrize(
    ("text", "count"),
    [("50GB", 50 * 10**9), ("512 MiB", 512 << 20), ("1tb", 10**12), ("1000000", 10**6), (".5kB", 500), ("8b", 8)],
)
def test_bytes_are_decimal_unless_they_say_otherwise(text: str, count: int) -> None:
    assert options.nbytes("--memory", text) == count


def test_what_is_not_given_is_nothing() -> None:
    assert options.nbytes("--memory", None) is None


@pytest.mark.parametrize("text", ["fast", "20mb", "20MB/s", "20MBps", "-1mbit", "0mbit", "0", "mbit", "", "1 2mbit"])
def test_what_is_no_rate_names_the_option_and_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--up .*20mbit"):
        options.rate_bps("--up", text)


@pytest.mark.parametrize("text", ["20", "1000", "1e3", "99999"])
def test_a_bare_small_number_may_mean_megabits_and_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=f"--up {text}: .*Write .*mbit if you mean megabits"):
        options.rate_bps("--up", text)


@pytest.mark.parametrize("text", ["8", "16", "999999"])
def test_a_bare_small_number_may_mean_gigabytes_and_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=f"--memory {text}: .*Write {text}GB if you mean gigabytes"):
        options.nbytes("--memory", text)


@pytest.mark.parametrize("text", ["5GB/s", "20mbit", "much", ""])
def test_what_is_no_number_of_bytes_names_the_option_and_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--per-day .*50GB"):
        options.nbytes("--per-day", text)


def test_the_terms_show_what_is_capped_and_nothing_where_nothing_is() -> None:
    assert capped(CapsConfig()) == []
    caps = CapsConfig(upload_bps=20e6, day_nbytes=5 * 10**9, cores=2)
    assert capped(caps) == ["at most   20 Mbit/s up, 5 GB a day, 2 cores"]
