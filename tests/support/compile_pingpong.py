"""Compiles the hand-scheduled numerators kernel for a Hopper GPU that is not there.

    python compile_pingpong.py FOLDER_OF_THE_KERNEL

Prints one JSON line per schedule: shared memory, its estimate, bytes of stack a thread (spills),
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


def compiled(schedule: Schedule, width: int, store: bool) -> Any:
    n, hidden, slab = 256, 1024, 4096
    x, w = torch.empty(n, hidden).bfloat16(), torch.empty(width, hidden).bfloat16()
    out = torch.empty(-(-width // slab) * n, slab).bfloat16() if store else None
    rows, table = torch.empty(n), torch.empty(-(-width // schedule.v_block), n)
    given = arguments(schedule, x, w, rows, 1.0, out, n, slab, table, table)
    return pingpong_kernel.warmup(*given, grid=(1,), num_warps=4)


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
    cases = [
        (Schedule(64, 256, 64, 4, shared=True, lead=3), 8192, True),
        (Schedule(128, 128, 64, 5, shared=False), 8191, False),
    ]
    for schedule, width, store in cases:
        kernel = compiled(schedule, width, store)
        row = {
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
