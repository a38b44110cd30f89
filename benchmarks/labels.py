"""Text beside points of a plot, placed so that it covers neither points nor other text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.patheffects import withStroke
from matplotlib.text import Text
from matplotlib.transforms import Bbox

# offsets in points, the text's alignment there, and whether it needs a line to its point
_SPOTS = [
    (dx * reach, dy * reach, ha, va, reach > 1)
    for reach in (1.0, 2.0, 3.2, 4.6)
    for dx, dy, ha, va in (
        (7, 0, "left", "center"),
        (-7, 0, "right", "center"),
        (0, 7, "center", "bottom"),
        (0, -7, "center", "top"),
        (6, 6, "left", "bottom"),
        (6, -6, "left", "top"),
        (-6, 6, "right", "bottom"),
        (-6, -6, "right", "top"),
    )
]


@dataclass(frozen=True)
class Label:
    """A text and the data point it belongs to."""

    text: str
    x: float
    y: float
    colour: str
    size: float = 8.0


def place(axes: Axes, labels: Sequence[Label]) -> None:
    """Draw the labels clear of each other, of their points and of the axes' lines.

    The axes' limits and lines must be final.
    """
    canvas = axes.figure.canvas
    if not isinstance(canvas, FigureCanvasAgg):
        raise TypeError(f"labels are placed with the Agg backend, got {type(canvas).__name__}")
    canvas.draw()  # type: ignore[no-untyped-call]
    renderer = canvas.get_renderer()  # type: ignore[no-untyped-call]
    frame = axes.get_window_extent(renderer)
    centres = axes.transData.transform([(label.x, label.y) for label in labels])
    taken = [Bbox.from_bounds(x - 5, y - 5, 10, 10) for x, y in centres] + _strokes(axes)
    for label in labels:
        best = None
        for dx, dy, ha, va, far in _SPOTS:
            text = axes.annotate(
                label.text,
                (label.x, label.y),
                xytext=(dx, dy),
                textcoords="offset points",
                ha=ha,
                va=va,
                fontsize=label.size,
                color=label.colour,
                path_effects=[withStroke(linewidth=2.5, foreground="white")],
                zorder=6,
                arrowprops={"arrowstyle": "-", "lw": 0.5, "color": label.colour} if far else None,
            )
            text.update_positions(renderer)
            box = Text.get_window_extent(text, renderer)  # without the line to its point
            cost = sum(_overlap(box, other) for other in taken) + box.width * box.height
            cost -= _overlap(box, frame)  # what lies outside the frame costs its area
            if best is None or cost < best[0]:
                if best is not None:
                    best[1].remove()
                best = (cost, text, box)
            else:
                text.remove()
            if best[0] <= 0:
                break
        if best is not None:
            taken.append(best[2])


def _strokes(axes: Axes) -> list[Bbox]:
    """The axes' horizontal and vertical line segments, as thin boxes."""
    boxes = []
    for line in axes.get_lines():
        path = line.get_transform().transform_path(line.get_path())
        corners = np.asarray(path.vertices, dtype=float)
        for (x0, y0), (x1, y1) in pairwise(corners.tolist()):
            x, y = min(x0, x1) - 2, min(y0, y1) - 2
            boxes.append(Bbox.from_bounds(x, y, abs(x1 - x0) + 4, abs(y1 - y0) + 4))
    return boxes


def _overlap(one: Bbox, other: Bbox) -> float:
    shared = Bbox.intersection(one, other)
    return 0.0 if shared is None else float(shared.width * shared.height)
