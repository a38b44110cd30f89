"""Two devices, or two toolchains, problem by problem."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query

from flce_tune.dispatch.convert import device_slug, toolchain_slug
from flce_tune.service.dependencies import StoreDep
from flce_tune.service.devices import find_device, find_toolchain
from flce_tune.service.errors import responses
from flce_tune.service.schemas import Page, ToolchainView
from flce_tune.service.schemas_compare import (
    CompareQuery,
    ComparisonView,
    DifferenceView,
    ToolchainItem,
)
from flce_tune.sweep.comparison import compare, geometric_mean, of_toolchain
from flce_tune.tuning_db.records import Winner
from flce_tune.tuning_db.store import Store

router = APIRouter(prefix="/v1", tags=["results"])


@router.get("/compare", responses=responses(404, 409, 422, 503))
def compare_sides(query: Annotated[CompareQuery, Query()], store: StoreDep) -> ComparisonView:
    """Compare two devices or two toolchains: the fastest config of each problem, and the ratio."""
    return comparison(query, store)


@router.get("/toolchains", responses=responses(503))
def toolchains(store: StoreDep) -> Page[ToolchainItem]:
    """List the toolchains that anything was measured with, oldest first."""
    return Page(
        items=[
            ToolchainItem(
                id=toolchain_slug(record), **ToolchainView.model_validate(record).model_dump()
            )
            for record in store.toolchains()
        ]
    )


def comparison(query: CompareQuery, store: Store) -> ComparisonView:
    """Work out a comparison.

    Raises:
        ApiError: a side is unknown, or its name is ambiguous.
        StoreError: the store cannot be read.
    """
    if query.by == "device":
        names, sides = _devices(query, store)
    else:
        names, sides = _toolchains(query, store)
    wanted = [[w for w in side if query.fits(w.measurement)] for side in sides]
    found = compare(*wanted, by_device=query.by == "toolchain")
    return ComparisonView(
        by=query.by,
        a=names[0],
        b=names[1],
        geometric_mean=geometric_mean(found),
        items=[DifferenceView.of(one) for one in found],
    )


_Sides = tuple[list[str], list[list[Winner]]]


def _devices(query: CompareQuery, store: Store) -> _Sides:
    known = store.devices()
    devices = [find_device(known, name) for name in (query.a, query.b)]
    return [device_slug(d) for d in devices], [store.winners(device=d) for d in devices]


def _toolchains(query: CompareQuery, store: Store) -> _Sides:
    known = store.toolchains()
    toolchains = [find_toolchain(known, name) for name in (query.a, query.b)]
    device = find_device(store.devices(), query.device) if query.device else None
    return (
        [toolchain_slug(t) for t in toolchains],
        [of_toolchain(store, t, device) for t in toolchains],
    )
