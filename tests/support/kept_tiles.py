"""Which tiles ``tile_skip`` keeps."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor


def watch(monkeypatch: pytest.MonkeyPatch, kernels: Any) -> list[Tensor]:
    """What each later call of the kernels keeps, [row tiles, T]."""
    decide, seen = kernels.tile_sums, []

    def watched(*arguments: Any) -> Tensor:
        seen.append(decide(*arguments))
        return seen[-1]

    monkeypatch.setattr(kernels, "tile_sums", watched)
    return seen


def share(keep: Tensor) -> float:
    """How many of the tiles are kept."""
    return float(keep.float().mean())
