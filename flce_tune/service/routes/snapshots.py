"""A device's winners as one document, for training jobs to fetch and keep."""

from __future__ import annotations

import hashlib
from typing import Annotated

from fastapi import APIRouter, Header, Path, Response

from flce_tune.service.dependencies import StoreDep
from flce_tune.service.devices import find_device
from flce_tune.service.errors import responses
from flce_tune.tuning_db.interchange import export_json

router = APIRouter(prefix="/v1/snapshots", tags=["snapshots"])

_HEADERS = {"ETag": {"schema": {"type": "string"}}}


@router.get(
    "/{device}",
    response_class=Response,
    responses=responses(404, 409, 422, 503)
    | {
        200: {
            "description": "an export document, schema flce-tune/1",
            "headers": _HEADERS,
            "content": {"application/json": {"schema": {"type": "object"}}},
        },
        304: {"description": "unchanged since the given ETag", "headers": _HEADERS},
    },
)
def snapshot(
    device: Annotated[str, Path(min_length=1, max_length=300, description="id or name")],
    store: StoreDep,
    if_none_match: Annotated[str | None, Header(max_length=2000)] = None,
) -> Response:
    """Send the winners of a device, or 304 if the caller's copy is still good."""
    record = find_device(store.devices(), device)
    body = export_json(store, device=record, winners_only=True).encode()
    etag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
    headers = {"ETag": etag, "Cache-Control": "no-cache"}
    if if_none_match is not None and _contains(if_none_match, etag):
        return Response(status_code=304, headers=headers)
    return Response(body, media_type="application/json", headers=headers)


def _contains(if_none_match: str, etag: str) -> bool:
    given = [value.strip().removeprefix("W/") for value in if_none_match.split(",")]
    return "*" in given or etag in given
