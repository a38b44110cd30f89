"""``full``: one chunk of all tokens, so that dW is written once. 6NDV, N × V logits in place."""

from __future__ import annotations

from collections.abc import Iterator

from flce_tune.kernels.config import Config
from flce_tune.kernels.problem import Device, Problem
from flce_tune.kernels.strategies import common
from flce_tune.kernels.strategies.chunked import Chunked


class Full(Chunked):
    """``chunked`` with all tokens in one chunk."""

    name = "full"

    def reject(self, config: Config, problem: Problem, device: Device) -> str | None:
        """Say why the config cannot run here, or None if it can."""
        if config.chunk is not None:
            return f"full takes all tokens at once and has no chunk, got {config.chunk}"
        return self._reject_common(config, problem, device)

    def space(self, problem: Problem, device: Device) -> Iterator[Config]:
        """The base GEMMs, and every choice of each."""
        for products in common.gemm_variations(problem, device):
            yield products.config(self.name)

    def default(self, problem: Problem, device: Device) -> Config:
        """What can be scheduled by hand, and cuBLAS for the rest."""
        products, _ = common.by_hand(problem, device)
        return products.config(self.name)
