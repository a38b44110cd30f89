"""``flce-tune worker``."""

from __future__ import annotations

from typing import Annotated

import typer

from flce_tune.cli import options
from flce_tune.cli.remote import ServerOption, TokenOption, server_and_token
from flce_tune.errors import FlceTuneError


def worker(
    server: ServerOption = None,
    token: TokenOption = None,
    executor: options.ExecutorOption = "local",
    device: Annotated[
        str | None,
        typer.Option(
            "--device",
            metavar="NAME",
            help="cuda:1 or cpu; by default the first GPU. With Ray, cpu only.",
        ),
    ] = None,
    devices: options.DevicesOption = None,
    accelerator: options.AcceleratorOption = None,
) -> None:
    """Run a service's jobs here, or in a Ray cluster; needs no access to the service's database.

    Stop it with Ctrl-C or SIGTERM: a running job goes back to the queue with what was measured.
    """
    from flce_tune.cli.executors import job_executor, where
    from flce_tune.cli.interrupt import stop_on_signal
    from flce_tune.cli.units import split_commas

    try:
        from flce_tune.service import logs
        from flce_tune.worker.run import WorkerSettings, work
    except ModuleNotFoundError as error:
        raise FlceTuneError(
            f"a worker needs {error.name}: pip install 'flce-tune[client]'"
        ) from error
    url, secret = server_and_token(server, token)
    named = None if device == "auto" else device
    on = where(executor, named, devices, split_commas(accelerator))
    logs.configure()
    with stop_on_signal(lambda: None) as stopped:
        work(WorkerSettings(url, secret, job_executor(on)), stopped)
