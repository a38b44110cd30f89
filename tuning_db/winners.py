"""Queries on winners and misses; each takes the session it runs in."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sqlalchemy import delete, func, literal, select, update
from sqlalchemy.orm import Session

from flce_tune.tuning_db import rows
from flce_tune.tuning_db.identities import Identities, find_device, find_problem
from flce_tune.tuning_db.measurements import matching
from flce_tune.tuning_db.models import CounterRow, DeviceRow, MeasurementRow, MissRow, WinnerRow
from flce_tune.tuning_db.records import DeviceRecord, Miss, ProblemRecord, Status, Winner

_COUNTS_WINNERS = CounterRow.name == "winners"


def replace_winners(
    session: Session, device: DeviceRecord, problem: ProblemRecord, winners: Sequence[Winner]
) -> None:
    """Make ``winners`` the whole front of this device and problem.

    Raises:
        ValueError: a winner's measurement is not stored, not ok, or of another device or problem.
    """
    here = matching(device, problem, None, 0)
    front = select(MeasurementRow.id).where(*here)
    session.execute(delete(WinnerRow).where(WinnerRow.measurement_id.in_(front)))
    now = rows.now(session)
    for winner in winners:
        number = winner.measurement.id
        eligible = front.where(MeasurementRow.id == number, MeasurementRow.status == Status.OK)
        if number is None or session.scalars(eligible).one_or_none() is None:
            raise ValueError(
                f"a winner needs a stored measurement with status ok of {device} and {problem}; "
                f"got id {number} ({winner.measurement.status.value})"
            )
        session.add(
            WinnerRow(
                measurement_id=number,
                default_ms=winner.default_ms,
                eager_ms=winner.eager_ms,
                verified=winner.verified,
                updated_at=now,
            )
        )
    session.execute(update(CounterRow).where(_COUNTS_WINNERS).values(value=CounterRow.value + 1))
    session.flush()


def version(session: Session) -> int:
    """Read the number that grows whenever winners change."""
    return session.scalars(select(CounterRow.value).where(_COUNTS_WINNERS)).one()


def find_winners(
    session: Session,
    device: DeviceRecord | None = None,
    architecture: str | None = None,
    problem: ProblemRecord | None = None,
) -> list[Winner]:
    """List winners, fastest first."""
    query = (
        select(WinnerRow)
        .join(WinnerRow.measurement)
        .where(*matching(device, problem, None, 0))
        .order_by(MeasurementRow.median_ms, MeasurementRow.id)
    )
    if architecture == "cpu":
        query = query.join(MeasurementRow.device).where(DeviceRow.kind == "cpu")
    elif architecture is not None:
        digits = func.replace(DeviceRow.capability, ".", "")
        query = query.join(MeasurementRow.device).where(
            DeviceRow.kind != "cpu", literal("sm_").concat(digits) == architecture
        )
    return [rows.winner_record(row) for row in session.scalars(query)]


def note_misses(session: Session, misses: Iterable[Miss]) -> None:
    """Add to the counts of what the dispatcher had no exact winner for."""
    identities = Identities(session)
    for miss in misses:
        key = (identities.device(miss.device), identities.problem(miss.problem))
        row = session.get(MissRow, key)
        if row is None:
            row = MissRow(device_id=key[0], problem_id=key[1], count=0, last_seen=miss.last_seen)
            session.add(row)
        row.count += miss.count
        row.tokens = miss.tokens
        row.last_seen = max(row.last_seen, miss.last_seen)
        session.flush()


def find_misses(session: Session, device: DeviceRecord | None, limit: int) -> list[Miss]:
    """List misses, most frequent first."""
    query = select(MissRow).order_by(MissRow.count.desc(), MissRow.last_seen.desc()).limit(limit)
    if device is not None:
        query = query.where(MissRow.device_id == find_device(device))
    return [rows.miss_record(row) for row in session.scalars(query)]


def clear_miss(session: Session, device: DeviceRecord, problem: ProblemRecord) -> None:
    """Forget a miss."""
    session.execute(
        delete(MissRow).where(
            MissRow.device_id == find_device(device),
            MissRow.problem_id == find_problem(problem),
        )
    )
