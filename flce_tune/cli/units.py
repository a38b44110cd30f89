"""Quantities as people write and read them."""

from __future__ import annotations

import re

import typer

_BYTES = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
}


def parse_bytes(text: str) -> int:
    """Read a number of bytes: ``256MiB``, ``1.5GiB``, ``2GB``, ``1000000``.

    Raises:
        typer.BadParameter: it is none.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip().lower())
    if match is None or match[2] not in _BYTES:
        raise typer.BadParameter(
            f"{text!r} is not a size; write a number of bytes, or one with a unit: "
            "256MiB, 1.5GiB, 2GB"
        )
    return int(float(match[1]) * _BYTES[match[2]])


def parse_counts(texts: list[str]) -> list[int]:
    """Read counts, given one by one or separated by commas: ``["4096,16384", "512"]``.

    Raises:
        typer.BadParameter: one is not a positive integer.
    """
    counts = []
    for part in split_commas(texts):
        if not part.isdecimal() or int(part) < 1:
            raise typer.BadParameter(f"{part!r} is not a positive integer")
        counts.append(int(part))
    return counts


def split_commas(texts: list[str] | None) -> list[str]:
    """Flatten values given one by one or separated by commas."""
    return [part.strip() for text in texts or () for part in text.split(",") if part.strip()]


def format_bytes(count: int | None) -> str:
    """``33.6 MiB``; a dash for None."""
    if count is None:
        return "–"
    if count < 1024:
        return f"{count} B"
    size = float(count)
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        size /= 1024
        if size < 999.5 or unit == "TiB":
            break
    return f"{size:.3g} {unit}" if size < 100 else f"{size:.0f} {unit}"


def format_ms(milliseconds: float | None) -> str:
    """Four significant digits; a dash for None."""
    if milliseconds is None:
        return "–"
    digits = 0 if milliseconds >= 1000 else 1 if milliseconds >= 100 else 2
    return f"{milliseconds:.{digits if milliseconds >= 1 else 3}f}"


def format_interval(interval: tuple[float, float] | None) -> str:
    """``17.37–18.59``, as ``format_ms``; a dash for None."""
    return "–" if interval is None else "–".join(map(format_ms, interval))


def format_speedup(baseline_ms: float | None, milliseconds: float | None) -> str:
    """``1.84×``: how many times faster than the baseline; a dash if either is unknown."""
    if not baseline_ms or not milliseconds:
        return "–"
    return f"{baseline_ms / milliseconds:.2f}×"
