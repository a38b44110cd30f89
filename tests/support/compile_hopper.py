"""Compiles the hand-scheduled GEMMs for a Hopper GPU that is not there.

    python compile_hopper.py

Prints one JSON line per kernel: shared memory, its estimate, registers that a thread spills,
registers by ``setmaxnreg``, and how the tensor cores' waits are spread.
"""

from __future__ import annotations

import json
import re
from typing import Any

import torch
from triton.runtime import driver

from flce_tune.kernels.config import Tile
from flce_tune.kernels.hopper import launch
from flce_tune.kernels.limits import shared_memory
from flce_tune.kernels.problem import Device
from flce_tune.kernels.values import Inputs
from flce_tune.sweep.absent import AbsentDriver
from flce_tune.sweep.resources import usage

HOPPER = AbsentDriver(Device("cuda", "a Hopper GPU", (9, 0), 132, 232448, 1 << 36))
PING_PONG = Tile(128, 128, 64, 8, 5, 16, "ping_pong")
SHARED = Tile(128, 256, 64, 8, 4, 16, "shared")


def compiled(name: str, tile: Tile, width: int, store: bool, bias: bool) -> Any:
    n, hidden, slab = 256, 1024, 4096
    x, w = torch.empty(n, hidden).bfloat16(), torch.empty(width, hidden).bfloat16()
    b = torch.empty(width).bfloat16() if bias else None
    inputs = Inputs(x, w, torch.empty(n, dtype=torch.int64), b)
    out = torch.empty(-(-width // slab) * n, slab).bfloat16() if store else None
    row, table = torch.empty(n), torch.empty(-(-width // tile.v_block), n)
    kernel, tables, scalars = {
        "numerators": (launch.numerators_kernel, (row, table, table), (1.5,)),
        "gradient": (launch.gradient_kernel, (row.long(), row, row, row), (width, 1.5)),
        "logits": (launch.logits_kernel, (table, table), (1.5,)),
    }[name]
    given, constants = launch.arguments(inputs, out, tables, n, slab, tile, *scalars)
    return kernel.warmup(*given, grid=(1,), **constants)


def told(kernel: Any, tile: object, estimate: int) -> dict[str, Any]:
    """What a compiled kernel takes, JSON-ready."""
    ptx = kernel.asm["ptx"]
    return {
        "tile": str(tile),
        "shared": kernel.metadata.shared,
        "estimate": estimate,
        "stack": usage(kernel.asm["cubin"])[1],
        "registers": sorted(set(map(int, re.findall(r"setmaxnreg.inc.*?(\d+);", ptx)))),
        "waits": re.findall(r"wgmma.wait_group.sync.aligned (\d)", ptx),
    }


def main() -> None:
    driver.set_active(HOPPER)
    cases = [
        ("numerators", PING_PONG, 8192, True, False),
        ("gradient", SHARED, 8208, True, True),
        ("logits", SHARED, 8208, False, True),
        ("logits", PING_PONG, 8208, True, True),
    ]
    for name, tile, *rest in cases:
        kernel = compiled(name, tile, *rest)
        row = {"kernel": name, **told(kernel, tile, shared_memory(tile, "d", 2))}
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
