"""``flce-tune sweep --dry-run``: what would be measured, on what."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flce_tune.cli.database import open_for_reading
from flce_tune.cli.views import device_view, problem_text, problem_view
from flce_tune.dispatch.convert import device_record, problem_record
from flce_tune.kernels import strategies
from flce_tune.kernels.problem import Device, Problem
from flce_tune.sweep.candidates import Search
from flce_tune.sweep.events import SweepOptions
from flce_tune.sweep.places import Place
from flce_tune.tuning_db.records import DeviceRecord, ToolchainRecord


@dataclass(frozen=True, slots=True)
class Plan:
    """What a sweep would do about one problem on one kind of device."""

    device: DeviceRecord
    problem: Problem
    configs: int  # at most, those known from before included
    known: int  # measured or failed before, with the same toolchain
    winners: int  # stored at present

    def to_dict(self) -> dict[str, Any]:
        """Make JSON of it."""
        return {
            "device": device_view(self.device),
            "problem": problem_view(self.problem),
            "configs": self.configs,
            "known": self.known,
            "winners": self.winners,
        }


def plan(problems: Sequence[Problem], places: Sequence[Place], options: SweepOptions) -> list[Plan]:
    """Look up what a sweep would do, for each kind of device among the places.

    Opens each place once, to see what it is.

    Raises:
        PlaceLostError: a place cannot be had.
        StoreError: the tuning database cannot be used.
        UnknownStrategyError: the options name a strategy that cannot be tuned.
    """
    for name in options.strategies or ():
        strategies.require_tunable(name)
    kinds = dict(map(_kind, places))
    store = open_for_reading()
    plans = []
    try:
        for device, toolchain in kinds.items():
            record = device_record(device)
            for problem in problems:
                default = strategies.default(problem, device)
                budget = Search(problem, device, options, [default]).budget
                known = winners = 0
                if store is not None:
                    one = problem_record(problem)
                    known = len(store.measured_configs(record, one, problem.tokens, toolchain))
                    winners = len(store.winners(device=record, problem=one))
                plans.append(Plan(record, problem, budget, known, winners))
    finally:
        if store is not None:
            store.close()
    return plans


def _kind(place: Place) -> tuple[Device, ToolchainRecord]:
    place.open(lambda: False)
    try:
        return place.device, place.toolchain
    finally:
        place.close()


def print_plans(plans: Sequence[Plan]) -> None:
    """Show them as a table."""
    from flce_tune.cli.console import results, table

    numbers = ("configs, at most", "known", "winners")
    made = table("device", "problem", *numbers, right=numbers)
    for one in plans:
        counts = (one.configs, one.known, one.winners)
        made.add_row(one.device.name, problem_text(one.problem), *map(str, counts))
    results().print(made)
