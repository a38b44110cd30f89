"""The values that cross the HTTP boundary. Times are milliseconds, sizes bytes, dates UTC."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, model_validator
from typing_extensions import Self

from flce_tune.dispatch.convert import device_slug
from flce_tune.kernels.problem import FEATURES, Accumulate, Mode, Problem, token_bucket
from flce_tune.sweep.interval import median_interval
from flce_tune.tuning_db.records import (
    DeviceRecord,
    Job,
    JobState,
    Measurement,
    Status,
    Winner,
)

DtypeName = Literal["bfloat16", "float16", "float32", "float64"]
Feature = Literal["bias", "softcap", "label_smoothing", "class_weight", "per_token", "statistics"]
Size = Annotated[int, Field(ge=1, le=2**31 - 1)]
Selector = Annotated[
    str,
    Field(
        pattern=r"^(auto|cpu|cuda(:[0-9]{1,2})?|sm_[0-9]{2,3}|(cpu|cuda)-[a-z0-9.-]{1,200})$",
        description="which device does it: any (auto: a GPU where there is one), a kind, one of "
        "the machine that takes the job (cuda:1), an architecture (sm_90), or a device by its id; "
        "the job waits for a machine that has it",
        examples=["auto", "sm_90"],
    ),
]
Interval = Annotated[
    tuple[float, float] | None,
    Field(
        description="95 % confidence interval of the median; null for too few samples",
        examples=[[17.37, 18.59]],
    ),
]
T = TypeVar("T")

MAX_TIME_LIMIT_S = 7 * 24 * 3600


class Model(BaseModel):
    """Read from records, written as JSON."""

    model_config = ConfigDict(from_attributes=True)


class Page(BaseModel, Generic[T]):
    """Part of a list; pass ``next`` back as the cursor for the part that follows."""

    items: list[T]
    next: str | None = Field(None, description="cursor of the next page; null on the last one")


class DeviceView(Model):
    """A device model that measurements exist for."""

    id: str = Field(
        description="as in /v1/snapshots/{device}", examples=["cuda-nvidia-h200-9.0-132-232448"]
    )
    kind: str
    name: str
    capability: str
    architecture: str
    sm_count: int
    shared_memory_per_block: int
    memory_bytes: int

    @classmethod
    def of(cls, record: DeviceRecord) -> DeviceView:
        """View a record, with the name it has in addresses."""
        return cls(
            id=device_slug(record),
            kind=record.kind,
            name=record.name,
            capability=record.capability,
            architecture=record.architecture,
            sm_count=record.sm_count,
            shared_memory_per_block=record.shared_memory_per_block,
            memory_bytes=record.memory_bytes,
        )


class ToolchainView(Model):
    """The software a measurement was taken with."""

    torch: str
    triton: str
    cuda: str
    driver: str
    kernel_hash: str


class ProblemView(Model):
    """A class of problems that shares winners."""

    mode: str
    dtype: str
    accumulate: str
    hidden: int
    vocab: int
    token_bucket: int
    features: tuple[str, ...]


class MeasurementView(Model):
    """One config timed, or failed, on one problem and device."""

    id: int | None
    device: str = Field(description="the device's id")
    device_name: str
    toolchain: ToolchainView
    problem: ProblemView
    tokens: int
    config: dict[str, Any]
    status: Status
    samples_ms: tuple[float, ...]
    median_ms: float | None
    spread_ms: float | None
    interval_ms: Interval
    workspace_bytes: int | None
    registers: int | None
    spills: int | None
    shared_memory: int | None
    errors: dict[str, float]
    clocks_mhz: int | None
    message: str
    created_at: datetime | None

    @classmethod
    def of(cls, record: Measurement) -> MeasurementView:
        """View a record."""
        worked_out = {
            "device": device_slug(record.device),
            "device_name": record.device.name,
            "interval_ms": median_interval(record.samples_ms),
        }
        stored = {n: getattr(record, n) for n in cls.model_fields if n not in worked_out}
        return cls.model_validate(stored | worked_out)


class WinnerView(Model):
    """A measurement on the time/workspace Pareto front."""

    measurement: MeasurementView
    default_ms: float | None
    eager_ms: float | None
    speedup_over_default: float | None
    speedup_over_eager: float | None
    verified: bool
    updated_at: datetime | None

    @classmethod
    def of(cls, record: Winner) -> WinnerView:
        """View a record, with its speed-ups."""
        median = record.measurement.median_ms
        return cls(
            measurement=MeasurementView.of(record.measurement),
            default_ms=record.default_ms,
            eager_ms=record.eager_ms,
            speedup_over_default=_ratio(record.default_ms, median),
            speedup_over_eager=_ratio(record.eager_ms, median),
            verified=record.verified,
            updated_at=record.updated_at,
        )


def _ratio(numerator: float | None, denominator: float | None) -> float | None:
    return numerator / denominator if numerator and denominator else None


class ProblemSpec(BaseModel):
    """One linear cross-entropy to tune."""

    model_config = ConfigDict(extra="forbid")

    tokens: Size = Field(description="N")
    hidden: Size = Field(description="D")
    vocab: Size = Field(description="V")
    dtype: DtypeName = "bfloat16"
    mode: Mode = "train"
    accumulate: Accumulate = "fp32"
    features: list[Feature] = Field([], max_length=len(FEATURES))

    def problem(self) -> Problem:
        """As the kernels know it."""
        return Problem(
            tokens=self.tokens,
            hidden=self.hidden,
            vocab=self.vocab,
            dtype=self.dtype,
            mode=self.mode,
            accumulate=self.accumulate,
            features=tuple(sorted(set(self.features))),
        )

    @classmethod
    def of(cls, problem: Problem) -> ProblemSpec:
        """The other way round."""
        return cls.model_validate(
            {name: getattr(problem, name) for name in cls.model_fields}
            | {"features": [*problem.features]}
        )


class JobOptions(BaseModel):
    """How thorough the sweep is."""

    model_config = ConfigDict(extra="forbid")

    strategies: list[str] | None = Field(None, min_length=1, max_length=16, description="null: all")
    budget: Annotated[int, Field(ge=1, le=1_000_000)] | None = Field(
        None, description="configs to measure at most; null: the whole space"
    )
    quick: bool = False
    time_limit_s: Annotated[float, Field(ge=1, le=MAX_TIME_LIMIT_S)] | None = Field(
        None,
        description="of one problem; null: 180, 30 if quick, none with a budget. What it left "
        "unmeasured, another job goes on with",
    )
    timeout_s: float = Field(60, gt=0, le=3600, description="of one config")
    seed: int = Field(0, ge=0, le=2**31 - 1)


class JobSpec(BaseModel):
    """What a job does, complete: the sweep needs nothing else to know."""

    device: Selector = "auto"
    problems: list[ProblemSpec] = Field(min_length=1, max_length=256)
    options: JobOptions = JobOptions()
    preset: str | None = Field(None, description="the preset the problems came from")
    missed: int | None = Field(None, description="how many misses were asked for, if they were")


class JobRequest(BaseModel):
    """A job to submit: problems spelled out, a preset and token counts, or what training missed."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "examples": [
                {"preset": "llama3-8b", "tokens": [4096, 16384], "options": {"quick": True}},
                {"missed": 10, "device": "sm_90"},
            ]
        },
    )

    device: Selector = "auto"
    problems: list[ProblemSpec] = Field([], max_length=256)
    preset: str | None = Field(None, max_length=100)
    missed: int | None = Field(
        None,
        ge=1,
        le=256,
        description="so many of the problems that training missed most on such a device, as in "
        "/v1/misses",
    )
    tokens: list[Size] = Field(
        [], max_length=64, description="N, one problem each; by default the preset's own"
    )
    dtype: DtypeName | None = Field(None, description="by default the preset's own")
    mode: Mode = Field("train", description="for a preset")
    options: JobOptions = JobOptions()
    priority: int = Field(
        0, ge=-1000, le=1000, description="larger runs first; above 0 needs scope admin"
    )

    @model_validator(mode="after")
    def _one_source(self) -> JobRequest:
        sources = (bool(self.problems), self.preset is not None, self.missed is not None)
        if sum(sources) != 1:
            raise ValueError("give one of 'problems', 'preset' and 'missed'")
        if self.preset is None and (self.tokens or self.dtype):
            raise ValueError("'tokens' and 'dtype' go with a 'preset'; each problem has its own")
        return self


class JobView(Model):
    """A tuning job and how far it is."""

    id: str
    state: JobState
    spec: JobSpec
    priority: int
    message: str
    cancel_requested: bool
    created_at: datetime | None
    started_at: datetime | None
    finished_at: datetime | None

    @classmethod
    def of(cls, job: Job) -> JobView:
        """View a record."""
        return cls.model_validate(job)


class DeviceQuery(BaseModel):
    """Which device; without either, the one this service runs on."""

    device: str | None = Field(None, min_length=1, max_length=200, description="id or name")
    architecture: str | None = Field(None, pattern=r"^(cpu|sm_[0-9]{2,3})$", examples=["sm_90"])

    @model_validator(mode="after")
    def _one_device(self) -> Self:
        if self.device is not None and self.architecture is not None:
            raise ValueError("give 'device' or 'architecture', not both")
        return self


class ConfigQuery(DeviceQuery):
    """Which problem on which device, and how much memory it may take."""

    model_config = ConfigDict(extra="forbid")

    tokens: Size = Field(description="N")
    preset: str | None = Field(None, max_length=100, description="instead of hidden and vocab")
    hidden: Size | None = Field(None, description="D")
    vocab: Size | None = Field(None, description="V")
    dtype: DtypeName | None = Field(None, description="default: the preset's, else bfloat16")
    mode: Mode = "train"
    accumulate: Accumulate = "fp32"
    features: list[Feature] = Field([], max_length=len(FEATURES))
    workspace_limit: int | None = Field(None, ge=0, le=2**63 - 1, description="bytes")

    @model_validator(mode="after")
    def _one_shape(self) -> Self:
        given = (self.hidden is not None, self.vocab is not None)
        if given != ((False, False) if self.preset is not None else (True, True)):
            raise ValueError("give either 'preset' or both 'hidden' and 'vocab'")
        return self


class ResultQuery(DeviceQuery):
    """Filters of stored results; without a device, those of all devices."""

    model_config = ConfigDict(extra="forbid")

    mode: Mode | None = None
    dtype: DtypeName | None = None
    hidden: Size | None = Field(None, description="D")
    vocab: Size | None = Field(None, description="V")
    tokens: Size | None = Field(None, description="N; results of its bucket")

    def fits(self, measurement: Measurement) -> bool:
        """Whether this measurement is asked for, apart from the device's name."""
        problem = measurement.problem
        return (
            self.architecture in (None, measurement.device.architecture)
            and self.mode in (None, problem.mode)
            and self.dtype in (None, problem.dtype)
            and self.hidden in (None, problem.hidden)
            and self.vocab in (None, problem.vocab)
            and (self.tokens is None or token_bucket(self.tokens) == problem.token_bucket)
        )


class MeasurementQuery(ResultQuery):
    """Filters and paging of measurements. A page may be short, or empty, and yet have a next."""

    status: Status | None = None
    cursor: int = Field(0, ge=0, le=2**63 - 1, description="'next' of the page before")
    limit: int = Field(100, ge=1, le=1000)


class BestView(BaseModel):
    """The config to use, and why."""

    config: dict[str, Any]
    rule: str = Field(description="which rule of the look-up chose it", examples=["exact"])
    detail: str
    expected_ms: float | None = Field(description="median when measured; null if it never was")
    expected_interval_ms: Interval
    workspace_bytes: int = Field(description="for exactly the tokens asked about")
    device: DeviceView
    problem: ProblemSpec
    winner: WinnerView | None = Field(description="the measurement behind it; null for a default")


class SkippedView(BaseModel):
    """A stored config that a rule found and did not take."""

    config: str
    origin: str
    reason: str
    broken: bool


class StepView(BaseModel):
    """One rule, and what came of it."""

    rule: str
    outcome: str
    detail: str
    skipped: list[SkippedView]


class ExplanationView(BaseModel):
    """Every rule in the order tried, and the choice they led to."""

    problem: dict[str, Any]
    device: dict[str, Any]
    workspace_limit: int | None
    source: str
    config: dict[str, Any]
    rule: str
    detail: str
    stale: str
    steps: list[StepView]


class PresetView(BaseModel):
    """Sizes of a model's output layer."""

    name: str
    hidden: int
    vocab: int
    softcap: float | None
    tokens: list[int]
    dtype: str
    features: list[str]


class ImportView(Model):
    """What an import did."""

    measurements: int = Field(description="added")
    winners: int = Field(description="added, as unverified")
    skipped: int = Field(description="known already, or worse than what is verified here")
