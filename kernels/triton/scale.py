"""Scaling by a factor that lives on the GPU; in place it is free of charge when that is 1.

``add_scaled`` adds the product to a tensor of another dtype, in the one pass that adding takes.

Numerics: the product is formed in float32 and rounded once. Plain torch would round the factor to
the tensor's dtype first. Bytes: one read and one write, or none; adding reads once more.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
MOST_PROGRAMS = 2048


@triton.jit
def scale_kernel(
    tensor_ptr,
    factor_ptr,  # scalar
    out_ptr,
    total,
    IN_PLACE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    factor = tl.load(factor_ptr).to(tl.float32)
    if factor != 1.0 or not IN_PLACE:
        start = tl.program_id(0).to(tl.int64) * BLOCK
        step = tl.num_programs(0).to(tl.int64) * BLOCK
        while start < total:
            places = start + tl.arange(0, BLOCK)
            value = tl.load(tensor_ptr + places, mask=places < total)
            value = (value.to(tl.float32) * factor).to(out_ptr.dtype.element_ty)
            tl.store(out_ptr + places, value, mask=places < total)
            start += step


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
    tensor: Tensor,  # contiguous, any shape
    factor: Tensor,  # scalar on the same device
) -> None:
    """Multiply in place, without a host synchronisation."""
    _launch(tensor, factor, tensor)


def scale_to(
    tensor: Tensor,  # contiguous, any shape
    factor: Tensor,  # scalar on the same device
    dtype: torch.dtype,
) -> Tensor:
    """Return the product, rounded once to ``dtype``."""
    out = torch.empty_like(tensor, dtype=dtype)
    _launch(tensor, factor, out)
    return out


def add_scaled(
    out: Tensor,  # contiguous, any shape and float dtype but float64; tensor·factor is added
    tensor: Tensor,  # contiguous, the same shape
    factor: Tensor,  # scalar on the same device
) -> None:
    """Add the product in float32, rounded once to ``out``'s dtype."""
    total = tensor.numel()
    add_scaled_kernel[(triton.cdiv(total, BLOCK),)](
        out, tensor, factor, total, BLOCK=BLOCK, num_warps=8
    )


def _launch(tensor: Tensor, factor: Tensor, out: Tensor) -> None:
    total = tensor.numel()
    programs = max(1, min(triton.cdiv(total, BLOCK), MOST_PROGRAMS))
    scale_kernel[(programs,)](
        tensor, factor, out, total, IN_PLACE=out is tensor, BLOCK=BLOCK, num_warps=8
    )
