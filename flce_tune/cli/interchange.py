"""``flce-tune export`` and ``flce-tune import``."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, BinaryIO

import typer

from flce_tune.cli import options
from flce_tune.cli.exits import NothingFoundError
from flce_tune.errors import FlceTuneError


def export(
    output: Annotated[Path | None, typer.Argument(help="File to write. Default: stdout.")] = None,
    device: options.DeviceOption = None,
    winners_only: Annotated[
        bool, typer.Option("--winners-only", help="The winners and the measurements behind them.")
    ] = False,
) -> None:
    """Write measurements and winners as JSON, for another database."""
    from flce_tune.cli.console import print_note
    from flce_tune.cli.database import open_for_reading
    from flce_tune.cli.targets import filter_record
    from flce_tune.tuning_db.interchange import export_pieces

    store = open_for_reading()
    if store is None:
        raise NothingFoundError("there is no tuning database yet; flce-tune sweep makes one")
    with store:
        record = filter_record(device, store.devices())
        pieces = export_pieces(store, device=record, winners_only=winners_only)
        if output is None:
            sys.stdout.writelines(pieces)
            return
        try:
            with output.open("w", encoding="utf-8") as file:
                file.writelines(pieces)
        except OSError as error:
            raise FlceTuneError(
                f"cannot write {output}: {error.strerror}; name a file that can be written"
            ) from error
    print_note(f"wrote {output}")


def import_(
    file: Annotated[Path, typer.Argument(help="A file that export wrote; - for stdin.")],
    as_json: options.JsonOption = False,
) -> None:
    """Add the measurements and winners of an export. What is known already is skipped.

    Imported winners count as unverified until they are measured here.
    """
    from flce_tune.cli.console import print_json, results
    from flce_tune.cli.database import open_for_writing
    from flce_tune.tuning_db.interchange import import_file

    with _opened(file) as opened, open_for_writing() as store:
        report = import_file(store, opened, source="stdin" if str(file) == "-" else str(file))
    if as_json:
        print_json(
            {
                "measurements": report.measurements,
                "winners": report.winners,
                "skipped": report.skipped,
            }
        )
        return
    results().print(
        f"added {report.measurements} measurements and {report.winners} winners, "
        f"skipped {report.skipped} known already"
    )


@contextmanager
def _opened(file: Path) -> Iterator[BinaryIO]:
    """The file, or a copy of stdin for ``-``: it is read more than once.

    Raises:
        FlceTuneError: it cannot be read.
    """
    try:
        with tempfile.TemporaryFile() if str(file) == "-" else file.open("rb") as opened:
            if str(file) == "-":
                shutil.copyfileobj(sys.stdin.buffer, opened)
            yield opened
    except OSError as error:
        raise FlceTuneError(f"cannot read {file}: {error.strerror}") from error


def read_export(file: Path) -> str:
    """Read a file, or stdin for ``-``, as text.

    Raises:
        FlceTuneError: it cannot be read, or is not UTF-8.
    """
    try:
        raw = sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes()
        return raw.decode("utf-8")
    except OSError as error:
        raise FlceTuneError(f"cannot read {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise FlceTuneError(f"{file} is not UTF-8 text: an export is JSON") from error
