"""Compiles the hand-scheduled product kernel for a Hopper GPU that is not there.

    python compile_hopper_product.py [CASE...]

Prints one JSON line per case: shared memory, its estimate, registers that a thread spills,
registers by ``setmaxnreg``, and how the tensor cores' waits are spread.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from compile_hopper import HOPPER, told
from triton.runtime import driver

from flce_tune.kernels.hopper.product import product_kernel

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "probes"))
from pingpong_product_schedule import ProductSchedule, arguments

NARROW, WIDE = ProductSchedule(32, 9, lead=5), ProductSchedule(64, 4, lead=2)
CASES = (
    # transposed, sum kept as split24, prior, last
    (NARROW, True, True, True, False),
    (WIDE, False, False, False, True),
    (NARROW, False, True, True, True),
    (NARROW, False, False, False, True),
    (WIDE, True, True, True, False),
    (WIDE, True, True, False, False),
    (NARROW, False, True, True, False),
)


def main() -> None:
    driver.set_active(HOPPER)
    m, n, k = 512, 512, 1024
    for which in map(int, sys.argv[1:] or range(len(CASES))):
        schedule, transposed, split, prior, last = CASES[which]
        a = torch.empty(k, m).bfloat16().t() if transposed else torch.empty(m, k).bfloat16()
        b, out = torch.empty(k, n).bfloat16(), torch.empty(m, n).bfloat16()
        extra = torch.empty(m, n, dtype=torch.uint8) if split else None
        given = arguments(schedule, a, b, out, extra, prior, last)
        kernel = product_kernel.warmup(*given, grid=(1,), num_warps=4)
        row = {"case": CASES[which][1:], **told(kernel, schedule, schedule.shared_memory)}
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
