"""Deletes measurements that nothing needs any more."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy import ColumnElement, delete, func, or_, select
from sqlalchemy.orm import Session

from flce_tune.tuning_db import rows
from flce_tune.tuning_db.identities import find_toolchain
from flce_tune.tuning_db.models import MeasurementRow, WinnerRow
from flce_tune.tuning_db.records import Status, ToolchainRecord

UNFINISHED = timedelta(days=1)
"""A toolchain without winners may belong to a sweep that is still running, for so long."""


@dataclass(frozen=True, slots=True)
class TrimReport:
    """Measurements that were deleted, or would be, and those that stay."""

    abandoned: int  # of a toolchain that is not in use
    old: int  # the others: timed too long ago
    kept: int


def trim(
    session: Session,
    *,
    older_than: timedelta | None,
    in_use: Collection[ToolchainRecord],
    dry_run: bool,
) -> TrimReport:
    """Delete what is neither a winner nor needed to know what fails; see ``Store.trim``."""
    now = rows.now(session)
    is_abandoned = _abandoned(now - UNFINISHED, in_use)
    abandoned = _count(session, [is_abandoned])
    total = _count(session, [])
    doomed = [is_abandoned]
    if older_than is not None:
        doomed.append(_loser(MeasurementRow.status == Status.OK, now - older_than))
    gone = _count(session, [or_(*doomed)])
    if not dry_run:
        session.execute(
            delete(MeasurementRow).where(or_(*doomed)).execution_options(synchronize_session=False)
        )
    return TrimReport(abandoned, gone - abandoned, total - gone)


def _abandoned(before: datetime, in_use: Collection[ToolchainRecord]) -> ColumnElement[bool]:
    """Of a toolchain that neither a winner nor the caller uses; failures, too."""
    used = select(MeasurementRow.toolchain_id).join(
        WinnerRow, WinnerRow.measurement_id == MeasurementRow.id
    )
    unused: ColumnElement[bool] = MeasurementRow.toolchain_id.not_in(used)
    for toolchain in in_use:
        # Unlike "!=", true where the toolchain has measured nothing yet.
        unused &= MeasurementRow.toolchain_id.is_distinct_from(find_toolchain(toolchain))
    return _loser(unused, before)


def _loser(condition: ColumnElement[bool], before: datetime) -> ColumnElement[bool]:
    """Add that it is no winner and older than ``before``."""
    winners = select(WinnerRow.measurement_id)
    return condition & (MeasurementRow.created_at < before) & MeasurementRow.id.not_in(winners)


def _count(session: Session, conditions: list[ColumnElement[bool]]) -> int:
    return session.scalars(select(func.count(MeasurementRow.id)).where(*conditions)).one()
