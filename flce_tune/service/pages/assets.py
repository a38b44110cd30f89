"""Vega for the charts, as it comes with vl-convert."""

from __future__ import annotations

import functools
import hashlib
import subprocess

import vl_convert
from fastapi import APIRouter, Request, Response

from flce_tune.service import child

router = APIRouter(include_in_schema=False)


@router.get("/static/vega.js")
def vega(request: Request) -> Response:
    """Vega, Vega-Lite and Vega-Embed in one script."""
    script, etag = _bundle()
    headers = {"ETag": etag, "Cache-Control": "no-cache"}
    if request.headers.get("if-none-match") == etag:
        return Response(status_code=304, headers=headers)
    return Response(script, media_type="text/javascript", headers=headers)


@functools.cache
def _bundle() -> tuple[bytes, str]:
    """The script and its ETag. Made in another process: it takes a JavaScript engine to do so."""
    import altair  # which takes long

    version = ".".join(altair.SCHEMA_VERSION.lstrip("v").split(".")[:2])
    made = subprocess.run(
        child.command(__name__, print_bundle.__name__, version), stdout=subprocess.PIPE, check=True
    )
    return made.stdout, f'"{hashlib.sha256(made.stdout).hexdigest()[:32]}"'


def print_bundle(version: str) -> None:
    """Print the script for a version of Vega-Lite; runs in a process of its own."""
    print(vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;", version))
