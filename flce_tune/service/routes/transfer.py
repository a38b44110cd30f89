"""Whole databases, or parts of them, in and out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import anyio.to_thread
from fastapi import APIRouter, Query, Request
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, ConfigDict, Field, model_validator
from typing_extensions import Self

from flce_tune.dispatch.convert import problem_record
from flce_tune.errors import InterchangeError
from flce_tune.kernels.problem import FEATURES, Accumulate, Mode
from flce_tune.service import space
from flce_tune.service.auth import Worker
from flce_tune.service.dependencies import LookupDep, StoreDep
from flce_tune.service.devices import find_device
from flce_tune.service.errors import invalid, responses
from flce_tune.service.schemas import DtypeName, Feature, ImportView, ProblemSpec, Size
from flce_tune.service.uploads import DOCUMENT_BODY, uploaded
from flce_tune.tuning_db.interchange import ImportReport, export_pieces, import_file
from flce_tune.tuning_db.records import ProblemRecord

router = APIRouter(prefix="/v1", tags=["transfer"])

_BLOCK = 1 << 16  # characters sent at once


class ExportQuery(BaseModel):
    """What to export; by default everything."""

    model_config = ConfigDict(extra="forbid")

    device: str | None = Field(None, min_length=1, max_length=200, description="id or name")
    winners_only: bool = False
    tokens: Size | None = Field(None, description="N: of this problem's class only")
    hidden: Size | None = Field(None, description="D")
    vocab: Size | None = Field(None, description="V")
    dtype: DtypeName = "bfloat16"
    mode: Mode = "train"
    accumulate: Accumulate = "fp32"
    features: list[Feature] = Field([], max_length=len(FEATURES))

    def problem(self) -> ProblemRecord | None:
        """The class of problems that is wanted; None: all."""
        if self.tokens is None:
            return None
        fields = self.model_dump(include=set(ProblemSpec.model_fields))
        return problem_record(ProblemSpec.model_validate(fields).problem())

    @model_validator(mode="after")
    def _whole_problem(self) -> Self:
        if len({self.tokens is None, self.hidden is None, self.vocab is None}) > 1:
            raise ValueError("a problem has 'tokens', 'hidden' and 'vocab'")
        return self


_DOCUMENT: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "an export document, schema flce-tune/1",
        "content": {"application/json": {"schema": {"type": "object"}}},
    }
}


@router.get(
    "/export", response_class=StreamingResponse, responses=responses(404, 409, 422, 503) | _DOCUMENT
)
def export(query: Annotated[ExportQuery, Query()], store: StoreDep) -> StreamingResponse:
    """Send measurements and winners as one document, for another database."""
    device = find_device(store.devices(), query.device) if query.device else None
    pieces = export_pieces(
        store, device=device, problem=query.problem(), winners_only=query.winners_only
    )
    return StreamingResponse(_blocks(pieces), media_type="application/json")


@router.post(
    "/import",
    dependencies=[Worker],
    openapi_extra=DOCUMENT_BODY,
    responses=responses(401, 403, 413, 422, 429, 503),
)
async def import_(request: Request, store: StoreDep, lookup: LookupDep) -> ImportView:
    """Add the measurements and winners of a document; what is known already is skipped.

    Each measurement must be one that can be had: its config in the space declared for its problem
    and device. Nothing is added unless the whole document is valid. Winners count as unverified.
    """
    async with uploaded(request) as file:

        def run() -> ImportReport:
            try:
                return import_file(store, file, source="document", check=space.check)
            except InterchangeError as error:
                raise invalid(str(error)) from error

        report = await anyio.to_thread.run_sync(run)
    lookup.forget()
    return ImportView.model_validate(report)


def _blocks(pieces: Iterator[str]) -> Iterator[str]:
    """The same text in larger pieces: each is handed from a thread to the event loop."""
    block: list[str] = []
    size = 0
    for piece in pieces:
        block.append(piece)
        size += len(piece)
        if size >= _BLOCK:
            yield "".join(block)
            block, size = [], 0
    yield "".join(block)
