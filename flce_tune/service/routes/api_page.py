"""``/docs``: the API to read and try, with nothing loaded from elsewhere."""

from __future__ import annotations

from fastapi import APIRouter, FastAPI
from fastapi.responses import HTMLResponse
from starlette.staticfiles import StaticFiles

router = APIRouter(include_in_schema=False)

_PAGE = """<!doctype html>
<html lang="en">
<head>
  <meta charset="utf-8">
  <meta name="viewport" content="width=device-width, initial-scale=1">
  <title>flce-tune: API</title>
  <link rel="stylesheet" href="/static/swagger/swagger-ui.css">
  <link rel="icon" href="/static/icon.svg" type="image/svg+xml">
</head>
<body>
<div id="swagger-ui"></div>
<noscript>This page needs JavaScript; <a href="/openapi.json">/openapi.json</a> does not.</noscript>
<script src="/static/swagger/swagger-ui-bundle.js"></script>
<script src="/static/api.js"></script>
</body>
</html>
"""

_HEADERS = {
    # Swagger UI sets styles inline, and draws its icons from data: addresses.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; connect-src 'self'; "
    "style-src 'self' 'unsafe-inline'; img-src 'self' data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
}


@router.get("/docs")
async def api_page() -> HTMLResponse:
    """Show the OpenAPI document in Swagger UI."""
    return HTMLResponse(_PAGE, headers=_HEADERS)


def mount_assets(app: FastAPI) -> None:
    """Serve Swagger UI from the package that carries it."""
    assets = StaticFiles(packages=[("fastapi_offline", "static")])
    app.mount("/static/swagger", assets, name="swagger")
