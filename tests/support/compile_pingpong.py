"""Compiles the hand-scheduled GEMMs for a Hopper GPU that is not there.

    python compile_pingpong.py FOLDER_OF_THE_KERNEL

Prints one JSON line per kernel: shared memory, its estimate, registers that a thread spills,
registers by ``setmaxnreg``, and how the tensor cores' waits are spread.
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import torch
from triton.runtime import driver

from flce_tune.kernels.problem import Device
from flce_tune.sweep.absent import AbsentDriver
from flce_tune.sweep.resources import usage

sys.path.insert(0, sys.argv[1])
from pingpong import pingpong_kernel
from pingpong_gradient import pingpong_gradient_kernel
from pingpong_logits import pingpong_logits_kernel
from pingpong_schedule import Schedule, arguments

HOPPER = AbsentDriver(Device("cuda", "a Hopper GPU", (9, 0), 132, 232448, 1 << 36))


def compiled(name: str, schedule: Schedule, width: int, store: bool, bias: bool) -> Any:
    n, hidden, slab = 256, 1024, 4096
    x, w = torch.empty(n, hidden).bfloat16(), torch.empty(width, hidden).bfloat16()
    b = torch.empty(width).bfloat16() if bias else None
    out = torch.empty(-(-width // slab) * n, slab).bfloat16() if store else None
    row, table = torch.empty(n), torch.empty(-(-width // schedule.v_block), n)
    kernel, tables, scalars = {
        "numerators": (pingpong_kernel, (row, table, table), (1.5,)),
        "gradient": (pingpong_gradient_kernel, (row.long(), row, row, row), (width, 1.5)),
        "logits": (pingpong_logits_kernel, (table, table), (1.5,)),
    }[name]
    given = arguments(schedule, x, w, b, out, tables, n, slab, *scalars)
    return kernel.warmup(*given, grid=(1,), num_warps=4)


def told(kernel: Any, schedule: Any) -> dict[str, Any]:
    """What a compiled kernel takes, JSON-ready."""
    ptx = kernel.asm["ptx"]
    return {
        "schedule": str(schedule),
        "shared": kernel.metadata.shared,
        "estimate": schedule.shared_memory,
        "stack": usage(kernel.asm["cubin"])[1],
        "registers": sorted(set(map(int, re.findall(r"setmaxnreg.inc.*?(\d+);", ptx)))),
        "waits": re.findall(r"wgmma.wait_group.sync.aligned (\d)", ptx),
    }


def main() -> None:
    driver.set_active(HOPPER)
    shared = Schedule(64, 256, 64, 4, shared=True, lead=3)
    cases = [
        ("numerators", shared, 8192, True, False),
        ("gradient", shared, 8208, True, True),
        ("logits", Schedule(128, 128, 64, 5, shared=False), 8208, True, True),
    ]
    for name, schedule, *rest in cases:
        kernel = compiled(name, schedule, *rest)
        print(json.dumps({"kernel": name, **told(kernel, schedule)}), flush=True)


if __name__ == "__main__":
    main()
