"""The tables. Rows stay inside this package: ``rows.py`` turns them into records."""

from __future__ import annotations

from datetime import datetime, timezone
from enum import Enum as PyEnum
from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    CheckConstraint,
    DateTime,
    Dialect,
    Double,
    Enum,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    Text,
    UniqueConstraint,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column, relationship
from sqlalchemy.types import TypeDecorator

from flce_tune.tuning_db.records import JobState, Scope, Status

BIG_ID = BigInteger().with_variant(Integer, "sqlite")  # SQLite numbers only INTEGER keys itself


class UtcDateTime(TypeDecorator[datetime]):
    """An aware datetime, stored and returned in UTC on every backend."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """Store in UTC."""
        if value is not None and value.tzinfo is None:
            raise ValueError(f"a datetime with a time zone is needed, got {value!r}")
        return None if value is None else value.astimezone(timezone.utc)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """Return in UTC; SQLite has forgotten the zone."""
        if value is None:
            return None
        if value.tzinfo is None:
            return value.replace(tzinfo=timezone.utc)
        return value.astimezone(timezone.utc)


def _text_enum(kind: type[PyEnum]) -> Enum:
    """Store an enum as its value, in a plain text column that may gain values later."""
    return Enum(
        kind,
        native_enum=False,
        length=20,
        values_callable=lambda members: [member.value for member in members],
    )


class Base(DeclarativeBase):
    """What all tables share: names of constraints, column types of Python types."""

    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_name)s",
            "ck": "ck_%(table_name)s_%(constraint_name)s",
            "fk": "fk_%(table_name)s_%(column_0_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map = {  # noqa: RUF012 - SQLAlchemy reads it as a plain class attribute
        str: Text(),
        datetime: UtcDateTime(),
        float: Double(),
        Status: _text_enum(Status),
        JobState: _text_enum(JobState),
        Scope: _text_enum(Scope),
        dict[str, Any]: JSON(),
        list[float]: JSON(),
    }


class DeviceRow(Base):
    """A device model."""

    __tablename__ = "device"
    __table_args__ = (
        UniqueConstraint("kind", "name", "capability", "sm_count", "shared_memory_per_block"),
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    kind: Mapped[str]
    name: Mapped[str]
    capability: Mapped[str]
    sm_count: Mapped[int]
    shared_memory_per_block: Mapped[int]
    memory_bytes: Mapped[int] = mapped_column(BigInteger)


class ToolchainRow(Base):
    """The software a measurement was taken with."""

    __tablename__ = "toolchain"
    __table_args__ = (UniqueConstraint("torch", "triton", "cuda", "driver", "kernel_hash"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    torch: Mapped[str]
    triton: Mapped[str]
    cuda: Mapped[str]
    driver: Mapped[str]
    kernel_hash: Mapped[str]


class ProblemRow(Base):
    """A class of problems that shares winners."""

    __tablename__ = "problem"
    __table_args__ = (
        UniqueConstraint(
            "mode", "dtype", "accumulate", "hidden", "vocab", "token_bucket", "features"
        ),
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    mode: Mapped[str]
    dtype: Mapped[str]
    accumulate: Mapped[str]
    hidden: Mapped[int]
    vocab: Mapped[int]
    token_bucket: Mapped[int] = mapped_column(BigInteger)
    features: Mapped[str]  # sorted, joined by commas


class MeasurementRow(Base):
    """Append-only. The checks hold for whoever writes with plain SQL, too."""

    __tablename__ = "measurement"
    __table_args__ = (
        CheckConstraint("(status = 'ok') = (median_ms IS NOT NULL)", name="time_iff_ok"),
        # NaN sorts above every number in PostgreSQL, and SQLite stores it as NULL.
        CheckConstraint("median_ms > 0 AND median_ms < 1e300", name="time_is_finite"),
        Index(None, "problem_id", "device_id"),
        Index(None, "device_id"),
    )

    id: Mapped[int] = mapped_column(BIG_ID, primary_key=True)
    device_id: Mapped[int] = mapped_column(ForeignKey("device.id"))
    toolchain_id: Mapped[int] = mapped_column(ForeignKey("toolchain.id"))
    problem_id: Mapped[int] = mapped_column(ForeignKey("problem.id"))
    tokens: Mapped[int] = mapped_column(BigInteger)
    config: Mapped[str]  # canonical JSON, so that it can be compared
    status: Mapped[Status]
    samples_ms: Mapped[list[float]]
    median_ms: Mapped[float | None]
    spread_ms: Mapped[float | None]
    workspace_bytes: Mapped[int | None] = mapped_column(BigInteger)
    registers: Mapped[int | None]
    spills: Mapped[int | None]
    shared_memory: Mapped[int | None]
    errors: Mapped[dict[str, Any]]
    clocks_mhz: Mapped[int | None]
    message: Mapped[str]
    created_at: Mapped[datetime]

    device: Mapped[DeviceRow] = relationship(lazy="joined", innerjoin=True)
    toolchain: Mapped[ToolchainRow] = relationship(lazy="joined", innerjoin=True)
    problem: Mapped[ProblemRow] = relationship(lazy="joined", innerjoin=True)


class WinnerRow(Base):
    """Which measurements are winners; device and problem are the measurement's."""

    __tablename__ = "winner"

    measurement_id: Mapped[int] = mapped_column(
        BIG_ID, ForeignKey("measurement.id"), primary_key=True, autoincrement=False
    )
    default_ms: Mapped[float | None]
    eager_ms: Mapped[float | None]
    verified: Mapped[bool]
    updated_at: Mapped[datetime]

    measurement: Mapped[MeasurementRow] = relationship(lazy="joined", innerjoin=True)


class MissRow(Base):
    """What the dispatcher looked for and had no exact winner of."""

    __tablename__ = "miss"

    device_id: Mapped[int] = mapped_column(ForeignKey("device.id"), primary_key=True)
    problem_id: Mapped[int] = mapped_column(ForeignKey("problem.id"), primary_key=True)
    tokens: Mapped[int] = mapped_column(BigInteger)  # of the latest miss
    count: Mapped[int] = mapped_column(BigInteger)
    last_seen: Mapped[datetime]

    device: Mapped[DeviceRow] = relationship(lazy="joined", innerjoin=True)
    problem: Mapped[ProblemRow] = relationship(lazy="joined", innerjoin=True)


class SweepLeaseRow(Base):
    """Who sweeps a problem on a kind of device, and what the last sweep that ended was."""

    __tablename__ = "sweep_lease"

    device_id: Mapped[int] = mapped_column(ForeignKey("device.id"), primary_key=True)
    problem_id: Mapped[int] = mapped_column(ForeignKey("problem.id"), primary_key=True)
    owner: Mapped[str | None]
    expires_at: Mapped[datetime | None]
    finished: Mapped[str | None]
    finished_at: Mapped[datetime | None]


class JobRow(Base):
    """A tuning job and its lease."""

    __tablename__ = "job"
    __table_args__ = (Index(None, "state", "priority", "number"),)

    number: Mapped[int] = mapped_column(BIG_ID, primary_key=True)  # order of submission
    id: Mapped[str] = mapped_column(unique=True)
    idempotency_key: Mapped[str | None] = mapped_column(unique=True)
    spec: Mapped[dict[str, Any]]
    state: Mapped[JobState]
    priority: Mapped[int]
    message: Mapped[str]
    created_at: Mapped[datetime]
    started_at: Mapped[datetime | None]
    finished_at: Mapped[datetime | None]
    lease_owner: Mapped[str | None]
    lease_expires_at: Mapped[datetime | None]
    cancel_requested: Mapped[bool]
    attempts: Mapped[int]
    received: Mapped[int] = mapped_column(server_default="0")  # last report of the lease's owner


class JobEventRow(Base):
    """Something that happened to a job."""

    __tablename__ = "job_event"
    __table_args__ = (Index(None, "job_id", "id"),)

    id: Mapped[int] = mapped_column(BIG_ID, primary_key=True)
    job_id: Mapped[str] = mapped_column(ForeignKey("job.id"))
    kind: Mapped[str]
    data: Mapped[dict[str, Any]]
    created_at: Mapped[datetime]


class TokenRow(Base):
    """Who may use the service. A revoked token keeps its row, and so its name."""

    __tablename__ = "token"

    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(unique=True)
    digest: Mapped[str] = mapped_column(unique=True)
    scope: Mapped[Scope]
    created_at: Mapped[datetime]
    revoked_at: Mapped[datetime | None]


class CounterRow(Base):
    """How often something has changed; the revision that made the table made its rows."""

    __tablename__ = "counter"

    name: Mapped[str] = mapped_column(primary_key=True)
    value: Mapped[int] = mapped_column(BigInteger)
