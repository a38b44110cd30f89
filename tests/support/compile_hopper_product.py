"""Compiles the hand-scheduled product kernel for a Hopper GPU that is not there.

    python compile_hopper_product.py [CASE...]

Prints one JSON line per case: shared memory, its estimate, registers that a thread spills,
registers by ``setmaxnreg``, and how the tensor cores' waits are spread.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import Any

import torch
from compile_hopper import HOPPER, told
from torch import Tensor
from triton.runtime import driver

from flce_tune.kernels.config import Tile
from flce_tune.kernels.hopper.product import product_kernel
from flce_tune.kernels.hopper.products import arguments
from flce_tune.kernels.limits import shared_memory
from flce_tune.kernels.triton.entries import RowEntries

M, N, K, SLAB = 512, 512, 1024, 512


@dataclass(frozen=True)
class Case:
    """A variant of the kernel."""

    k_block: int
    contraction: str  # "v" for dX, "n" for dW
    split: bool = False
    prior: bool = False
    last: bool = True
    blocks: bool = False  # A lies in blocks; dX has a row factor and entries, dW written once sums

    @property
    def tile(self) -> Tile:
        stages = {32: 9, 64: 4}[self.k_block]
        n, v = (128, self.k_block) if self.contraction == "v" else (self.k_block, 128)
        return Tile(n, v, 256, 8, stages, 16, "shared")


CASES = (
    Case(64, "n", split=True, prior=True, last=False, blocks=True),
    Case(64, "v", split=True, prior=True, blocks=True),
    Case(32, "v", blocks=True),
    Case(64, "n", blocks=True),
    Case(32, "n", blocks=True),
    Case(32, "n", split=True, prior=True, last=False),
    Case(64, "v", split=True, last=False, blocks=True),
    Case(64, "n", prior=True, blocks=True),
    Case(64, "v"),
    Case(32, "v", split=True, prior=True),
    Case(64, "n", split=True, last=False),
    Case(32, "v", split=True, prior=True, last=False, blocks=True),
    Case(64, "v", split=True, prior=True, last=False, blocks=True),
    Case(64, "v", prior=True, blocks=True),
)


def matrix(rows: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(rows, columns, dtype=dtype)


def compiled(case: Case) -> Any:
    transposed = case.contraction == "n"
    stored = matrix(K, M) if transposed else matrix(M, K)
    if case.blocks:
        stored = matrix(2 * (K if transposed else M), SLAB)
    factor = joined = None
    if case.blocks and not transposed:
        factor = torch.empty(M)
        joined = RowEntries(torch.arange(M), torch.empty(M), matrix(K, N))
    elif case.blocks and case.last and not case.prior:
        joined = RowEntries(torch.arange(M), torch.empty(M), matrix(K, N, torch.float32))
    given, constants = arguments(
        stored, SLAB if case.blocks else 0, K if transposed else M, matrix(K, N), matrix(M, N),
        matrix(M, N, torch.uint8) if case.split else None, factor, joined, case.tile,
        case.contraction, transposed, case.prior, case.last,
    )  # fmt: skip
    return product_kernel.warmup(*given, grid=(1,), **constants)


def main() -> None:
    driver.set_active(HOPPER)
    for case in (CASES[int(which)] for which in sys.argv[1:] or range(len(CASES))):
        estimate = shared_memory(case.tile, case.contraction, 2)
        row = {"case": str(case), **told(compiled(case), case.tile, estimate)}
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
