"""Each example runs on a CPU, and its loss goes down."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


TORCH_ABORTS_AT_EXIT = "terminate called without an active exception"
"""torch 2.13 with FSDP2 over gloo, with or without this package, once in some forty runs."""


def losses(*command):
    """Run an example with small settings; the losses it prints."""
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, *command, "--length", "32"], cwd=ROOT, capture_output=True, text=True,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}, timeout=240,
        )  # fmt: skip
        if TORCH_ABORTS_AT_EXIT not in done.stderr:
            break
    assert done.returncode == 0, done.stderr[-3000:]
    return [float(value) for value in re.findall(r"^.*\bloss'?:? '?([0-9.]+)", done.stdout, re.M)]


def test_plain_torch():
    found = losses("examples/plain_torch.py", "--steps", "4", "--vocab", "512")
    assert len(found) == 4
    assert found[-1] < found[0]


def test_hf_trainer():
    pytest.importorskip("accelerate")
    found = losses("examples/hf_trainer.py", "--steps", "3")
    assert len(found) >= 3
    assert found[-1] < found[0]


def test_trl_sft():
    pytest.importorskip("trl")
    found = losses("examples/trl_sft.py", "--steps", "2")
    assert len(found) >= 2
    assert found[-1] < found[0]


def test_fsdp2():
    run = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    found = losses(*run, "examples/fsdp2.py", "--steps", "3", "--vocab", "512")
    assert len(found) == 3
    assert found[-1] < found[0]
