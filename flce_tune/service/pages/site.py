"""All pages together."""

from __future__ import annotations

from fastapi import APIRouter

from flce_tune.service.pages import (
    assets,
    compare,
    jobs,
    login,
    overview,
    problems,
    result,
    submit,
)

router = APIRouter(include_in_schema=False)
for module in (assets, overview, problems, result, jobs, submit, compare, login):
    router.include_router(module.router)
