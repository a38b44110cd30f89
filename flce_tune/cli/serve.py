"""``flce-tune serve``."""

from __future__ import annotations

from typing import Annotated

import typer

from flce_tune.cli import options
from flce_tune.errors import FlceTuneError


def serve(
    host: Annotated[str, typer.Option("--host", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535)] = 8000,
    jobs: Annotated[
        bool,
        typer.Option("--jobs/--no-jobs", help="Run queued jobs here, or leave them to others."),
    ] = True,
    executor: options.ExecutorOption = "local",
    devices: options.DevicesOption = None,
    device: Annotated[
        str | None,
        typer.Option("--device", metavar="NAME", help="cuda:1 or cpu; with Ray, cpu only."),
    ] = None,
    accelerator: options.AcceleratorOption = None,
    private: Annotated[bool, typer.Option("--private", help="Reads need a token, too.")] = False,
    insecure: Annotated[
        bool,
        typer.Option("--insecure", help="Listen beyond loopback although anybody may write."),
    ] = False,
) -> None:
    """Serve results and tuning jobs to the team; `flce-tune token` says who may write.

    A job's problems are spread over all devices that it means: of this machine, or of those named.
    """
    from flce_tune.cli.database import load_settings
    from flce_tune.cli.executors import job_executor, where
    from flce_tune.cli.units import split_commas

    try:
        from flce_tune.service.app import run
        from flce_tune.service.executors import LocalExecutor
        from flce_tune.service.settings import ServiceSettings
    except ModuleNotFoundError as error:
        raise FlceTuneError(
            f"the service needs {error.name}: pip install 'flce-tune[service]'"
        ) from error
    config = load_settings()
    everything = executor == "local" and devices is None and device is None and not accelerator
    on = None if everything else where(executor, device, devices, split_commas(accelerator))
    run(
        ServiceSettings(
            database_url=config.database_url,
            host=host,
            port=port,
            token=config.token,
            private=private,
            insecure=insecure,
            run_jobs=jobs,
            executor=LocalExecutor() if on is None else job_executor(on),
        )
    )
