"""Tiles the validity predicate accepts compile for GPUs that are not here, within its bounds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
PROGRAM = Path(__file__).parents[1] / "support" / "compile_kernels.py"
GPUS = {  # compute capability, shared memory a block may opt in to
    "sm_86": (8, 6, 101376),
    "sm_90": (9, 0, 232448),
}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("gpu", GPUS.values(), ids=GPUS)
def test_accepted_tiles_compile_within_the_estimated_shared_memory(gpu, tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run(
        [sys.executable, "-P", str(PROGRAM), *map(str, gpu)]
        if sys.version_info >= (3, 11)
        else [sys.executable, str(PROGRAM), *map(str, gpu)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert {row["kernel"].split()[0] for row in rows} == {
        "logits",
        "statistics",
        "slab",
        "dx",
        "dw",
        "sent",
        "kept",
    }
    over = [row for row in rows if row["shared"] > gpu[2]]
    assert not over, "does not fit the GPU"
    underestimated = [row for row in rows if row["shared"] > row["estimate"]]
    assert not underestimated, "takes more than limits.shared_memory says"
