"""Launchers of the product kernel and of the article's kernel."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flce_tune.kernels.config import Accumulator, Tile
from flce_tune.kernels.limits import SUM_STRIP, product_blocks, programs_per_sm
from flce_tune.kernels.loss import weight_total
from flce_tune.kernels.numerators import Blocks, Entries
from flce_tune.kernels.problem import describe_device
from flce_tune.kernels.triton.arguments import (
    cdiv,
    descriptor,
    empty_statistics,
    loss_scalars,
    statistics_flags,
)
from flce_tune.kernels.triton.atomic import atomic_kernel
from flce_tune.kernels.triton.product import product_kernel
from flce_tune.kernels.values import Inputs, LossSpec, Statistics, Wanted

ENTRY_BLOCK = 32


def launch_product(
    a: Tensor,  # [m, k], or the transposed view of a [k, m]
    b: Tensor,  # [k, n]
    out: Tensor,  # [m, n]
    extra: Tensor | None,  # [m, n] float32 or uint8 accumulator
    tile: Tile,
    contraction: str,  # "v" for dX, "n" for dW
    accumulator: Accumulator,
    prior: bool,
    last: bool,
    yielding: bool = False,
) -> None:
    """Add a·b to what earlier parts left in ``out`` and ``extra``.

    Persistent programs hold every multiprocessor to the end. ``yielding`` gives each tile a program
    of its own instead, so that a collective's kernel gets its multiprocessors between two tiles,
    and slows the product by its share of them, not by its whole time.
    """
    transposed = a.stride(0) == 1 and a.stride(1) != 1
    stored = a.t() if transposed else a
    _launch_product(
        stored, 0, 0, b, out, extra, None, None, 0, tile, contraction, transposed, accumulator,
        prior, last, yielding,
    )  # fmt: skip


def launch_block_product(
    blocks: Blocks,  # [m, k]; taken as [k, m] for dW
    b: Tensor,  # [k, n]
    out: Tensor,  # [m, n]
    extra: Tensor | None,  # [m, n] float32 or uint8 accumulator
    row_factor: Tensor | None,  # [m] float32
    entries: Entries | None,  # of the product's rows; for dW of the whole vocabulary's
    tile: Tile,
    contraction: str,  # "v" for dX, "n" for dW
    accumulator: Accumulator,
    prior: bool,
    last: bool,
    yielding: bool = False,
) -> None:
    """Add diag(row_factor)·A·b and the entries to what earlier parts left, A stored in blocks."""
    transposed = contraction == "n"
    _launch_product(
        blocks.data, blocks.slab, blocks.padded_rows, b, out, extra, row_factor, entries,
        blocks.columns.start if transposed else 0, tile, contraction, transposed, accumulator,
        prior, last, yielding,
    )  # fmt: skip


def _launch_product(
    stored: Tensor,  # A as it lies in memory
    slab: int,
    block_rows: int,
    b: Tensor,
    out: Tensor,
    extra: Tensor | None,
    row_factor: Tensor | None,
    entries: Entries | None,
    entry_first: int,  # the entries' row that is the product's first
    tile: Tile,
    contraction: str,
    transposed: bool,
    accumulator: Accumulator,
    prior: bool,
    last: bool,
    yielding: bool = False,
) -> None:
    if tile.schedule != "compiler":
        from flce_tune.kernels.hopper import products

        if not yielding and products.serves(out, extra):
            products.launch_product(
                stored, slab, block_rows, b, out, extra, row_factor, entries, entry_first, tile,
                contraction, transposed, prior, last,
            )  # fmt: skip
            return
        tile = tile.compiled
    (m, n), k = out.shape, b.shape[0]
    m_block, k_block = product_blocks(tile, contraction)
    device = describe_device(b.device)
    programs = device.sm_count * programs_per_sm(tile, b.element_size(), device, contraction)
    tiles = cdiv(m, m_block) * cdiv(n, tile.d_block)
    product_kernel[(tiles if yielding else min(tiles, programs),)](
        descriptor(stored, [k_block, m_block] if transposed else [m_block, k_block]),
        descriptor(b, [k_block, tile.d_block]),
        descriptor(out, [m_block, tile.d_block]) if out.element_size() == 2 else None,
        out,
        extra,
        row_factor,
        *entry_arguments(entries, entry_first, m_block),
        m,
        n,
        k,
        out.stride(0),
        0 if extra is None else extra.stride(0),
        block_rows,
        M_BLOCK=m_block,
        N_BLOCK=tile.d_block,
        K_BLOCK=k_block,
        GROUP=tile.group,
        TRANSPOSED=transposed,
        SLAB=slab,
        HAS_FACTOR=row_factor is not None,
        ENTRY_BLOCK=0 if entries is None else ENTRY_BLOCK,
        ACCUMULATOR=accumulator,
        PRIOR=prior,
        LAST=last,
        STORE_WIDTH=SUM_STRIP,
        WHOLE=out.element_size() == 2,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def entry_arguments(entries: Entries | None, first: int, block: int) -> tuple[Any, ...]:
    """Entries as arguments of the kernel, from a row on."""
    if entries is None:
        return None, None, None, None, None, 0, 0
    if entries.block != block or first % block:
        raise ValueError(f"entries of tiles of {entries.block} rows, got {block} from row {first}")
    return (
        entries.offsets[first // block :], entries.row, entries.source, entries.value,
        entries.rows, first, entries.rows.stride(0),
    )  # fmt: skip


def launch_atomic(
    inputs: Inputs,
    row_weight: Tensor,  # [N]
    loss: LossSpec,
    wanted: Wanted,
    tile: Tile,
) -> tuple[Statistics, Tensor | None, Tensor | None, Tensor | None]:
    """Return statistics, and dX, dW, db in float32 where wanted."""
    (n, hidden), vocab = inputs.x.shape, inputs.weight.shape[0]
    result = empty_statistics(n, inputs.x.device, loss, wanted)

    def zeros(needed: bool, *shape: int) -> Tensor | None:
        return inputs.x.new_zeros(shape, dtype=torch.float32) if needed else None

    dx, dw, db = (
        zeros(wanted.dx, n, hidden),
        zeros(wanted.dw, vocab, hidden),
        zeros(wanted.db, vocab),
    )
    total = None if inputs.class_weight is None else weight_total(inputs)
    atomic_kernel[(n,)](
        inputs.x,
        inputs.weight,
        inputs.bias,
        inputs.target,
        inputs.class_weight,
        row_weight,
        result.lse,
        result.lse_low,
        result.target_logit,
        result.logit_sum,
        result.mean_logit,
        result.prediction,
        dx,
        dw,
        db,
        vocab,
        hidden,
        inputs.x.stride(0),
        inputs.weight.stride(0),
        *loss_scalars(loss),
        float(loss.label_smoothing),
        float(loss.z_loss),
        loss.ignore_index,
        total,
        HAS_BIAS=inputs.bias is not None,
        **statistics_flags(inputs, loss, wanted),
        NEED_DX=wanted.dx,
        NEED_DW=wanted.dw,
        NEED_DB=wanted.db,
        D_BLOCK=tile.d_block,
        V_BLOCK=tile.v_block,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return result, dx, dw, db
