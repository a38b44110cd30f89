"""One measured number beside its bar, and what all sections of ``bars.py`` measure with."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from cases import DEFAULT_SHAPES, Inputs, Shape, make_inputs
from measure import Deadline, Stopwatch, half_quartile_range

Step = Callable[[], object]
WARM_S = 3.0


@dataclass(frozen=True)
class Row:
    """A number, and the bar it is held to."""

    section: str
    case: str
    value: float | None  # None: not to be had on this device
    unit: str
    bar: float | None = None  # None: for information
    at_least: bool = False  # the bar is a lower bound
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def met(self) -> bool | None:
        """Whether the bar is met; None where nothing can be said."""
        if self.value is None or self.bar is None:
            return None
        return self.value >= self.bar if self.at_least else self.value <= self.bar

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "section": self.section,
            "case": self.case,
            "value": self.value,
            "unit": self.unit,
            "bar": self.bar,
            "at_least": self.at_least,
            "met": self.met,
            **self.details,
        }


@dataclass(frozen=True)
class Bench:
    """Where and how long to measure."""

    device: torch.device
    rounds: int
    deadline: Deadline
    shrink: int  # divisor of all sizes, to try the script where there is no GPU
    stopwatch: Stopwatch

    def shape(self, tokens: int, hidden: int, vocab: int) -> Shape:
        """A shape, shrunk."""
        return Shape(*(max(2, size // self.shrink) for size in (tokens, hidden, vocab)))

    def default_shapes(self) -> list[Shape]:
        """The shapes that comparisons use, shrunk."""
        return [self.shape(s.tokens, s.hidden, s.vocab) for s in DEFAULT_SHAPES]

    def inputs(self, shape: Shape) -> Inputs:
        """Trained-like bfloat16 inputs."""
        return make_inputs(shape, "peaked", torch.bfloat16, self.device)

    def race(self, steps: Mapping[str, Step]) -> dict[str, Times]:
        """Time all steps in interleaved rounds, after some seconds of them on a GPU.

        A GPU that was idle runs at clocks it cannot keep. Between two samples matrix products of
        100 MB run: L2 is cold, and the host runs ahead.
        """
        samples: dict[str, list[float]] = {name: [] for name in steps}
        begin = time.monotonic()
        while True:
            for step in steps.values():
                self.stopwatch.time(step)
            if self.device.type == "cpu" or time.monotonic() - begin >= WARM_S:
                break
        names = list(steps)
        gc.collect()
        gc.disable()
        try:
            for done in range(self.rounds):
                if done >= 3 and self.deadline.remaining <= 0:
                    break
                turn = done % len(names)  # nobody always follows the same neighbour
                for name in names[turn:] + names[:turn]:
                    samples[name].append(self.stopwatch.time(steps[name]))
        finally:
            gc.enable()
        return {name: Times(values) for name, values in samples.items()}


@dataclass(frozen=True)
class Times:
    """Samples of one step, in milliseconds."""

    samples: list[float]

    @property
    def median(self) -> float:
        """Milliseconds."""
        return statistics.median(self.samples)

    def ratio(self, other: Times) -> float:
        """The median over the rounds: both of a round ran at the same clock."""
        pairs = zip(self.samples, other.samples, strict=True)
        return statistics.median(mine / theirs for mine, theirs in pairs)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "median_ms": self.median,
            "spread_ms": half_quartile_range(self.samples),
            "samples_ms": self.samples,
        }


def as_dicts(times: Mapping[str, Times]) -> dict[str, Any]:
    """JSON-ready times by name."""
    return {name: taken.to_dict() for name, taken in times.items()}


def table(rows: Iterable[Mapping[str, Any]]) -> str:
    """Rows, as they stand in the JSON, for a terminal or a Markdown page."""
    lines = ["| section | case | measured | | bar | met |", "|---|---|---|---|---|---|"]
    for row in rows:
        value = "-" if row["value"] is None else f"{row['value']:.3g}"
        sign = "≥" if row["at_least"] else "≤"
        bar = "" if row["bar"] is None else f"{sign} {row['bar']:g}"
        met = {True: "yes", False: "no", None: ""}[row["met"]]
        cells = (row["section"], row["case"], value, row["unit"], bar, met)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
