"""Launcher of the gradients' GEMM scheduled by hand."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flce_tune.kernels.config import Tile
from flce_tune.kernels.hopper.launch import CONSUMER_WARPS, descriptor
from flce_tune.kernels.hopper.product import product_kernel
from flce_tune.kernels.label_sums import piece_columns
from flce_tune.kernels.limits import HAND_PRODUCT, product_blocks
from flce_tune.kernels.numerators import Entries
from flce_tune.kernels.problem import describe_device
from flce_tune.kernels.products import row_bytes, some_rows
from flce_tune.kernels.splits import Plan, split_plan
from flce_tune.kernels.triton.arguments import cdiv
from flce_tune.kernels.triton.entries import RowEntries, launch_entries, launch_label_sums
from flce_tune.kernels.triton.partial_sums import launch_partial_sums

MOST_LEAD = 5
"""Steps the second consumer follows the first by, if there are as many stages and one more."""


def serves(out: Tensor, extra: Tensor | None) -> bool:
    """Whether the kernel can leave its sums there: it keeps none in float32."""
    return out.dtype == torch.bfloat16 and (extra is None or extra.dtype == torch.uint8)


def launch_product(
    stored: Tensor,  # A as it lies in memory: [m, k], or if transposed [k, m]; or blocks of it
    slab: int,  # columns of a block of A; 0: A is one block
    block_rows: int,
    b: Tensor,  # [k, n]
    out: Tensor,  # [m, n]
    extra: Tensor | None,  # [m, n] uint8 beside it; None: sums are kept as the output is
    row_factor: Tensor | None,  # [m] float32
    entries: Entries | None,
    entry_first: int,  # the entries' row that is the product's first
    tile: Tile,
    contraction: str,  # "v" for dX, "n" for dW
    transposed: bool,
    prior: bool,
    last: bool,
) -> None:
    """Add diag(row_factor)·A·b and the entries to what earlier parts left.

    Entries of dW join a kept sum before the product, or after it where it is the first part: either
    way a rounded result is rounded once. A product written once adds their own sums.
    """

    def multiply(stored: Tensor, out: Tensor, joined: RowEntries | None) -> None:
        _launch(
            stored, slab, block_rows, b, out, extra, row_factor, joined, tile, contraction,
            transposed, prior, last,
        )  # fmt: skip

    if entries is None:
        multiply(stored, out, None)
    elif not transposed:
        multiply(stored, out, RowEntries(entries.source, entries.value, entries.rows))
    elif prior:
        launch_entries(entries, out, extra, entry_first)
        multiply(stored, out, None)
    elif not last:
        multiply(stored, out, None)
        launch_entries(entries, out, extra, entry_first)
    else:
        piece = piece_columns(len(entries.row), slab) or len(out)
        for first in range(0, len(out), piece):
            some = out[first : first + piece]
            sums = launch_label_sums(entries, len(some), entry_first + first)
            multiply(stored[first // slab * block_rows :], some, sums)
            del sums  # the next piece's take its place


def _launch(
    stored: Tensor,
    slab: int,
    block_rows: int,
    b: Tensor,
    out: Tensor,
    extra: Tensor | None,
    row_factor: Tensor | None,
    joined: RowEntries | None,
    tile: Tile,
    contraction: str,
    transposed: bool,
    prior: bool,
    last: bool,
) -> None:
    """Launch the product; dX's last rows may be split along the vocabulary, see ``splits``."""
    (m, n), sm_count = out.shape, describe_device(b.device).sm_count
    plan = Plan(m) if transposed else split_plan(m, n, len(b), sm_count)
    whole, others = slice(0, plan.whole), slice(plan.whole, m)
    if plan.whole:
        given, constants = arguments(
            stored, slab, block_rows, b, some_rows(out, whole), _rows(extra, whole),
            row_factor, joined, tile, contraction, transposed, prior, last,
        )  # fmt: skip
        product_kernel[(_programs(plan.whole, n, sm_count),)](*given, **constants)
    if plan.whole < m:
        high, low = partial_sums(b, m - plan.whole, plan.splits)
        given, constants = arguments(
            stored[plan.whole :] if plan.whole else stored, slab, block_rows, b, high, low, None,
            None, tile, contraction, transposed, prior=False, last=False, splits=plan.splits,
        )  # fmt: skip
        product_kernel[(_programs(len(high), n, sm_count),)](*given, **constants)
        launch_partial_sums(
            high, low, plan.splits, some_rows(out, others), _rows(extra, others),
            _rows(row_factor, others),
            None if joined is None else some_rows(joined.source, others),
            None if joined is None else some_rows(joined.value, others),
            None if joined is None else joined.rows,
            prior, last,
        )  # fmt: skip


def _programs(m: int, n: int, sm_count: int) -> int:
    rows, columns = HAND_PRODUCT
    return min(cdiv(m, rows) * cdiv(n, columns), sm_count)


def _rows(tensor: Tensor | None, rows: slice) -> Tensor | None:
    return None if tensor is None else some_rows(tensor, rows)


def partial_sums(b: Tensor, m: int, splits: int) -> tuple[Tensor, Tensor]:
    """Allocate split24 sums for each part of an [m, n] product, of whole tiles of rows."""
    rows, n = splits * cdiv(m, HAND_PRODUCT[0]) * HAND_PRODUCT[0], b.shape[1]
    return b.new_empty(rows, n), b.new_empty(rows, row_bytes(n), dtype=torch.uint8)


def arguments(
    stored: Tensor,
    slab: int,
    block_rows: int,
    b: Tensor,
    out: Tensor,
    extra: Tensor | None,
    row_factor: Tensor | None,
    joined: RowEntries | None,
    tile: Tile,
    contraction: str,
    transposed: bool,
    prior: bool,
    last: bool,
    splits: int = 1,  # parts of the dimension summed over; the output has m rows for each
) -> tuple[tuple[object, ...], dict[str, Any]]:
    """What the kernel is given, by place and by name."""
    (m, n), rows = out.shape, HAND_PRODUCT[0] // 2
    _, k_block = product_blocks(tile, contraction)
    part = cdiv(cdiv(len(b), k_block), splits) * k_block
    strip = [rows, 2 * k_block]
    labels: tuple[Any, ...] = (None, None, None, 0)
    if joined is not None:
        labels = *joined, joined.rows.stride(0)
    given = (
        descriptor(stored, [k_block, rows] if transposed else [rows, k_block]),
        descriptor(b, [k_block, HAND_PRODUCT[1]]),
        descriptor(out, strip),
        None if extra is None else descriptor(extra, strip),
        row_factor, *labels, m // splits, n, len(b), block_rows, splits, part,
    )  # fmt: skip
    constants = {
        "GROUP": tile.group,
        "STAGES": tile.num_stages,
        "LEAD": min(tile.num_stages - 1, MOST_LEAD),
        "TRANSPOSED": transposed,
        "SLAB": slab,
        "PRIOR": prior,
        "LAST": last or extra is None,
        "num_warps": CONSUMER_WARPS,
    }
    return given, constants
