"""The hand-scheduled product kernel: its source run on the CPU, and compiled for Hopper."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import subprocess
import sys
import types
from pathlib import Path

import gluon_emulator
import pytest
import torch
from gluon_emulator import Descriptor, Machine, Pointer, language, run, tensor

ROOT = Path(__file__).parents[2]

triton = pytest.importorskip("triton")
if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 6):
    pytest.skip("Gluon's warp_specialize is another one before Triton 3.6", allow_module_level=True)

hopper_product = importlib.import_module("flce_tune.kernels.hopper.product")
product = importlib.import_module("flce_tune.kernels.triton.product")

ROWS, N_BLOCK, GROUP = 8, 32, 2
SUMS = {  # kept as split24, of earlier parts, the last part
    "once": (False, False, True),
    "first": (True, False, False),
    "next": (True, True, False),
    "last": (True, True, True),
    "rounded": (False, True, True),
}


def split(value):
    """Upper 16 bits and the next 8 of float32, rounded to nearest, as integers."""
    bits = value.view(torch.int32).long()
    bits = torch.where(value.isfinite(), bits + 0x80, bits)
    bits = torch.where(value.isnan(), bits | 0x400000, bits)
    return (bits >> 16).to(torch.int16), (bits >> 8 & 0xFF).to(torch.uint8)


def in_blocks(stored, slab, block_rows):
    """The matrix in blocks of ``slab`` columns, one by one; NaN in the padding."""
    rows, columns = stored.shape
    count = -(-columns // slab)
    blocks = torch.full((count, block_rows, slab), torch.nan, dtype=stored.dtype)
    for i, some in enumerate(stored.split(slab, 1)):
        blocks[i, :rows, : some.shape[1]] = some
        blocks[i, :, some.shape[1] :] = 0  # as what fills blocks does
    blocks[:, rows : -(-rows // ROWS) * ROWS] = 0
    return blocks.view(-1, slab)


def emulate(
    m, n, depth, *, kind="next", transposed=True, lead=2, k_block=4, stages=7, programs=2, seed=0,
    slab=0, joined=False, label_sums=False, module=hopper_product,
):  # fmt: skip
    """Upper and lower bits that the kernel leaves, and those that it should."""
    kept_split, prior, last = SUMS[kind]
    torch.manual_seed(seed)
    a = torch.randint(-8, 9, (m, depth)).bfloat16()  # so that no order of a sum matters
    b = torch.randint(-8, 9, (depth, n)).bfloat16()
    before = torch.randn(m, n) * 100
    before.view(-1)[::7] *= 1e-6
    before[0, :3] = torch.tensor([torch.inf, -torch.inf, torch.nan])
    high, low = split(before)
    kept = (high.int() << 16 | low.int() << 8).view(torch.float32)
    if not kept_split:
        kept = high.view(torch.bfloat16).float()
    out, extra = high.view(torch.bfloat16), low
    if not prior:
        out, extra = torch.full_like(out, torch.nan), torch.full_like(extra, 7)
    stored, strip = (a.t().contiguous() if transposed else a), [ROWS, 2 * k_block]
    block_rows = -(-len(stored) // 16) * 16
    value = 0.0 + a.float() @ b.float()  # no negative zero
    rows = (None, None, None, None, 0)
    if joined:
        factor = 2.0 ** torch.randint(-2, 3, (m,))
        entry_b = torch.randint(-8, 9, (11, n)).bfloat16()
        source, label = torch.randint(0, 11, (m,)), torch.randint(-3, 4, (m,)) / 4
        entry_b[source[label == 0]] = torch.nan  # nobody may look there
        label[entry_b[source].isnan().any(1)] = 0
        rows = (*map(Pointer, (factor, source, label, entry_b)), n)
        value = value * factor[:, None] + label[:, None] * entry_b[source].float().nan_to_num(0.0)
    if label_sums:
        sums, place, has = torch.randn(11, n), torch.randint(0, 11, (m,)), torch.arange(m) % 3 > 0
        place[~has] = 10**15
        rows = (None, *map(Pointer, (place, has.float(), sums)), n)
        value[has] += sums[place[has]]
    arguments = (
        Descriptor(
            in_blocks(stored, slab, block_rows) if slab else stored,
            [k_block, ROWS] if transposed else [ROWS, k_block],
        ),
        Descriptor(b, [k_block, N_BLOCK]), Descriptor(out, strip),
        Descriptor(extra, strip) if kept_split else None,
        *rows, m, n, depth, block_rows, 1, depth, GROUP, stages, lead, transposed, slab, prior,
        last,
    )  # fmt: skip
    untouched = extra.clone()
    run(module, "product_kernel", arguments, programs, seed)
    value = value + kept if prior else value
    if last:
        return (out.view(torch.int16), extra), (value.bfloat16().view(torch.int16), untouched)
    return (out.view(torch.int16), extra), split(value)


def emulate_parts(m, n, depth, splits, *, slab=0, k_block=4, seed=0, module=hopper_product):
    """The partial sums of a product split along K, and what they should be."""
    torch.manual_seed(seed)
    a = torch.randint(-8, 9, (m, depth)).bfloat16()
    b = torch.randint(-8, 9, (depth, n)).bfloat16()
    block_rows = height = -(-m // (2 * ROWS)) * 2 * ROWS
    part = -(-depth // (k_block * splits)) * k_block
    high = torch.full((splits * height, n), torch.nan, dtype=torch.bfloat16)
    low, strip = torch.full(high.shape, 7, dtype=torch.uint8), [ROWS, 2 * k_block]
    arguments = (
        Descriptor(in_blocks(a, slab, block_rows) if slab else a, [ROWS, k_block]),
        Descriptor(b, [k_block, N_BLOCK]), Descriptor(high, strip), Descriptor(low, strip),
        None, None, None, None, 0, height, n, depth, block_rows, splits, part, GROUP, 5, 3, False,
        slab, False, False,
    )  # fmt: skip
    run(module, "product_kernel", arguments, 2, seed)
    sums = [
        0.0 + some_a.float() @ some_b.float()
        for some_a, some_b in zip(a.split(part, 1), b.split(part), strict=True)
    ]
    got = (all_.view(splits, height, n)[:, :m] for all_ in (high.view(torch.int16), low))
    return tuple(got), split(torch.stack(sums))


def check(*arguments, **options):
    compare(*emulate(*arguments, **options))


def compare(got, expected):
    (high, low), (expected_high, expected_low) = got, expected
    nans = high.view(torch.bfloat16).isnan() & expected_high.view(torch.bfloat16).isnan()
    assert ((high == expected_high) | nans).all()
    assert ((low == expected_low) | nans).all()


@pytest.mark.parametrize("kind", SUMS)
@pytest.mark.parametrize("lead", [0, 3])
@pytest.mark.parametrize(
    ("m", "n", "depth"),
    [(32, 64, 24), (37, 40, 18), (5, 16, 3)],
    ids=["even", "ragged", "one step"],
)
def test_source_computes_the_product_in_any_order_of_events(kind, lead, m, n, depth):
    check(m, n, depth, kind=kind, lead=lead, transposed=m % 2 == 1, seed=n + lead)


@pytest.mark.parametrize("kind", SUMS)
def test_wide_strips_and_a_ring_that_holds_less_than_the_lead_and_a_tile(kind):
    check(37, 72, 40, kind=kind, k_block=8, stages=4, lead=3, seed=1)


@pytest.mark.parametrize("kind", SUMS)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("m", "n", "depth"), [(32, 64, 24), (37, 40, 18)])
def test_blocks_of_a_and_what_joins_the_product(kind, transposed, m, n, depth):
    check(m, n, depth, kind=kind, transposed=transposed, slab=16, joined=not transposed, seed=m)


@pytest.mark.parametrize(("m", "n", "depth"), [(32, 64, 24), (37, 40, 18)])
def test_labels_sums_join_a_product_before_it_is_rounded(m, n, depth):
    check(m, n, depth, kind="once", slab=16, label_sums=True, seed=m)


@pytest.mark.parametrize("slab", [0, 16])
@pytest.mark.parametrize(
    ("m", "n", "depth", "splits"),
    [(32, 64, 48, 2), (37, 40, 42, 3), (5, 16, 15, 4), (16, 40, 3, 1)],
)
def test_parts_of_k_have_sums_of_their_own(m, n, depth, splits, slab):
    compare(*emulate_parts(m, n, depth, splits, slab=slab, seed=m))


@pytest.mark.parametrize("programs", [1, 5])
def test_one_program_and_more_programs_than_tiles(programs):
    check(20, 40, 12, programs=programs, stages=2, lead=1)


def test_a_lead_of_all_stages_is_refused_as_it_would_hang(monkeypatch):
    with pytest.raises(AssertionError):
        emulate(32, 64, 24, stages=3, lead=3)
    monkeypatch.setattr(gluon_emulator, "static_assert", lambda condition: None)
    with pytest.raises(gluon_emulator.DeadlockError):
        emulate(32, 64, 24, stages=3, lead=3)


MUTANTS = {
    "a strip is read unfilled": (
        "        mbarrier.wait(full.index(stage), step // STAGES & 1)\n        part =",
        "        part =",
    ),
    "a product is read unfilled": (
        "        mbarrier.wait(full.index(stage), step // STAGES & 1)\n        a =",
        "        a =",
    ),
    "a tile is refilled under its product": ("warpgroup_mma_wait(1,", "warpgroup_mma_wait(2,"),
    "a tile's last one, too": ("warpgroup_mma_wait(0,", "warpgroup_mma_wait(1,"),
    "a strip is refilled under its copy": ("1 if LAST else 2)", "2 if LAST else 4)"),
    "a tile's last strip, too": ("        tma.store_wait(0)\n        mbarrier", "        mbarrier"),
    "a strip's copy is not fenced": ("            fence_async_shared()\n", ""),
    "a program ends during its copies": ("    tma.store_wait(0)\n\n", "\n"),
    "a strip's stage is kept": ("        if i > 0:", "        if i > 1:"),
    "a tile's last strip is kept": ("pred=step > 0", "pred=k > 0"),
    "a stage is handed on twice": ("pred=step > 0", "pred=True"),
    "a strip is granted before it is empty": (
        "            mbarrier.wait(empty.index(stage), (step // STAGES & 1) ^ 1)\n"
        "            ready = full.index(stage)\n            if PRIOR",
        "            ready = full.index(stage)\n            if PRIOR",
    ),
    "fewer bytes are expected": ("2 * low_desc.block_type.nbytes", "low_desc.block_type.nbytes"),
    "a block's rows are another's": ("across // SLAB * block_rows", "across // SLAB * m"),
    "columns go on in the next block": ("across %= SLAB", "across += 0"),
    "all parts begin alike": ("begin = tile_m // tiles_m * part", "begin = 0"),
    "a part goes on to the end": ("gl.minimum(begin + part, depth)", "depth"),
    "a part's rows of A are its own": ("tile_m % tiles_m * M_BLOCK", "tile_m * M_BLOCK"),
    "the factor is left out": ("part *= factor[:, None]", "pass"),
    "an entry is another row's": (
        "of_rows(source_ptr, rows, m)",
        "of_rows(source_ptr, rows ^ 1, m)",
    ),
    "turns are not taken": ("mbarrier.arrive(turns.index(1 - WHICH))", "pass"),
    "one consumer hands a stage on": ("empty.index(stage), count=2", "empty.index(stage), count=1"),
}


def test_narrow_keeps_24_bits_of_any_float():
    high = torch.arange(-(2**15), 2**15, dtype=torch.int32)[:, None] << 16
    low = torch.tensor([0, 1, 0x7F, 0x80, 0x7FFF, 0xFF7F, 0xFF80, 0xFFFF], dtype=torch.int32)
    values = (high | low).view(torch.float32)
    names = language(Machine(0), 0, 1)
    narrow = types.FunctionType(hopper_product.narrow.fn.__code__, names)
    for got, expected in zip(narrow(tensor(values)), split(values), strict=True):
        assert torch.equal(got.view(expected.dtype), expected)


def check_often(module):
    for seed in range(12):
        kind, stages = ("first", "next")[seed % 2], 4 + seed % 3
        joined = seed % 4 > 1
        check(
            33, 64, 24, kind=kind, stages=stages, seed=seed, module=module, joined=joined,
            slab=16 if joined else 0,
        )  # fmt: skip
    compare(*emulate_parts(33, 64, 34, 3, slab=16, module=module))


def test_the_protocol_is_right_where_wrong_ones_are_noticed():
    check_often(hopper_product)


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_wrong_protocol_is_noticed(mutant, tmp_path):
    source = Path(hopper_product.__file__).read_text()
    right, wrong = MUTANTS[mutant]
    assert right in source
    path = tmp_path / "mutant.py"
    path.write_text(source.replace(right, wrong))
    spec = importlib.util.spec_from_file_location("mutant", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with pytest.raises((AssertionError, gluon_emulator.DeadlockError)):
        check_often(module)


def test_compiles_for_hopper_without_spills(tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    script = ROOT / "tests/support/compile_hopper_product.py"
    done = subprocess.run(
        [sys.executable, str(script), "0", "1", "2", "3"],
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
