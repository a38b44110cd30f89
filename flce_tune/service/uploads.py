"""Export documents that come as the body of a request; they may be larger than memory."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, BinaryIO, cast

import anyio.to_thread
from fastapi import Request

from flce_tune.service.errors import invalid

IN_MEMORY = 1 << 20  # bytes; more goes to disk

DOCUMENT_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "description": "an export document, schema flce-tune/1",
        "content": {"application/json": {"schema": {"type": "object"}}},
    }
}


@asynccontextmanager
async def uploaded(request: Request) -> AsyncIterator[BinaryIO]:
    """The body as a file, which is gone afterwards.

    Raises:
        ApiError: 422 if it does not say that it is JSON. Only who was allowed to by CORS can say
            so from another web page.
        HTTPException: 413 if it is too large.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise invalid(f"the body must be application/json, not {kind or 'of no declared type'}")
    with tempfile.SpooledTemporaryFile(IN_MEMORY) as file:
        async for block in request.stream():
            await anyio.to_thread.run_sync(file.write, block)
        yield cast(BinaryIO, file)
