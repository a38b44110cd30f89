"""``flce-tune job``: tuning jobs of a service."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flce_tune.cli import options
from flce_tune.cli.exits import NothingFoundError
from flce_tune.cli.remote import ServerOption, TokenOption, open_client

if TYPE_CHECKING:
    from flce_tune.client import Client, Event
    from flce_tune.service.schemas import JobView

app = typer.Typer(help="Tuning jobs of a service.", no_args_is_help=True)

JobId = Annotated[str, typer.Argument(metavar="JOB", help="The job's id.")]
FollowOption = Annotated[bool, typer.Option("--follow", help="Show events until it has ended.")]


@app.command()
def submit(
    preset: options.PresetOption = None,
    from_model: options.FromModelOption = None,
    tokens: options.TokensOption = None,
    hidden: options.HiddenOption = None,
    vocab: options.VocabOption = None,
    dtype: options.DtypeOption = None,
    mode: options.ModeOption = "train",
    accumulate: options.AccumulateOption = "fp32",
    features: options.FeaturesOption = None,
    device: Annotated[
        str,
        typer.Option(
            "--device",
            metavar="NAME",
            help="Which device does it: auto, cpu, cuda, sm_90, or an id from /v1/devices.",
        ),
    ] = "auto",
    missed: Annotated[
        int | None,
        typer.Option(
            "--missed", min=1, max=256, help="Tune so many of what training missed most there."
        ),
    ] = None,
    strategy: options.StrategyOption = None,
    budget: Annotated[
        int | None, typer.Option("--budget", min=1, help="Configs to measure at most.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A small sample, a short final.")] = False,
    time_limit: Annotated[
        float | None,
        typer.Option(
            "--time-limit",
            metavar="SECONDS",
            min=1,
            help="For each problem, a week at most. By default 180, 30 with --quick, none with "
            "--budget.",
        ),
    ] = None,
    follow: FollowOption = False,
    server: ServerOption = None,
    token: TokenOption = None,
) -> None:
    """Queue a job and print its id."""
    import sys

    from pydantic import ValidationError

    from flce_tune.cli.selection import NO_SELECTION, Selection
    from flce_tune.cli.units import split_commas

    selection = Selection(
        preset, from_model, tokens, hidden, vocab, dtype, mode, accumulate, features
    )
    if missed and selection != NO_SELECTION:
        raise typer.BadParameter("--missed says which problems; leave out the options of a problem")
    with open_client(server, token) as client:
        from flce_tune.service.schemas import JobOptions, JobRequest, ProblemSpec

        try:
            job_options = JobOptions(
                strategies=split_commas(strategy) or None,
                budget=budget,
                quick=quick,
                time_limit_s=time_limit,
            )
            problems = [] if missed else [ProblemSpec.of(p) for p in selection.problems()]
            request = JobRequest(
                device=device, problems=problems, missed=missed, options=job_options
            )
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            place = ".".join(map(str, first["loc"]))
            raise typer.BadParameter(f"{place}: {first['msg']}") from error
        job = client.submit(request)
        sys.stdout.write(f"{job.id}\n")
        if follow:
            _follow(client, job.id)


@app.command("list")
def list_(
    state: Annotated[
        list[str] | None,
        typer.Option("--state", metavar="NAME", help="queued, running, succeeded, ..."),
    ] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, help="How many at most.")] = 20,
    as_json: options.JsonOption = False,
    server: ServerOption = None,
    token: TokenOption = None,
) -> None:
    """List jobs, newest first."""
    import itertools

    from flce_tune.cli.console import print_json, results, table
    from flce_tune.tuning_db.records import JobState

    try:
        states = [JobState(name) for name in state or ()]
    except ValueError as error:
        known = ", ".join(one.value for one in JobState)
        raise typer.BadParameter(f"{error}; states are {known}") from error
    with open_client(server, token) as client:
        jobs = list(itertools.islice(client.jobs(*states), limit))
    if as_json:
        print_json([job.model_dump(mode="json") for job in jobs])
        return
    if not jobs:
        raise NothingFoundError("no such job; `flce-tune job submit` makes one")
    shown = table("id", "state", "device", "what", "submitted (UTC)")
    for job in jobs:
        at = "" if job.created_at is None else f"{job.created_at:%Y-%m-%d %H:%M}"
        shown.add_row(job.id, job.state.value, job.spec.device, _what(job), at)
    results().print(shown)


@app.command()
def show(
    job: JobId,
    follow: FollowOption = False,
    as_json: options.JsonOption = False,
    server: ServerOption = None,
    token: TokenOption = None,
) -> None:
    """Say how far a job is."""
    from flce_tune.cli.console import print_json

    with open_client(server, token) as client:
        if follow:
            _follow(client, job)
        found = client.job(job)
    if as_json:
        print_json(found.model_dump(mode="json"))
    else:
        _print(found)


@app.command()
def cancel(job: JobId, server: ServerOption = None, token: TokenOption = None) -> None:
    """Cancel a job: a queued one at once, a running one once its worker has stopped."""
    with open_client(server, token) as client:
        _print(client.cancel(job))


def _follow(client: Client, job: str) -> None:
    from flce_tune.cli.console import print_note

    for event in client.follow(job):
        if line := _line(event):
            print_note(line)


def _line(event: Event) -> str:
    data = event.data
    line = _news(event.kind, data)
    return f"{data['place']}: {line}" if line and "place" in data else line


def _news(kind: str, data: Mapping[str, Any]) -> str:
    if kind == "state":
        return f"{data['state']} {data.get('message', '')}".rstrip()
    if kind == "measurement":
        time = data["status"] if data["median_ms"] is None else f"{data['median_ms']:.3g} ms"
        return f"{data['done']}/{data['total']} {data['config']}: {time}"
    if kind == "log":
        return str(data.get("text", ""))
    if kind == "progress" and "stage" in data:
        return f"{data['stage']}, {data['total']} configs"
    return ""


def _print(job: JobView) -> None:
    import sys

    asked = " (to be cancelled)" if job.cancel_requested and not job.state.final else ""
    sys.stdout.write(f"{job.state.value}{asked}: {_what(job)} on {job.spec.device}\n")
    if job.message:
        sys.stdout.write(f"{job.message}\n")


def _what(job: JobView) -> str:
    spec = job.spec
    if spec.preset is not None:
        return f"{spec.preset}, N={','.join(str(p.tokens) for p in spec.problems)}"
    first, more = spec.problems[0], len(spec.problems) - 1
    text = f"N={first.tokens} D={first.hidden} V={first.vocab} {first.dtype}"
    return text + (f" and {more} more" if more else "")
