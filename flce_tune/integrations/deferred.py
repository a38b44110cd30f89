"""Logits that are not computed: what a model does between its head and its loss, recorded.

A head's linear layer gives ``DeferredLogits`` instead of a product. Scaling, a soft cap, casts,
views and sums with other products (the low-rank adapters of PEFT) are noted down; the loss then
runs ``linear_cross_entropy`` on what was noted. Any other operation computes the logits, with a
warning, so the result is that of the model's own code whatever that code is.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flce_tune.api import linear_cross_entropy


class UnknownOperationError(Exception):
    """An operation that cannot be noted down, on logits that must not be computed."""


@dataclass(frozen=True)
class Product:
    """factor · (x @ weight.T + bias)."""

    x: Tensor  # [..., D]
    weight: Tensor  # [V, D]
    bias: Tensor | None  # [V]
    factor: float = 1.0

    def compute(self) -> Tensor:
        """The product, [..., V]."""
        out = F.linear(self.x, self.weight, self.bias)
        return out if self.factor == 1.0 else out * self.factor


@dataclass(frozen=True, eq=False)
class DeferredLogits:
    """cap · tanh(factor · Σ products), or factor · Σ products without a cap; shape [..., V]."""

    products: tuple[Product, ...]  # of one shape; the head's own comes first
    dtype: torch.dtype
    autocast: torch.dtype | None  # of the region that made them; None: there was none
    factor: float = 1.0
    cap: float | None = None
    options: Mapping[str, Any] = field(default_factory=dict)  # for linear_cross_entropy
    strict: bool = False  # refuse to compute the logits

    @classmethod
    def of_linear(
        cls,
        x: Tensor,  # [..., D]
        weight: Tensor,  # [V, D]
        bias: Tensor | None,  # [V]
        options: Mapping[str, Any],
        *,
        strict: bool = False,
    ) -> DeferredLogits:
        """Defer ``F.linear(x, weight, bias)``."""
        kind = x.device.type
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        dtype = autocast or x.dtype
        return cls((Product(x, weight, bias),), dtype, autocast, options=options, strict=strict)

    # As a tensor ---------------------------------------------------------------------------------

    @property
    def shape(self) -> torch.Size:
        """That of the logits."""
        first = self.products[0]
        return torch.Size((*first.x.shape[:-1], first.weight.shape[0]))

    @property
    def device(self) -> torch.device:
        """Where the logits would be."""
        return self.products[0].x.device

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return self.products[0].x.dim()

    def dim(self) -> int:
        """Number of dimensions."""
        return self.ndim

    def size(self, dim: int | None = None) -> Any:
        """The shape, or one of its entries."""
        return self.shape if dim is None else self.shape[dim]

    def compute(self) -> Tensor:
        """The logits, differentiable."""
        with torch.autocast(
            self.device.type, dtype=self.autocast, enabled=self.autocast is not None
        ):
            total = self.products[0].compute()
            for product in self.products[1:]:
                total = total + product.compute()
            if self.factor != 1.0:
                total = total * self.factor
            if self.cap is not None:
                total = torch.tanh(total) * self.cap
        return total.to(self.dtype)

    def _compute_for(self, operation: str) -> Tensor:
        """Compute the logits because nothing else will do, and say so."""
        if self.strict:
            raise UnknownOperationError(f"{operation} on its output cannot be recorded")
        warnings.warn(
            f"flce_tune computes the full logits: {operation} on them cannot be left to the loss",
            stacklevel=3,
        )
        return self.compute()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        _refuse_writing(name)
        return getattr(self._compute_for(f".{name}"), name)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, DeferredLogits):
            if func is torch.tanh:
                return first.tanh()
            if func in (torch.mul, torch.multiply) and len(args) == 2 and not kwargs:
                return first * args[1]
            if func in (torch.div, torch.divide, torch.true_divide) and not kwargs:
                return first / args[1]
            if func is F.cross_entropy:
                return _cross_entropy(first, *args[1:], **kwargs)
        name = getattr(func, "__name__", str(func))
        _refuse_writing(name)
        args = tuple(_computed(value, name) for value in args)
        return func(*args, **{key: _computed(value, name) for key, value in kwargs.items()})

    # What is noted down --------------------------------------------------------------------------

    def __mul__(self, other: Any) -> Any:
        if not _is_positive(other):
            return self._compute_for("a product with something else than a positive number") * other
        if self.cap is None:
            return replace(self, factor=self.factor * other)
        return replace(self, cap=self.cap * other)

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Any:
        if not _is_positive(other):
            return self._compute_for("division by something else than a positive number") / other
        return self * (1.0 / other)

    def tanh(self) -> Any:
        """Start of a soft cap."""
        if self.cap is not None:
            return self._compute_for("a second tanh").tanh()
        return replace(self, cap=1.0)

    def __add__(self, other: Any) -> Any:
        both = isinstance(other, DeferredLogits) and self.cap is None and other.cap is None
        if not both or self.shape != other.shape:
            left = self._compute_for("a sum with something else than another product of its shape")
            return left + (other.compute() if isinstance(other, DeferredLogits) else other)
        return replace(self, products=(*self._scaled(), *other._scaled()), factor=1.0)

    def _scaled(self) -> tuple[Product, ...]:
        """The products with the common factor in each of them."""
        return tuple(replace(p, factor=p.factor * self.factor) for p in self.products)

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Note a dtype; a move to the device they are on is none."""
        wanted = [*args, *kwargs.values()]
        dtypes = [value for value in wanted if isinstance(value, torch.dtype)]
        places = [torch.device(v) for v in wanted if isinstance(v, (str, torch.device))]
        if len(dtypes) + len(places) != len(wanted) or any(p != self.device for p in places):
            return self._compute_for("a conversion other than to a dtype").to(*args, **kwargs)
        return replace(self, dtype=dtypes[0]) if dtypes else self

    def float(self) -> DeferredLogits:
        """Note float32."""
        return replace(self, dtype=torch.float32)

    def contiguous(self) -> DeferredLogits:
        """They will be."""
        return self

    def view(self, *shape: Any) -> Any:
        """Regroup the rows; a view that cuts through the vocabulary computes the logits."""
        sizes = tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else shape
        if len(sizes) < 2 or sizes[-1] != self.shape[-1]:
            return self._compute_for(f"a view as {sizes}").view(*sizes)
        return self._of_rows(lambda x: x.reshape(*sizes[:-1], x.shape[-1]))

    reshape = view

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> Any:
        """Regroup the rows."""
        if end_dim % self.ndim == self.ndim - 1:
            return self._compute_for("flattening the vocabulary").flatten(start_dim, end_dim)
        return self._of_rows(lambda x: x.flatten(start_dim, end_dim))

    def __setitem__(self, index: Any, value: Any) -> None:
        _refuse_writing("__setitem__")

    def __getitem__(self, index: Any) -> Any:
        """Select rows: an index of leading dimensions, or one that ends in ``..., :``."""
        entries = index if isinstance(index, tuple) else (index,)
        plain = all(isinstance(entry, (int, slice)) or entry is Ellipsis for entry in entries)
        if not plain or len(entries) > self.ndim:
            return self._compute_for("this index")[index]
        reaches_vocabulary = Ellipsis in entries or len(entries) == self.ndim
        if reaches_vocabulary and entries[-1] != slice(None):
            return self._compute_for("an index of the vocabulary")[index]
        return self._of_rows(lambda x: x[index])

    def _of_rows(self, change: Callable[[Tensor], Tensor]) -> DeferredLogits:
        return replace(self, products=tuple(replace(p, x=change(p.x)) for p in self.products))

    # The loss ------------------------------------------------------------------------------------

    def cross_entropy(self, target: Tensor, **options: Any) -> Any:
        """``linear_cross_entropy`` of what was noted; target and options are its own."""
        self.check_weights()
        x, weight, bias = self._one_product()
        scale = self.factor if self.cap is None else self.factor * self.cap
        one = math.isclose(scale, 1.0, rel_tol=1e-12)
        return linear_cross_entropy(
            x, weight, target, bias=bias, softcap=self.cap, logit_scale=None if one else scale,
            **self.options, **options,
        )  # fmt: skip

    def check_weights(self) -> None:
        """See that the weights are still there: who gathers them for the head alone frees them.

        Raises:
            ValueError: a weight without storage (fully_shard) or without elements (ZeRO-3).
        """
        if any(_is_gone(product.weight) for product in self.products):
            raise ValueError(
                "the head's weight was freed between head and loss, so the head is sharded by "
                "itself: leave it to the root's fully_shard, or use reshard_after_forward=False; "
                "with ZeRO-3 the weight must be gathered around the whole call"
            )

    def _one_product(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """The sum of the products as one: x [..., D], weight [V, D], bias [V].

        Several become [f₁·x₁, f₂·x₂, …] @ [W₁, W₂, …]ᵀ, in the dtypes of the first: a copy of the
        weights and of their gradient, but no logits.
        """
        first = self.products[0]
        if len(self.products) == 1 and first.factor == 1.0:
            return first.x, first.weight, first.bias
        x = torch.cat([(p.x * p.factor).to(first.x.dtype) for p in self.products], dim=-1)
        weight = torch.cat([p.weight.to(first.weight.dtype) for p in self.products], dim=1)
        biases = [p.bias * p.factor for p in self.products if p.bias is not None]
        return x, weight, torch.stack(biases).sum(0) if biases else None


def _computing(name: str) -> Callable[..., Any]:
    def operator(self: DeferredLogits, *operands: Any) -> Any:
        return getattr(self._compute_for(name), name)(*operands)

    return operator


for _name in ("radd", "sub", "rsub", "rtruediv", "neg", "abs", "pow", "matmul", "rmatmul", "iter",
              "eq", "ne", "lt", "le", "gt", "ge"):  # fmt: skip
    setattr(DeferredLogits, f"__{_name}__", _computing(f"__{_name}__"))


def _refuse_writing(name: str) -> None:
    """Who writes into logits expects to find there later what was written."""
    if name == "__setitem__" or (name[-1] == "_" and name[-2:] != "__"):
        raise ValueError(
            f"this model writes into its logits ({name}), which are not there: train it without "
            "flce_tune.integrations.transformers.apply"
        )


def _cross_entropy(
    logits: DeferredLogits,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """``torch.nn.functional.cross_entropy`` where a model calls it by itself."""
    classes = logits.ndim == target.dim() + 1 == 2 and not target.is_floating_point()
    if not classes or size_average is not None or reduce is not None:
        return F.cross_entropy(
            logits._compute_for("this form of cross_entropy"), target, weight, size_average,
            ignore_index, reduce, reduction, label_smoothing,
        )  # fmt: skip
    return logits.cross_entropy(
        target, class_weight=weight, ignore_index=ignore_index, reduction=reduction,
        label_smoothing=label_smoothing,
    )  # fmt: skip


def _is_gone(weight: Tensor) -> bool:
    if type(weight) not in (Tensor, nn.Parameter) or torch.compiler.is_compiling():
        return False
    return weight.untyped_storage().size() == 0


def _is_positive(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf


def _computed(value: Any, operation: str) -> Any:
    """The logits in place of deferred ones, in lists too."""
    if isinstance(value, DeferredLogits):
        return value._compute_for(operation)
    if isinstance(value, (list, tuple)):
        return type(value)(_computed(entry, operation) for entry in value)
    return value
