"""What both ops check and compare between ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from flce_tune.kernels.arguments import check_class_weight, check_target_range
from flce_tune.kernels.loss import statistics_dtype
from flce_tune.kernels.parallel.agreement import require_same_labels
from flce_tune.kernels.parallel.shard import GlobalLabels, Shard
from flce_tune.kernels.reduction import Reduction
from flce_tune.kernels.values import LossSpec

Function = TypeVar("Function", bound=Callable[..., Any])


def untraced(function: Function) -> Function:
    """Keep the compiler out: ranks compare their calls on the host."""
    return cast(Function, torch.compiler.disable(function))  # type: ignore[no-untyped-call]


def shared_description(
    target: Tensor,
    class_weight: Tensor | None,
    token_weight: Tensor | None,
    loss: LossSpec,
    reduction: str,
    divisor: Tensor | float | None,
    outputs: Sequence[str],
    shift: bool,
    return_lse: bool,
) -> dict[str, object]:
    """What both ops must find equal on all ranks."""
    return {
        "target's shape": tuple(target.shape),
        "class_weight": None if class_weight is None else tuple(class_weight.shape),
        "token_weight": None if token_weight is None else token_weight.requires_grad,
        "loss": loss,
        "reduction": reduction,
        "divisor": "a tensor" if isinstance(divisor, Tensor) else divisor,
        "outputs": tuple(outputs),
        "shift": shift,
        "return_lse": return_lse,
        "gradients": torch.is_grad_enabled(),
    }


def global_labels(
    shard: Shard,
    asked: Reduction,
    dtype: torch.dtype,
    *,
    check_targets: bool,
) -> GlobalLabels:
    """Check what needs V, and the labels; every rank finds the same."""
    class_weight = asked.class_weight
    check_class_weight(class_weight, shard.vocab)
    target = asked.target.to(torch.int64)
    require_same_labels(shard, target)
    if check_targets or target.device.type == "cpu":
        check_target_range(target, shard.vocab, asked.loss.ignore_index)
    if class_weight is not None:
        class_weight = class_weight.to(statistics_dtype(dtype)).contiguous()
    return GlobalLabels(target.contiguous(), shard.vocab, class_weight)


def usable_device(tensor: Tensor, group: ProcessGroup) -> torch.device:
    """The tensor's device, if the group can communicate there.

    Raises:
        ValueError: it cannot, or this rank is not in the group; the same on every rank.
    """
    if not isinstance(group, ProcessGroup):
        raise ValueError(
            "process_group must be a torch.distributed ProcessGroup with this rank in it, got "
            f"{group!r}"
        )
    device = tensor.device
    if device.type not in {kind.type for kind in group._device_types}:
        known = ", ".join(sorted(kind.type for kind in group._device_types))
        raise ValueError(
            f"process_group communicates on {known}, the tensors are on {device}: move them, "
            "materialise them if they are on meta, or make a group for that device"
        )
    return device
