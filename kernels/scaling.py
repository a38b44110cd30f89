"""Multiplying saved gradients by the upstream gradient, and adding them to a buffer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flce_tune.kernels.backends import has_kernels, on_device


class _Scale(torch.autograd.Function):
    """Out-of-place product that refuses to be differentiated again."""

    @staticmethod
    def forward(ctx: object, tensor: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
        """Multiply."""
        return _product(tensor, factor, dtype)

    @staticmethod
    def backward(ctx: object, *grads: Tensor) -> None:
        """Refuse."""
        raise RuntimeError(
            "linear_cross_entropy can be differentiated once: its gradients are computed in the "
            "forward pass, so create_graph=True gives no second derivative. Use the plain "
            "F.cross_entropy(F.linear(...)) where you need one."
        )


def scaled(
    gradients: Sequence[Tensor | None],  # saved ones; None where none is wanted
    factor: Tensor,  # scalar
    dtype: torch.dtype,
) -> list[Tensor | None]:
    """Each times factor, in ``dtype``; the tensors themselves where their graph is used up."""
    wanted = [tensor for tensor in gradients if tensor is not None]
    products = iter(_scaled(wanted, factor, dtype))
    return [None if tensor is None else next(products) for tensor in gradients]


def _scaled(tensors: Sequence[Tensor], factor: Tensor, dtype: torch.dtype) -> Sequence[Tensor]:
    if torch.is_grad_enabled():  # create_graph=True: the result must say that it cannot follow
        linked = factor if factor.requires_grad else factor.detach().requires_grad_()
        return [_Scale.apply(tensor, linked, dtype) for tensor in tensors]  # type: ignore[no-untyped-call]
    if any(type(tensor) is not Tensor for tensor in tensors):
        # somebody traces: a plain product is what can be compiled
        return [(tensor.to(factor.dtype) * factor).to(dtype) for tensor in tensors]
    if any(tensor.dtype != dtype for tensor in tensors) or graph_is_kept():
        return [_product(tensor, factor, dtype) for tensor in tensors]
    if tensors and has_kernels(tensors[0]):
        from flce_tune.kernels.triton.scale import scale_unless_one

        with on_device(tensors[0].device):
            scale_unless_one(tensors, factor)
    else:
        for tensor in tensors:
            tensor.mul_(factor)
    return tensors


def add_scaled_(
    out: Tensor,  # contiguous; tensor·factor is added
    tensor: Tensor,  # a gradient of the same shape
    factor: Tensor,  # scalar
) -> None:
    """out += tensor·factor, rounded once; on a GPU one pass without a temporary."""
    with torch.no_grad():
        if type(tensor) is not Tensor:  # somebody traces
            out.add_(tensor.to(factor.dtype) * factor)
        elif has_kernels(tensor):
            from flce_tune.kernels.triton.scale import add_scaled

            with on_device(tensor.device):
                add_scaled(out, tensor, factor)
            torch.autograd.graph.increment_version(out)
        elif tensor.device.type == "cpu":
            out.add_(tensor, alpha=float(factor))
        else:
            out.add_(tensor.to(factor.dtype) * factor)


def _product(tensor: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    if has_kernels(tensor):
        from flce_tune.kernels.triton.scale import scale_to

        with on_device(tensor.device):
            return scale_to(tensor, factor, dtype)
    return (tensor * factor).to(dtype)


def graph_is_kept() -> bool:
    """Whether the running backward keeps its graph; True where torch cannot tell."""
    probe = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return True if probe is None else bool(probe())
