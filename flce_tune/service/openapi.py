"""The OpenAPI document: FastAPI's, with the errors' media type as it is answered."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

from flce_tune.service.errors import MEDIA_TYPE


def install(app: FastAPI) -> None:
    """Have ``app`` declare ``application/problem+json`` for every answer of 400 and above."""
    generate = app.openapi

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            _correct_media_types(generate())
        assert app.openapi_schema is not None
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]


def _correct_media_types(schema: dict[str, Any]) -> None:
    for path in schema["paths"].values():
        for operation in path.values():
            for status, response in operation["responses"].items():
                if status >= "400":
                    content = response["content"]
                    response["content"] = {MEDIA_TYPE: next(iter(content.values()))}
