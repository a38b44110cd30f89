"""Launcher of the gradients' GEMM scheduled by hand."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flce_tune.kernels.config import Tile
from flce_tune.kernels.hopper.launch import CONSUMER_WARPS, descriptor
from flce_tune.kernels.hopper.product import product_kernel
from flce_tune.kernels.limits import HAND_PRODUCT, product_blocks
from flce_tune.kernels.numerators import Entries
from flce_tune.kernels.problem import describe_device
from flce_tune.kernels.triton.arguments import cdiv
from flce_tune.kernels.triton.entries import launch_entries

MOST_LEAD = 5
"""Steps the second consumer follows the first by, if there are as many stages and one more."""


def serves(
    out: Tensor, extra: Tensor | None, entries: Entries | None, transposed: bool, once: bool
) -> bool:
    """Whether the kernel, and one for the entries beside it, can do what is asked for.

    It keeps no float32 sums. Entries of dW, any number a row, are added to a kept sum by a kernel
    of their own; a product written once has none, and rounding it twice would not be exact.
    """
    rounded_at_once = once and transposed and entries is not None
    kept = extra is None or extra.dtype == torch.uint8
    return out.dtype == torch.bfloat16 and kept and not rounded_at_once


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

    Entries of dW join the sum before the product, or after it where it is the first part: either
    way a rounded result is rounded once.
    """
    apart = entries if transposed else None
    if apart is not None and prior:
        launch_entries(apart, out, extra, entry_first)
    (m, n), (rows, columns) = out.shape, HAND_PRODUCT
    programs = min(cdiv(m, rows) * cdiv(n, columns), describe_device(b.device).sm_count)
    given, constants = arguments(
        stored, slab, block_rows, b, out, extra, row_factor, None if transposed else entries, tile,
        contraction, transposed, prior, last,
    )  # fmt: skip
    product_kernel[(programs,)](*given, **constants)
    if apart is not None and not prior:
        launch_entries(apart, out, extra, entry_first)


def arguments(
    stored: Tensor,
    slab: int,
    block_rows: int,
    b: Tensor,
    out: Tensor,
    extra: Tensor | None,
    row_factor: Tensor | None,
    entries: Entries | None,  # one for each row, in order
    tile: Tile,
    contraction: str,
    transposed: bool,
    prior: bool,
    last: bool,
) -> tuple[tuple[object, ...], dict[str, Any]]:
    """What the kernel is given, by place and by name."""
    (m, n), rows = out.shape, HAND_PRODUCT[0] // 2
    _, k_block = product_blocks(tile, contraction)
    strip = [rows, 2 * k_block]
    joined: tuple[Any, ...] = (None, None, None, 0)
    if entries is not None:
        joined = entries.source, entries.value, entries.rows, entries.rows.stride(0)
    given = (
        descriptor(stored, [k_block, rows] if transposed else [rows, k_block]),
        descriptor(b, [k_block, HAND_PRODUCT[1]]),
        descriptor(out, strip),
        None if extra is None else descriptor(extra, strip),
        row_factor, *joined, m, n, len(b), block_rows,
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
