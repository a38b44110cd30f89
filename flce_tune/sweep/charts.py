"""Charts of a report, drawn with Altair; importing this imports it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt

from flce_tune.sweep.comparison import Difference
from flce_tune.sweep.interval import median_interval
from flce_tune.sweep.results import ATOMIC, GEMMS, ProblemResults, TileTime, tile_times
from flce_tune.tuning_db.records import Measurement, Winner

MIB = 1 << 20
FAR = 3.0  # times the best: what is slower is left out of the front's chart
WIDTH, HEIGHT = 420, 260  # pixels
COLOURS = {
    "full": "#0072b2",
    "chunked": "#009e73",
    "recompute": "#d55e00",
    "factored": "#e69f00",
    "overlay": "#56b4e9",
    "atomic": "#cc79a7",
}

Chart = Any  # of Altair, whose methods promise no more
Named = dict[str, Chart]


def charts(results: ProblemResults) -> Named:
    """Draw what there is to draw of one problem: ``front``, ``speedup``, ``tiles``, ``failures``.

    ``results`` needs at least one measurement.
    """
    drawn: Named = {}
    if results.timed:
        drawn["front"] = front(results)
    if any(w.default_ms or w.eager_ms for w in results.winners):
        drawn["speedup"] = speedup(results.winners)
    if tile_times(results.timed):
        drawn["tiles"] = tiles(results)
    if results.failures:
        drawn["failures"] = failures(results)
    return drawn


def together(drawn: Named, title: str) -> Chart:
    """Put the charts of one problem on one sheet."""
    sheet = alt.concat(*drawn.values(), columns=2, spacing=40)
    return sheet.resolve_scale(color="independent").properties(
        title=alt.TitleParams(title, anchor="start", fontSize=16, offset=16), background="white"
    )


def front(results: ProblemResults) -> Chart:
    """Time against workspace: every config, and the front of the winners."""
    timed = results.timed
    limit = FAR * (timed[0].median_ms or 0.0)
    winning = {w.measurement.id for w in results.winners}
    rows = [
        {
            "strategy": str(m.config.get("strategy")),
            "ms": m.median_ms,
            "MiB": max(m.workspace_bytes or 0, 1 << 10) / MIB,
            "config": _config(m.config),
            "winner": m.id in winning,
            **_bounds(m),
        }
        for m in timed
        if (m.median_ms or 0.0) <= limit or m.id in winning
    ]
    far = len(timed) - len(rows)
    points = alt.Chart(_data(rows)).encode(
        x=alt.X(
            "MiB:Q",
            title="workspace, MiB",
            scale=alt.Scale(type="log", nice=False, padding=12),
            axis=alt.Axis(labelOverlap="greedy", labelSeparation=6),
        ),
        y=alt.Y("ms:Q", title="time, ms", scale=alt.Scale(zero=False, padding=12)),
    )
    tooltip = [
        "config:N",
        alt.Tooltip("ms:Q", format=".4~g"),
        alt.Tooltip("MiB:Q", format=",.4~g"),
    ]
    layers: list[Any] = [
        points.mark_point(size=35, opacity=0.45, filled=True).encode(
            color=_strategy(rows), tooltip=tooltip
        ),
        points.transform_filter("datum.winner").mark_line(color="#555", interpolate="step-after"),
        points.transform_filter("datum.winner && datum.low")
        .mark_rule(strokeWidth=2)
        .encode(y=alt.Y("low:Q"), y2="high:Q", color=_strategy(rows)),
        points.transform_filter("datum.winner")
        .mark_point(size=130, strokeWidth=2, filled=False)
        .encode(color=_strategy(rows), tooltip=tooltip),
    ]
    layers += _baselines(results.winners, limit)
    subtitle = [
        "circles: winners, with the 95 % interval of their median",
        "others may have run only once",
    ]
    if far:
        subtitle.append(f"{far} slower than {FAR:g} times the best left out")
    return alt.layer(*layers).properties(
        width=WIDTH,
        height=HEIGHT,
        title=alt.TitleParams(
            "Time and workspace",
            subtitle=subtitle,
        ),
    )


def speedup(winners: Sequence[Winner]) -> Chart:
    """How many times faster than the default config and than plain PyTorch the winners are."""
    rows: list[dict[str, Any]] = [
        {"config": label, "over": over, "times": baseline / w.measurement.median_ms}
        for label, w in zip(_labels(winners), winners, strict=True)
        for over, baseline in (("default config", w.default_ms), ("plain PyTorch", w.eager_ms))
        if baseline and w.measurement.median_ms
    ]
    limit = 1.15 * max(1.0, *(row["times"] for row in rows))  # room for the last number
    bars = alt.Chart(_data(rows)).encode(
        y=alt.Y("config:N", title=None, sort=None, axis=alt.Axis(labelLimit=220)),
        yOffset=alt.YOffset("over:N"),
        x=alt.X("times:Q", title="times as fast", scale=alt.Scale(domain=[0, limit])),
    )
    one = alt.Chart(_data([{"times": 1}])).mark_rule(color="#555", strokeDash=[4, 3])
    return alt.layer(
        bars.mark_bar().encode(
            color=alt.Color("over:N", title="over", scale=alt.Scale(range=["#7f8fa6", "#0072b2"]))
        ),
        bars.mark_text(align="left", dx=3).encode(text=alt.Text("times:Q", format=".2f")),
        one.encode(x="times:Q"),
    ).properties(width=WIDTH - 120, height=alt.Step(16), title="Speed-up of the winners")


def tiles(results: ProblemResults) -> Chart:
    """The best time for each V_BLOCK × D_BLOCK that was measured, GEMM by GEMM."""
    times = tile_times(results.timed)
    gemms = [gemm for gemm in (*GEMMS, ATOMIC) if any(t.gemm == gemm for t in times)]
    return alt.hconcat(
        *(_tiles_of(gemm, [t for t in times if t.gemm == gemm]) for gemm in gemms)
    ).properties(
        title=alt.TitleParams(
            "Best time by tile of our GEMMs",
            subtitle="ms of the whole op at its best, perhaps of a single run",
        )
    )


def _tiles_of(gemm: str, times: Sequence[TileTime]) -> Chart:
    best = min(t.ms for t in times)
    rows = [{"V": t.v_block, "D": t.d_block, "ms": t.ms, "times": t.ms / best} for t in times]
    cells = alt.Chart(_data(rows)).encode(
        x=alt.X("V:O", title="V_BLOCK", axis=alt.Axis(labelAngle=0)),
        y=alt.Y("D:O", title="D_BLOCK", sort="descending"),
    )
    # One scale for all: a light cell is far from the best of its GEMM, be it by 20 % or more.
    colour = alt.Color(
        "times:Q",
        title="of the best",
        scale=alt.Scale(scheme="viridis", reverse=True, domain=[1, 1.2], clamp=True),
        legend=None,
    )
    return alt.layer(
        cells.mark_rect(stroke="white").encode(
            color=colour, tooltip=["V:O", "D:O", "ms:Q", alt.Tooltip("times:Q", format=".3f")]
        ),
        cells.mark_text(fontSize=11).encode(
            text=alt.Text("ms:Q", format=".4~g"),
            color=alt.condition("datum.times > 1.1", alt.value("white"), alt.value("black")),
        ),
    ).properties(width=alt.Step(52), height=alt.Step(34), title=gemm)


def failures(results: ProblemResults) -> Chart:
    """How many configs failed, by strategy and status."""
    rows = [
        {"strategy": strategy, "status": status, "configs": count}
        for (strategy, status), count in results.failures.items()
    ]
    ticks = min(5, max(results.failures.values()))
    return (
        alt.Chart(_data(rows))
        .mark_bar()
        .encode(
            x=alt.X("configs:Q", title="configs", axis=alt.Axis(format="d", tickCount=ticks)),
            y=alt.Y("status:N", title=None),
            color=_strategy(rows),
            tooltip=["strategy:N", "status:N", "configs:Q"],
        )
        .properties(width=WIDTH - 120, height=alt.Step(24), title="Configs that failed")
    )


def side_by_side(differences: Mapping[str, Difference], names: tuple[str, str]) -> Chart:
    """The fastest time of each problem on two sides.

    Args:
        differences: of problems that both sides have, by the problem's name.
        names: of the two sides.
    """
    rows = [
        {"problem": problem, "side": name, "ms": winner.measurement.median_ms}
        for problem, one in differences.items()
        for name, winner in zip(names, (one.a, one.b), strict=True)
        if winner is not None
    ]
    return (
        alt.Chart(_data(rows))
        .mark_bar()
        .encode(
            y=alt.Y("problem:N", title=None, sort=None, axis=alt.Axis(labelLimit=240)),
            yOffset=alt.YOffset("side:N", sort=list(names)),
            x=alt.X("ms:Q", title="time, ms"),
            color=alt.Color(
                "side:N",
                title=None,
                sort=list(names),
                scale=alt.Scale(range=["#0072b2", "#d55e00"]),
                legend=alt.Legend(orient="top"),
            ),
            tooltip=["problem:N", "side:N", "ms:Q"],
        )
        .properties(width=WIDTH, height=alt.Step(16), title="Fastest config of each problem")
    )


def _data(rows: Sequence[dict[str, Any]]) -> alt.Data:
    return alt.Data(values=list(rows))  # type: ignore[no-untyped-call]


def _bounds(measurement: Measurement) -> dict[str, float | None]:
    low, high = median_interval(measurement.samples_ms) or (None, None)
    return {"low": low, "high": high}


def _strategy(rows: Sequence[dict[str, Any]]) -> alt.Color:
    there = {row["strategy"] for row in rows}
    names = [*(name for name in COLOURS if name in there), *sorted(there - {*COLOURS})]
    scale = alt.Scale(domain=names, range=[COLOURS.get(name, "#777777") for name in names])
    return alt.Color("strategy:N", title="strategy", scale=scale)


def _baselines(winners: Sequence[Winner], limit: float) -> list[Chart]:
    """Lines at the default config's and plain PyTorch's time, where they are near enough."""
    if not winners:
        return []
    lines: list[tuple[str, float | None, dict[str, Any]]] = [
        ("default config", winners[0].default_ms, {"align": "left", "x": 4}),
        ("plain PyTorch", winners[0].eager_ms, {"align": "right", "x": "width", "dx": -4}),
    ]
    layers: list[Chart] = []
    for what, ms, side in lines:
        if ms is not None and ms <= limit:
            line = alt.Chart(_data([{"ms": ms, "what": what}])).encode(y="ms:Q")
            layers.append(line.mark_rule(strokeDash=[4, 3], color="#555"))
            text = line.mark_text(dy=-6, color="#555", **side)
            layers.append(text.encode(text="what:N"))
    return layers


def _labels(winners: Sequence[Winner]) -> list[str]:
    """Short names of winners, told apart by their workspace."""
    return [
        f"{m.config.get('strategy')}, {(m.workspace_bytes or 0) / MIB:.0f} MiB"
        for m in (winner.measurement for winner in winners)
    ]


def _config(config: Any) -> str:
    """A config for a tooltip: its fields as they are stored."""
    parts = [str(config.get("strategy"))]
    for name, value in config.items():
        if name != "strategy":
            inner = "×".join(map(str, value.values())) if isinstance(value, dict) else value
            parts.append(f"{name}={inner}")
    return " ".join(parts)
