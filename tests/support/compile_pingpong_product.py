"""Compiles the hand-scheduled product kernel for a Hopper GPU that is not there.

    python compile_pingpong_product.py FOLDER_OF_THE_KERNEL [CASE...]

Prints one JSON line per case: shared memory, its estimate, registers that a thread spills,
registers by ``setmaxnreg``, and how the tensor cores' waits are spread.
"""

from __future__ import annotations

import json
import sys

import torch
from compile_pingpong import HOPPER, told
from pingpong_product import pingpong_product_kernel
from pingpong_product_schedule import ProductSchedule, arguments
from triton.runtime import driver

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
    for which in map(int, sys.argv[2:] or range(len(CASES))):
        schedule, transposed, split, prior, last = CASES[which]
        a = torch.empty(k, m).bfloat16().t() if transposed else torch.empty(m, k).bfloat16()
        b, out = torch.empty(k, n).bfloat16(), torch.empty(m, n).bfloat16()
        extra = torch.empty(m, n, dtype=torch.uint8) if split else None
        given = arguments(schedule, a, b, out, extra, prior, last)
        kernel = pingpong_product_kernel.warmup(*given, grid=(1,), num_warps=4)
        row = {"case": CASES[which][1:], **told(kernel, schedule)}
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
