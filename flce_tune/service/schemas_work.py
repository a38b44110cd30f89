"""What workers and the service tell each other."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, field_validator

from flce_tune.service.schemas import JobView, Selector

Owner = Annotated[
    str,
    Field(pattern=r"^[A-Za-z0-9._:-]{8,200}$", description="unique to one start of one worker"),
]
MAX_MEASUREMENTS = 1000


class Owned(BaseModel):
    """About a job that is the worker's."""

    model_config = ConfigDict(extra="forbid")

    owner: Owner


class ClaimRequest(Owned):
    """What the worker can do."""

    devices: list[Selector] = Field(min_length=1, max_length=100)


class ClaimView(BaseModel):
    """A job that is the worker's now."""

    job: JobView
    lease_seconds: float = Field(description="how long, unless it reports")


class EventPart(BaseModel):
    """Something that happened to a job."""

    model_config = ConfigDict(extra="forbid")

    number: int = Field(ge=1, le=2**31 - 1, description="grows from one to the worker's next")
    kind: Literal["progress", "measurement", "winners", "log"]
    data: dict[str, JsonValue]

    @field_validator("data")
    @classmethod
    def _plain(cls, data: dict[str, Any]) -> dict[str, Any]:
        if not _is_finite(data):
            raise ValueError("NaN and infinity are no JSON")
        return data


class ReportRequest(Owned):
    """That the worker lives, and what happened since."""

    events: list[EventPart] = Field([], max_length=1000)


class LeaseView(BaseModel):
    """What a worker must know."""

    lease_seconds: float
    cancel_requested: bool


class FinishRequest(Owned):
    """How the job ended."""

    state: Literal["succeeded", "failed", "cancelled"]
    message: str = Field("", max_length=100_000)


def _is_finite(value: object) -> bool:
    if isinstance(value, dict):
        return all(map(_is_finite, value.values()))
    if isinstance(value, list):
        return all(map(_is_finite, value))
    return not isinstance(value, float) or math.isfinite(value)
