"""Logits that a model's output shows and nobody may ever look at."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from flce_tune.integrations.deferred import DeferredLogits

_GETTERS = (
    "shape", "dtype", "device", "ndim", "layout", "requires_grad", "grad_fn", "is_leaf", "is_cuda",
    "is_meta",
)  # fmt: skip
_DESCRIPTIONS = {
    *(getattr(Tensor, name).__get__ for name in _GETTERS),
    Tensor.size, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.__len__,
    Tensor.is_floating_point, Tensor.is_complex, torch.is_floating_point, torch.is_complex,
    torch.numel,
}  # fmt: skip
"""What is known without the values."""

_CASTS = {
    Tensor.float: torch.float32, Tensor.double: torch.float64, Tensor.half: torch.float16,
    Tensor.bfloat16: torch.bfloat16,
}  # fmt: skip


class LogitsOnDemand(Tensor):
    """A tensor that is computed at the first operation on it, and kept from then on.

    Shape, dtype and device are known at once, and a cast to another floating dtype stays on
    demand: mixed-precision wrappers cast every output. Gradients flow where gradients are enabled
    when it is computed.
    """

    _deferred: DeferredLogits
    _computed: dict[bool, Tensor]  # with and without gradients

    @classmethod
    def of(cls, deferred: DeferredLogits) -> LogitsOnDemand:
        """The logits that were deferred."""
        made: LogitsOnDemand = Tensor._make_wrapper_subclass(
            cls, deferred.shape, dtype=deferred.dtype, device=deferred.device
        )
        made._deferred, made._computed = deferred, {}
        return made

    def compute(self) -> Tensor:
        """The logits."""
        gradients = torch.is_grad_enabled()
        if gradients not in self._computed:
            self._computed[gradients] = self._deferred.compute()
        return self._computed[gradients]

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func in _DESCRIPTIONS:
                return func(*args, **(kwargs or {}))
            if (dtype := _cast(func, args, kwargs)) is not None:
                return cls.of(args[0]._deferred.to(dtype))
            args, kwargs = tree_map(_computed, (args, kwargs or {}))
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        args, kwargs = tree_map(_computed, (args, kwargs or {}))
        return func(*args, **kwargs)


def _cast(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any] | None
) -> torch.dtype | None:
    """The dtype of a plain cast of logits that nobody has computed yet."""
    if kwargs or not isinstance(args[0], LogitsOnDemand) or args[0]._computed:
        return None
    if func in _CASTS and len(args) == 1:
        return _CASTS[func]
    to_dtype = func is Tensor.to and len(args) == 2 and isinstance(args[1], torch.dtype)
    return args[1] if to_dtype and args[1].is_floating_point else None


def _computed(value: Any) -> Any:
    return value.compute() if isinstance(value, LogitsOnDemand) else value
