"""Between rows and records."""

from __future__ import annotations

import json
from datetime import datetime, timezone
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from flce_tune.tuning_db import models
from flce_tune.tuning_db.identities import Identities
from flce_tune.tuning_db.records import (
    DeviceRecord,
    Job,
    JobEvent,
    Measurement,
    Miss,
    ProblemRecord,
    SweepLease,
    Token,
    ToolchainRecord,
    Winner,
    canonical_config,
)


def now(session: Session) -> datetime:
    """Read the clock all users of the database share: the server's, or this host's for a file."""
    if session.get_bind().dialect.name == "sqlite":
        return datetime.now(timezone.utc)
    time: datetime = session.scalars(select(func.clock_timestamp())).one()
    return time.astimezone(timezone.utc)


def storable(text: str) -> str:
    """Replace what PostgreSQL refuses in text (NUL) and UTF-8 cannot say (lone surrogates)."""
    return text.replace("\0", "\ufffd").encode("utf-8", "replace").decode("utf-8")


def device_record(row: models.DeviceRow) -> DeviceRecord:
    """Turn a row into a record."""
    return DeviceRecord(
        kind=row.kind,
        name=row.name,
        capability=row.capability,
        sm_count=row.sm_count,
        shared_memory_per_block=row.shared_memory_per_block,
        memory_bytes=row.memory_bytes,
    )


def toolchain_record(row: models.ToolchainRow) -> ToolchainRecord:
    """Turn a row into a record."""
    return ToolchainRecord(row.torch, row.triton, row.cuda, row.driver, row.kernel_hash)


def problem_record(row: models.ProblemRow) -> ProblemRecord:
    """Turn a row into a record."""
    return ProblemRecord(
        mode=row.mode,
        dtype=row.dtype,
        accumulate=row.accumulate,
        hidden=row.hidden,
        vocab=row.vocab,
        token_bucket=row.token_bucket,
        features=tuple(filter(None, row.features.split(","))),
    )


def measurement_record(row: models.MeasurementRow) -> Measurement:
    """Turn a row into a record."""
    return Measurement(
        device=device_record(row.device),
        toolchain=toolchain_record(row.toolchain),
        problem=problem_record(row.problem),
        tokens=row.tokens,
        config=json.loads(row.config),
        status=row.status,
        samples_ms=tuple(row.samples_ms),
        median_ms=row.median_ms,
        spread_ms=row.spread_ms,
        workspace_bytes=row.workspace_bytes,
        registers=row.registers,
        spills=row.spills,
        shared_memory=row.shared_memory,
        errors=row.errors,
        clocks_mhz=row.clocks_mhz,
        message=row.message,
        created_at=row.created_at,
        id=row.id,
    )


def measurement_values(
    record: Measurement, identities: Identities, created_at: datetime
) -> dict[str, Any]:
    """Turn a record into a new row's values; its device, toolchain and problem are added if new."""
    return {
        "device_id": identities.device(record.device),
        "toolchain_id": identities.toolchain(record.toolchain),
        "problem_id": identities.problem(record.problem),
        "tokens": record.tokens,
        "config": canonical_config(record.config),
        "status": record.status,
        "samples_ms": list(record.samples_ms),
        "median_ms": record.median_ms,
        "spread_ms": record.spread_ms,
        "workspace_bytes": record.workspace_bytes,
        "registers": record.registers,
        "spills": record.spills,
        "shared_memory": record.shared_memory,
        "errors": dict(record.errors),
        "clocks_mhz": record.clocks_mhz,
        "message": storable(record.message),
        "created_at": created_at,
    }


def winner_record(row: models.WinnerRow) -> Winner:
    """Turn a row into a record."""
    return Winner(
        measurement=measurement_record(row.measurement),
        default_ms=row.default_ms,
        eager_ms=row.eager_ms,
        verified=row.verified,
        updated_at=row.updated_at,
    )


def miss_record(row: models.MissRow) -> Miss:
    """Turn a row into a record."""
    return Miss(
        device=device_record(row.device),
        problem=problem_record(row.problem),
        tokens=row.tokens,
        count=row.count,
        last_seen=row.last_seen,
    )


def lease_record(row: models.SweepLeaseRow) -> SweepLease:
    """Turn a row into a record."""
    return SweepLease(row.owner, row.expires_at, row.finished, row.finished_at)


def job_record(row: models.JobRow) -> Job:
    """Turn a row into a record."""
    return Job(
        id=row.id,
        spec=row.spec,
        state=row.state,
        priority=row.priority,
        idempotency_key=row.idempotency_key,
        message=row.message,
        created_at=row.created_at,
        started_at=row.started_at,
        finished_at=row.finished_at,
        lease_owner=row.lease_owner,
        lease_expires_at=row.lease_expires_at,
        cancel_requested=row.cancel_requested,
        attempts=row.attempts,
    )


def event_record(row: models.JobEventRow) -> JobEvent:
    """Turn a row into a record."""
    return JobEvent(
        id=row.id, job_id=row.job_id, kind=row.kind, data=row.data, created_at=row.created_at
    )


def token_record(row: models.TokenRow) -> Token:
    """Turn a row into a record."""
    return Token(row.name, row.digest, row.scope, row.created_at, row.revoked_at)
