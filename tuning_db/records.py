"""Frozen records: everything that enters or leaves the database.

ORM rows stay inside the package; these do not know SQL, and the rest of flce-tune does not know
the tables.
"""

from __future__ import annotations

import enum
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any


class Status(str, enum.Enum):
    """How the measurement of one config ended. Only ``ok`` has a time."""

    OK = "ok"
    COMPILE_ERROR = "compile_error"
    OUT_OF_RESOURCES = "out_of_resources"
    WRONG_RESULT = "wrong_result"
    TIMEOUT = "timeout"
    CRASH = "crash"
    OUT_OF_MEMORY = "out_of_memory"
    ERROR = "error"


class JobState(str, enum.Enum):
    """Life of a tuning job: queued → running → one of the other three."""

    QUEUED = "queued"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def final(self) -> bool:
        """Whether nothing more will happen to the job."""
        return self not in (JobState.QUEUED, JobState.RUNNING)


@dataclass(frozen=True, slots=True)
class DeviceRecord:
    """A device model. Identity: kind, name, capability, sm_count, shared_memory_per_block."""

    kind: str  # "cuda" or "cpu"
    name: str  # normalised
    capability: str  # "9.0"; "0.0" on a CPU
    sm_count: int
    shared_memory_per_block: int  # bytes
    memory_bytes: int = field(default=0, compare=False)  # recorded, not part of the identity

    @property
    def architecture(self) -> str:
        """``sm_90``, or ``cpu``."""
        return "cpu" if self.kind == "cpu" else "sm_" + self.capability.replace(".", "")


@dataclass(frozen=True, slots=True)
class ToolchainRecord:
    """The software a measurement was taken with. All fields are its identity."""

    torch: str
    triton: str  # "" where there is none
    cuda: str  # "" on a CPU
    driver: str  # "" on a CPU
    kernel_hash: str  # of the sources of flce_tune.kernels


@dataclass(frozen=True, slots=True)
class ProblemRecord:
    """A class of problems that shares winners. All fields are its identity."""

    mode: str  # "train", "train_frozen_weight", "eval"
    dtype: str
    accumulate: str  # "fp32", "weight_dtype"
    hidden: int  # D
    vocab: int  # V
    token_bucket: int  # N, rounded up to its bucket
    features: tuple[str, ...] = ()  # sorted

    def __post_init__(self) -> None:
        object.__setattr__(self, "features", tuple(sorted(self.features)))


@dataclass(frozen=True, slots=True)
class Measurement:
    """One config timed (or failed) on one problem, device and toolchain. Never changed.

    Raises ValueError for a time without ``ok``, ``ok`` without a time, or a number that is NaN or
    infinite: a failure is a status, never a magic time.
    """

    device: DeviceRecord
    toolchain: ToolchainRecord
    problem: ProblemRecord
    tokens: int  # the exact N measured
    config: Mapping[str, Any]  # Config.to_dict(); opaque here
    status: Status
    samples_ms: tuple[float, ...] = ()  # raw times; empty unless ok
    median_ms: float | None = None  # None unless ok; never NaN or infinite
    spread_ms: float | None = None  # half the interquartile range of the samples
    workspace_bytes: int | None = None  # peak beyond inputs and returned gradients, measured
    registers: int | None = None  # per thread, the largest of the config's kernels
    spills: int | None = None
    shared_memory: int | None = None  # bytes per block, likewise
    errors: Mapping[str, float] = field(default_factory=dict)  # relative, by output name
    clocks_mhz: int | None = None  # SM clock while it ran
    message: str = ""  # why it failed, or whose time this is
    created_at: datetime | None = None  # UTC; the store fills it in
    id: int | None = None  # the store fills it in

    def __post_init__(self) -> None:
        canonical_config(self.config)
        times = (*self.samples_ms, *(t for t in (self.median_ms, self.spread_ms) if t is not None))
        if self.status is Status.OK:
            if self.median_ms is None:
                raise ValueError("a measurement with status ok needs median_ms")
            if not self.median_ms > 0 or not all(0 <= time < math.inf for time in times):
                raise ValueError(
                    f"times must be finite, and the median above 0, got {times}; a config that "
                    f"failed has another status than ok and no time"
                )
        elif times:
            raise ValueError(f"only status ok has times, got {times} with {self.status.value}")
        for output, error in self.errors.items():
            if not math.isfinite(error):
                raise ValueError(
                    f"errors[{output!r}] is {error}: leave it out and say so in the message"
                )


@dataclass(frozen=True, slots=True)
class Winner:
    """A measurement on the time/workspace Pareto front of its problem and device."""

    measurement: Measurement
    default_ms: float | None = None  # the default config, in the same final race
    eager_ms: float | None = None  # plain PyTorch, in the same sweep; None where it did not fit
    verified: bool = True  # False: imported, not yet measured here
    updated_at: datetime | None = None  # UTC; the store fills it in


@dataclass(frozen=True, slots=True)
class Job:
    """A tuning job as submitted, and how far it is."""

    id: str  # UUID
    spec: Mapping[str, Any]  # validated by the service; opaque here
    state: JobState
    priority: int = 0  # larger first
    idempotency_key: str | None = None
    message: str = ""  # why it failed or was cancelled
    created_at: datetime | None = None
    started_at: datetime | None = None
    finished_at: datetime | None = None
    lease_owner: str | None = None
    lease_expires_at: datetime | None = None
    cancel_requested: bool = False
    attempts: int = 0  # times a worker claimed it; more than 1: a worker was lost


@dataclass(frozen=True, slots=True)
class JobEvent:
    """Something that happened to a job. ``id`` grows within the database."""

    id: int
    job_id: str
    kind: str  # "state", "progress", "measurement", "log"
    data: Mapping[str, Any]
    created_at: datetime


@dataclass(frozen=True, slots=True)
class SweepLease:
    """Who sweeps a problem on a kind of device, and what the last sweep of it was."""

    owner: str | None  # None: nobody
    expires_at: datetime | None  # of the owner's lease, unless it is renewed
    finished: str | None  # what the last sweep that ended said it was; None: there was none
    finished_at: datetime | None


@dataclass(frozen=True, slots=True)
class Miss:
    """A problem the dispatcher had no exact winner for."""

    device: DeviceRecord
    problem: ProblemRecord
    tokens: int
    count: int
    last_seen: datetime


_encode = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False).encode


def canonical_config(config: Mapping[str, Any]) -> str:
    """Write a config as JSON with sorted keys: equal configs give equal text.

    Raises:
        ValueError: it holds something JSON has no word for, NaN and infinity included.
    """
    try:
        return _encode(config)
    except (TypeError, ValueError) as error:
        raise ValueError(f"a config must be plain JSON ({error}), got {config!r}") from error


class Scope(str, enum.Enum):
    """What a token allows; each allows what those before it do, too."""

    READ = "read"
    SUBMIT = "submit"
    WORK = "work"
    ADMIN = "admin"

    def covers(self, other: Scope) -> bool:
        """Whether this is enough where ``other`` is needed."""
        scopes = list(Scope)
        return scopes.index(self) >= scopes.index(other)


@dataclass(frozen=True, slots=True)
class Token:
    """A token of the service, without the secret: only its digest is known."""

    name: str
    digest: str  # SHA-256, hex
    scope: Scope
    created_at: datetime
    revoked_at: datetime | None = None
