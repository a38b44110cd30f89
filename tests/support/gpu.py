"""What the tests that need a GPU share."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from flce_tune.kernels import strategies
from flce_tune.kernels.config import Config, Tile
from flce_tune.kernels.problem import DTYPE_NAMES, Problem, describe_device

needs_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
LARGE = {
    "logits": Tile(128, 256, 64, 8, 3, 8),
    "dx": Tile(128, 64, 256, 8, 3, 8),
    "dw": Tile(64, 128, 256, 8, 3, 8),
}
PING_PONG = LARGE | {"logits": Tile(128, 128, 64, 8, 5, 16, "ping_pong")}
SHARED = LARGE | {"logits": Tile(128, 256, 64, 8, 4, 16, "shared")}
BY_HAND = PING_PONG | {
    "dx": Tile(128, 64, 256, 8, 4, 16, "shared"),
    "dw": Tile(64, 128, 256, 8, 4, 16, "shared"),
}
BY_HAND_NARROW = SHARED | {
    "dx": Tile(128, 32, 256, 8, 9, 8, "shared"),
    "dw": Tile(32, 128, 256, 8, 9, 8, "shared"),
}
"""Products scheduled by hand keep no float32 sums."""
SMALL = {
    "logits": Tile(64, 128, 32, 4, 3, 4),
    "dx": Tile(64, 32, 64, 4, 3, 4),
    "dw": Tile(32, 64, 64, 4, 3, 4),
}
ATOMIC = Config("atomic", logits=Tile(1, 64, 64, 4, 2, 1))


def cuts(tiles: dict[str, Tile], chunk: int = 128, slab: int = 4096) -> dict[str, Config]:
    """Every deterministic strategy with the given tiles."""
    by_hand = bool(tiles) and tiles["dw"].schedule != "compiler"
    summed = Config("", accumulator="split24" if by_hand else "fp32", **tiles)
    return {
        "chunked": replace(summed, strategy="chunked", chunk=chunk),
        "full": Config("full", **tiles),
        "recompute": replace(summed, strategy="recompute", slab=slab),
    }


def skip_unless_it_runs(
    config: Config, n: int, hidden: int, vocab: int, dtype: torch.dtype
) -> None:
    """Skip a test of a config this GPU cannot run."""
    problem = Problem(n, hidden, vocab, DTYPE_NAMES[dtype])
    if reason := strategies.reject(config, problem, describe_device(torch.device("cuda", 0))):
        pytest.skip(reason)
