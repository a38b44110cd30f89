"""``atomic``: the article's kernel, one program per token, dW by float32 atomics. 8NDV.

The readable baseline: workspace O(1) in N·V, slow, and not deterministic in the last bits of dW.
Its loss per token and its evaluation are ``recompute``'s, which share no code with the kernel.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from flce_tune.kernels.backends import has_triton
from flce_tune.kernels.config import Config, Tile
from flce_tune.kernels.problem import Device, Problem
from flce_tune.kernels.strategies import common
from flce_tune.kernels.strategies.recompute import Recompute
from flce_tune.kernels.values import (
    Coefficients,
    Gradients,
    Inputs,
    LossSpec,
    Statistics,
    Wanted,
)

BLOCKS = (32, 64, 128)
WARPS = (2, 4, 8)
LARGEST_BLOCK = 256
MAX_ELEMENTS = 128 * 256
LARGEST_SWEPT = 1 << 38
"""N·D·V beyond which one run takes seconds: such problems are not swept, only run on request."""


class Atomic:
    """One program per token; see the module's text."""

    name = "atomic"
    deterministic = False

    def reject(self, config: Config, problem: Problem, device: Device) -> str | None:
        """Say why the config cannot run here, or None if it can."""
        tile = config.logits
        if device.kind != "cuda" or not has_triton():
            return f"atomic needs a CUDA device and Triton, this is {device.kind}"
        if problem.dtype == "float64":
            return "atomic sums in float32, the problem is float64"
        if problem.accumulate != "fp32" or config.accumulator != "fp32":
            return "atomic always accumulates in fp32"
        if config.chunk is not None or config.slab is not None or config.dx or config.dw:
            return "atomic has one tile, logits, and no chunk, slab, dx or dw"
        if tile is None:
            return "atomic needs the tile logits, with n_block = 1"
        if tile.n_block != 1:
            return f"atomic works row by row: n_block must be 1, got {tile.n_block}"
        for name, size in (("v_block", tile.v_block), ("d_block", tile.d_block)):
            if size & (size - 1) or not 16 <= size <= LARGEST_BLOCK:
                return f"{name} must be a power of two in [16, {LARGEST_BLOCK}], got {size}"
        if tile.num_warps not in (1, 2, 4, 8, 16):
            return f"num_warps must be 1, 2, 4, 8 or 16, got {tile.num_warps}"
        if tile.v_block * tile.d_block > MAX_ELEMENTS:
            return f"a tile of {tile.v_block}×{tile.d_block} does not fit the registers"
        return None

    def space(self, problem: Problem, device: Device) -> Iterator[Config]:
        """D_BLOCK × V_BLOCK × num_warps."""
        if problem.tokens * problem.hidden * problem.vocab > LARGEST_SWEPT:
            return
        for v_block in BLOCKS:
            for d_block in BLOCKS:
                for warps in WARPS:
                    yield article_config(d_block, v_block, warps)

    def default(self, problem: Problem, device: Device) -> Config:
        """The article's tile."""
        return article_config()

    def workspace(self, config: Config, problem: Problem) -> int:
        """float32 images of the gradients, rounded at the end."""
        if problem.mode == "eval":
            return Recompute().workspace(Config("recompute"), problem)
        elements = problem.tokens * problem.hidden
        if problem.mode == "train":
            elements += problem.vocab * problem.hidden
        return 0 if problem.dtype == "float32" else 4 * elements

    def products(self, config: Config, problem: Problem) -> float:
        """The three GEMMs, and the logits once more."""
        return 4.0

    def train(
        self,
        inputs: Inputs,
        row_weight: Tensor,
        loss: LossSpec,
        wanted: Wanted,
        config: Config,
    ) -> tuple[Statistics, Gradients]:
        """Compute statistics and the gradients of Σ_i r_i·loss_i in one go."""
        from flce_tune.kernels.triton.launch import launch_atomic

        assert config.logits is not None
        statistics, dx, dw, db = launch_atomic(inputs, row_weight, loss, wanted, config.logits)
        dtype = common.gradient_dtype(inputs.x.dtype)

        def rounded(gradient: Tensor | None) -> Tensor | None:
            return None if gradient is None else gradient.to(dtype)

        return statistics, Gradients(dx=rounded(dx), dw=rounded(dw), db=rounded(db))

    def evaluate(
        self, inputs: Inputs, loss: LossSpec, wanted: Wanted, config: Config
    ) -> Statistics:
        """Compute statistics only."""
        return Recompute().evaluate(inputs, loss, wanted, Config("recompute"))

    def backward(
        self,
        inputs: Inputs,
        statistics: Statistics,
        coefficients: Coefficients,
        loss: LossSpec,
        wanted: Wanted,
        config: Config,
    ) -> Gradients:
        """Compute the gradients for given row coefficients, recomputing the logits."""
        given = Config("recompute", slab=4096)
        return Recompute().backward(inputs, statistics, coefficients, loss, wanted, given)


def article_config(d_block: int = 64, v_block: int = 64, num_warps: int = 4) -> Config:
    """D_BLOCK × V_BLOCK tiles, one row a program."""
    tile = Tile(1, v_block, d_block, num_warps=num_warps, num_stages=2, group=1)
    return Config("atomic", logits=tile)
