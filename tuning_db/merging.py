"""Bring measurements and winners from elsewhere into a database, once."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from sqlalchemy import ColumnElement, insert, select
from sqlalchemy.orm import Session

from flce_tune.tuning_db import measurements, rows
from flce_tune.tuning_db.identities import Identities
from flce_tune.tuning_db.models import MeasurementRow
from flce_tune.tuning_db.records import (
    DeviceRecord,
    Measurement,
    ProblemRecord,
    Winner,
    canonical_config,
)
from flce_tune.tuning_db.winners import clear_miss, find_winners, replace_winners

BATCH = 1000
"""Measurements per transaction: others wait for the database no longer than that takes."""

_COLUMNS = [column for column in MeasurementRow.__table__.columns if column.name != "id"]

_plain_values = operator.itemgetter(
    *(column.name for column in _COLUMNS if column.name not in ("errors", "created_at"))
)


class Contents:
    """Digests of what is stored, of the devices and problems that a merge has come by.

    Two measurements are the same if everything they say is, to the microsecond they were taken.
    Ids grow in the order of commits (see ``engine``), so that reading on after the last id seen
    misses nothing that others add between two batches.
    """

    def __init__(self) -> None:
        self._digests: set[bytes] = set()
        self._loaded: set[tuple[DeviceRecord, ProblemRecord]] = set()
        self._last_id: int | None = None

    def load(
        self, session: Session, batch: Sequence[Measurement], *which: ColumnElement[bool]
    ) -> None:
        """Read what is stored of the devices and problems of a batch, if not yet done.

        ``which`` leaves out what the batch cannot hold.
        """
        if self._last_id is None:
            self._last_id = measurements.last_id(session)
        for device, problem in {(m.device, m.problem) for m in batch} - self._loaded:
            self._read(session, [*measurements.matching(device, problem, None, 0), *which])
            self._loaded.add((device, problem))

    def add(self, session: Session, batch: Sequence[Measurement]) -> int:
        """Append those of a batch that are not there yet; returns how many."""
        self._read(session, [MeasurementRow.id > (self._last_id or 0)])
        identities, created_at = Identities(session), rows.now(session)
        new = []
        for record in batch:
            values = rows.measurement_values(record, identities, record.created_at or created_at)
            digest = _digest(values)
            if digest not in self._digests:
                self._digests.add(digest)
                new.append(values)
        if new:
            session.execute(insert(MeasurementRow), new)
        self._last_id = measurements.last_id(session)
        return len(new)

    def _read(self, session: Session, where: Iterable[ColumnElement[bool]]) -> None:
        query = select(*_COLUMNS).where(*where).execution_options(yield_per=1000)
        for row in session.execute(query):
            self._digests.add(_digest(row._mapping))


def add_batch(session: Session, batch: Sequence[Measurement]) -> int:
    """Append those of a batch that are not there yet; returns how many. For small batches."""
    times = [m.created_at for m in batch if m.created_at is not None]
    if not batch:
        return 0
    contents = Contents()
    contents.load(session, batch, MeasurementRow.created_at.between(min(times), max(times)))
    return contents.add(session, batch)


def replace_fronts(session: Session, front: Iterable[Winner]) -> None:
    """Make verified winners the whole fronts of their devices and problems.

    Raises:
        ValueError: see ``replace_winners``.
    """
    for (device, problem), winners in _fronts(session, front).items():
        replace_winners(session, device, problem, [replace(w, verified=True) for w in winners])
        clear_miss(session, device, problem)


def merge_winners(session: Session, winners: Iterable[Winner]) -> int:
    """Bring winners in whose measurements are stored; returns how many.

    They replace the front of their device and problem unless that has a verified one: what was
    measured here is worth more.
    """
    added = 0
    for (device, problem), front in _fronts(session, winners).items():
        here = find_winners(session, device=device, problem=problem)
        if any(winner.verified for winner in here) or _same_front(here, front):
            continue
        replace_winners(session, device, problem, front)
        added += len(front)
    return added


def _fronts(
    session: Session, winners: Iterable[Winner]
) -> dict[tuple[DeviceRecord, ProblemRecord], list[Winner]]:
    """Group winners from elsewhere, with the ids that their measurements have here."""
    fronts: dict[tuple[DeviceRecord, ProblemRecord], list[Winner]] = {}
    for winner in winners:
        measurement = replace(winner.measurement, id=stored_id(session, winner.measurement))
        front = fronts.setdefault((measurement.device, measurement.problem), [])
        front.append(replace(winner, measurement=measurement))
    return fronts


def stored_id(session: Session, measurement: Measurement) -> int | None:
    """Find the id of a measurement from elsewhere; None if it is not stored."""
    assert measurement.created_at is not None
    values = rows.measurement_values(measurement, Identities(session), measurement.created_at)
    query = select(MeasurementRow.id, *_COLUMNS).where(
        *measurements.matching(measurement.device, measurement.problem, None, 0),
        MeasurementRow.config == canonical_config(measurement.config),
    )
    digest = _digest(values)
    for row in session.execute(query.order_by(MeasurementRow.id)):
        if _digest(row._mapping) == digest:
            return int(row.id)
    return None


def _same_front(here: Iterable[Winner], there: Iterable[Winner]) -> bool:
    def content(winner: Winner) -> tuple[object, ...]:
        return winner.measurement.id, winner.default_ms, winner.eager_ms

    return set(map(content, here)) == set(map(content, there))


def _digest(values: Mapping[Any, Any]) -> bytes:
    """Of everything a row says, apart from its id."""
    told = (
        *_plain_values(values),
        sorted(values["errors"].items()),
        values["created_at"].timestamp(),
    )
    return hashlib.blake2b(repr(told).encode(), digest_size=16).digest()
