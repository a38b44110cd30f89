"""Queries on measurements and what they are of; each takes the session it runs in."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from sqlalchemy import ColumnElement, func, insert, select
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
Parents = tuple[DeviceRecord, ToolchainRecord, ProblemRecord]

_RACED = 3  # samples of a config that came through to a final; a first look takes one


def add(session: Session, record: Measurement) -> MeasurementRow:
    """Append a measurement; its id is set."""
    created_at = record.created_at or rows.now(session)
    row = MeasurementRow(**rows.measurement_values(record, Identities(session), created_at))
    session.add(row)
    session.flush()
    return row


def add_all(session: Session, records: Iterable[Measurement]) -> list[int]:
    """Append measurements, in order; returns their ids."""
    identities = Identities(session)
    created_at = rows.now(session)
    statement = insert(MeasurementRow).returning(MeasurementRow.id, sort_by_parameter_order=True)
    ids: list[int] = []
    left = iter(records)
    while batch := list(itertools.islice(left, _BATCH)):
        values = [
            rows.measurement_values(record, identities, record.created_at or created_at)
            for record in batch
        ]
        ids += session.scalars(statement, values)
    return ids


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


def last_id(session: Session) -> int:
    """Say the largest id; 0 without any."""
    return session.scalars(select(func.max(MeasurementRow.id))).one() or 0


def parents(
    session: Session, device: DeviceRecord | None, problem: ProblemRecord | None, up_to: int
) -> list[Parents]:
    """List the distinct devices, toolchains and problems together, as they first came by."""
    keys = (MeasurementRow.device_id, MeasurementRow.toolchain_id, MeasurementRow.problem_id)
    seen = (
        select(*keys, func.min(MeasurementRow.id).label("first"))
        .where(*matching(device, problem, None, 0), MeasurementRow.id <= up_to)
        .group_by(*keys)
        .subquery()
    )
    query = (
        select(DeviceRow, ToolchainRow, ProblemRow)
        .join(seen, DeviceRow.id == seen.c.device_id)
        .join(ToolchainRow, ToolchainRow.id == seen.c.toolchain_id)
        .join(ProblemRow, ProblemRow.id == seen.c.problem_id)
        .order_by(seen.c.first)
    )
    return [
        (rows.device_record(row[0]), rows.toolchain_record(row[1]), rows.problem_record(row[2]))
        for row in session.execute(query)
    ]


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


def fastest(
    session: Session, toolchain: ToolchainRecord, device: DeviceRecord | None
) -> list[Measurement]:
    """Find what a toolchain ran fastest of each device and problem.

    The latest measurement of each config counts, and one that came through to a final beats any
    that was timed once.
    """
    here = [MeasurementRow.toolchain_id == find_toolchain(toolchain)]
    here += matching(device, None, None, 0)
    latest = (
        select(func.max(MeasurementRow.id))
        .where(*here)
        .group_by(MeasurementRow.device_id, MeasurementRow.problem_id, MeasurementRow.config)
    )
    raced = func.json_array_length(MeasurementRow.samples_ms) >= _RACED
    rank = func.row_number().over(
        partition_by=(MeasurementRow.device_id, MeasurementRow.problem_id),
        order_by=(raced.desc(), MeasurementRow.median_ms, MeasurementRow.id),
    )
    ranked = (
        select(MeasurementRow.id, rank.label("rank"))
        .where(MeasurementRow.id.in_(latest), MeasurementRow.status == Status.OK)
        .subquery()
    )
    return find(session, [MeasurementRow.id.in_(select(ranked.c.id).where(ranked.c.rank == 1))])


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
