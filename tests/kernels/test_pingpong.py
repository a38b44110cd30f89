"""The hand-scheduled numerators kernel: its source run on the CPU, and compiled for Hopper."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import gluon_emulator
import pytest
import torch
from gluon_emulator import Descriptor, Pointer, run

ROOT = Path(__file__).parents[2]
PROBES = ROOT / "benchmarks" / "probes"

triton = pytest.importorskip("triton")
if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 6):
    pytest.skip("Gluon's warp_specialize is another one before Triton 3.6", allow_module_level=True)

sys.path.insert(0, str(PROBES))
pingpong = importlib.import_module("pingpong")

FACTOR, GROUP, SLAB = 1.25, 2, 256


def emulate(shared, lead, n, hidden, width, *, stages=3, rows=8, store=True, seed=0, programs=2):
    """Outputs of the kernel, and what they should be."""
    v_block, d_block = (128, 16) if seed % 2 else (256, 8)
    n_block = rows * (1 + shared)
    torch.manual_seed(seed)
    x, w = torch.randn(n, hidden).bfloat16(), torch.randn(width, hidden).bfloat16()
    block_rows = -(-n // n_block) * n_block
    tiles = -(-width // v_block)
    out = torch.full((-(-width // SLAB) * block_rows, SLAB), torch.nan, dtype=torch.bfloat16)
    z = x.float() @ w.float().t() * FACTOR
    reference = z[:, 0].ceil()
    reference[::3] = torch.nan  # a row without a label
    reference[1::5] -= 200  # a label so unlikely that tiles take their own reference
    tile_reference, tile_total = torch.full((2, tiles, n), torch.nan)
    arguments = (
        Descriptor(x, [n_block, d_block]), Descriptor(w, [v_block, d_block]),
        Descriptor(out, [rows, 64]) if store else None,
        Pointer(reference), Pointer(tile_reference), Pointer(tile_total),
        n, hidden, width, block_rows, FACTOR, rows, GROUP, stages, lead, SLAB, shared, store,
        width % v_block == 0,
    )  # fmt: skip
    run(pingpong, "pingpong_kernel", arguments, programs, seed)
    padded = torch.full((n, tiles * v_block), -torch.inf)
    padded[:, :width] = z
    parts = padded.view(n, tiles, v_block)
    largest = parts.amax(2)
    kept = largest <= reference[:, None] + 64
    expected = torch.where(kept, reference[:, None], largest.ceil())
    e = torch.exp2(parts - expected[:, :, None])
    blocks = out.view(-1, block_rows, SLAB)[:, :n].transpose(0, 1).reshape(n, -1)
    return (
        (tile_reference.t(), tile_total.t(), blocks[:, : tiles * v_block].float()),
        (expected, e.sum(2), e.reshape(n, -1)),
    )


@pytest.mark.parametrize(
    ("shared", "lead"),
    [(True, 0), (True, 1), (True, 2), (False, 0)],
)
@pytest.mark.parametrize(
    ("n", "hidden", "width"),
    [(32, 64, 512), (37, 40, 300), (5, 16, 100), (24, 104, 640)],
    ids=["even", "ragged", "one step", "odd"],
)
def test_source_computes_numerators_in_any_order_of_events(shared, lead, n, hidden, width):
    got, expected = emulate(shared, lead, n, hidden, width, seed=n + lead)
    for name, a, b in zip(("reference", "total", "e"), got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-5, msg=name)


def test_more_programs_than_tiles_and_nothing_stored():
    (reference, total, e), expected = emulate(True, 2, 5, 40, 100, store=False, programs=3)
    torch.testing.assert_close(reference, expected[0])
    torch.testing.assert_close(total, expected[1], rtol=1e-4, atol=0)
    assert e.isnan().all()


def test_a_lead_of_all_stages_is_refused_as_it_would_hang(monkeypatch):
    with pytest.raises(AssertionError):
        emulate(True, 3, 32, 64, 512, stages=3)
    monkeypatch.setattr(gluon_emulator, "static_assert", lambda condition: None)
    with pytest.raises(gluon_emulator.DeadlockError):
        emulate(True, 3, 32, 64, 512, stages=3)


def test_compiles_for_hopper_without_spills(tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests/support/compile_pingpong.py"), str(PROBES)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    for row in map(json.loads, done.stdout.splitlines()):
        assert row["shared"] <= row["estimate"] <= 232448, row
        assert row["stack"] == 0, row
        assert 240 in row["registers"], row
        assert row["waits"].count("0") == 2, "a consumer waits for its tile's end only"
