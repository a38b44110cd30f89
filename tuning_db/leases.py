"""Queries on who sweeps what, so that two sweeps do not double each other's work.

Like ``jobs``, the changing ones run in a writing session, the only one of its kind at any moment:
a problem is never claimed twice while a lease lasts.
"""

from __future__ import annotations

from datetime import timedelta

from sqlalchemy.orm import Session

from flce_tune.tuning_db import rows
from flce_tune.tuning_db.identities import Identities
from flce_tune.tuning_db.models import SweepLeaseRow
from flce_tune.tuning_db.records import DeviceRecord, ProblemRecord


def claim(
    session: Session,
    device: DeviceRecord,
    problem: ProblemRecord,
    owner: str,
    seconds: float,
    dead_owner: str | None,
) -> SweepLeaseRow:
    """Take the lease if it is free, ran out, is ours already or ``dead_owner``'s; return it."""
    time = rows.now(session)
    row = _find_or_add(session, device, problem)
    free = row.owner in (None, owner, dead_owner)
    if free or row.expires_at is None or row.expires_at < time:
        row.owner = owner
        row.expires_at = time + timedelta(seconds=seconds)
        session.flush()
    return row


def renew(
    session: Session, device: DeviceRecord, problem: ProblemRecord, owner: str, seconds: float
) -> bool:
    """Extend a lease from now on; False if it is not this owner's any more."""
    row = _find_or_add(session, device, problem)
    if row.owner != owner:
        return False
    row.expires_at = rows.now(session) + timedelta(seconds=seconds)
    return True


def release(
    session: Session,
    device: DeviceRecord,
    problem: ProblemRecord,
    owner: str,
    finished: str | None,
) -> bool:
    """Give a lease back; False if it is not this owner's any more."""
    row = _find_or_add(session, device, problem)
    if row.owner != owner:
        return False
    row.owner = row.expires_at = None
    if finished is not None:
        row.finished = finished
        row.finished_at = rows.now(session)
    return True


def _find_or_add(session: Session, device: DeviceRecord, problem: ProblemRecord) -> SweepLeaseRow:
    identities = Identities(session)
    key = (identities.device(device), identities.problem(problem))
    row = session.get(SweepLeaseRow, key)
    if row is None:
        row = SweepLeaseRow(device_id=key[0], problem_id=key[1])
        session.add(row)
        session.flush()
    return row
