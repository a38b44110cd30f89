"""Queries on jobs; each takes the session it runs in.

A claim is one statement, beside other claims and whatever else is being written (see
``Database.claiming``). All others lock the job they change before they look at it, so that what
they read is still so when they write. Every change of state leaves a "state" event.
"""

from __future__ import annotations

import uuid
from collections.abc import Collection, Iterable, Mapping
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import and_, func, or_, select, update
from sqlalchemy.orm import Session

from flce_tune.tuning_db.models import JobEventRow, JobRow
from flce_tune.tuning_db.records import JobState
from flce_tune.tuning_db.rows import now, storable

MAX_FRUITLESS_ATTEMPTS = 5
"""A job that kills whoever runs it is not tried for ever; one that gets on is."""

_AS_STORED = {"synchronize_session": False, "populate_existing": True}
"""What a changing statement returns is what the database has now."""


def submit(
    session: Session, spec: Mapping[str, Any], priority: int, idempotency_key: str | None
) -> JobRow:
    """Queue a job, or find the one that was submitted with this key before."""
    if idempotency_key is not None:
        known = select(JobRow).where(JobRow.idempotency_key == idempotency_key)
        if (row := session.scalars(known).one_or_none()) is not None:
            return row
    time = now(session)
    row = JobRow(
        id=str(uuid.uuid4()),
        idempotency_key=idempotency_key,
        spec=dict(spec),
        state=JobState.QUEUED,
        priority=priority,
        message="",
        created_at=time,
        cancel_requested=False,
        attempts=0,
    )
    session.add(row)
    session.flush()
    _note_state(session, row, time)
    return row


def get(session: Session, job_id: str) -> JobRow | None:
    """Find a job."""
    return session.scalars(select(JobRow).where(JobRow.id == job_id)).one_or_none()


def lock(session: Session, job_id: str) -> JobRow | None:
    """Find a job, once a claim that is taking it has ended, and let no other take it."""
    query = select(JobRow).where(JobRow.id == job_id)
    return session.scalars(query.with_for_update(key_share=True)).one_or_none()


def find(
    session: Session, states: Collection[JobState] | None, before: str | None, limit: int
) -> list[JobRow]:
    """List jobs, newest first, from the one submitted before ``before`` on."""
    query = select(JobRow).order_by(JobRow.number.desc()).limit(limit)
    if states is not None:
        query = query.where(JobRow.state.in_(states))
    if before is not None:
        cursor = select(JobRow.number).where(JobRow.id == before).scalar_subquery()
        query = query.where(JobRow.number < cursor)
    return list(session.scalars(query))


def count_by_state(session: Session) -> dict[JobState, int]:
    """Count the jobs of each state, zeros included."""
    query = select(JobRow.state, func.count()).group_by(JobRow.state)
    return dict.fromkeys(JobState, 0) | {row[0]: row[1] for row in session.execute(query)}


def oldest_queued(session: Session) -> datetime | None:
    """Find when the oldest queued job was submitted; None: none is queued."""
    query = select(JobRow.created_at).where(JobRow.state == JobState.QUEUED)
    return session.scalars(query.order_by(JobRow.number).limit(1)).one_or_none()


def claim(
    session: Session, owner: str, lease_seconds: float, devices: Collection[str] | None
) -> JobRow | None:
    """Take the next job: the highest priority, then the oldest, queued or left by a lost worker.

    Only jobs whose spec names one of ``devices``; None: any. An owner who still has a job is
    given that one again: the answer to its claim was lost. A lost worker's job that somebody
    wanted cancelled is cancelled instead, and one that lost ``MAX_FRUITLESS_ATTEMPTS`` workers in
    a row before they measured anything has failed.
    """
    time = now(session)
    if (row := _claimed_before(session, owner, time, lease_seconds)) is not None:
        return row
    while (row := _take_next(session, owner, time, lease_seconds, devices)) is not None:
        ending = _why_not(session, row)
        if ending is None:
            _note_state(session, row, time, owner=owner, attempt=row.attempts)
            return row
        row.attempts -= 1  # nobody got it
        _finish(session, row, *ending, time)
    return None


def _claimed_before(
    session: Session, owner: str, time: datetime, lease_seconds: float
) -> JobRow | None:
    own = (
        JobRow.state == JobState.RUNNING,
        JobRow.lease_owner == owner,
        JobRow.lease_expires_at >= time,
    )
    expiry = time + timedelta(seconds=lease_seconds)
    statement = update(JobRow).where(*own).values(lease_expires_at=expiry, received=0)
    return session.scalars(statement.returning(JobRow), execution_options=_AS_STORED).first()


def _take_next(
    session: Session,
    owner: str,
    time: datetime,
    lease_seconds: float,
    devices: Collection[str] | None,
) -> JobRow | None:
    """Find the next job that nobody else is taking, and make it the owner's, in one statement."""
    lost = and_(JobRow.state == JobState.RUNNING, JobRow.lease_expires_at < time)
    found = (
        select(JobRow.number)
        .where(or_(JobRow.state == JobState.QUEUED, lost))
        .order_by(JobRow.priority.desc(), JobRow.number)
        .limit(1)
        .with_for_update(skip_locked=True, key_share=True)  # SQLite has no row locks, nor needs any
        .correlate(None)
    )
    if devices is not None:
        found = found.where(JobRow.spec["device"].as_string().in_(devices))
    statement = (
        update(JobRow)
        .where(JobRow.number == found.scalar_subquery())
        .values(
            state=JobState.RUNNING,
            attempts=JobRow.attempts + 1,
            received=0,
            started_at=func.coalesce(JobRow.started_at, time),
            lease_owner=owner,
            lease_expires_at=time + timedelta(seconds=lease_seconds),
        )
        .returning(JobRow)
    )
    return session.scalars(statement, execution_options=_AS_STORED).one_or_none()


def _why_not(session: Session, row: JobRow) -> tuple[JobState, str] | None:
    """How a job ends that was left by a lost worker and is not to be run again; None: run it."""
    if row.cancel_requested:
        return JobState.CANCELLED, "cancelled; its worker was lost"
    if row.attempts > 1 and _fruitless(session, row) >= MAX_FRUITLESS_ATTEMPTS:
        return JobState.FAILED, (
            f"{MAX_FRUITLESS_ATTEMPTS} workers in a row were lost before they measured "
            "anything; see their logs, then submit it again"
        )
    return None


def renew(session: Session, job_id: str, owner: str, lease_seconds: float) -> JobRow | None:
    """Extend a lease; None if it is not this owner's any more."""
    row = leased(session, job_id, owner)
    if row is not None:
        row.lease_expires_at = now(session) + timedelta(seconds=lease_seconds)
    return row


def report(
    session: Session,
    job_id: str,
    owner: str,
    lease_seconds: float,
    events: Iterable[tuple[int, str, Mapping[str, Any]]],
) -> JobRow | None:
    """Renew a lease and add events; None if it is not this owner's any more.

    An owner numbers its events upwards: those that came before, in a report whose answer was
    lost, are not added again.
    """
    row = renew(session, job_id, owner, lease_seconds)
    if row is not None:
        for number, kind, data in events:
            if number > row.received:
                row.received = number
                add_event(session, job_id, kind, data)
    return row


def release(session: Session, job_id: str, owner: str) -> bool:
    """Give a job back for the next claim; False if it is not this owner's any more."""
    row = leased(session, job_id, owner)
    if row is None:
        return False
    time = now(session)
    row.lease_expires_at = time
    _note_state(session, row, time, released=True)
    return True


def finish(session: Session, job_id: str, owner: str, state: JobState, message: str) -> bool:
    """End a job; False if it is not this owner's any more."""
    row = leased(session, job_id, owner)
    if row is None:
        return False
    _finish(session, row, state, message, now(session))
    return True


def request_cancel(session: Session, job_id: str) -> JobRow | None:
    """Cancel a job at once if nobody runs it, else ask its worker to; None: no such job."""
    row = lock(session, job_id)
    if row is None or row.state.final:
        return row
    time = now(session)
    lost = row.lease_expires_at is not None and row.lease_expires_at < time
    if row.state is JobState.QUEUED or lost:
        _finish(session, row, JobState.CANCELLED, "cancelled on request", time)
    elif not row.cancel_requested:
        row.cancel_requested = True
        _note_state(session, row, time, cancel_requested=True)
    return row


def add_event(session: Session, job_id: str, kind: str, data: Mapping[str, Any]) -> JobEventRow:
    """Record that something happened to a job that exists and is locked."""
    row = JobEventRow(job_id=job_id, kind=kind, data=dict(data), created_at=now(session))
    session.add(row)
    session.flush()
    return row


def find_events(session: Session, job_id: str, after_id: int, limit: int) -> list[JobEventRow]:
    """List the events of a job, oldest first."""
    query = (
        select(JobEventRow)
        .where(JobEventRow.job_id == job_id, JobEventRow.id > after_id)
        .order_by(JobEventRow.id)
        .limit(limit)
    )
    return list(session.scalars(query))


def find_latest_event(session: Session, job_id: str, kinds: Collection[str]) -> JobEventRow | None:
    """Find a job's last event of one of these kinds."""
    query = (
        select(JobEventRow)
        .where(JobEventRow.job_id == job_id, JobEventRow.kind.in_(kinds))
        .order_by(JobEventRow.id.desc())
        .limit(1)
    )
    return session.scalars(query).one_or_none()


def leased(session: Session, job_id: str, owner: str) -> JobRow | None:
    """Lock a job if it is this owner's."""
    row = lock(session, job_id)
    ours = row is not None and row.state is JobState.RUNNING and row.lease_owner == owner
    return row if ours else None


def _fruitless(session: Session, row: JobRow) -> int:
    """Count the workers that were lost since anything was last measured."""
    events = select(JobEventRow).where(JobEventRow.job_id == row.id)
    latest = find_latest_event(session, row.id, ["measurement"])
    since = 0 if latest is None else latest.id
    states = session.scalars(events.where(JobEventRow.kind == "state", JobEventRow.id > since))
    return sum(("attempt" in event.data) - ("released" in event.data) for event in states)


def _finish(session: Session, row: JobRow, state: JobState, message: str, time: datetime) -> None:
    row.state = state
    row.message = storable(message)
    row.finished_at = time
    row.lease_owner = None
    row.lease_expires_at = None
    _note_state(session, row, time, message=row.message)


def _note_state(session: Session, row: JobRow, time: datetime, **more: object) -> None:
    data = {"state": row.state.value, **more}
    session.add(JobEventRow(job_id=row.id, kind="state", data=data, created_at=time))
    session.flush()
