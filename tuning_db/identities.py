"""What makes two rows the same device, toolchain or problem, and their ids."""

from __future__ import annotations

from typing import Any, TypeVar

from sqlalchemy import ScalarSelect, select
from sqlalchemy.orm import Session

from flce_tune.tuning_db import models
from flce_tune.tuning_db.records import DeviceRecord, ProblemRecord, ToolchainRecord

IdentityRow = TypeVar("IdentityRow", models.DeviceRow, models.ToolchainRow, models.ProblemRow)


def device_key(record: DeviceRecord) -> dict[str, Any]:
    """Columns that identify a device."""
    return {
        "kind": record.kind,
        "name": record.name,
        "capability": record.capability,
        "sm_count": record.sm_count,
        "shared_memory_per_block": record.shared_memory_per_block,
    }


def toolchain_key(record: ToolchainRecord) -> dict[str, Any]:
    """Columns that identify a toolchain."""
    return {
        "torch": record.torch,
        "triton": record.triton,
        "cuda": record.cuda,
        "driver": record.driver,
        "kernel_hash": record.kernel_hash,
    }


def problem_key(record: ProblemRecord) -> dict[str, Any]:
    """Columns that identify a problem."""
    return {
        "mode": record.mode,
        "dtype": record.dtype,
        "accumulate": record.accumulate,
        "hidden": record.hidden,
        "vocab": record.vocab,
        "token_bucket": record.token_bucket,
        "features": ",".join(record.features),
    }


def find_device(record: DeviceRecord) -> ScalarSelect[int]:
    """Build the subquery for a device's id; NULL if it is not there."""
    return select(models.DeviceRow.id).filter_by(**device_key(record)).scalar_subquery()


def find_toolchain(record: ToolchainRecord) -> ScalarSelect[int]:
    """Build the subquery for a toolchain's id; NULL if it is not there."""
    return select(models.ToolchainRow.id).filter_by(**toolchain_key(record)).scalar_subquery()


def find_problem(record: ProblemRecord) -> ScalarSelect[int]:
    """Build the subquery for a problem's id; NULL if it is not there."""
    return select(models.ProblemRow.id).filter_by(**problem_key(record)).scalar_subquery()


class Identities:
    """Ids of devices, toolchains and problems in one writing transaction; new ones are added."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._ids: dict[DeviceRecord | ToolchainRecord | ProblemRecord, int] = {}

    def device(self, record: DeviceRecord) -> int:
        """Find or add a device."""
        if record not in self._ids:
            key = device_key(record)
            new = models.DeviceRow(**key, memory_bytes=record.memory_bytes)
            self._ids[record] = self._find_or_add(new, key)
        return self._ids[record]

    def toolchain(self, record: ToolchainRecord) -> int:
        """Find or add a toolchain."""
        if record not in self._ids:
            key = toolchain_key(record)
            self._ids[record] = self._find_or_add(models.ToolchainRow(**key), key)
        return self._ids[record]

    def problem(self, record: ProblemRecord) -> int:
        """Find or add a problem."""
        if record not in self._ids:
            key = problem_key(record)
            self._ids[record] = self._find_or_add(models.ProblemRow(**key), key)
        return self._ids[record]

    def _find_or_add(self, new: IdentityRow, key: dict[str, Any]) -> int:
        row = type(new)
        found = self._session.scalars(select(row.id).filter_by(**key)).one_or_none()
        if found is not None:
            return found
        self._session.add(new)
        self._session.flush()
        return new.id
