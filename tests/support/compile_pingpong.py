"""Compiles the hand-scheduled GEMMs for a Hopper GPU that is not there.

    python compile_pingpong.py FOLDER_OF_THE_KERNEL

Prints one JSON line per kernel: shared memory, its estimate, bytes of stack a thread (spills),
registers by ``setmaxnreg``, and how the tensor cores' waits are spread.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

sys.path.insert(0, sys.argv[1])
from pingpong import pingpong_kernel
from pingpong_gradient import pingpong_gradient_kernel
from pingpong_logits import pingpong_logits_kernel
from pingpong_schedule import Schedule, arguments

SHARED_MEMORY = 232448


class NoGpu:
    """Triton's view of a GPU that can be compiled for, and nothing else."""

    utils = SimpleNamespace(get_device_properties=lambda _: {"max_shared_mem": SHARED_MEMORY})

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


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


def stack(cubin: bytes) -> int:
    """Bytes a thread has in local memory."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = triton.knobs.nvidia.cuobjdump.path
        usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True)
    return sum(int(size) for size in re.findall(r"(?:STACK|LOCAL):(\d+)", usage.stdout))


def main() -> None:
    driver.set_active(NoGpu())
    shared = Schedule(64, 256, 64, 4, shared=True, lead=3)
    cases = [
        ("numerators", shared, 8192, True, False),
        ("gradient", shared, 8208, True, True),
        ("logits", Schedule(128, 128, 64, 5, shared=False), 8208, True, True),
    ]
    for name, schedule, *rest in cases:
        kernel = compiled(name, schedule, *rest)
        row = {
            "kernel": name,
            "schedule": str(schedule),
            "shared": kernel.metadata.shared,
            "estimate": schedule.shared_memory,
            "stack": stack(kernel.asm["cubin"]),
            "registers": sorted(
                set(map(int, re.findall(r"setmaxnreg.inc.*?(\d+);", kernel.asm["ptx"])))
            ),
            "waits": re.findall(r"wgmma.wait_group.sync.aligned (\d)", kernel.asm["ptx"]),
        }
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
