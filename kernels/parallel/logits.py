"""The public op of given logits with a process group: check, agree, compute."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.distributed import ProcessGroup

from flce_tune.kernels.arguments import check_logits, check_loss
from flce_tune.kernels.given_logits import check_in_place
from flce_tune.kernels.parallel.agreement import agree, refusing_together
from flce_tune.kernels.parallel.checks import (
    global_labels,
    shared_description,
    untraced,
    usable_device,
)
from flce_tune.kernels.parallel.given import given_row_loss
from flce_tune.kernels.parallel.shard import Range
from flce_tune.kernels.reduction import LossOutputs, Reduction
from flce_tune.kernels.values import LossSpec, Wanted


@untraced
def cross_entropy(
    logits: Tensor,  # [..., columns], this rank's
    target: Tensor,  # [...] int64, of all classes
    class_weight: Tensor | None,  # [V]
    token_weight: Tensor | None,  # [...]
    loss: LossSpec,
    reduction: str,
    divisor: Tensor | float | None,
    outputs: Sequence[str],
    *,
    shift: bool,
    return_lse: bool,
    check_targets: bool,
    in_place: bool,
    process_group: ProcessGroup,
    vocab_range: Range | None,
) -> Tensor | tuple[Tensor, Tensor] | LossOutputs:
    """The op on one rank's logits; arguments and errors are the public op's."""
    description = {
        "op": "cross_entropy",
        "logits' dtype": logits.dtype,
        "requires_grad of logits": logits.requires_grad,
    } | shared_description(
        target, class_weight, token_weight, loss, reduction, divisor, outputs, shift, return_lse
    )
    with refusing_together(process_group, usable_device(logits, process_group)):
        check_logits(logits, target, class_weight, token_weight, split=True)
        check_loss(loss, reduction, "fp32", outputs)
        asked = Reduction.of_call(
            logits, target, class_weight, token_weight, loss, reduction, divisor, outputs,
            return_lse=return_lse, shift=shift,
        )  # fmt: skip
        rows = logits.reshape(-1, logits.shape[-1])
        if in_place:
            check_in_place(logits, rows)
    shard = agree(process_group, logits.device, description, logits.shape[-1], vocab_range)
    labels = global_labels(shard, asked, logits.dtype, check_targets=check_targets)
    entropy, prediction = asked.statistics()
    wanted = Wanted(entropy=entropy, prediction=prediction)
    results = given_row_loss(rows, shard, labels, loss, wanted, in_place)
    return asked.of_rows(*results, return_lse=return_lse)
