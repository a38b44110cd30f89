"""Two devices, or two toolchains, problem by problem."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Query
from pydantic import BaseModel, Field, model_validator
from typing_extensions import Self

from flce_tune.dispatch.convert import device_slug, toolchain_slug
from flce_tune.service.dependencies import StoreDep
from flce_tune.service.devices import find_device, find_toolchain
from flce_tune.service.errors import responses
from flce_tune.service.schemas import Page, ProblemView, ResultQuery, ToolchainView, WinnerView
from flce_tune.sweep.comparison import Difference, compare, geometric_mean, of_toolchain
from flce_tune.tuning_db.records import Winner
from flce_tune.tuning_db.store import Store

router = APIRouter(prefix="/v1", tags=["results"])

Side = Annotated[str, Field(min_length=1, max_length=200)]


class CompareQuery(ResultQuery):
    """Which two sides, and of which problems."""

    a: Side = Field(description="a device's id or name; or (part of) a toolchain's id")
    b: Side
    by: Literal["device", "toolchain"] = "device"

    @model_validator(mode="after")
    def _devices_are_the_sides(self) -> Self:
        if self.by == "device" and (self.device or self.architecture):
            raise ValueError("'device' and 'architecture' go with by=toolchain")
        return self


class DifferenceView(BaseModel):
    """One problem; a side is null where it has nothing of it."""

    problem: ProblemView
    device: str | None = Field(description="id; null when devices are compared")
    a: WinnerView | None = Field(description="the fastest; of a toolchain, winner or not")
    b: WinnerView | None
    ratio: float | None = Field(description="A's time over B's: above 1 where B is faster")
    same_config: bool

    @classmethod
    def of(cls, one: Difference) -> DifferenceView:
        """View a record."""
        return cls(
            problem=ProblemView.model_validate(one.problem, from_attributes=True),
            device=None if one.device is None else device_slug(one.device),
            a=None if one.a is None else WinnerView.of(one.a),
            b=None if one.b is None else WinnerView.of(one.b),
            ratio=one.ratio,
            same_config=one.same_config,
        )


class ComparisonView(BaseModel):
    """Two sides, problem by problem, by V, D and N."""

    by: Literal["device", "toolchain"]
    a: str = Field(description="id of the device or toolchain")
    b: str
    geometric_mean: float | None = Field(
        description="of the ratios: above 1 where B is faster on the whole"
    )
    items: list[DifferenceView]


class ToolchainItem(ToolchainView):
    """A toolchain that anything was measured with."""

    id: str = Field(description="as in /v1/compare")


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
