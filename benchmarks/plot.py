#!/usr/bin/env python
"""Draw time against memory from ``compare.py``'s JSON: a figure per shape and kind of data.

Every peer is a labelled point, ours the Pareto line: at each budget the fastest config that fits.
Hollow points have a dW error clearly above plain PyTorch's.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from labels import Label, place
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator
from measure import GIB

# Okabe and Ito's colours, told apart by all common kinds of colour blindness
BLUE, VERMILION, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#4D4D4D"
OURS = {
    "exact": ("flce-tune", BLUE, "o"),
    "weight_dtype": ("flce-tune, dW accumulated in weight dtype", VERMILION, "s"),
}
LESS_EXACT = 1.25  # times plain PyTorch's dW error
GIB_TICKS = (0.1, 0.2, 0.3, 0.5, 0.7, 1, 1.5, 2, 3, 4, 5, 7, 10, 15, 20, 30, 50, 100)
FLOOR_TICKS = (0.5, 0.7, 0.8, 0.9, 1, 1.05, 1.1, 1.2, 1.3, 1.5, 2, 3, 4, 6, 10, 20, 50, 100)

Row = dict[str, Any]

FASTER = 0.997
"""A point that takes more memory is drawn if it takes this much of the time, or less."""


def drawable(result: dict[str, Any]) -> list[Row]:
    """The rows that have both a time and a peak."""
    return [r for r in result["implementations"] if r.get("times_floor") and r.get("extra_bytes")]


def merged(documents: Sequence[dict[str, Any]]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Each shape and kind of data with all documents' rows, and the last one's environment.

    Of what several documents measured, the last counts.
    """
    found: dict[tuple[Any, ...], tuple[dict[str, Any], dict[str, Any]]] = {}
    for document in documents:
        for result in document["results"]:
            key = tuple(result[name] for name in ("tokens", "hidden", "vocab", "data"))
            before = found[key][0]["implementations"] if key in found else []
            rows = {_identity(row): row for row in (*before, *drawable(result))}
            found[key] = ({**result, "implementations": [*rows.values()]}, document["environment"])
    return list(found.values())


def _identity(row: Row) -> str:
    """What a row is of: a config, or a peer."""
    config = row.get("config")
    return json.dumps([config, row.get("accumulate")], sort_keys=True) if config else row["name"]


def series_of(row: Row) -> str:
    """Which line of ours a row belongs to, or ``peer``."""
    if not row["family"].startswith("ours"):
        return "peer"
    return "weight_dtype" if row.get("accumulate") == "weight_dtype" else "exact"


def pareto(rows: Sequence[Row]) -> list[Row]:
    """The rows no other beats in both memory and time, by memory, but for hardly faster ones."""
    front: list[Row] = []
    for row in sorted(rows, key=lambda row: (row["extra_bytes"], row["times_floor"])):
        if not front or row["times_floor"] < FASTER * front[-1]["times_floor"]:
            front.append(row)
    return front


def config_label(row: Row) -> str:
    """A config in a word or two."""
    config = row["config"]
    for name in ("chunk", "slab"):
        if config.get(name):
            return f"{config['strategy']} {config[name]}"
    return str(config["strategy"])


def draw(result: dict[str, Any], environment: dict[str, Any]) -> Figure:
    """One figure."""
    rows = drawable(result)
    figure, axes = plt.subplots(figsize=(8.4, 5.2), layout="constrained")
    x, y = [r["extra_bytes"] / GIB for r in rows], [r["times_floor"] for r in rows]
    origin = 0.85 * min(1.0, *y)  # logarithmic above it: the small differences are the news
    axes.set_xscale("log")
    axes.set_yscale("function", functions=(_log_above(origin), _exp_above(origin)))
    axes.set_xlim(min(x) / 1.45, max(x) * 1.45)
    axes.set_ylim(min(0.95, 0.95 * min(y)), max(y) * 1.12)
    for axis, ticks in ((axes.xaxis, GIB_TICKS), (axes.yaxis, FLOOR_TICKS)):
        axis.set_major_locator(FixedLocator(ticks))
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.grid(color="#DDDDDD", linewidth=0.6)
    axes.axhline(1.0, color=GREY, linewidth=1, linestyle=(0, (4, 3)))
    labels = _draw_peers(axes, rows) + _draw_ours(axes, rows)
    axes.set_xlabel("peak memory above x and weight, dX and dW included (GiB)")
    axes.set_ylabel("forward + backward, times the three dense GEMMs (6NDV)")
    axes.set_title(_title(result, environment), fontsize=10, loc="left")
    axes.legend(loc="upper right", fontsize=8, frameon=False)
    place(axes, labels)
    return figure


def _log_above(origin: float) -> Callable[[Any], Any]:
    return lambda value: np.log(np.maximum(value - origin, 1e-6))


def _exp_above(origin: float) -> Callable[[Any], Any]:
    return lambda value: np.exp(value) + origin


def _draw_peers(axes: Axes, rows: Sequence[Row]) -> list[Label]:
    plain = [r["errors"]["dw"] for r in rows if r["family"] == "eager"]
    _diamond(axes, [], [], False, label="peers")
    _diamond(axes, [], [], True, label="peers whose dW is less exact than plain PyTorch's")
    labels = []
    for row in rows:
        if series_of(row) != "peer":
            continue
        hollow = bool(plain) and row["errors"]["dw"] > LESS_EXACT * plain[0]
        x, y = row["extra_bytes"] / GIB, row["times_floor"]
        _diamond(axes, [x], [y], hollow)
        labels.append(Label(row["name"], x, y, GREY, 8.5))
    return labels


def _diamond(
    axes: Axes, x: Sequence[float], y: Sequence[float], hollow: bool, label: str | None = None
) -> None:
    face = "white" if hollow else GREY
    axes.plot(x, y, "D", color=GREY, markerfacecolor=face, markersize=6, zorder=3, label=label)


def _draw_ours(axes: Axes, rows: Sequence[Row]) -> list[Label]:
    labels = []
    for series, (name, colour, marker) in OURS.items():
        front = pareto([row for row in rows if series_of(row) == series])
        if not front:
            continue
        x, y = [r["extra_bytes"] / GIB for r in front], [r["times_floor"] for r in front]
        reach = axes.get_xlim()[1]
        axes.plot(*_stairs(x, y, reach), color=colour, linewidth=1.6, zorder=4)
        axes.plot(x, y, marker, color=colour, markersize=6, zorder=5, label=name)
        texts = {
            config_label(row): point
            for row, point in zip(front, zip(x, y, strict=True), strict=True)
        }
        labels += [Label(text, *point, colour, 7.5) for text, point in texts.items()]
    return labels


def _stairs(
    x: Sequence[float], y: Sequence[float], reach: float
) -> tuple[list[float], list[float]]:
    """Hold each value until the next point, the last one to ``reach``."""
    return np.repeat([*x, reach], 2)[1:-1].tolist(), np.repeat(y, 2).tolist()


def _title(result: dict[str, Any], environment: dict[str, Any]) -> str:
    versions = environment["versions"]
    sizes = f"{result['tokens']} tokens × {result['hidden']} × {result['vocab']}"
    kind = {"peaked": "trained-like logits", "flat": "untrained logits"}[result["data"]]
    return (
        f"{sizes}, {result['dtype']}, {kind}\n"
        f"{environment['device']['name']}, torch {versions['torch']},"
        f" {environment['date'][:10]}; dashed: three dense GEMMs, {result['floor_ms']:.1f} ms"
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "comparisons", type=Path, nargs="+",
        help="JSON of compare.py; of several, one figure a shape, each point beside its floor",
    )  # fmt: skip
    parser.add_argument("--out-dir", type=Path, default=Path())
    arguments = parser.parse_args(argv)
    documents = [json.loads(path.read_text()) for path in arguments.comparisons]
    arguments.out_dir.mkdir(parents=True, exist_ok=True)
    plt.rcParams.update({"svg.hashsalt": "flce-tune", "svg.fonttype": "path"})
    for result, environment in merged(documents):
        name = "{tokens}x{hidden}x{vocab}-{data}".format(**result)
        if not drawable(result):
            print(f"{name}: nothing has both a time and a peak, no figure", file=sys.stderr)
            continue
        figure = draw(result, environment)
        for suffix, metadata in (("svg", {"Date": None}), ("png", None)):
            path = arguments.out_dir / f"{name}.{suffix}"
            figure.savefig(path, dpi=160, metadata=metadata)
            print(path)
        plt.close(figure)
    return 0


if __name__ == "__main__":
    sys.exit(main())
