"""Records as JSON and as cells of tables. Fields are named as in the service's answers."""

from __future__ import annotations

from typing import Any

from flce_tune.cli.units import format_bytes, format_interval, format_ms, format_speedup
from flce_tune.dispatch.convert import device_slug
from flce_tune.errors import InvalidConfigError
from flce_tune.kernels.config import Config
from flce_tune.kernels.problem import Problem
from flce_tune.sweep.interval import median_interval
from flce_tune.tuning_db.records import DeviceRecord, Measurement, ProblemRecord, Winner


def device_view(record: DeviceRecord) -> dict[str, Any]:
    """A device as JSON."""
    return {
        "id": device_slug(record),
        "kind": record.kind,
        "name": record.name,
        "capability": record.capability,
        "architecture": record.architecture,
        "sm_count": record.sm_count,
        "shared_memory_per_block": record.shared_memory_per_block,
        "memory_bytes": record.memory_bytes,
    }


def problem_view(problem: Problem) -> dict[str, Any]:
    """A problem as JSON."""
    return {
        "tokens": problem.tokens,
        "hidden": problem.hidden,
        "vocab": problem.vocab,
        "dtype": problem.dtype,
        "mode": problem.mode,
        "accumulate": problem.accumulate,
        "features": list(problem.features),
    }


def problem_record_view(record: ProblemRecord) -> dict[str, Any]:
    """A class of problems as JSON."""
    return {
        "mode": record.mode,
        "dtype": record.dtype,
        "accumulate": record.accumulate,
        "hidden": record.hidden,
        "vocab": record.vocab,
        "token_bucket": record.token_bucket,
        "features": list(record.features),
    }


def measurement_view(record: Measurement) -> dict[str, Any]:
    """A measurement as JSON."""
    return {
        "id": record.id,
        "device": device_slug(record.device),
        "device_name": record.device.name,
        "toolchain": {
            "torch": record.toolchain.torch,
            "triton": record.toolchain.triton,
            "cuda": record.toolchain.cuda,
            "driver": record.toolchain.driver,
            "kernel_hash": record.toolchain.kernel_hash,
        },
        "problem": problem_record_view(record.problem),
        "tokens": record.tokens,
        "config": dict(record.config),
        "status": record.status.value,
        "samples_ms": list(record.samples_ms),
        "median_ms": record.median_ms,
        "spread_ms": record.spread_ms,
        "interval_ms": median_interval(record.samples_ms),
        "workspace_bytes": record.workspace_bytes,
        "registers": record.registers,
        "spills": record.spills,
        "shared_memory": record.shared_memory,
        "errors": dict(record.errors),
        "clocks_mhz": record.clocks_mhz,
        "message": record.message,
        "created_at": record.created_at.isoformat() if record.created_at else None,
    }


def winner_view(record: Winner) -> dict[str, Any]:
    """A winner as JSON, with its speed-ups."""
    median = record.measurement.median_ms
    return {
        "measurement": measurement_view(record.measurement),
        "default_ms": record.default_ms,
        "eager_ms": record.eager_ms,
        "speedup_over_default": _ratio(record.default_ms, median),
        "speedup_over_eager": _ratio(record.eager_ms, median),
        "verified": record.verified,
        "updated_at": record.updated_at.isoformat() if record.updated_at else None,
    }


def _ratio(numerator: float | None, denominator: float | None) -> float | None:
    return numerator / denominator if numerator and denominator else None


def config_text(record: Measurement) -> str:
    """A stored config in words, as it is if this version cannot read it."""
    try:
        return str(Config.from_dict(record.config))
    except InvalidConfigError:
        return str(dict(record.config))


def problem_text(problem: Problem | ProblemRecord) -> str:
    """A problem in one line; only what is not usual is spelled out."""
    tokens = f"N={problem.tokens}" if isinstance(problem, Problem) else f"N≤{problem.token_bucket}"
    parts = [tokens, f"D={problem.hidden}", f"V={problem.vocab}", problem.dtype]
    if problem.mode != "train":
        parts.append(problem.mode)
    if problem.accumulate != "fp32":
        parts.append(f"accumulate={problem.accumulate}")
    parts += problem.features
    return " ".join(parts)


WINNER_COLUMNS = ("config", "ms", "95 %", "workspace", "vs default", "vs PyTorch")
WINNER_NUMBERS = WINNER_COLUMNS[1:]


def winner_cells(record: Winner) -> tuple[str, ...]:
    """A winner as a row of ``WINNER_COLUMNS``."""
    measured = record.measurement
    return (
        config_text(measured),
        format_ms(measured.median_ms),
        format_interval(median_interval(measured.samples_ms)),
        format_bytes(measured.workspace_bytes),
        format_speedup(record.default_ms, measured.median_ms),
        format_speedup(record.eager_ms, measured.median_ms),
    )
