"""Which service a command talks to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from flce_tune.errors import FlceTuneError

if TYPE_CHECKING:
    from flce_tune.client import Client

ServerOption = Annotated[
    str | None,
    typer.Option("--server", metavar="URL", help="Of the service. Default: FLCE_TUNE_URL."),
]
TokenOption = Annotated[
    str | None,
    typer.Option(
        "--token",
        metavar="TOKEN",
        help="Default: FLCE_TUNE_TOKEN, which other users of this machine cannot see.",
    ),
]


def server_and_token(server: str | None, token: str | None) -> tuple[str, str | None]:
    """What the options say, else the settings.

    Raises:
        typer.BadParameter: neither names a service.
    """
    from flce_tune.cli.database import load_settings

    config = load_settings()
    url = server or config.url
    if url is None:
        raise typer.BadParameter("which service? Give --server URL, or set FLCE_TUNE_URL")
    return url, token or config.token


def open_client(server: str | None, token: str | None) -> Client:
    """A client of that service.

    Raises:
        typer.BadParameter: neither names a service.
        FlceTuneError: the client's packages are not installed.
    """
    try:
        from flce_tune.client import Client
    except ModuleNotFoundError as error:
        raise FlceTuneError(
            f"talking to a service needs {error.name}: pip install 'flce-tune[client]'"
        ) from error
    url, secret = server_and_token(server, token)
    return Client(url, token=secret)
