"""The report: one HTML file that needs no network, and a PNG for each problem."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flce_tune.errors import FlceTuneError

if TYPE_CHECKING:
    from flce_tune.sweep.charts import Named

STYLE = """
:root { color-scheme: light; }
body { margin: 0 auto; max-width: 80rem; padding: 0 1rem 3rem;
  font: 1rem/1.5 system-ui, sans-serif; color: #1b1f24; background: #fff; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.2rem; margin: 2.5rem 0 .5rem;
  border-top: 1px solid #d0d7de; padding-top: 1rem; }
.charts { display: flex; flex-wrap: wrap; gap: 1.5rem 2.5rem; align-items: flex-start; }
.chart, .scroll { overflow-x: auto; max-width: 100%; }
table { border-collapse: collapse; margin: .5rem 0 1rem; font-size: .9rem; }
th, td { text-align: left; padding: .25rem 1rem .25rem 0; border-bottom: 1px solid #d0d7de; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; }
p { color: #57606a; }
"""


@dataclass(frozen=True, slots=True)
class Section:
    """One problem of a report: a title, a line about it, a table and charts."""

    title: str
    about: str
    columns: tuple[str, ...]  # the first is text, the others are numbers
    rows: Sequence[tuple[str, ...]]
    charts: Named


def require_altair() -> None:
    """Make sure that charts can be drawn.

    Raises:
        FlceTuneError: Altair or vl-convert is missing.
    """
    try:
        import altair  # noqa: F401
        import vl_convert  # noqa: F401
    except ModuleNotFoundError as error:
        raise FlceTuneError(
            f"a report is drawn with Altair and vl-convert ({error}); "
            "install them: pip install 'flce-tune[service]'"
        ) from error


def page(title: str, about: str, sections: Sequence[Section]) -> str:
    """Write the HTML page; its scripts are inside."""
    import vl_convert

    specs: dict[str, dict[str, Any]] = {}
    body = [f"<h1>{html.escape(title)}</h1>\n<p>{html.escape(about)}</p>"]
    for number, section in enumerate(sections):
        body.append(f"<h2>{html.escape(section.title)}</h2>\n<p>{html.escape(section.about)}</p>")
        if section.rows:
            body.append(_table(section))
        divisions = []
        for name, chart in section.charts.items():
            key = f"chart-{number}-{name}"
            specs[key] = chart.to_dict()
            divisions.append(f'<div class="chart" id="{key}"></div>')
        body.append(f'<div class="charts">{"".join(divisions)}</div>')
    library = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed", _vega_lite())
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>{STYLE}</style>\n"
        f"<script>{library}</script>\n</head>\n<body>\n"
        + "\n".join(body)
        + f"\n<script>\nconst specs = {_script(specs)};\n"
        "for (const [id, spec] of Object.entries(specs))\n"
        "  vegaEmbed('#' + id, spec, {actions: false, renderer: 'svg'}).catch(console.error);\n"
        "</script>\n</body>\n</html>\n"
    )


def png(chart: Any, scale: float = 2.0) -> bytes:
    """Draw a chart as PNG."""
    import vl_convert

    drawn: bytes = vl_convert.vegalite_to_png(chart.to_json(), vl_version=_vega_lite(), scale=scale)
    return drawn


def _vega_lite() -> str:
    """The Vega-Lite version that Altair writes, as vl-convert names it."""
    import altair

    return "v" + ".".join(altair.SCHEMA_VERSION.lstrip("v").split(".")[:2])


def _table(section: Section) -> str:
    def row(cells: tuple[str, ...], tag: str) -> str:
        first, *numbers = map(html.escape, cells)
        rest = "".join(f'<{tag} class="number">{cell}</{tag}>' for cell in numbers)
        return f"<tr><{tag}>{first}</{tag}>{rest}</tr>"

    rows = "\n".join(row(cells, "td") for cells in section.rows)
    return (
        f'<div class="scroll"><table><thead>{row(section.columns, "th")}</thead>\n'
        f"<tbody>{rows}</tbody></table></div>"
    )


def _script(value: Mapping[str, Any]) -> str:
    """JSON that cannot end the script element it stands in."""
    return json.dumps(value, ensure_ascii=False).replace("<", "\\u003c")
