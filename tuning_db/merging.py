"""Bring measurements and winners from elsewhere into a database, once."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace

from sqlalchemy.orm import Session

from flce_tune.tuning_db import measurements as stored
from flce_tune.tuning_db.records import (
    DeviceRecord,
    Measurement,
    ProblemRecord,
    Winner,
    canonical_config,
)
from flce_tune.tuning_db.rows import storable
from flce_tune.tuning_db.winners import find_winners, replace_winners


def merge(
    session: Session, measurements: Sequence[Measurement], winners: Iterable[Winner]
) -> tuple[int, int]:
    """Add the measurements that are not there yet, and the winners.

    Each winner's measurement must be among ``measurements``. Winners replace the front of their
    device and problem unless that has a verified one: what was measured here is worth more.

    Returns:
        How many measurements and how many winners were added.
    """
    ids = _ids_by_content(session, measurements)
    new = {content: m for m in measurements if (content := _content(m)) not in ids}
    ids.update(zip(new, stored.add_all(session, new.values()), strict=True))
    fronts: dict[tuple[DeviceRecord, ProblemRecord], list[Winner]] = {}
    for winner in winners:
        measurement = replace(winner.measurement, id=ids[_content(winner.measurement)])
        front = fronts.setdefault((measurement.device, measurement.problem), [])
        front.append(replace(winner, measurement=measurement))
    added = 0
    for (device, problem), front in fronts.items():
        here = find_winners(session, device=device, problem=problem)
        if any(winner.verified for winner in here) or _same_front(here, front):
            continue
        replace_winners(session, device, problem, front)
        added += len(front)
    return len(new), added


def _ids_by_content(
    session: Session, measurements: Iterable[Measurement]
) -> dict[Hashable, int | None]:
    """Find the ids of all that is stored for the devices and problems of ``measurements``."""
    return {
        _content(known): known.id
        for device, problem in {(m.device, m.problem) for m in measurements}
        for known in stored.find(session, stored.matching(device, problem, None, 0))
    }


def _same_front(here: Iterable[Winner], there: Iterable[Winner]) -> bool:
    def content(winner: Winner) -> Hashable:
        return winner.measurement.id, winner.default_ms, winner.eager_ms

    return set(map(content, here)) == set(map(content, there))


def _content(measurement: Measurement) -> Hashable:
    """Everything a measurement says, so that equal ones compare equal; not its id."""
    return (
        measurement.device,
        measurement.toolchain,
        measurement.problem,
        measurement.tokens,
        canonical_config(measurement.config),
        measurement.status,
        measurement.samples_ms,
        measurement.median_ms,
        measurement.spread_ms,
        measurement.workspace_bytes,
        measurement.registers,
        measurement.spills,
        measurement.shared_memory,
        frozenset(measurement.errors.items()),
        measurement.clocks_mhz,
        storable(measurement.message),
        measurement.created_at,
    )
