"""What was tuned where, arranged for the pages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime

from flce_tune.dispatch.snapshot import Snapshot
from flce_tune.service.errors import not_found
from flce_tune.service.pages.formats import models, problem_slug
from flce_tune.sweep.presets import PRESETS
from flce_tune.tuning_db.records import DeviceRecord, ProblemRecord, Winner


@dataclass(frozen=True, slots=True)
class DeviceLine:
    """A device and how much is known of it."""

    device: DeviceRecord
    problems: int  # that have winners
    shipped: bool  # all of them come with the package
    last: datetime | None  # when winners were last stored


@dataclass(frozen=True, slots=True)
class CoverageRow:
    """An output layer, and the problems tuned for it on each device."""

    models: tuple[str, ...]  # presets that have it
    hidden: int
    vocab: int
    cells: tuple[tuple[ProblemRecord, ...], ...]  # one per device


@dataclass(frozen=True, slots=True)
class Coverage:
    """Output layers that were tuned, and models nobody tuned for."""

    devices: tuple[DeviceRecord, ...]
    rows: tuple[CoverageRow, ...]
    missing: tuple[str, ...]  # presets


def all_devices(snapshot: Snapshot, stored: Iterable[DeviceRecord]) -> list[DeviceRecord]:
    """GPUs first, by name; those of the database and those results ship for."""
    devices = dict.fromkeys([*stored, *snapshot.fronts])
    return sorted(devices, key=lambda d: (d.kind == "cpu", d.name, d.sm_count))


def device_lines(snapshot: Snapshot, devices: Iterable[DeviceRecord]) -> list[DeviceLine]:
    """Sum up what is known of each device."""
    lines = []
    for device in devices:
        fronts = snapshot.fronts.get(device, {})
        winners = [winner for front in fronts.values() for winner in front]
        times = [winner.updated_at for winner in winners if winner.updated_at]
        shipped = bool(winners) and all(map(is_shipped, winners))
        lines.append(DeviceLine(device, len(fronts), shipped, max(times, default=None)))
    return lines


def coverage(snapshot: Snapshot, devices: Sequence[DeviceRecord]) -> Coverage:
    """Arrange what was tuned by output layer and device."""
    layers: dict[tuple[int, int], list[list[ProblemRecord]]] = {}
    for column, device in enumerate(devices):
        for problem in sorted(snapshot.fronts.get(device, {}), key=order):
            empty: list[list[ProblemRecord]] = [[] for _ in devices]
            cells = layers.setdefault((problem.vocab, problem.hidden), empty)
            cells[column].append(problem)
    rows = []
    for (vocab, hidden), cells in sorted(layers.items(), reverse=True):
        names = dict.fromkeys(name for cell in cells for p in cell for name in models(p))
        rows.append(CoverageRow(tuple(names), hidden, vocab, tuple(map(tuple, cells))))
    there = {name for row in rows for name in row.models}
    missing = tuple(name for name in PRESETS if name not in there)
    return Coverage(tuple(devices), tuple(rows), missing)


def fronts_of(
    snapshot: Snapshot, problem: ProblemRecord
) -> list[tuple[DeviceRecord, tuple[Winner, ...]]]:
    """The winners of one problem on each device that has some, fastest device first."""
    found = [
        (device, of_device[problem])
        for device, of_device in snapshot.fronts.items()
        if problem in of_device
    ]
    return sorted(found, key=lambda one: one[1][0].measurement.median_ms or 0.0)


def find_problem(known: Iterable[ProblemRecord], slug: str) -> ProblemRecord:
    """The problem that has this name in addresses.

    Raises:
        ApiError: 404 if there is none.
    """
    for problem in known:
        if problem_slug(problem) == slug:
            return problem
    raise not_found("unknown-problem", f"nothing was measured for a problem {slug!r}")


def all_problems(snapshot: Snapshot, stored: Iterable[ProblemRecord]) -> list[ProblemRecord]:
    """Those of the database and those results ship for, by V, D and N."""
    shipped = [problem for fronts in snapshot.fronts.values() for problem in fronts]
    return sorted(dict.fromkeys([*stored, *shipped]), key=order)


def is_shipped(winner: Winner) -> bool:
    """Whether a winner comes with the package and is not in the database."""
    return winner.measurement.id is None


def order(problem: ProblemRecord) -> tuple[object, ...]:
    """Sort key: by V, D and N."""
    p = problem
    return (p.vocab, p.hidden, p.token_bucket, p.mode, p.dtype, p.accumulate, p.features)
