"""``flce-tune serve``."""

from __future__ import annotations

from typing import Annotated

import typer

from flce_tune.errors import FlceTuneError


def serve(
    host: Annotated[str, typer.Option("--host", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535)] = 8000,
    jobs: Annotated[
        bool,
        typer.Option("--jobs/--no-jobs", help="Run queued jobs here, or leave them to others."),
    ] = True,
    private: Annotated[bool, typer.Option("--private", help="Reads need a token, too.")] = False,
    insecure: Annotated[
        bool,
        typer.Option("--insecure", help="Listen beyond loopback although anybody may write."),
    ] = False,
) -> None:
    """Serve results and tuning jobs to the team; `flce-tune token` says who may write."""
    from flce_tune.cli.database import load_settings

    try:
        from flce_tune.service.app import run
        from flce_tune.service.settings import ServiceSettings
    except ModuleNotFoundError as error:
        raise FlceTuneError(
            f"the service needs {error.name}: pip install 'flce-tune[service]'"
        ) from error
    config = load_settings()
    run(
        ServiceSettings(
            database_url=config.database_url,
            host=host,
            port=port,
            token=config.token,
            private=private,
            insecure=insecure,
            run_jobs=jobs,
        )
    )
