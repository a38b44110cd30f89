"""What is asked and answered about two devices or two toolchains."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field, model_validator
from typing_extensions import Self

from flce_tune.dispatch.convert import device_slug
from flce_tune.service.schemas import ProblemView, ResultQuery, ToolchainView, WinnerView
from flce_tune.sweep.comparison import Difference

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
    within_noise: bool | None = Field(
        description="whether the intervals of both times overlap; null unless both have one"
    )
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
            within_noise=one.within_noise,
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
