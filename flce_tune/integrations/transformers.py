"""Hugging Face causal language models whose loss never stores the logits.

    from flce_tune.integrations.transformers import apply

    model = apply(AutoModelForCausalLM.from_pretrained(...))

When a call asks for a loss, the linear layers of the head hand out ``DeferredLogits`` instead of a
product; the model's own code between head and loss is recorded by them, and its loss runs
``linear_cross_entropy`` on what was recorded. No list of models, no reading of configs: a soft cap
or a scale is whatever the model's code does.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flce_tune.integrations.deferred import DeferredLogits, UnknownOperationError
from flce_tune.integrations.on_demand import LogitsOnDemand
from flce_tune.kernels.problem import DTYPE_NAMES, Accumulate

Model = TypeVar("Model", bound=nn.Module)

ACCEPTED = (
    "accepted is nn.Linear with a floating-point weight, also with PEFT's plain LoRA or "
    "modules_to_save around it; otherwise train without flce_tune.integrations.transformers.apply"
)


@dataclass(eq=False)
class _Patch:
    """What ``apply`` changed in one model, and whether a call is asking for a loss just now."""

    installed: Callable[..., Any]  # our forward, unbound
    previous: Callable[..., Any] | None  # one that stood in the instance before ours
    labels_position: int | None  # among the positional arguments of forward
    options: dict[str, Any]
    head: nn.Module | None = None
    linears: list[nn.Linear] = field(default_factory=list)
    active: bool = True
    deferring: bool = False
    strict: bool = False


def apply(
    model: Model,
    *,
    workspace_limit: int | None = None,
    accumulate: Accumulate = "fp32",
    drop_ignored: bool = False,
    tile_skip: float | None = None,
) -> Model:
    """Let a causal language model compute its loss without storing the logits.

    Loss and gradients are the model's own, for ``labels``, ``shift_labels``,
    ``num_items_in_batch``, ``logits_to_keep`` and whatever else its forward takes. Calls without
    labels, and so generation, are untouched. With labels, ``outputs.logits`` is a tensor that is
    computed when it is first looked at; inside ``torch.compile`` it is None.

    Args:
        model: a transformers model with a language-model head, or PEFT's wrapper of one. Changed
            in place, to be undone by ``undo``. Call ``apply`` before wrapping it further
            (``torch.compile``, DDP, FSDP, accelerate), and before or after adding adapters.
        workspace_limit, accumulate, drop_ignored, tile_skip: as in ``linear_cross_entropy``.

    Returns:
        The same model.

    Raises:
        TypeError: not a transformers model.
        ValueError: a head that cannot be left to the loss; the message says which and why.
    """
    options = {
        "workspace_limit": workspace_limit,
        "accumulate": accumulate,
        "drop_ignored": drop_ignored,
        "tile_skip": tile_skip,
    }
    inner = language_model(model)
    if (patch := _patch_of(inner)) is None:
        parameters = [*inspect.signature(type(inner).forward).parameters][1:]
        position = parameters.index("labels") if "labels" in parameters else None
        ours = _forward_for(type(inner))
        patch = _Patch(ours, inner.__dict__.get("forward"), position, options)
    patch.options, patch.active = options, True
    _take_head(inner, patch)
    if _patch_of(inner) is None:
        inner._flce_tune = patch
        inner.forward = types.MethodType(patch.installed, inner)
    if _is_standard_loss(inner.loss_function):
        inner.loss_function = causal_loss
    return model


def undo(model: Model) -> Model:
    """Give a model back the forward it had before ``apply``; without effect on any other.

    A wrapper put around the model since then keeps ours inside, which from now on only passes
    calls through.
    """
    inner = language_model(model)
    if (patch := _patch_of(inner)) is None:
        return model
    patch.active = False
    _release_head(patch)
    if inner.__dict__.get("_loss_function") is causal_loss:
        del inner._loss_function
    if getattr(inner.__dict__.get("forward"), "__func__", None) is patch.installed:
        del inner.forward, inner._flce_tune
        if patch.previous is not None:
            inner.forward = patch.previous
    return model


@contextmanager
def applied(model: Model, **options: Any) -> Iterator[Model]:
    """``apply`` for the length of a with-block; the options are its own."""
    apply(model, **options)
    try:
        yield model
    finally:
        undo(model)


def causal_loss(
    logits: Any,  # [..., T, V]
    labels: Tensor,  # [..., T]
    vocab_size: int,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,  # [..., T]
    **kwargs: Any,
) -> Any:
    """transformers' ``ForCausalLMLoss``, for deferred logits too."""
    if isinstance(logits, DeferredLogits):
        logits.check_weights()
    if not isinstance(logits, DeferredLogits) or logits.shape[-1] != vocab_size:
        from transformers.loss.loss_utils import ForCausalLMLoss

        return ForCausalLMLoss(
            logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels, **kwargs
        )
    target = labels if shift_labels is None else shift_labels
    return logits.cross_entropy(
        target.to(logits.device),
        shift=shift_labels is None,
        ignore_index=ignore_index,
        divisor=num_items_in_batch,
    )


# A model's parts ---------------------------------------------------------------------------------


def language_model(model: Any) -> Any:
    """The transformers model itself, out of PEFT's wrapper."""
    from transformers import PreTrainedModel

    inner = model
    if not isinstance(model, PreTrainedModel) and hasattr(model, "get_base_model"):
        inner = model.get_base_model()
    if not isinstance(inner, PreTrainedModel):
        raise TypeError(
            f"apply takes a transformers model, got {type(model).__name__}: give it the model "
            "itself, before it is compiled or wrapped"
        )
    return inner


def _patch_of(inner: Any) -> _Patch | None:
    return getattr(inner, "_flce_tune", None)


def _is_standard_loss(function: Any) -> bool:
    from transformers.loss.loss_utils import ForCausalLMLoss

    return function is ForCausalLMLoss


def _take_head(inner: Any, patch: _Patch) -> None:
    """Let the linear layers of the model's head defer, and see that its result is deferred."""
    _release_head(patch)
    head = inner.get_output_embeddings()
    if head is None:
        raise ValueError(f"{type(inner).__name__} has no output embeddings, so no logits to save")
    layers = [layer for layer in head.modules() if isinstance(layer, nn.Linear)]
    vocab = max((layer.out_features for layer in layers), default=0)
    patch.head = head
    try:
        if callable(getattr(head, "reshard", None)):
            raise UnknownOperationError(
                "it is sharded by itself; leave it to the root's fully_shard"
            )
        for layer in layers:
            if layer.out_features == vocab:
                _take_linear(layer, patch)
        _probe(head, patch)
    except UnknownOperationError as reason:
        _release_head(patch)
        raise ValueError(
            f"the head of {type(inner).__name__}, a {_described(head)}, cannot be left to the "
            f"loss: {reason}; {ACCEPTED}"
        ) from None


def _described(head: Any) -> str:
    """A head's class, and the variants of LoRA on it."""
    variants = {type(variant).__name__ for variant in getattr(head, "lora_variant", {}).values()}
    kind = f"{type(head).__module__}.{type(head).__qualname__}"
    return f"{kind} with {', '.join(sorted(variants))}" if variants else kind


def _take_linear(layer: nn.Linear, patch: _Patch) -> None:
    kind, weight = type(layer).__name__, layer.weight
    if type(layer).forward is not nn.Linear.forward or "forward" in layer.__dict__:
        raise UnknownOperationError(f"its {kind} has a forward of its own (quantised, or hooked)")
    plain = type(weight) in (Tensor, nn.Parameter) or hasattr(weight, "full_tensor")
    if not plain or weight.dtype not in DTYPE_NAMES:
        raise UnknownOperationError(
            f"the weight of its {kind} is a {type(weight).__name__} of {weight.dtype} (quantised?)"
        )
    layer._flce_tune = patch  # type: ignore[assignment]
    layer.forward = types.MethodType(_linear_forward, layer)  # type: ignore[method-assign]
    patch.linears.append(layer)


def _release_head(patch: _Patch) -> None:
    for layer in patch.linears:
        del layer.forward, layer._flce_tune
    patch.linears, patch.head = [], None


def _probe(head: nn.Module, patch: _Patch) -> None:
    """Run the head on one row without its product; UnknownOperationError if that cannot be."""
    if not patch.linears:
        raise UnknownOperationError("there is no nn.Linear in it")
    entry = next(layer for layer in head.modules() if isinstance(layer, nn.Linear))
    weight = entry.weight
    row = torch.zeros(1, entry.in_features, dtype=weight.dtype, device=weight.device)
    cuda = [weight.device] if weight.device.type == "cuda" else []
    patch.deferring = patch.strict = True
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=cuda):
            result = head(row)
    finally:
        patch.deferring = patch.strict = False
    if not isinstance(result, DeferredLogits):
        raise UnknownOperationError("its linear layers are not what its result comes from")


# What runs inside the model ----------------------------------------------------------------------


def _linear_forward(self: Any, input: Tensor) -> Any:
    patch: _Patch = self._flce_tune
    if not patch.deferring:
        return F.linear(input, self.weight, self.bias)
    return DeferredLogits.of_linear(
        input, self.weight, self.bias, patch.options, strict=patch.strict
    )


def standing_in_for(original: Callable[..., Any]) -> Callable[[Any], Callable[..., Any]]:
    """``functools.wraps`` without ``__wrapped__``: accelerate unwraps along it, past us."""

    def decorate(replacement: Any) -> Callable[..., Any]:
        made: Callable[..., Any] = functools.update_wrapper(replacement, original)
        del replacement.__wrapped__
        replacement.__signature__ = inspect.signature(original)
        return made

    return decorate


def _forward_for(kind: Any) -> Callable[..., Any]:
    """The forward of a model class, with its signature, which others inspect."""

    @standing_in_for(kind.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        patch: _Patch = self._flce_tune
        original = patch.previous or functools.partial(kind.forward, self)
        if not patch.active or not _asks_for_loss(patch, args, kwargs):
            return original(*args, **kwargs)
        if self.get_output_embeddings() is not patch.head:  # an adapter, since apply
            _take_head(self, patch)
        patch.deferring = True
        try:
            outputs = original(*args, **kwargs)
        finally:
            patch.deferring = False
        return _shown(outputs)

    return forward


def _asks_for_loss(patch: _Patch, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if kwargs.get("labels") is not None:
        return True
    position = patch.labels_position
    return position is not None and len(args) > position and args[position] is not None


def _shown(outputs: Any) -> Any:
    """Outputs with logits on demand in place of deferred ones; None in a compiled model."""

    def show(value: Any) -> Any:
        if not isinstance(value, DeferredLogits):
            return value
        return None if torch.compiler.is_compiling() else LogitsOnDemand.of(value)

    if isinstance(outputs, tuple):
        return tuple(show(value) for value in outputs)
    return type(outputs)(**{name: show(value) for name, value in outputs.items()})
