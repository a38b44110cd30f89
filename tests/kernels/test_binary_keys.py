"""A kernel is found on disk whatever a process has launched before."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
PROGRAM = Path(__file__).parents[1] / "support" / "kernel_keys.py"


def keys(order):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, str(PROGRAM), order]
    done = subprocess.run(command, env=environment, capture_output=True, check=True)
    return json.loads(done.stdout)


def test_a_kernels_key_does_not_depend_on_what_was_hashed_before():
    forwards, backwards = keys("forwards"), keys("backwards")
    assert list(forwards) == list(backwards)[::-1]
    assert "flce_tune.kernels.triton.logits.logits_kernel JITFunction" in forwards
    assert "flce_tune.kernels.hopper.logits.logits_kernel GluonJITFunction" in forwards
    assert forwards == backwards
