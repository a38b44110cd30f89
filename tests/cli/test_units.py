"""Quantities as people write and read them."""

import pytest
import typer

from flce_tune.cli.units import (
    format_bytes,
    format_interval,
    format_ms,
    format_speedup,
    parse_bytes,
    parse_counts,
    split_commas,
)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("0", 0),
        ("1000000", 1_000_000),
        ("256MiB", 256 << 20),
        ("256 mib", 256 << 20),
        ("1.5GiB", 3 << 29),
        ("2GB", 2 * 10**9),
        ("12B", 12),
    ],
)
def test_sizes(text: str, count: int):
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "much", "-1", "1.5.2MiB", "5 bananas", "MiB", "1e3"])
def test_what_is_no_size(text: str):
    with pytest.raises(typer.BadParameter, match="256MiB"):
        parse_bytes(text)


def test_counts():
    assert parse_counts(["4096,16384", "512"]) == [4096, 16384, 512]
    for bad in ("0", "-1", "many", "1.5"):
        with pytest.raises(typer.BadParameter, match="positive integer"):
            parse_counts([bad])


def test_commas():
    assert split_commas(["a, b", "c", ""]) == ["a", "b", "c"]
    assert split_commas(None) == []


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (None, "–"),
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (512 << 20, "512 MiB"),
        (1023 << 20, "0.999 GiB"),
        (3 << 40, "3 TiB"),
        (5000 << 40, "5000 TiB"),
    ],
)
def test_bytes_as_read(count: int | None, text: str):
    assert format_bytes(count) == text


def test_times_as_read():
    assert [format_ms(ms) for ms in (None, 0.01234, 1.234, 12.345, 123.45, 1234.5)] == [
        "–",
        "0.012",
        "1.23",
        "12.35",
        "123.5",
        "1234",
    ]


def test_speedups_as_read():
    assert format_speedup(20.0, 10.0) == "2.00×"
    assert format_speedup(None, 10.0) == format_speedup(10.0, None) == "–"


def test_an_interval_reads_as_its_two_ends():
    assert format_interval((17.371, 18.59)) == "17.37–18.59"
    assert format_interval(None) == "–"
