"""What training jobs looked for and nothing was tuned for."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import BaseModel, ConfigDict, Field

from flce_tune.dispatch.convert import problem_record
from flce_tune.service.auth import Submitter
from flce_tune.service.dependencies import StoreDep
from flce_tune.service.errors import responses
from flce_tune.service.schemas import DeviceView, Page, ProblemSpec, ProblemView
from flce_tune.tuning_db.document import DevicePart
from flce_tune.tuning_db.records import DeviceRecord, Miss

router = APIRouter(prefix="/v1/misses", tags=["misses"])


class MissReport(BaseModel):
    """One problem that had no exact winner on one device."""

    model_config = ConfigDict(extra="forbid")

    device: DevicePart
    problem: ProblemSpec
    count: int = Field(1, ge=1, le=1_000_000, description="processes that missed it")


class MissReports(BaseModel):
    """A batch of them."""

    model_config = ConfigDict(extra="forbid")

    misses: list[MissReport] = Field(min_length=1, max_length=1000)


class MissView(BaseModel):
    """A miss, as counted so far."""

    device: DeviceView
    problem: ProblemView
    tokens: int = Field(description="of the latest one")
    count: int
    last_seen: datetime


@router.post(
    "",
    status_code=204,
    dependencies=[Submitter],
    responses=responses(400, 401, 403, 413, 422, 429, 503),
)
def report(body: MissReports, store: StoreDep) -> None:
    """Count misses, all or none."""
    now = datetime.now(timezone.utc)
    store.note_misses(
        Miss(
            device=DeviceRecord(**miss.device.model_dump()),
            problem=problem_record(miss.problem.problem()),
            tokens=miss.problem.tokens,
            count=miss.count,
            last_seen=now,
        )
        for miss in body.misses
    )


@router.get("", responses=responses(422, 503))
def list_misses(
    store: StoreDep, limit: Annotated[int, Query(ge=1, le=1000)] = 100
) -> Page[MissView]:
    """List misses, most frequent first: what to tune next."""
    return Page(
        items=[
            MissView(
                device=DeviceView.of(miss.device),
                problem=ProblemView.model_validate(miss.problem, from_attributes=True),
                tokens=miss.tokens,
                count=miss.count,
                last_seen=miss.last_seen,
            )
            for miss in store.misses(limit=limit)
        ]
    )
