"""The hand-scheduled GEMMs: their source run on the CPU, and compiled for Hopper."""

from __future__ import annotations

import importlib
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import gluon_emulator
import pytest
import torch
from gluon_emulator import Descriptor, Pointer, run

ROOT = Path(__file__).parents[2]

triton = pytest.importorskip("triton")
if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 6):
    pytest.skip("Gluon's warp_specialize is another one before Triton 3.6", allow_module_level=True)

numerators_gemm = importlib.import_module("flce_tune.kernels.hopper.numerators")
gradient_gemm = importlib.import_module("flce_tune.kernels.hopper.gradient")
logits_gemm = importlib.import_module("flce_tune.kernels.hopper.logits")

SCALE, LOG2E, GROUP, SLAB = 0.87, math.log2(math.e), 2, 256

schedules = pytest.mark.parametrize(
    ("shared", "lead"), [(True, 0), (True, 1), (True, 2), (False, 0)]
)
sizes = pytest.mark.parametrize(
    ("n", "hidden", "width"),
    [(32, 64, 512), (37, 40, 300), (5, 16, 100), (24, 104, 640)],
    ids=["even", "ragged", "one step", "odd"],
)


class Case:
    """Inputs, and a kernel's run on them in some order of events."""

    def __init__(self, shared, lead, n, hidden, width, *, stages=3, rows=8, bias=True):
        self.seed = n + lead
        torch.manual_seed(self.seed)
        self.n, self.hidden, self.width = n, hidden, width
        self.shared, self.lead, self.stages, self.rows = shared, lead, stages, rows
        self.v_block, self.d_block = (128, 16) if n % 2 else (256, 8)
        self.n_block = rows * (1 + shared)
        self.block_rows = -(-n // self.n_block) * self.n_block
        self.tiles = -(-width // self.v_block)
        self.x, self.w = torch.randn(n, hidden).bfloat16(), torch.randn(width, hidden).bfloat16()
        self.bias = torch.randn(width).bfloat16() if bias else None

    @property
    def raw(self):
        return self.x.float() @ self.w.float().t() + (0 if self.bias is None else self.bias.float())

    def table(self):
        return torch.full((self.tiles, self.n), torch.nan)

    def blocks(self):
        size = (-(-self.width // SLAB) * self.block_rows, SLAB)
        return torch.full(size, torch.nan, dtype=torch.bfloat16)

    def of_blocks(self, blocks):  # [n, whole blocks]
        parts = blocks.view(-1, self.block_rows, SLAB)[:, : self.n]
        return parts.transpose(0, 1).reshape(self.n, -1).float()

    def of_tiles(self, values):  # [n, tiles, v_block]
        width = self.tiles * self.v_block
        padded = torch.nn.functional.pad(values, (0, width - self.width), value=-torch.inf)
        return padded.view(self.n, self.tiles, self.v_block)

    def run(self, module, kernel, out, tables, scalars, slab=SLAB, programs=2):
        arguments = (
            Descriptor(self.x, [self.n_block, self.d_block]),
            Descriptor(self.w, [self.v_block, self.d_block]),
            None if out is None else Descriptor(out, [self.rows, 64]),
            None if self.bias is None else Pointer(self.bias), *map(Pointer, tables),
            self.n, self.hidden, self.width, self.block_rows, *scalars, self.rows, GROUP,
            self.stages, self.lead, slab, self.shared, out is not None,
            self.width % self.v_block == 0,
        )  # fmt: skip
        run(module, kernel, arguments, programs, self.seed)


def numerators(case, out, programs=2):
    """References, sums and numerators of a run, and what they should be."""
    z = case.raw * SCALE * LOG2E
    reference = z[:, 0].ceil()
    reference[::3] = torch.nan  # a row without a label
    reference[1::5] -= 200  # a label so unlikely that tiles take their own reference
    tables = (case.table(), case.table())
    case.run(
        numerators_gemm,
        "numerators_kernel",
        out,
        (reference, *tables),
        (SCALE * LOG2E,),
        programs=programs,
    )
    parts = case.of_tiles(z)
    largest = parts.amax(2)
    kept = largest <= reference[:, None] + 64
    expected = torch.where(kept, reference[:, None], largest.ceil())
    e = torch.exp2(parts - expected[:, :, None])
    return [table.t() for table in tables], (expected, e.sum(2), e.reshape(case.n, -1))


@schedules
@sizes
def test_source_computes_numerators_in_any_order_of_events(shared, lead, n, hidden, width):
    case = Case(shared, lead, n, hidden, width, bias=width != 640)
    out = case.blocks()
    got, (*expected, e) = numerators(case, out)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-5)
    torch.testing.assert_close(case.of_blocks(out)[:, : e.shape[1]], e, rtol=1e-2, atol=1e-5)


@pytest.mark.parametrize(("shared", "lead", "slab"), [(True, 2, SLAB), (False, 0, 0)])
@sizes
def test_source_computes_gradients(shared, lead, n, hidden, width, slab):
    case = Case(shared, lead, n, hidden, width, bias=width != 640)
    vocab = width + 3
    lse, a, b = (case.raw * SCALE).logsumexp(1), torch.rand(n), torch.rand(n)
    target = torch.randint(0, vocab, (n,))
    target[::4], target[1::4] = -1, vocab
    b[: n // 2] = 0  # unknown labels are an error where they count
    out = case.blocks() if slab else torch.full((n, width), torch.nan, dtype=torch.bfloat16)
    case.run(
        gradient_gemm, "gradient_kernel", out, (target, lse, a, b), (vocab, SCALE),
        slab,
    )  # fmt: skip
    unknown = ((target < 0) | (target >= vocab)) & (b != 0)
    expected = torch.exp(case.raw * SCALE - lse[:, None]) * a[:, None] * SCALE
    expected[unknown] = torch.nan
    got = case.of_blocks(out)[:, :width] if slab else out.float()
    assert unknown.any()
    torch.testing.assert_close(got, expected, rtol=1e-2, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize(
    ("shared", "lead", "store"), [(True, 2, True), (False, 0, True), (True, 0, False)]
)
@sizes
def test_source_computes_logits_and_their_statistics(shared, lead, n, hidden, width, store):
    case = Case(shared, lead, n, hidden, width, bias=width != 640)
    if width == 512:
        case.bias[: case.v_block] = -torch.inf  # a tile without any probability
    out = torch.full((n, width), torch.nan, dtype=torch.bfloat16) if store else None
    tile_max, total = case.table(), case.table()
    case.run(logits_gemm, "logits_kernel", out, (tile_max, total), (SCALE,), slab=0)
    z = case.raw
    if store:
        torch.testing.assert_close(out, case.raw.bfloat16(), rtol=2**-7, atol=1e-5)
        z = out.float()
    parts = case.of_tiles(z * SCALE)
    largest = parts.amax(2)
    torch.testing.assert_close(tile_max.t(), largest, rtol=1e-5, atol=1e-5)
    e = torch.exp(parts - torch.where(largest == -torch.inf, 0, largest)[:, :, None])
    torch.testing.assert_close(total.t(), e.sum(2), rtol=1e-4, atol=1e-5)


def test_more_programs_than_tiles_and_nothing_stored():
    got, (*expected, _) = numerators(Case(True, 2, 5, 40, 100), None, programs=3)
    torch.testing.assert_close(got[0], expected[0])
    torch.testing.assert_close(got[1], expected[1], rtol=1e-4, atol=0)


def test_a_lead_of_all_stages_is_refused_as_it_would_hang(monkeypatch):
    case = Case(True, 3, 32, 64, 512, stages=3)
    with pytest.raises(AssertionError):
        numerators(case, case.blocks())
    monkeypatch.setattr(gluon_emulator, "static_assert", lambda condition: None)
    with pytest.raises(gluon_emulator.DeadlockError):
        numerators(case, case.blocks())


def test_compiles_for_hopper_without_spills(tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests/support/compile_hopper.py")],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert {row["kernel"] for row in rows} == {"numerators", "gradient", "logits"}
    for row in rows:
        assert row["shared"] <= row["estimate"] <= 232448, row
        assert row["stack"] == 0, row
        assert 240 in row["registers"], row
        assert row["waits"].count("0") == 2, "a consumer waits for its tile's end only"
