"""Sizes, rates and durations read and print as people write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worldpager.errors import ConfigError
from worldpager.units import (
    format_duration,
    format_rate,
    format_size,
    parse_duration,
    parse_rate,
    parse_size,
)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("24GiB", 25_769_803_776),
        ("1.5 GB", 1_500_000_000),
        ("640KiB", 655_360),
        ("640kib", 655_360),
        (" 1 B ", 1),
        ("4096", 4096),
        (".5MiB", 524_288),
        ("1e3", 1000),
        (7, 7),
    ],
)
def test_sizes_are_read(text: str | int, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize(
    "text",
    ["", "GiB", "24 gibs", "-1GiB", "0", "0.1B", "1,5GB", "nan", "1e400", "9EiB", -5, 0, 2**63],
)
def test_other_sizes_are_refused_by_name(text: str | int) -> None:
    with pytest.raises(ConfigError, match="size") as caught:
        parse_size(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize(
    ("text", "rate"),
    [("0.25GB/s", 250_000_000), ("1MiB/s", 2**20), ("3.5GB", 3_500_000_000), (9, 9)],
)
def test_rates_are_sizes_per_second(text: str | int, rate: int) -> None:
    assert parse_rate(text) == rate


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("250ms", 0.25),
        ("1.5s", 1.5),
        ("30min", 1800),
        ("2 h", 7200),
        ("0.75", 0.75),
        (3, 3),
        ("0", 0),
    ],
)
def test_durations_are_read(text: str | float, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "text", ["", "fast", "1 day", "-1s", -1, float("nan"), float("inf"), "1e400"]
)
def test_other_durations_are_refused(text: str | float) -> None:
    with pytest.raises(ConfigError, match="duration"):
        parse_duration(text)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (25_769_803_776, "24GiB"),
        (0, "0B"),
        (1023, "1023B"),
        (129_254_400, "123.3MiB"),
        (-4096, "-4KiB"),
        (2**50, "1024TiB"),
    ],
)
def test_sizes_print_with_binary_prefixes(nbytes: int, text: str) -> None:
    assert format_size(nbytes) == text


@pytest.mark.parametrize(
    ("rate", "text"), [(106_777_695, "106.8MB/s"), (12.0, "12B/s"), (3.5e9, "3.5GB/s")]
)
def test_rates_print_with_decimal_prefixes(rate: float, text: str) -> None:
    assert format_rate(rate) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0158, "15.8 ms"),
        (1.2105, "1.21 s"),
        (169.5, "2 min 50 s"),
        (2250, "37 min 30 s"),
        (7260, "2 h 1 min"),
        (0, "0 ms"),
    ],
)
def test_durations_print_in_fitting_units(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


@given(st.integers(min_value=1, max_value=2**50))
def test_a_printed_size_reads_back_to_four_digits(nbytes: int) -> None:
    assert parse_size(format_size(nbytes)) == pytest.approx(nbytes, rel=1e-3)
