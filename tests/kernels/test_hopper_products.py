"""The launcher of the hand-scheduled products, and what it launches, run on the CPU."""

import pytest
import torch
from gluon_emulator import Descriptor, Pointer, run
from hand_products import SLAB, Case, check_dw, check_dx, check_pieces, check_plain

from flce_tune.kernels.config import Tile
from flce_tune.kernels.splits import Plan

triton = pytest.importorskip("triton")
if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 6):
    pytest.skip("Gluon's warp_specialize is another one before Triton 3.6", allow_module_level=True)
hopper_product = pytest.importorskip("flce_tune.kernels.hopper.product")
products = pytest.importorskip("flce_tune.kernels.hopper.products")

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="compiled kernels run in tests/gpu"),
]
SHAPES = {"ragged": (150, 264, 300), "few": (5, 40, 24)}
DX, DW = Tile(128, 64, 256, 8, 4, 2, "shared"), Tile(64, 128, 256, 8, 4, 2, "shared")
NARROW_DX, NARROW_DW = (
    Tile(128, 32, 256, 8, 9, 2, "shared"), Tile(32, 128, 256, 8, 9, 2, "shared"),
)  # fmt: skip
with_shapes = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
with_tiles = pytest.mark.parametrize(("dx", "dw"), [(DX, DW), (NARROW_DX, NARROW_DW)])
with_sums = pytest.mark.parametrize(
    ("accumulator", "parts"), [("split24", 3), ("weight_dtype", 2), ("weight_dtype", 1)]
)


class Emulated:
    """The kernel's source, given what the compiled one would be."""

    def __getitem__(self, grid):
        def launch(*given, num_warps, **constants):
            run(hopper_product, "product_kernel", (*map(posed, given), *constants.values()),
                *grid, seed=0)  # fmt: skip

        return launch


def posed(argument):
    """A launch's argument, for the emulator."""
    if isinstance(argument, torch.Tensor):
        return Pointer(argument)
    if hasattr(argument, "block_shape"):
        return Descriptor(argument.base, argument.block_shape)
    return argument


@pytest.fixture(autouse=True)
def _emulated(monkeypatch):
    monkeypatch.setattr(products, "product_kernel", Emulated())


@with_shapes
@with_tiles
@with_sums
def test_sums_of_products(dx, dw, shape, accumulator, parts):
    check_plain(Case(shape, "cpu"), dx, "v", accumulator, parts)
    check_plain(Case(shape, "cpu"), dw, "n", accumulator, parts)


@pytest.mark.parametrize("split", [False, True], ids=["whole", "last tiles split"])
@pytest.mark.parametrize("tile", [DX, NARROW_DX], ids=["64", "32"])
def test_rows_of_dx_over_rows_of_g(monkeypatch, tile, split):
    if split:
        monkeypatch.setattr(products, "split_plan", lambda m, *_: Plan((m - 1) // 128 * 128, 2))
        monkeypatch.setattr(products, "launch_partial_sums", rounding(products.launch_partial_sums))
    check_pieces(Case((600, 128, 0), "cpu"), tile, "split24")


@pytest.mark.parametrize(
    "shape", [SHAPES["few"], pytest.param(SHAPES["ragged"], marks=pytest.mark.slow)], ids=str
)
@with_tiles
@with_sums
def test_blocks_with_factors_and_entries(dx, dw, shape, accumulator, parts):
    check_dx(Case(shape, "cpu"), dx, accumulator, parts)
    if accumulator == "split24":  # the interpreter rounds to bfloat16 toward zero
        check_dw(Case(shape, "cpu"), dw, accumulator, parts)


@pytest.mark.parametrize("piece", [None, SLAB], ids=["whole", "in pieces"])
@pytest.mark.parametrize("shape", [SHAPES["few"], (150, 40, 600)], ids=str)
@pytest.mark.parametrize("tile", [DW, NARROW_DW], ids=["64", "32"])
def test_dw_written_once_with_labels(monkeypatch, tile, shape, piece):
    monkeypatch.setattr(products, "piece_columns", lambda *_: piece)
    check_dw(Case(shape, "cpu"), tile, "split24", 1)


def rounding(launch):
    """A launch whose result torch rounds: the interpreter rounds to bfloat16 toward zero."""

    def rounded(high, low, splits, out, extra, *joined_and_prior, last):
        launch(high, low, splits, out, extra, *joined_and_prior, last=False)
        if last:
            bits = out.view(torch.int16).int() << 16 | extra.int()[:, : out.shape[1]] << 8
            out.copy_(bits.view(torch.float32))

    return lambda *given: rounded(*given[:-1], last=given[-1])


@pytest.mark.parametrize("whole", [0, 128])
@pytest.mark.parametrize("splits", [2, 3])
@pytest.mark.parametrize("tile", [DX, NARROW_DX], ids=["64", "32"])
def test_dx_split_along_the_vocabulary(monkeypatch, tile, splits, whole):
    monkeypatch.setattr(products, "split_plan", lambda *_: Plan(whole, splits))
    monkeypatch.setattr(products, "launch_partial_sums", rounding(products.launch_partial_sums))
    shape = (150, 40, 600)
    check_plain(Case(shape, "cpu"), tile, "v", "split24", 2)
    check_dx(Case(shape, "cpu"), tile, "split24", 2)
