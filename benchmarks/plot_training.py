#!/usr/bin/env python
"""Draw ``train_lm.py``'s JSON: the loss curves, and how far they are from the fp32 head's."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from measure import GIB

STYLES = {  # Okabe and Ito's colours; dashes, so that curves that lie on each other both show
    "plain_fp32": ("PyTorch, head in fp32", "#4D4D4D", "-", 3.0),
    "plain": ("PyTorch, bf16 logits", "#E69F00", "-", 1.6),
    "flce_tune": ("flce-tune", "#0072B2", (0, (3, 2)), 1.6),
}


def draw(document: dict[str, Any]) -> Figure:
    """Loss above, differences from the reference run below."""
    runs: dict[str, dict[str, Any]] = document["runs"]
    figure, (above, below) = plt.subplots(
        2, 1, figsize=(8.4, 6.0), sharex=True, height_ratios=(2, 1), layout="constrained"
    )
    names = [name for name in STYLES if name in runs]
    reference = names[0]
    for name in names:
        label, colour, dashes, width = STYLES[name]
        run = runs[name]
        legend = f"{label} ({run['median_step_ms']:.0f} ms a step{_memory(run)})"
        style: dict[str, Any] = {"color": colour, "linestyle": dashes, "linewidth": width}
        above.plot(run["losses"], label=legend, **style)
        if name != reference:
            gaps = [a - b for a, b in zip(run["losses"], runs[reference]["losses"], strict=True)]
            below.plot(gaps, label=f"{label} minus {STYLES[reference][0]}", **style)
    above.set_ylabel("loss (nats per token)")
    below.set_ylabel("difference")
    below.set_xlabel("step")
    for axes in (above, below):
        axes.grid(color="#DDDDDD", linewidth=0.6)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=8, frameon=False)
    below.axhline(0.0, color="#4D4D4D", linewidth=0.8)
    above.set_title(_title(document), fontsize=10, loc="left")
    return figure


def _memory(run: dict[str, Any]) -> str:
    return f", peak {run['peak_bytes'] / GIB:.1f} GiB" if run["peak_bytes"] else ""


def _title(document: dict[str, Any]) -> str:
    model, environment = document["model"], document["environment"]
    parameters = next(iter(document["runs"].values()))["parameters"]
    return (
        f"{parameters / 1e6:.0f} M parameters, D = {model['hidden']}, V = {model['vocab']},"
        f" {document['training']['tokens_per_step']} tokens a step,"
        f" {environment['device']['name']}, {environment['date'][:10]}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("training", type=Path, help="JSON of train_lm.py")
    parser.add_argument("--out", type=Path, default=Path("training"), help="without suffix")
    arguments = parser.parse_args(argv)
    figure = draw(json.loads(arguments.training.read_text()))
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    plt.rcParams.update({"svg.hashsalt": "flce-tune", "svg.fonttype": "path"})
    for suffix, metadata in (("svg", {"Date": None}), ("png", None)):
        path = arguments.out.with_name(f"{arguments.out.name}.{suffix}")
        figure.savefig(path, dpi=160, metadata=metadata)
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
