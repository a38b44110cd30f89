"""Errors as ``application/problem+json`` (RFC 9457), each kind with a stable ``type``."""

from __future__ import annotations

import logging
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException

from flce_tune.errors import SchemaMismatchError, StoreError

MEDIA_TYPE = "application/problem+json"
TYPE_PREFIX = "urn:flce-tune:error:"

log = logging.getLogger(__name__)


class FieldError(BaseModel):
    """One value that was refused."""

    location: str = Field(description="where it stood, e.g. body.problems.0.tokens")
    message: str


class ErrorDocument(BaseModel):
    """What every answer of status 400 and above carries."""

    type: str = Field(description="stable name of this kind of error", examples=["about:blank"])
    title: str
    status: int
    detail: str = Field(description="what came, what is accepted, what to do")
    errors: list[FieldError] = Field(default=[], description="one per refused value")


class ApiError(Exception):
    """An answer other than success; ``kind`` becomes the ``type`` of its document."""

    def __init__(
        self, status: int, kind: str, detail: str, *, headers: dict[str, str] | None = None
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.kind = kind
        self.detail = detail
        self.headers = headers


def not_found(kind: str, detail: str) -> ApiError:
    """A 404 of the given kind."""
    return ApiError(404, kind, detail)


def invalid(detail: str) -> ApiError:
    """A 422 for values that are well formed, but do not fit each other or this installation."""
    return ApiError(422, "invalid-request", detail)


def responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Declare error answers of a route for the OpenAPI document."""
    return {
        status: {"model": ErrorDocument, "description": HTTPStatus(status).phrase}
        for status in statuses
    }


def install(app: FastAPI) -> None:
    """Make every error of ``app`` answer with an ``ErrorDocument``."""
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(StoreError, _store_error)


def _answer(
    status: int,
    kind: str,
    detail: str,
    *,
    errors: list[FieldError] | None = None,
    headers: dict[str, str] | None = None,
) -> JSONResponse:
    document = ErrorDocument(
        type=TYPE_PREFIX + kind,
        title=HTTPStatus(status).phrase,
        status=status,
        detail=detail,
        errors=errors or [],
    )
    return JSONResponse(document.model_dump(), status, headers=headers, media_type=MEDIA_TYPE)


def _api_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, ApiError)
    return _answer(error.status, error.kind, error.detail, headers=error.headers)


def _validation_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    errors = [
        FieldError(location=".".join(map(str, e["loc"])), message=e["msg"])
        for e in error.errors()[:20]
    ]
    detail = "; ".join(f"{e.location}: {e.message}" for e in errors[:3])
    return _answer(422, "invalid-request", detail, errors=errors)


def _http_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    kind = HTTPStatus(error.status_code).phrase.lower().replace(" ", "-")
    headers = dict(error.headers) if error.headers else None
    return _answer(error.status_code, kind, str(error.detail), headers=headers)


def _store_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, StoreError)
    return _api_error(request, store_failure(error))


def store_failure(error: StoreError) -> ApiError:
    """What to tell a caller whose request the database failed; the log gets the rest."""
    log.error("database: %s", error)
    if isinstance(error, SchemaMismatchError):
        return ApiError(503, "schema-mismatch", str(error))
    # The message may hold the database's address, which is nobody else's business.
    detail = "the tuning database cannot be used at the moment; the service's log says why"
    return ApiError(503, "database-unavailable", detail, headers={"Retry-After": "5"})


def unexpected_error(request: Request, error: Exception) -> JSONResponse:
    """A 500 that tells the caller nothing of our insides."""
    return _answer(500, "internal-error", "the service failed; its log says why")
