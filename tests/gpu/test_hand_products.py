"""Gradients' products scheduled by hand, bit for bit."""

import pytest
import torch
from gpu import BY_HAND, BY_HAND_NARROW, needs_gpu, skip_unless_it_runs
from hand_products import SLAB, Case, check_dw, check_dx, check_pieces, check_plain

from flce_tune.kernels.config import Config
from flce_tune.kernels.numerators import Entries
from flce_tune.kernels.problem import describe_device
from flce_tune.kernels.products import Sum
from flce_tune.kernels.splits import split_plan

pytestmark = needs_gpu

SHAPES = {  # tokens, hidden, vocab
    "even": (512, 512, 1024),
    "ragged": (333, 200, 1001),
    "slivers": (257, 264, 897),
    "few": (5, 40, 24),
    "more tiles than programs": (2100, 1032, 5000),
}
SPLIT = {  # dX's tiles are few and long enough
    "all rows": (2048, 1024, 7000),
    "ragged": (700, 264, 9001),
    "last rows": (8192, 2304, 21000),
}
with_shapes = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
with_tiles = pytest.mark.parametrize("tiles", [BY_HAND, BY_HAND_NARROW], ids=["64", "32"])
with_sums = pytest.mark.parametrize(
    ("accumulator", "parts"), [("split24", 3), ("weight_dtype", 3), ("weight_dtype", 1)]
)


@pytest.fixture(autouse=True)
def _runs(tiles):
    skip_unless_it_runs(Config("full", **tiles), 512, 512, 1024, torch.bfloat16)


@with_tiles
@with_shapes
@with_sums
def test_sums_of_products(tiles, shape, accumulator, parts):
    check_plain(Case(shape, "cuda"), tiles["dx"], "v", accumulator, parts)
    check_plain(Case(shape, "cuda"), tiles["dw"], "n", accumulator, parts)


@with_tiles
@pytest.mark.parametrize("shape", [(600, 128, 0), (3000, 2304, 0), (2048, 4096, 0)], ids=str)
@pytest.mark.parametrize("accumulator", ["split24", "weight_dtype"])
def test_rows_of_dx_over_rows_of_g(tiles, shape, accumulator):
    check_pieces(Case(shape, "cuda"), tiles["dx"], accumulator)


@with_tiles
@with_shapes
@with_sums
def test_blocks_with_factors_and_entries(tiles, shape, accumulator, parts):
    check_dx(Case(shape, "cuda"), tiles["dx"], accumulator, parts)
    check_dw(Case(shape, "cuda"), tiles["dw"], accumulator, parts)


@with_tiles
@with_shapes
@pytest.mark.parametrize("piece", [None, SLAB], ids=["whole", "in pieces"])
def test_dw_written_once_with_labels(monkeypatch, tiles, shape, piece):
    products = pytest.importorskip("flce_tune.kernels.hopper.products")
    monkeypatch.setattr(products, "piece_columns", lambda *_: piece)
    check_dw(Case(shape, "cuda"), tiles["dw"], "split24", 1)


@with_tiles
@pytest.mark.parametrize("shape", SPLIT.values(), ids=SPLIT)
@with_sums
def test_dx_split_along_the_vocabulary(tiles, shape, accumulator, parts):
    n, hidden, vocab = shape
    sm_count = describe_device(torch.device("cuda", 0)).sm_count
    if split_plan(n, hidden, vocab // parts, sm_count).splits == 1 and parts == 1:
        pytest.skip(f"not split on {sm_count} multiprocessors")
    check_plain(Case(shape, "cuda"), tiles["dx"], "v", accumulator, parts)
    check_dx(Case(shape, "cuda"), tiles["dx"], accumulator, parts)


@with_tiles
def test_dx_split_along_the_vocabulary_twice_gives_the_same_bits(tiles):
    case = Case(SPLIT["ragged"], "cuda")
    e = torch.randn(case.n, case.vocab, generator=case.generator, device="cuda").bfloat16()
    weight = torch.randn(case.vocab, case.hidden, generator=case.generator, device="cuda")
    value, target = case.labels()
    weight = weight.bfloat16()
    entries = Entries.of_dx(value * torch.pi, target, weight, 128)
    factor, blocks = torch.rand(case.n, device="cuda"), case.blocks(e)
    results = []
    for _ in range(2):
        total = Sum(case.output(case.n)[0], 1, "split24", tiles["dx"], "v", scaled=True)
        total.add_blocks([blocks], weight, factor, entries)
        results.append(total.result())
    assert torch.equal(*results)


@with_tiles
def test_twice_gives_the_same_bits(tiles):
    case = Case(SHAPES["ragged"], "cuda")
    e = torch.randn(case.n, case.vocab, generator=case.generator, device="cuda").bfloat16()
    x = torch.randn(case.n, case.hidden, generator=case.generator, device="cuda").bfloat16()
    value, target = case.labels()
    entries = Entries.of_dw(value * torch.pi, target, x, case.vocab, 128)
    results = []
    for _ in range(2):
        total = Sum(case.output(case.vocab)[0], 2, "split24", tiles["dw"], "n")
        for _ in range(2):
            total.add_transposed([case.blocks(e)], x, entries)
        results.append(total.result())
    assert torch.equal(*results)
