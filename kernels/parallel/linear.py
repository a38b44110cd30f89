"""The public ops of hidden states with a process group: check, agree, compute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from flce_tune.kernels.arguments import (
    check_grad_weight_out,
    check_loss,
    check_tensors,
    compute_dtype,
)
from flce_tune.kernels.config import Config
from flce_tune.kernels.counted import CountedRows, counted_rows
from flce_tune.kernels.loss import statistics_dtype
from flce_tune.kernels.parallel.agreement import agree, refusing_together
from flce_tune.kernels.parallel.checks import (
    global_labels,
    shared_description,
    untraced,
    usable_device,
)
from flce_tune.kernels.parallel.functions import Scalar, reduced_loss, row_loss
from flce_tune.kernels.parallel.job import Job
from flce_tune.kernels.parallel.shard import Range
from flce_tune.kernels.problem import Accumulate
from flce_tune.kernels.reduction import LossOutputs, Reduction
from flce_tune.kernels.values import LossSpec, Wanted


@dataclass(frozen=True, slots=True)
class Split:
    """How a call is split over ranks."""

    group: ProcessGroup
    vocab_range: Range | None
    sequence_parallel: bool = False


@dataclass(frozen=True, slots=True)
class LinearCall:
    """What the public ops have in common; their arguments, with those of ``Split``."""

    x: Tensor  # [..., D], or this rank's part of the first dimension
    weight: Tensor  # [rows, D]
    target: Tensor  # [...] int64, all tokens, of all classes
    bias: Tensor | None  # [rows]
    class_weight: Tensor | None  # [V]
    token_weight: Tensor | None  # [...]
    loss: LossSpec
    reduction: str
    divisor: Tensor | float | None
    outputs: tuple[str, ...]
    shift: bool
    return_lse: bool
    check_targets: bool
    accumulate: Accumulate
    workspace_limit: int | None
    config: Config | None
    grad_weight_out: Tensor | None
    drop_ignored: bool
    max_counted: int | None

    def description(self) -> dict[str, object]:
        """What must be equal on all ranks."""
        x, weight, bias = self.x, self.weight, self.bias
        return {
            "op": "linear_cross_entropy",
            "x's dtype": x.dtype,
            "weight's dtype": weight.dtype,
            "hidden size": weight.shape[-1],
            "requires_grad of x": x.requires_grad,
            "requires_grad of weight": weight.requires_grad,
            "bias": None if bias is None else (bias.dtype, bias.requires_grad),
            "accumulate": self.accumulate,
            "workspace_limit": self.workspace_limit,
            "config": self.config,
            "drop_ignored": (self.drop_ignored, self.max_counted),
        } | shared_description(
            self.target, self.class_weight, self.token_weight, self.loss, self.reduction,
            self.divisor, self.outputs, self.shift, self.return_lse,
        )  # fmt: skip

    def checked(self, split: Split) -> Reduction:
        """Check what this rank can check by itself."""
        check_tensors(
            self.x, self.weight, self.target, self.bias, self.class_weight, self.token_weight,
            split=True,
            empty=split.vocab_range is not None and split.vocab_range[0] == split.vocab_range[1],
            ranks=split.group.size() if split.sequence_parallel else 1,
        )  # fmt: skip
        check_loss(self.loss, self.reduction, self.accumulate, self.outputs)
        if self.grad_weight_out is not None:
            check_grad_weight_out(self.grad_weight_out, self.weight)
        if split.sequence_parallel and (self.shift or self.drop_ignored):
            raise ValueError(
                "shift and drop_ignored do not go with sequence_parallel, where x is not all here: "
                "shift the labels before the call"
            )
        return Reduction.of_call(
            self.x, self.target, self.class_weight, self.token_weight, self.loss, self.reduction,
            self.divisor, self.outputs, return_lse=self.return_lse, shift=self.shift,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Agreed:
    """A call all ranks make, with the rows that are computed."""

    job: Job
    tensors: tuple[Tensor, Tensor, Tensor | None]  # x, weight, bias in the compute dtype
    asked: Reduction
    kept: CountedRows | None

    @classmethod
    def of(cls, call: LinearCall, split: Split) -> _Agreed:
        """Check, compare with the other ranks, prepare."""
        group, x, bias = split.group, call.x, call.bias
        description = call.description() | {"sequence_parallel": split.sequence_parallel}
        with refusing_together(group, usable_device(x, group)):
            asked = call.checked(split)
        shard = agree(group, x.device, description, len(call.weight), split.vocab_range)
        dtype = compute_dtype(x, call.weight)
        labels = global_labels(shard, asked, dtype, check_targets=call.check_targets)
        kept = counted_rows(
            labels.target, shard.vocab, call.loss.ignore_index, check_targets=call.check_targets,
            drop_ignored=call.drop_ignored, max_counted=call.max_counted,
        )  # fmt: skip
        rows = x.reshape(-1, x.shape[-1])
        if kept is not None:
            rows, labels = kept.take(rows), replace(labels, target=kept.take(labels.target))
        job = Job(
            shard, labels, call.loss, call.accumulate, call.workspace_limit, call.config,
            split.sequence_parallel, call.grad_weight_out,
        )  # fmt: skip
        bias = None if bias is None else bias.to(dtype)
        return cls(job, (rows.to(dtype), call.weight.to(dtype), bias), asked, kept)

    def rows(self) -> list[Tensor]:
        """Differentiable token_loss, lse and entropy, and prediction."""
        entropy, prediction = self.asked.statistics()
        wanted = Wanted(entropy=entropy, prediction=prediction)
        return self._spread(row_loss(*self.tensors, self.job, wanted))

    def reduced(self) -> Tensor | LossOutputs:
        """Scalar loss with gradients computed at once."""
        asked, (x, *_) = self.asked, self.tensors
        token_weight = asked.token_weight
        if token_weight is not None and self.kept is not None:
            token_weight = self.kept.take(token_weight)
        scalar = Scalar(asked.kind, token_weight, asked.given_divisor(statistics_dtype(x.dtype)))
        dx, dw, db = (torch.is_grad_enabled() and _differentiable(t) for t in self.tensors)
        wanted = Wanted(dx, dw, db, *asked.statistics())
        value, *rows = reduced_loss(*self.tensors, self.job, scalar, wanted)
        if self.kept is not None:
            value = self.kept.poisoned(value)
        return asked.collect(value, *self._spread(rows)) if asked.outputs else value

    def _spread(self, rows: Sequence[Tensor]) -> list[Tensor]:
        return list(rows) if self.kept is None else [self.kept.spread(r) for r in rows]


@untraced
def linear_cross_entropy(
    call: LinearCall, split: Split
) -> Tensor | tuple[Tensor, Tensor] | LossOutputs:
    """The public op on one rank; its errors, too."""
    agreed = _Agreed.of(call, split)
    if call.reduction == "none" or call.return_lse or _differentiable(call.token_weight):
        return agreed.asked.of_rows(*agreed.rows(), return_lse=call.return_lse)
    return agreed.reduced()


@untraced
def token_losses(call: LinearCall, split: Split) -> list[Tensor]:
    """Differentiable token_loss, lse and entropy, and prediction, each [N] or empty."""
    return _Agreed.of(call, split).rows()


def _differentiable(tensor: Tensor | None) -> bool:
    return tensor is not None and tensor.requires_grad
