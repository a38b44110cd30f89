"""Queries on measurements and what they are of; each takes the session it runs in."""

from __future__ import annotations

from collections.abc import Iterable

from sqlalchemy import ColumnElement, func, select
from sqlalchemy.orm import Session

from flce_tune.tuning_db import rows
from flce_tune.tuning_db.identities import (
    Identities,
    find_device,
    find_problem,
    find_toolchain,
)
from flce_tune.tuning_db.models import (
    DeviceRow,
    MeasurementRow,
    ProblemRow,
    ToolchainRow,
)
from flce_tune.tuning_db.records import (
    DeviceRecord,
    Measurement,
    ProblemRecord,
    Status,
    ToolchainRecord,
)

_BATCH = 1000


def add(session: Session, records: Iterable[Measurement]) -> list[MeasurementRow]:
    """Append measurements, in order; their ids are set."""
    added = []
    identities = Identities(session)
    created_at = rows.now(session)
    for record in records:
        row = rows.measurement_row(record, identities, record.created_at or created_at)
        session.add(row)
        added.append(row)
        if len(added) % _BATCH == 0:
            session.flush()
    session.flush()
    return added


def matching(
    device: DeviceRecord | None, problem: ProblemRecord | None, status: Status | None, after_id: int
) -> list[ColumnElement[bool]]:
    """Build the conditions on measurements; None: any."""
    conditions: list[ColumnElement[bool]] = []
    if device is not None:
        conditions.append(MeasurementRow.device_id == find_device(device))
    if problem is not None:
        conditions.append(MeasurementRow.problem_id == find_problem(problem))
    if status is not None:
        conditions.append(MeasurementRow.status == status)
    if after_id:
        conditions.append(MeasurementRow.id > after_id)
    return conditions


def find(
    session: Session, conditions: Iterable[ColumnElement[bool]], limit: int | None = None
) -> list[Measurement]:
    """List measurements by id."""
    query = select(MeasurementRow).where(*conditions).order_by(MeasurementRow.id).limit(limit)
    return [rows.measurement_record(row) for row in session.scalars(query)]


def count(session: Session, conditions: Iterable[ColumnElement[bool]]) -> int:
    """Count measurements."""
    return session.scalars(select(func.count(MeasurementRow.id)).where(*conditions)).one()


def latest_by_config(
    session: Session,
    device: DeviceRecord,
    problem: ProblemRecord,
    tokens: int,
    toolchain: ToolchainRecord,
) -> dict[str, Measurement]:
    """Find the latest measurement of each config, keyed by its canonical JSON."""
    query = (
        select(MeasurementRow)
        .where(*matching(device, problem, None, 0))
        .where(MeasurementRow.tokens == tokens)
        .where(MeasurementRow.toolchain_id == find_toolchain(toolchain))
        .order_by(MeasurementRow.id)
    )
    return {row.config: rows.measurement_record(row) for row in session.scalars(query)}


def devices(session: Session) -> list[DeviceRecord]:
    """List the devices, by name."""
    query = select(DeviceRow).order_by(DeviceRow.name, DeviceRow.id)
    return [rows.device_record(row) for row in session.scalars(query)]


def toolchains(session: Session) -> list[ToolchainRecord]:
    """List the toolchains, oldest first."""
    query = select(ToolchainRow).order_by(ToolchainRow.id)
    return [rows.toolchain_record(row) for row in session.scalars(query)]


def problems(session: Session, device: DeviceRecord | None) -> list[ProblemRecord]:
    """List the problems (measured on a device), by V, D and N."""
    query = select(ProblemRow).order_by(
        ProblemRow.vocab, ProblemRow.hidden, ProblemRow.token_bucket, ProblemRow.id
    )
    if device is not None:
        measured = select(MeasurementRow.problem_id).where(*matching(device, None, None, 0))
        query = query.where(ProblemRow.id.in_(measured))
    return [rows.problem_record(row) for row in session.scalars(query)]
