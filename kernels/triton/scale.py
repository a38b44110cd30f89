"""Scaling by a factor that lives on the GPU; in place it is free of charge when that is 1.

``add_scaled`` adds the product to a tensor of another dtype, in the one pass that adding takes.

Numerics: the product is formed in float32 and rounded once. Plain torch would round the factor to
the tensor's dtype first. Bytes: one read and one write, or none; adding reads once more.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from flce_tune.kernels.triton.arguments import cdiv
from flce_tune.kernels.triton.relaunch import relaunched

BLOCK = 4096
MOST_PROGRAMS = 2048


@triton.jit
def scale_span(from_ptr, to_ptr, total, factor, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * BLOCK
    step = tl.num_programs(0).to(tl.int64) * BLOCK
    while start < total:
        places = start + tl.arange(0, BLOCK)
        value = tl.load(from_ptr + places, mask=places < total)
        value = (value.to(tl.float32) * factor).to(to_ptr.dtype.element_ty)
        tl.store(to_ptr + places, value, mask=places < total)
        start += step


@relaunched
@triton.jit
def scale_in_place_kernel(
    factor_ptr,  # scalar
    a_ptr,
    a_total,
    b_ptr,  # or None, as the next
    b_total,
    c_ptr,
    c_total,
    BLOCK: tl.constexpr,
):
    factor = tl.load(factor_ptr).to(tl.float32)
    if factor != 1.0:
        scale_span(a_ptr, a_ptr, a_total, factor, BLOCK)
        if b_ptr is not None:
            scale_span(b_ptr, b_ptr, b_total, factor, BLOCK)
        if c_ptr is not None:
            scale_span(c_ptr, c_ptr, c_total, factor, BLOCK)


@relaunched
@triton.jit
def scale_to_kernel(
    tensor_ptr,
    factor_ptr,  # scalar
    out_ptr,
    total,
    BLOCK: tl.constexpr,
):
    factor = tl.load(factor_ptr).to(tl.float32)
    scale_span(tensor_ptr, out_ptr, total, factor, BLOCK)


@relaunched
@triton.jit
def add_scaled_kernel(
    out_ptr,  # any float dtype
    tensor_ptr,
    factor_ptr,  # scalar
    total,
    BLOCK: tl.constexpr,
):
    factor = tl.load(factor_ptr).to(tl.float32)
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(tensor_ptr + places, mask=places < total).to(tl.float32)
    prior = tl.load(out_ptr + places, mask=places < total).to(tl.float32)
    tl.store(
        out_ptr + places, (prior + value * factor).to(out_ptr.dtype.element_ty), places < total
    )


def scale_unless_one(
    tensors: Sequence[Tensor],  # one to three, contiguous, any shapes
    factor: Tensor,  # scalar on the same device
) -> None:
    """Multiply all of them in place, in one launch, without a host synchronisation."""
    arguments: list[Tensor | int | None] = []
    for tensor in tensors:
        arguments += (tensor, tensor.numel())
    arguments += (None, 0) * (3 - len(tensors))
    largest = max(tensor.numel() for tensor in tensors)
    scale_in_place_kernel[(_programs(largest),)](factor, *arguments, BLOCK=BLOCK, num_warps=8)


def scale_to(
    tensor: Tensor,  # contiguous, any shape
    factor: Tensor,  # scalar on the same device
    dtype: torch.dtype,
) -> Tensor:
    """Return the product, rounded once to ``dtype``."""
    out = torch.empty_like(tensor, dtype=dtype)
    total = tensor.numel()
    scale_to_kernel[(_programs(total),)](tensor, factor, out, total, BLOCK=BLOCK, num_warps=8)
    return out


def add_scaled(
    out: Tensor,  # contiguous, any shape and float dtype but float64; tensor·factor is added
    tensor: Tensor,  # contiguous, the same shape
    factor: Tensor,  # scalar on the same device
) -> None:
    """Add the product in float32, rounded once to ``out``'s dtype."""
    total = tensor.numel()
    add_scaled_kernel[(cdiv(total, BLOCK),)](out, tensor, factor, total, BLOCK=BLOCK, num_warps=8)


def _programs(total: int) -> int:
    return max(1, min(cdiv(total, BLOCK), MOST_PROGRAMS))
