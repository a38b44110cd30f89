"""An export document of as many measurements as wanted, spread over four GPUs and ten problems."""

from __future__ import annotations

import json
from pathlib import Path

GPUS = 4
VOCABS = (32000, 128256)
BUCKETS = (1024, 4096, 8192, 16384, 65536)


def write_document(path: Path, count: int) -> None:
    """Write a document; a longer one begins with the measurements of a shorter one."""
    problems = [(vocab, bucket) for vocab in VOCABS for bucket in BUCKETS]
    tables = {
        "devices": [
            {
                "kind": "cuda",
                "name": f"Load GPU {gpu}",
                "capability": "9.0",
                "sm_count": 132,
                "shared_memory_per_block": 232448,
                "memory_bytes": 150_000_000_000,
            }
            for gpu in range(GPUS)
        ],
        "toolchains": [
            {
                "torch": "2.13.0",
                "triton": "3.7.1",
                "cuda": "13.0",
                "driver": "580.1",
                "kernel_hash": "0" * 64,
            }
        ],
        "problems": [
            {
                "mode": "train",
                "dtype": "bfloat16",
                "accumulate": "fp32",
                "hidden": 4096,
                "vocab": vocab,
                "token_bucket": bucket,
            }
            for vocab, bucket in problems
        ],
        "measurements": [
            {
                "device": number % GPUS,
                "toolchain": 0,
                "problem": number // GPUS % len(problems),
                "tokens": problems[number // GPUS % len(problems)][1],
                "config": {"strategy": "chunked", "chunk": 256 + number // 40},
                "status": "ok",
                "samples_ms": [10 + number / 1e5, 11 + number / 1e5, 12 + number / 1e5],
                "median_ms": 11 + number / 1e5,
                "spread_ms": 0.5,
                "workspace_bytes": 1 << 30,
                "errors": {"loss": 1e-6, "dx": 2e-3, "dweight": 3e-3},
                "created_at": "2026-11-01T00:00:00+00:00",
            }
            for number in range(count)
        ],
    }
    path.write_text(json.dumps({"schema": "flce-tune/1"} | tables))
