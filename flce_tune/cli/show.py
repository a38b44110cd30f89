"""``flce-tune show``: what is stored."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from flce_tune.cli import options
from flce_tune.cli.exits import NothingFoundError

if TYPE_CHECKING:
    from flce_tune.tuning_db.records import Measurement, ProblemRecord, Winner

T = TypeVar("T")


def show(
    measurements: Annotated[
        bool, typer.Option("--measurements", help="Every measurement, failures included.")
    ] = False,
    device: options.DeviceOption = None,
    tokens: Annotated[
        int | None, typer.Option("--tokens", metavar="N", min=1, help="Only this N.")
    ] = None,
    hidden: Annotated[
        int | None, typer.Option("--hidden", metavar="D", min=1, help="Only this D.")
    ] = None,
    vocab: Annotated[
        int | None, typer.Option("--vocab", metavar="V", min=1, help="Only this V.")
    ] = None,
    dtype: Annotated[options.DtypeName | None, typer.Option("--dtype", metavar="NAME")] = None,
    mode: Annotated[options.ModeName | None, typer.Option("--mode", metavar="NAME")] = None,
    status: Annotated[
        options.StatusName | None,
        typer.Option(
            "--status", metavar="NAME", help="Only measurements that ended so, e.g. ok or timeout."
        ),
    ] = None,
    limit: Annotated[
        int,
        typer.Option("--limit", metavar="COUNT", min=1, help="Measurements at most, the newest."),
    ] = 50,
    as_json: options.JsonOption = False,
) -> None:
    """List stored winners, by problem; or measurements, newest first.

    Without --device those of all devices.
    """
    from flce_tune.cli.database import open_for_reading
    from flce_tune.cli.targets import filter_record
    from flce_tune.kernels.problem import token_bucket
    from flce_tune.tuning_db.records import Status

    wanted = {
        "token_bucket": None if tokens is None else token_bucket(tokens),
        "hidden": hidden,
        "vocab": vocab,
        "dtype": dtype,
        "mode": mode,
    }

    def fits(problem: ProblemRecord) -> bool:
        return all(
            value is None or value == getattr(problem, name) for name, value in wanted.items()
        )

    store = open_for_reading()
    if store is None:
        raise NothingFoundError("there is no tuning database yet; flce-tune sweep makes one")
    with store:
        record = filter_record(device, store.devices())
        if measurements or status is not None:
            ended = None if status is None else Status(status)
            stored = store.measurements(device=record, status=ended)
            newest = [one for one in reversed(stored) if fits(one.problem)][:limit]
            _show_measurements(newest, as_json)
            found = len(newest)
        else:
            winners = [one for one in store.winners(device=record) if fits(one.measurement.problem)]
            _show_winners(winners, as_json)
            found = len(winners)
    if not found:
        raise NothingFoundError("nothing stored fits; flce-tune show without options lists all")


def _show_winners(winners: list[Winner], as_json: bool) -> None:
    from flce_tune.cli.console import print_json, results, table
    from flce_tune.cli.views import (
        WINNER_COLUMNS,
        WINNER_NUMBERS,
        winner_cells,
        winner_view,
    )

    if as_json:
        print_json([winner_view(one) for one in winners])
        return
    for title, front in _by_problem(winners, lambda one: one.measurement).items():
        made = table(*WINNER_COLUMNS, title=title, right=WINNER_NUMBERS)
        for one in front:
            made.add_row(*winner_cells(one))
        results().print(made)


def _show_measurements(measurements: list[Measurement], as_json: bool) -> None:
    from flce_tune.cli.console import print_json, results, table
    from flce_tune.cli.units import format_bytes, format_ms
    from flce_tune.cli.views import config_text, measurement_view

    if as_json:
        print_json([measurement_view(one) for one in measurements])
        return
    numbers = ("id", "status", "ms", "workspace")
    for title, group in _by_problem(measurements, lambda one: one).items():
        made = table("id", "config", "status", "ms", "workspace", title=title, right=numbers)
        for one in group:
            made.add_row(
                str(one.id),
                config_text(one),
                one.status.value,
                format_ms(one.median_ms),
                format_bytes(one.workspace_bytes),
            )
        results().print(made)


def _by_problem(records: list[T], measurement: Callable[[T], Measurement]) -> dict[str, list[T]]:
    """Group records under a title that names their problem and device."""
    from flce_tune.cli.views import problem_text

    groups: dict[str, list[T]] = {}
    for record in records:
        measured = measurement(record)
        title = f"{problem_text(measured.problem)} on {measured.device.name}"
        groups.setdefault(title, []).append(record)
    return groups
