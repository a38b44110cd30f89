"""Checks and preparation of the op's arguments; every refusal names the argument."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import cast

import torch
from torch import Tensor

from flce_tune.errors import TargetOutOfRangeError
from flce_tune.kernels import loss as losses
from flce_tune.kernels.backends import on_device
from flce_tune.kernels.limits import ALIGNMENT
from flce_tune.kernels.loss import statistics_dtype
from flce_tune.kernels.problem import DTYPE_NAMES, FEATURES, Accumulate, Mode, Problem
from flce_tune.kernels.values import GivenLogits, Inputs, LossSpec, Wanted

REDUCTIONS = ("mean", "sum", "none")
ACCUMULATE = ("fp32", "weight_dtype")
PLAIN = (Tensor, torch.nn.Parameter)
"""Types of tensors that are nothing more."""
OUTPUTS = ("lse", "token_loss", "entropy", "prediction", "accuracy", "z_loss")


def check_tensors(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    class_weight: Tensor | None,
    token_weight: Tensor | None,
    *,
    split: bool = False,
    empty: bool = False,
    ranks: int = 1,
) -> None:
    """Check types, shapes, dtypes and devices.

    ``split``: weight holds some of the classes; how many there are, and so what class_weight must
    look like, is not known yet. ``empty``: weight may have no rows. ``ranks``: into how many parts
    x's first dimension is cut, of which x is one.

    Raises:
        TypeError: not a tensor, or a dtype that is not accepted.
        ValueError: a shape or a device that does not fit.
    """
    _check_each(
        {"x": x, "weight": weight, "target": target},
        {"bias": bias, "class_weight": class_weight, "token_weight": token_weight},
    )
    if weight.dim() != 2:
        hint = _unmaterialised(weight)
        raise ValueError(f"weight must be [V, D], got shape {tuple(weight.shape)}{hint}")
    vocab, hidden = weight.shape
    if weight.numel() == 0 and not (empty and hidden):
        raise ValueError(f"weight is empty, shape {tuple(weight.shape)}{_unmaterialised(weight)}")
    if x.dim() < 1 or x.shape[-1] != hidden:
        raise ValueError(
            f"x must be [..., D] with D = {hidden} as in weight {tuple(weight.shape)}, "
            f"got {tuple(x.shape)}"
        )
    tokens = tuple(x.shape[:-1])
    if ranks > 1:
        tokens = (tokens[0] * ranks, *tokens[1:])
    _require_shape("target", target, tokens, "x without its last dimension, of all ranks")
    _require_shape("bias", bias, (vocab,), "[V]")
    _check_weights(target, None if split else vocab, class_weight, token_weight)


def check_logits(
    logits: Tensor,
    target: Tensor,
    class_weight: Tensor | None,
    token_weight: Tensor | None,
    *,
    split: bool = False,
) -> None:
    """Check types, shapes, dtypes and devices of given logits and what belongs to them.

    ``split``: they are the logits of some of the classes, perhaps none, as in ``check_tensors``.

    Raises:
        TypeError: not a tensor, or a dtype that is not accepted.
        ValueError: a shape or a device that does not fit.
    """
    _check_each(
        {"logits": logits, "target": target},
        {"class_weight": class_weight, "token_weight": token_weight},
    )
    if logits.dim() < 1 or (logits.shape[-1] == 0 and not split):
        raise ValueError(f"logits must be [..., V] with V > 0, got {tuple(logits.shape)}")
    _require_shape(
        "target", target, tuple(logits.shape[:-1]), "logits without their last dimension"
    )
    _check_weights(target, None if split else logits.shape[-1], class_weight, token_weight)


def check_class_weight(class_weight: Tensor | None, vocab: int) -> None:
    """Check that there is one weight for each class.

    Raises:
        ValueError: there is not.
    """
    _require_shape("class_weight", class_weight, (vocab,), "[V]")


def _check_weights(
    target: Tensor, vocab: int | None, class_weight: Tensor | None, token_weight: Tensor | None
) -> None:
    if vocab is not None:
        check_class_weight(class_weight, vocab)
    _require_shape("token_weight", token_weight, tuple(target.shape), "target's shape")
    if class_weight is not None and class_weight.requires_grad:
        raise ValueError("class_weight must not require grad: its gradient is not computed")


def _check_each(required: dict[str, Tensor], optional: dict[str, Tensor | None]) -> None:
    """Check types, dtypes and devices; the first tensor says which device."""
    first, like = next(iter(required.items()))
    given = required | {name: tensor for name, tensor in optional.items() if tensor is not None}
    for name, tensor in given.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
        if is_distributed(tensor):
            raise TypeError(f"{name} must hold all of its rows, got a DTensor: pass the result of "
                            f"{name}.full_tensor(), gathered before the call")  # fmt: skip
        if tensor.device != like.device:
            meta = tensor.is_meta or like.is_meta
            remedy = "load the values of what is on meta" if meta else "move one of them"
            raise ValueError(f"{name} is on {tensor.device}, {first} is on {like.device}: {remedy}")
        if name == "target":
            if tensor.dtype not in (torch.int64, torch.int32):
                raise TypeError(f"target must be int64 or int32, got {tensor.dtype}")
        elif tensor.dtype not in DTYPE_NAMES:
            raise TypeError(f"{name} must be one of {sorted(DTYPE_NAMES.values())}, "
                            f"got {tensor.dtype}")  # fmt: skip


def is_distributed(tensor: Tensor) -> bool:
    """Whether it is a DTensor, known without importing torch.distributed."""
    return type(tensor) not in PLAIN and hasattr(tensor, "full_tensor")


def check_unsplit(vocab_range: tuple[int, int] | None, *, sequence_parallel: bool) -> None:
    """Refuse what says how a problem is split where it is not.

    Raises:
        ValueError: one of the two is given.
    """
    if vocab_range is not None or sequence_parallel:
        raise ValueError(
            f"vocab_range and sequence_parallel go with process_group, got {vocab_range} and "
            f"{sequence_parallel} without one"
        )


def _require_shape(name: str, tensor: Tensor | None, shape: tuple[int, ...], rule: str) -> None:
    if tensor is not None and tuple(tensor.shape) != shape:
        raise ValueError(f"{name} must have shape {shape} ({rule}), got {tuple(tensor.shape)}")


def _unmaterialised(weight: Tensor) -> str:
    if weight.numel() == 0 or weight.dim() == 1:
        return (
            ": a partitioned parameter (ZeRO-3, FSDP) must be gathered before the call, "
            "for example with deepspeed.zero.GatheredParameters or FullyShardedDataParallel."
            "summon_full_params"
        )
    return ""


def check_grad_weight_out(out: Tensor, weight: Tensor) -> None:
    """Check a buffer for weight's gradient.

    Raises:
        TypeError: not a tensor.
        ValueError: a buffer that does not fit, or a weight without a gradient of its own.
    """
    if not isinstance(out, Tensor):
        raise TypeError(f"grad_weight_out must be a torch.Tensor, got {type(out).__name__}")
    _require_shape("grad_weight_out", out, tuple(weight.shape), "weight's shape")
    if out.dtype not in (torch.float32, weight.dtype):
        raise ValueError(
            f"grad_weight_out must be torch.float32 or {weight.dtype} as weight is, got {out.dtype}"
        )
    if out.device != weight.device:
        raise ValueError(f"grad_weight_out is on {out.device}, weight is on {weight.device}")
    if not out.is_contiguous() or out.requires_grad:
        raise ValueError(
            "grad_weight_out must be contiguous and must not require grad, got strides "
            f"{out.stride()}, requires_grad={out.requires_grad}"
        )
    if not (weight.requires_grad and weight.is_leaf):
        raise ValueError(
            "grad_weight_out needs a weight that is a leaf and requires grad: there is no gradient "
            "of a frozen weight, and that of a computed one would not reach what it comes from; "
            f"got requires_grad={weight.requires_grad}, is_leaf={weight.is_leaf}"
        )


def check_loss(loss: LossSpec, reduction: str, accumulate: str, outputs: Sequence[str]) -> None:
    """Check the options.

    Raises:
        ValueError: an option outside its range, naming what is accepted.
    """
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction must be one of {REDUCTIONS}, got {reduction!r}")
    if accumulate not in ACCUMULATE:
        raise ValueError(f"accumulate must be one of {ACCUMULATE}, got {accumulate!r}")
    if not 0.0 <= loss.label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing must be in [0, 1], got {loss.label_smoothing}")
    if loss.softcap is not None and not loss.softcap > 0.0:
        raise ValueError(f"softcap must be positive, or None for no cap, got {loss.softcap}")
    if loss.logit_scale is not None and not loss.logit_scale > 0.0:
        raise ValueError(f"logit_scale must be positive, or None for 1, got {loss.logit_scale}")
    if loss.z_loss < 0.0:
        raise ValueError(f"z_loss must not be negative, got {loss.z_loss}")
    if unknown := [name for name in outputs if name not in OUTPUTS]:
        raise ValueError(f"outputs must be among {OUTPUTS}, got {unknown}")


def check_target_range(target: Tensor, vocab: int, ignore_index: int) -> None:
    """Look for labels outside [0, V); synchronises with a GPU.

    Raises:
        TargetOutOfRangeError: naming the first such label and V.
    """
    out_of_range = losses.out_of_range(target, vocab, ignore_index)
    if bool(out_of_range.any()):
        place = int(out_of_range.nonzero()[0])
        raise TargetOutOfRangeError(
            f"target {int(target[place])} at position {place} is outside [0, {vocab}) "
            f"and is not ignore_index ({ignore_index})"
        )


def compute_dtype(x: Tensor, weight: Tensor) -> torch.dtype:
    """The GEMMs' dtype: autocast's where it is on, else the promotion of both inputs'."""
    kind = x.device.type
    autocast = kind != "meta" and torch.is_autocast_enabled(kind)
    if autocast and torch.float64 not in (x.dtype, weight.dtype):
        return torch.get_autocast_dtype(kind)
    return torch.promote_types(x.dtype, weight.dtype)


@contextlib.contextmanager
def _launching_on(device: torch.device) -> Iterator[None]:
    with torch.autocast(device.type, enabled=False), on_device(device):
        yield


def launching_on(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Launch on the tensors' device, in the dtypes chosen: no autocast, and the device current."""
    if torch.is_autocast_enabled(device.type):
        return _launching_on(device)
    return on_device(device)


def direct(*tensors: Tensor) -> bool:
    """Whether a call may skip the dispatcher's custom op: plain tensors, nobody tracing."""
    plain = all(type(t) in PLAIN and not t.is_meta for t in tensors)
    return plain and not torch.compiler.is_compiling() and not torch._C._len_torch_dispatch_stack()


def prepare(
    x: Tensor,  # [N, D]
    weight: Tensor,  # [V, D]
    target: Tensor,  # [N]
    bias: Tensor | None,
    class_weight: Tensor | None,
) -> Inputs:
    """Lay the tensors out as the strategies need them; copies only what does not fit."""
    return Inputs(
        x=_rows_aligned(x),
        weight=_rows_aligned(weight),
        target=target.contiguous(),
        bias=None if bias is None else bias.contiguous(),
        class_weight=_class_weight(class_weight, x.dtype),
    )


def prepare_logits(
    logits: Tensor,  # [N, V]
    target: Tensor,  # [N]
    class_weight: Tensor | None,
) -> GivenLogits:
    """Lay given logits out as the row kernels need them: copies them only for the last stride."""
    fits = logits.stride(1) == 1 or logits.shape[1] == 1
    return GivenLogits(
        raw=logits if fits else logits.contiguous(),
        target=target.contiguous(),
        class_weight=_class_weight(class_weight, logits.dtype),
    )


def _class_weight(class_weight: Tensor | None, compute: torch.dtype) -> Tensor | None:
    if class_weight is None:
        return None
    return class_weight.to(statistics_dtype(compute)).contiguous()


def _rows_aligned(tensor: Tensor) -> Tensor:
    """Give the tensor unit last stride, rows that do not overlap, and aligned rows if it can."""
    rows, width = tensor.shape
    step = tensor.stride(0) * tensor.element_size()
    fits = tensor.stride(1) == 1 and (rows == 1 or tensor.stride(0) >= width)
    aligned = step % ALIGNMENT == 0 and tensor.data_ptr() % ALIGNMENT == 0
    wanted = width * tensor.element_size() % ALIGNMENT == 0
    if fits and (aligned or not wanted):
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def problem_of(
    inputs: Inputs, loss: LossSpec, wanted: Wanted, accumulate: str, *, per_token: bool
) -> Problem:
    """Describe a call."""
    mode: Mode = "eval"
    if wanted.dx or wanted.dw or wanted.db:
        mode = "train" if wanted.dw else "train_frozen_weight"
    present = (  # in FEATURES' order
        inputs.bias is not None,
        loss.softcap is not None,
        loss.label_smoothing > 0,
        inputs.class_weight is not None,
        per_token and mode != "eval",
        wanted.entropy or wanted.prediction,
    )
    n, hidden = inputs.x.shape
    return _problem(n, hidden, inputs.vocab, inputs.x.dtype, mode, accumulate, present)


@functools.lru_cache(maxsize=1024)
def _problem(
    tokens: int,
    hidden: int,
    vocab: int,
    dtype: torch.dtype,
    mode: Mode,
    accumulate: str,
    present: tuple[bool, ...],
) -> Problem:
    """The problem of a call, made and checked once for all calls like it."""
    features = (name for name, there in zip(FEATURES, present, strict=True) if there)
    return Problem(
        tokens, hidden, vocab, DTYPE_NAMES[dtype], mode, cast(Accumulate, accumulate),
        tuple(sorted(features)),
    )  # fmt: skip
