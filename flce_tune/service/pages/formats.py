"""Quantities and names as the pages show them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from flce_tune.errors import InvalidConfigError
from flce_tune.kernels.config import Config
from flce_tune.sweep.interval import median_interval
from flce_tune.sweep.presets import PRESETS
from flce_tune.tuning_db.records import ProblemRecord

NOTHING = "–"


def ms(milliseconds: float | None) -> str:
    """About four significant digits, without the unit: it stands in the column's header."""
    if milliseconds is None:
        return NOTHING
    digits = 1 if milliseconds >= 100 else 2 if milliseconds >= 1 else 3
    return f"{milliseconds:,.{digits}f}"


def interval(samples_ms: Sequence[float]) -> str:
    """``17.37 to 18.59``: how sure the median is; a dash for too few samples."""
    bounds = median_interval(samples_ms)
    return NOTHING if bounds is None else " to ".join(map(ms, bounds))


def mib(count: int | None) -> str:
    """Bytes as MiB, without the unit."""
    if count is None:
        return NOTHING
    size = count / (1 << 20)
    return f"{size:,.0f}" if size >= 10 or count == 0 else f"{size:.2g}"


def gib(count: int | None) -> str:
    """Bytes as GiB, without the unit."""
    return f"{count / (1 << 30):,.0f}" if count else NOTHING


def ratio(numerator: float | None, denominator: float | None) -> str:
    """``1.84×``."""
    return f"{numerator / denominator:.2f}×" if numerator and denominator else NOTHING


def moment(time: datetime | None) -> str:
    """A time of day in UTC."""
    return time.strftime("%Y-%m-%d %H:%M") if time else NOTHING


def duration(start: datetime | None, end: datetime | None) -> str:
    """``1 h 5 min``, ``3 min 20 s``, ``12 s``."""
    if start is None or end is None:
        return NOTHING
    minutes, seconds = divmod(max(0, round((end - start).total_seconds())), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {seconds} s" if minutes else f"{seconds} s"


def config(stored: Mapping[str, Any]) -> str:
    """A config in one line; as it is stored, if this version does not know it."""
    try:
        return str(Config.from_dict(stored))
    except InvalidConfigError:
        return str(dict(stored))


def shape(problem: ProblemRecord) -> str:
    """``N ≤ 16384, D = 4096, V = 128256``, with spaces that do not break within a term."""
    sizes = (f"N ≤ {problem.token_bucket}", f"D = {problem.hidden}", f"V = {problem.vocab}")
    return ", ".join(size.replace(" ", "\u00a0") for size in sizes)


def kind(problem: ProblemRecord) -> str:
    """What a problem is beyond its sizes: ``bfloat16, train, with softcap``."""
    parts = [problem.dtype, problem.mode.replace("_", " ")]
    if problem.accumulate != "fp32":
        parts.append("accumulates in the weight's dtype")
    if problem.features:
        parts.append("with " + ", ".join(f.replace("_", " ") for f in problem.features))
    return ", ".join(parts)


def models(problem: ProblemRecord) -> list[str]:
    """Names of the presets that have this output layer."""
    return [
        preset.name
        for preset in PRESETS.values()
        if (preset.hidden, preset.vocab) == (problem.hidden, problem.vocab)
        and set(preset.features) <= set(problem.features)
    ]


def problem_label(problem: ProblemRecord) -> str:
    """A short name for charts, e.g. ``llama3-8b, N ≤ 16384``, that no other problem has."""
    names = models(problem)
    layer = names[0] if names else f"{problem.hidden} × {problem.vocab}"
    expected = PRESETS[names[0]].features if names else ()
    usual = ("bfloat16", "train", "fp32", expected)
    rest = (problem.dtype, problem.mode, problem.accumulate, problem.features)
    return f"{layer}, N ≤ {problem.token_bucket}" + ("" if rest == usual else f", {kind(problem)}")


def problem_slug(problem: ProblemRecord) -> str:
    """A problem's identity as one path segment, e.g. ``16384x4096x128256-bfloat16-train``."""
    parts = [
        f"{problem.token_bucket}x{problem.hidden}x{problem.vocab}",
        problem.dtype,
        problem.mode,
        *([problem.accumulate] if problem.accumulate != "fp32" else []),
        *problem.features,
    ]
    return "-".join(parts)
