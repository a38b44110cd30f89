"""``flce-tune db``: the tuning database itself."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flce_tune.cli.exits import DATABASE

app = typer.Typer(help="The tuning database itself.", no_args_is_help=True)


@app.command()
def path() -> None:
    """Say where the database is: FLCE_TUNE_DB, or a file in the user data directory."""
    import sys

    from flce_tune.cli.database import load_settings
    from flce_tune.dispatch.snapshot import without_password

    config = load_settings()
    where = config.database_path or without_password(config.database_url)
    sys.stdout.write(f"{where}\n")


@app.command()
def upgrade() -> None:
    """Bring the database to this version's schema, or create it."""
    from flce_tune.cli.console import results
    from flce_tune.cli.database import load_settings
    from flce_tune.tuning_db import migrations

    revision = migrations.upgrade(load_settings().database_url)
    results().print(f"the database is at schema revision {revision}")


@app.command()
def check() -> None:
    """Look for damage; exits with 3 if there is any."""
    from flce_tune.cli.console import print_error, results
    from flce_tune.cli.database import load_settings
    from flce_tune.tuning_db.maintenance import check_integrity

    found = check_integrity(load_settings().database_url)
    for line in found:
        print_error(line)
    if found:
        raise typer.Exit(DATABASE)
    results().print("the database is sound")


@app.command()
def backup(
    file: Annotated[Path, typer.Argument(help="A new file for the copy.")],
) -> None:
    """Copy a SQLite database to a new file, also while others use it."""
    from flce_tune.cli.console import print_note
    from flce_tune.cli.database import load_settings
    from flce_tune.tuning_db import maintenance

    maintenance.backup(load_settings().database_url, file)
    print_note(f"wrote {file}")
