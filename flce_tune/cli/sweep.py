"""``flce-tune sweep``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from flce_tune.cli import options
from flce_tune.cli.exits import FAILURE, INTERRUPTED

if TYPE_CHECKING:
    import torch

    from flce_tune.cli.train_step import TrainStep
    from flce_tune.kernels.problem import Problem
    from flce_tune.sweep.events import ProblemReport, SweepReport

START_S = 10.0  # of this command, at most: a process may be older than what it runs


def sweep(
    preset: options.PresetOption = None,
    from_model: options.FromModelOption = None,
    tokens: options.TokensOption = None,
    hidden: options.HiddenOption = None,
    vocab: options.VocabOption = None,
    dtype: options.DtypeOption = None,
    mode: options.ModesOption = None,
    accumulate: options.AccumulatesOption = None,
    features: options.FeaturesOption = None,
    device: options.LocalDeviceOption = None,
    devices: options.DevicesOption = None,
    executor: options.ExecutorOption = "local",
    accelerator: options.AcceleratorOption = None,
    strategy: options.StrategyOption = None,
    budget: Annotated[
        int | None,
        typer.Option(
            "--budget", metavar="COUNT", min=1, help="Configs to measure at most, for each problem."
        ),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="A small sample and a short final.")
    ] = False,
    time_limit: Annotated[
        float | None,
        typer.Option(
            "--time-limit",
            metavar="SECONDS",
            min=1,
            help="For each problem; inf: none. By default 180, 30 with --quick, inf with --budget.",
        ),
    ] = None,
    timeout: Annotated[
        float, typer.Option("--timeout", min=1, metavar="SECONDS", help="For one config.")
    ] = 60.0,
    missed: Annotated[
        bool,
        typer.Option(
            "--missed",
            help="What training on this device asked for and found no exact result of. "
            "Instead of the options of a problem.",
        ),
    ] = False,
    train_step: Annotated[
        bool,
        typer.Option("--train-step", help="Then train one step with the config that was stored."),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say what would be measured, on what.")
    ] = False,
    as_json: options.JsonOption = False,
) -> None:
    """Measure which config is fastest here, and store the winners.

    Everything is stored as it comes: after Ctrl-C the same command goes on where it stopped.
    """
    from flce_tune.cli.console import messages, print_error, print_json, print_text
    from flce_tune.cli.database import load_settings, open_for_writing
    from flce_tune.cli.dry_run import plan, print_plans
    from flce_tune.cli.executors import where as measure_where
    from flce_tune.cli.interrupt import stop_on_signal
    from flce_tune.cli.missed import missed_problems
    from flce_tune.cli.progress import reporting
    from flce_tune.cli.selection import Selection
    from flce_tune.cli.units import split_commas
    from flce_tune.dispatch.snapshot import without_password
    from flce_tune.sweep.events import SweepOptions
    from flce_tune.sweep.missed import clear_misses
    from flce_tune.sweep.processes import age_s
    from flce_tune.sweep.sweep import sweep as run_sweep

    one = Selection(preset, from_model, tokens, hidden, vocab, dtype, "train", "fp32", features)
    selections = one.variants(mode, accumulate)
    on = measure_where(executor, device, devices, split_commas(accelerator))
    if (missed or train_step) and not on.devices:
        raise typer.BadParameter("--missed and --train-step are about this machine, not about Ray")
    if missed:
        problems = missed_problems(selections[-1], on.devices[0])
    else:
        problems = [problem for selection in selections for problem in selection.problems()]
    if train_step:
        _refuse_train_step(problems)
    effort = SweepOptions(
        strategies=tuple(split_commas(strategy)) or None,
        budget=budget,
        quick=quick,
        time_limit_s=time_limit,
        timeout_s=timeout,
    )
    config = load_settings()
    database = str(config.database_path or without_password(config.database_url))
    if dry_run:
        with on.places(len(problems)) as places:
            plans = plan(problems, places, effort)
        if as_json:
            print_json([one.to_dict() for one in plans])
        else:
            print_plans(plans)
        return
    console = messages()
    with (
        on.places(len(problems)) as places,
        open_for_writing() as store,
        reporting(console, len(problems)) as events,
        stop_on_signal(lambda: console.print("stopping ...")) as stopped,
    ):
        print_text(console, f"tuning on {on.describe(places)}, database {database}")
        report = run_sweep(
            problems,
            store,
            places,
            effort,
            events=events,
            should_stop=stopped,
            spent_s=min(age_s(), START_S),
        )
        clear_misses(report, store)
    step = _train(report, on.devices[0]) if train_step and not report.interrupted else None
    if as_json:
        print_json(_as_json(report, database, step))
    else:
        _print_report(report, step)
    for failed in (one for one in report.problems if one.error):
        print_error(f"{_name(failed.problem)}: {failed.error}")
    if report.interrupted:
        print_error("interrupted; what was measured is stored, the same command goes on from there")
        raise typer.Exit(INTERRUPTED)
    if any(one.error for one in report.problems):
        raise typer.Exit(FAILURE)


def _refuse_train_step(problems: list[Problem]) -> None:
    from flce_tune.cli.train_step import why_not

    for problem in problems:
        if reason := why_not(problem):
            raise typer.BadParameter(reason, param_hint="--train-step")


def _train(report: SweepReport, device: torch.device) -> TrainStep | None:
    from flce_tune.cli.train_step import train_step

    tuned = next((one.problem for one in report.problems if one.winners), None)
    return train_step(tuned, device) if tuned is not None else None


def _name(problem: Problem) -> str:
    from flce_tune.cli.views import problem_text

    return problem_text(problem)


def _print_report(report: SweepReport, step: TrainStep | None) -> None:
    from flce_tune.cli.console import print_text, results, table
    from flce_tune.cli.views import WINNER_COLUMNS, WINNER_NUMBERS, winner_cells

    console = results()
    kinds = {one.device for one in report.problems}
    for one in report.problems:
        if one.winners:
            title = _name(one.problem)
            if len(kinds) > 1 and one.device is not None:
                title += f", {one.device.name}"
            made = table(*WINNER_COLUMNS, title=title, right=WINNER_NUMBERS)
            for winner in one.winners:
                made.add_row(*winner_cells(winner))
            console.print(made)
        print_text(console, _account(one))
    if step is not None:
        print_text(console, _step_text(step))


def _account(one: ProblemReport) -> str:
    from flce_tune.cli.units import format_ms

    counts = [f"{one.measured} measured"]
    if one.resumed:
        counts.append(f"{one.resumed} known from before")
    counts += [f"{count} {status.value}" for status, count in one.failures.items()]
    stages = ", ".join(f"{stage} {seconds:.1f}" for stage, seconds in one.stages.items())
    account = f"{', '.join(counts)}, in {one.seconds:.1f} s"
    account += f" ({stages})." if stages else ": another process has just done it."
    if one.left_out:
        account += (
            f" There was no time for the last {one.left_out} configs, or less:"
            " the same command goes on with them, --time-limit gives it more."
        )
    if one.winners:
        account += (
            f" Default config: {format_ms(one.default_ms)} ms;"
            f" plain PyTorch: {format_ms(one.eager_ms)} ms."
        )
    return account


def _step_text(step: TrainStep) -> str:
    return (
        f"\nOne training step: loss {step.loss:.4f} (plain PyTorch: {step.plain_loss:.4f}), "
        f"{step.loss_after:.4f} after it.\n"
        f"  config   {step.choice.config}\n"
        f"  because  {step.choice.rule}: {step.choice.detail}"
    )


def _as_json(report: SweepReport, database: str, step: TrainStep | None) -> dict[str, Any]:
    from flce_tune.cli.views import device_view, problem_view, winner_view
    from flce_tune.dispatch.convert import device_record

    return {
        "database": database,
        "interrupted": report.interrupted,
        "problems": [
            {
                "device": device_view(device_record(one.device)) if one.device else None,
                "problem": problem_view(one.problem),
                "winners": [winner_view(winner) for winner in one.winners],
                "measured": one.measured,
                "resumed": one.resumed,
                "left_out": one.left_out,
                "failures": {status.value: count for status, count in one.failures.items()},
                "default_ms": one.default_ms,
                "eager_ms": one.eager_ms,
                "seconds": one.seconds,
                "stages": dict(one.stages),
                "error": one.error,
            }
            for one in report.problems
        ],
        "train_step": step.to_dict() if step is not None else None,
    }
