"""``flce-tune worker``."""

from __future__ import annotations

from typing import Annotated

import typer

from flce_tune.cli.remote import ServerOption, TokenOption, server_and_token
from flce_tune.errors import FlceTuneError


def worker(
    server: ServerOption = None,
    token: TokenOption = None,
    device: Annotated[
        str,
        typer.Option("--device", metavar="NAME", help="cuda, cuda:1 or cpu; one per worker."),
    ] = "auto",
) -> None:
    """Run a service's jobs on a device of this machine, which needs no access to its database.

    Stop it with Ctrl-C or SIGTERM: a running job goes back to the queue with what was measured.
    """
    from flce_tune.cli.interrupt import stop_on_signal

    try:
        from flce_tune.service import logs
        from flce_tune.worker.run import WorkerSettings, work
    except ModuleNotFoundError as error:
        raise FlceTuneError(
            f"a worker needs {error.name}: pip install 'flce-tune[client]'"
        ) from error
    url, secret = server_and_token(server, token)
    logs.configure()
    with stop_on_signal(lambda: None) as stopped:
        work(WorkerSettings(url, secret, device), stopped)
