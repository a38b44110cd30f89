"""``flce-tune token``: who may use the service."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal

import typer

from flce_tune.cli.exits import NothingFoundError

app = typer.Typer(help="Tokens for the service, in its database.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(help="What you call it, e.g. who gets it.")]


@app.command()
def create(
    name: Name,
    scope: Annotated[
        Literal["read", "submit", "work", "admin"],
        typer.Option("--scope", help="Each allows what those before it do, too."),
    ] = "submit",
) -> None:
    """Make a token and print it, this once: only its digest is stored."""
    import sys

    from flce_tune.cli.console import print_note
    from flce_tune.cli.database import open_for_writing
    from flce_tune.tuning_db.records import Scope

    with open_for_writing() as store:
        try:
            secret = store.create_token(name, Scope(scope))
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error
    print_note("shown only now; revoke it with: flce-tune token revoke " + name)
    sys.stdout.write(f"{secret}\n")


@app.command("list")
def list_() -> None:
    """List the tokens; what they are is not known any more."""
    from flce_tune.cli.console import results, table
    from flce_tune.cli.database import open_for_reading

    store = open_for_reading()
    if store is None:
        raise NothingFoundError("no token yet; make one with `flce-tune token create NAME`")
    with store:
        tokens = store.tokens()
    if not tokens:
        raise NothingFoundError("no token yet; make one with `flce-tune token create NAME`")
    shown = table("name", "scope", "created (UTC)", "revoked (UTC)")
    for token in tokens:
        shown.add_row(token.name, token.scope.value, _at(token.created_at), _at(token.revoked_at))
    results().print(shown)


@app.command()
def revoke(name: Name) -> None:
    """Make a token useless for good; a running service notices within a second."""
    from flce_tune.cli.console import print_note
    from flce_tune.cli.database import open_for_writing

    with open_for_writing() as store:
        token = store.revoke_token(name)
    if token is None:
        raise NothingFoundError(f"no token {name!r}; see `flce-tune token list`")
    print_note(f"{name} is revoked")


def _at(time: datetime | None) -> str:
    return "" if time is None else f"{time:%Y-%m-%d %H:%M}"
