"""The application: its commands, and what becomes of errors."""

from __future__ import annotations

import warnings
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from flce_tune.cli import (
    db,
    diff,
    gc,
    interchange,
    job,
    lookup,
    machine,
    regret,
    report,
    serve,
    show,
    sweep,
    token,
    verify,
    worker,
)
from flce_tune.cli.exits import INTERRUPTED, code_of
from flce_tune.errors import FlceTuneError, InvalidConfigError, UnknownStrategyError
from flce_tune.version import __version__


class _Group(TyperGroup):
    """Turns expected errors into one message on stderr and an exit code, warnings into lines."""

    def invoke(self, ctx: Any) -> Any:
        from flce_tune.cli.console import print_error

        try:
            with warnings.catch_warnings():
                warnings.showwarning = _show_warning
                return super().invoke(ctx)
        except (UnknownStrategyError, InvalidConfigError) as error:
            raise typer.BadParameter(str(error)) from error
        except FlceTuneError as error:
            print_error(str(error))
            raise typer.Exit(code_of(error)) from error
        except KeyboardInterrupt as error:
            print_error("interrupted")
            raise typer.Exit(INTERRUPTED) from error


def _show_warning(message: Warning | str, *_: object, **__: object) -> None:
    from rich.text import Text

    from flce_tune.cli.console import messages, print_text

    text = str(message).removeprefix("flce-tune: ")
    print_text(messages(), Text(f"warning: {text}", style="yellow"))


app = typer.Typer(
    cls=_Group,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0 done, 1 failure, 2 usage, 3 database, 4 nothing found, 130 interrupted.",
)
app.command()(sweep.sweep)
app.command()(verify.verify)
app.command()(lookup.best)
app.command()(show.show)
app.command()(lookup.explain)
app.command()(interchange.export)
app.command("import")(interchange.import_)
app.command()(report.report)
app.command()(diff.diff)
app.command()(regret.regret)
app.command()(gc.gc)
app.command()(machine.devices)
app.command()(machine.presets)
app.command()(machine.space)
app.add_typer(db.app, name="db")
app.command()(serve.serve)
app.command()(worker.worker)
app.add_typer(token.app, name="token")
app.add_typer(job.app, name="job")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"flce-tune {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Say the version and exit."
        ),
    ] = False,
) -> None:
    """Tune fused linear cross-entropy on this machine, and look up what was found."""
