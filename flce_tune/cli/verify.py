"""``flce-tune verify``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from flce_tune.cli import options
from flce_tune.cli.exits import FAILURE, INTERRUPTED, NothingFoundError

if TYPE_CHECKING:
    from flce_tune.sweep.verify import Verification
    from flce_tune.tuning_db.records import DeviceRecord, ProblemRecord, Winner
    from flce_tune.tuning_db.store import Store


def verify(
    device: options.LocalDeviceOption = None,
    preset: Annotated[
        list[str] | None,
        typer.Option(
            "--preset",
            metavar="NAME",
            help="Only problems with this model's sizes; several: repeat, or separate with commas.",
        ),
    ] = None,
    timeout: Annotated[
        float, typer.Option("--timeout", min=1, metavar="SECONDS", help="For one config.")
    ] = 60.0,
    as_json: options.JsonOption = False,
) -> None:
    """Measure this device's winners again, and demote those that no longer win.

    Each problem's winners race the default config. Those that still win count as measured with
    the kernels and Triton of now; shipped results of this device become results of your own.
    """
    from flce_tune.cli.console import messages, print_error, print_json
    from flce_tune.cli.database import open_for_writing
    from flce_tune.cli.interrupt import stop_on_signal
    from flce_tune.cli.progress import reporting
    from flce_tune.cli.targets import local_device
    from flce_tune.dispatch.convert import device_record
    from flce_tune.kernels.problem import describe_device
    from flce_tune.sweep.events import SweepOptions
    from flce_tune.sweep.verify import verify as run_verify

    target = local_device(device)
    record = device_record(describe_device(target))
    sizes = _sizes(preset)
    console = messages()
    with open_for_writing() as store:
        fronts = [
            front
            for problem, front in _fronts(store, record).items()
            if not sizes or (problem.hidden, problem.vocab) in sizes
        ]
        if not fronts:
            raise NothingFoundError(
                f"no winners of {record.name} are stored for what was asked; "
                "flce-tune sweep measures them, flce-tune show lists what there is"
            )
        with (
            reporting(console, len(fronts)) as events,
            stop_on_signal(lambda: console.print("stopping ...")) as stopped,
        ):
            effort = SweepOptions(quick=True, timeout_s=timeout)
            done = run_verify(fronts, store, target, effort, events=events, should_stop=stopped)
    interrupted = len(done) < len(fronts)
    if as_json:
        print_json(_as_json(record, done, interrupted))
    else:
        _print(done)
    for failed in (one for one in done if one.error):
        print_error(f"{_name(failed.problem)}: {failed.error}")
    if interrupted:
        left = len(fronts) - len(done)
        print_error(
            f"interrupted; {left} of {len(fronts)} problems keep their winners as they were"
        )
        raise typer.Exit(INTERRUPTED)
    if any(one.error for one in done):
        raise typer.Exit(FAILURE)


def _sizes(presets: list[str] | None) -> set[tuple[int, int]]:
    from flce_tune.cli.units import split_commas
    from flce_tune.sweep.presets import get_preset

    try:
        found = [get_preset(name) for name in split_commas(presets)]
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    return {(one.hidden, one.vocab) for one in found}


def _fronts(store: Store, device: DeviceRecord) -> dict[ProblemRecord, list[Winner]]:
    """The fronts the dispatcher uses for exactly this device: stored ones before shipped ones."""
    from flce_tune import pretuned

    fronts: dict[ProblemRecord, list[Winner]] = {}
    for winner in store.winners(device=device):
        fronts.setdefault(winner.measurement.problem, []).append(winner)
    shipped: dict[ProblemRecord, list[Winner]] = {}
    for winner in pretuned.winners():
        if winner.measurement.device == device:
            shipped.setdefault(winner.measurement.problem, []).append(winner)
    return {**shipped, **fronts}


def _name(problem: ProblemRecord) -> str:
    from flce_tune.cli.views import problem_text

    return problem_text(problem)


def _print(done: list[Verification]) -> None:
    from flce_tune.cli.console import print_text, results, table
    from flce_tune.cli.units import format_ms
    from flce_tune.cli.views import WINNER_COLUMNS, WINNER_NUMBERS, config_text, winner_cells

    console = results()
    for one in done:
        if one.sweep is None or one.error:
            continue
        columns, numbers = (*WINNER_COLUMNS, "ms before"), (*WINNER_NUMBERS, "ms before")
        made = table(*columns, title=_name(one.problem), right=numbers)
        before = {config_text(v.before.measurement): v.before.measurement for v in one.verdicts}
        for winner in one.sweep.winners:
            earlier = before.get(config_text(winner.measurement))
            cells = winner_cells(winner)
            made.add_row(*cells, format_ms(earlier.median_ms if earlier else None))
        console.print(made)
        for verdict in one.verdicts:
            if verdict.reason:
                config = config_text(verdict.before.measurement)
                print_text(console, f"demoted {config}: {verdict.reason}")


def _as_json(device: DeviceRecord, done: list[Verification], interrupted: bool) -> dict[str, Any]:
    from flce_tune.cli.views import device_view, problem_record_view, winner_view

    return {
        "device": device_view(device),
        "interrupted": interrupted,
        "problems": [
            {
                "problem": problem_record_view(one.problem),
                "winners": [winner_view(w) for w in one.sweep.winners] if one.sweep else [],
                "demoted": [
                    {"winner": winner_view(verdict.before), "reason": verdict.reason}
                    for verdict in one.verdicts
                    if verdict.reason
                ],
                "kept": sum(verdict.reason is None for verdict in one.verdicts),
                "seconds": one.sweep.seconds if one.sweep else 0.0,
                "error": one.error,
            }
            for one in done
        ],
    }
