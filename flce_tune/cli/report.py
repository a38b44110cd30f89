"""``flce-tune report``."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flce_tune.cli import options
from flce_tune.cli.exits import NothingFoundError
from flce_tune.errors import FlceTuneError

if TYPE_CHECKING:
    from flce_tune.sweep.charts import Named
    from flce_tune.sweep.report import Section
    from flce_tune.sweep.results import ProblemResults


def report(
    out: Annotated[
        Path, typer.Option("--out", metavar="FILE", help="The HTML file to write.")
    ] = Path("report.html"),
    png: Annotated[
        Path | None,
        typer.Option(
            "--png", metavar="FOLDER", help="Also write one PNG for each problem into this folder."
        ),
    ] = None,
    device: options.DeviceOption = None,
) -> None:
    """Draw what is stored: fronts, tiles, failures, speed-ups. The file works offline.

    Without --device the results of all devices.
    """
    from flce_tune.cli.console import print_note
    from flce_tune.cli.database import open_for_reading
    from flce_tune.cli.targets import filter_record
    from flce_tune.sweep import report as drawing
    from flce_tune.sweep.results import gather

    drawing.require_altair()
    store = open_for_reading()
    if store is None:
        raise NothingFoundError("there is no tuning database yet; flce-tune sweep makes one")
    with store:
        record = filter_record(device, store.devices())
        results = gather(store.measurements(device=record), store.winners(device=record))
    if not results:
        raise NothingFoundError("nothing is stored that could be drawn; flce-tune sweep measures")
    from flce_tune.sweep.charts import charts

    drawn = [(one, charts(one)) for one in results]
    about = f"{len(results)} problems, {sum(len(one.measurements) for one in results)} configs."
    page = drawing.page("flce-tune report", about, [_section(*one) for one in drawn])
    _write(out, page.encode())
    print_note(f"wrote {out}")
    if png is not None:
        for name, content in _sheets(drawn).items():
            _write(png / name, content)
            print_note(f"wrote {png / name}")


def _section(results: ProblemResults, charts: Named) -> Section:
    from flce_tune.cli.views import WINNER_COLUMNS, winner_cells
    from flce_tune.sweep.report import Section

    toolchain = results.measurements[-1].toolchain
    failed = sum(results.failures.values())
    about = (
        f"{len(results.timed)} configs timed, {failed} failed; torch {toolchain.torch}"
        + (f", Triton {toolchain.triton}" if toolchain.triton else "")
        + (f", driver {toolchain.driver}" if toolchain.driver else "")
    )
    rows = [winner_cells(winner) for winner in results.winners]
    return Section(_title(results), about, WINNER_COLUMNS, rows, charts)


def _title(results: ProblemResults) -> str:
    from flce_tune.cli.views import problem_text

    return f"{problem_text(results.problem)} on {results.device.name}"


def _sheets(drawn: list[tuple[ProblemResults, Named]]) -> dict[str, bytes]:
    """A PNG by file name for each problem."""
    from flce_tune.dispatch.convert import device_slug
    from flce_tune.sweep.charts import together
    from flce_tune.sweep.report import png

    seen: Counter[str] = Counter()
    sheets = {}
    for results, charts in drawn:
        p = results.problem
        name = f"{device_slug(results.device)}-{p.token_bucket}x{p.hidden}x{p.vocab}-{p.mode}"
        seen[name] += 1
        suffix = f"-{seen[name]}" if seen[name] > 1 else ""
        sheets[f"{name}{suffix}.png"] = png(together(charts, _title(results)))
    return sheets


def _write(file: Path, content: bytes) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    except OSError as error:
        raise FlceTuneError(
            f"cannot write {file}: {error.strerror}; name a file that can be written"
        ) from error
