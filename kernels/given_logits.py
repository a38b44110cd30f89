"""The public op for those who hold the logits: ``cross_entropy``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flce_tune.kernels.arguments import check_logits, check_loss, check_unsplit, direct
from flce_tune.kernels.given_loss import reduced
from flce_tune.kernels.given_rows import EagerGivenRowLoss, given_row_loss
from flce_tune.kernels.reduction import LossOutputs, Reduction
from flce_tune.kernels.values import LossSpec

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def cross_entropy(
    logits: Tensor,  # [..., V]
    target: Tensor,  # [...] int64
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    logit_scale: float | None = None,
    z_loss: float = 0.0,
    class_weight: Tensor | None = None,  # [V]
    token_weight: Tensor | None = None,  # [...], like target
    divisor: Tensor | float | None = None,
    shift: bool = False,
    outputs: Sequence[str] = (),
    return_lse: bool = False,
    check_targets: bool = False,
    in_place: bool = False,
    process_group: ProcessGroup | None = None,
    vocab_range: tuple[int, int] | None = None,
) -> Tensor | tuple[Tensor, Tensor] | LossOutputs:
    """``F.cross_entropy(logits, target)`` in one pass forward and one backward.

    The logits are never copied to float32: the kernels hold the softmax in it. All but the
    arguments named here are ``linear_cross_entropy``'s, and so are the results.

    Args:
        logits: bfloat16, float16, float32 or float64, of any row length and alignment. Rows may
            have any stride; they are copied if their elements are not neighbours, or if the
            leading dimensions cannot be seen as one.
        shift: logits [..., T, V] at position t predict target [..., T] at t + 1; nothing of the
            logits is copied.
        in_place: let backward write the gradient over the logits' own storage, so that no second
            [N, V] tensor exists. Their values are lost then; a backward that still needs them
            raises autograd's error. Where the graph is retained, saved tensors are hooked
            (checkpointing, offloading) or torch.compile plans the memory, it has no effect.
        process_group: the classes are split over its ranks: logits are this rank's columns, all
            else is the same on every rank. Their gradient is local; the loss is not.
        vocab_range: this rank's classes (start, stop), in the first columns of logits; further
            columns are padding. None: the columns of all ranks, one after the other.

    Returns:
        The loss, float32 (float64 for float64 logits): a scalar, or target's shape for "none".
        (loss, lse) with ``return_lse``; LossOutputs when ``outputs`` names any.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: a shape, device, option or combination that is not accepted; logits that
            ``in_place`` may not overwrite: a leaf or its view, overlapping or copied rows.
        TargetOutOfRangeError: (an IndexError) a label outside [0, V), on a CPU or with
            ``check_targets``; on a GPU NaN loss and gradients, without a synchronisation.
        RankMismatchError: (a ValueError) the ranks of ``process_group`` make different calls.
    """
    loss = LossSpec(ignore_index, float(label_smoothing), softcap, logit_scale, float(z_loss))
    if process_group is not None:
        from flce_tune.kernels.parallel import logits as split

        return split.cross_entropy(
            logits, target, class_weight, token_weight, loss, reduction, divisor, outputs,
            shift=shift, return_lse=return_lse, check_targets=check_targets, in_place=in_place,
            process_group=process_group, vocab_range=vocab_range,
        )  # fmt: skip
    check_unsplit(vocab_range, sequence_parallel=False)
    check_logits(logits, target, class_weight, token_weight)
    check_loss(loss, reduction, "fp32", outputs)
    asked = Reduction.of_call(
        logits, target, class_weight, token_weight, loss, reduction, divisor, outputs,
        return_lse=return_lse, shift=shift,
    )  # fmt: skip
    rows = logits.reshape(-1, logits.shape[-1])
    arguments = (
        rows, asked.target.to(torch.int64), class_weight, *asked.scalars(), *asked.statistics(),
        check_targets,
    )  # fmt: skip
    plain = direct(logits)
    if plain and in_place:
        check_in_place(logits, rows)
    weighted = token_weight is not None and token_weight.requires_grad
    if plain and reduction != "none" and not return_lse and not weighted and len(rows):
        return reduced(asked, rows, arguments, in_place=in_place)
    if plain:
        run: Callable[..., Any] = functools.partial(EagerGivenRowLoss.apply, in_place)
    else:
        run = given_row_loss
    token_loss, lse, entropy, prediction, *_ = run(*arguments)
    return asked.of_rows(token_loss, lse, entropy, prediction, return_lse=return_lse)


def check_in_place(
    logits: Tensor,
    rows: Tensor,  # [N, V], logits flattened
) -> None:
    """Refuse to overwrite what autograd, or somebody else, holds to be unchanged."""
    if not (logits.requires_grad and torch.is_grad_enabled()):
        return
    owner = logits if logits._base is None else logits._base
    if owner.is_leaf and owner.requires_grad:
        raise ValueError(
            "in_place would overwrite the values of a leaf that requires grad: logits must be "
            "computed, not a parameter or a view of one"
        )
    (n, vocab), (row_stride, column_stride) = rows.shape, rows.stride()
    copied = rows.data_ptr() != logits.data_ptr()
    if copied or (vocab > 1 and column_stride != 1) or (n > 1 and row_stride < vocab):
        raise ValueError(
            "in_place needs logits that can be seen as [N, V] rows, one after the other, without "
            f"a copy, got shape {tuple(logits.shape)} with strides {logits.stride()}; with labels "
            "one position ahead pass all positions and shift=True"
        )
