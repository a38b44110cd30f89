"""Launchers of the kernels scheduled by hand."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from flce_tune.kernels.config import Tile
from flce_tune.kernels.hopper.gradient import gradient_kernel
from flce_tune.kernels.hopper.logits import logits_kernel
from flce_tune.kernels.hopper.numerators import numerators_kernel
from flce_tune.kernels.limits import HAND_STRIP, consumer_rows
from flce_tune.kernels.problem import describe_device
from flce_tune.kernels.triton.arguments import cdiv
from flce_tune.kernels.values import Coefficients, Inputs, Statistics

CONSUMER_WARPS = 4  # of each of two; ``warp_specialize`` adds the others


@functools.cache
def _layout(rows: int, columns: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    """How tiles lie in shared memory."""
    element = {torch.bfloat16: gl.bfloat16, torch.uint8: gl.uint8}[dtype]
    return gl.NVMMASharedLayout.get_default_for([rows, columns], element)


def descriptor(tensor: Tensor, block: list[int]) -> TensorDescriptor:
    """Describe a 2-D tensor to the copy engine, with its tiles' layout in shared memory."""
    layout = _layout(*block, tensor.dtype)
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), block, layout)


def launch_numerators(
    inputs: Inputs,  # of v columns
    out: Tensor | None,  # [blocks · block_rows, slab]
    block_rows: int,
    slab: int,
    reference: Tensor,  # [n]
    tile_reference: Tensor,  # [tiles, n]
    tile_total: Tensor,  # [tiles, n]
    factor: float,  # bits per unit of a raw logit
    tile: Tile,
) -> None:
    """Store numerators, if wanted, and what each tile and row adds up to."""
    tables = (reference, tile_reference, tile_total)
    _launch(numerators_kernel, inputs, out, tables, block_rows, slab, tile, factor)


def launch_gradient(
    slab: Inputs,  # of v columns
    vocab: int,
    stats: Statistics,
    coefficients: Coefficients,
    scale: float,
    out: Tensor,  # [n, v], or blocks of some columns, ``block_rows`` rows from each to the next
    block_rows: int,
    tile: Tile,
) -> None:
    """Write G of a slab, but for the labels' entries."""
    tables = (slab.target, stats.lse, coefficients.a, coefficients.b)
    columns = out.shape[1] if block_rows else 0
    _launch(gradient_kernel, slab, out, tables, block_rows, columns, tile, vocab, scale)


def launch_logits(
    inputs: Inputs,
    out: Tensor | None,  # [n, V]
    tables: tuple[Tensor | None, ...],  # max and total of each tile and row, [tiles, n]
    scale: float,
    tile: Tile,
) -> None:
    """Store raw logits, if wanted, and max and Σ exp(z - max) of each tile and row."""
    _launch(logits_kernel, inputs, out, tables, 0, 0, tile, scale)


def _launch(
    kernel: Any,
    inputs: Inputs,
    out: Tensor | None,
    tables: tuple[Tensor | None, ...],
    block_rows: int,
    slab: int,
    tile: Tile,
    *scalars: float,
) -> None:
    tiles = cdiv(len(inputs.x), tile.n_block) * cdiv(inputs.vocab, tile.v_block)
    programs = min(tiles, describe_device(inputs.x.device).sm_count)
    given, constants = arguments(inputs, out, tables, block_rows, slab, tile, *scalars)
    kernel[(programs,)](*given, **constants)


def arguments(
    inputs: Inputs,
    out: Tensor | None,
    tables: tuple[Tensor | None, ...],
    block_rows: int,
    slab: int,  # 0: the output is one block
    tile: Tile,
    *scalars: float,
) -> tuple[tuple[object, ...], dict[str, Any]]:
    """What a kernel of logits is given, by place and by name."""
    (n, hidden), width = inputs.x.shape, inputs.vocab
    rows, shared = consumer_rows(tile), tile.schedule == "shared"
    given = (
        descriptor(inputs.x, [tile.n_block, tile.d_block]),
        descriptor(inputs.weight, [tile.v_block, tile.d_block]),
        None if out is None else descriptor(out, [rows, HAND_STRIP]),
        inputs.bias, *tables, n, hidden, width, block_rows, *scalars,
    )  # fmt: skip
    constants = {
        "ROWS": rows,
        "GROUP": tile.group,
        "STAGES": tile.num_stages,
        "LEAD": tile.num_stages - 1 if shared else 0,
        "SLAB": slab,
        "SHARED": shared,
        "STORE": out is not None,
        "EVEN": width % tile.v_block == 0,
        "num_warps": CONSUMER_WARPS,
    }
    return given, constants
