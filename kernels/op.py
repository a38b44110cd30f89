"""The public op: ``linear_cross_entropy``, and per-token log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from flce_tune.kernels.arguments import (
    check_grad_weight_out,
    check_loss,
    check_tensors,
    check_unsplit,
    is_distributed,
)
from flce_tune.kernels.call import Call
from flce_tune.kernels.config import Config
from flce_tune.kernels.counted import counted_rows
from flce_tune.kernels.problem import Accumulate
from flce_tune.kernels.reduction import LossOutputs, Reduction
from flce_tune.kernels.strategies.tile_skip import skipping_config
from flce_tune.kernels.values import LossSpec

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def linear_cross_entropy(
    x: Tensor,  # [..., D]
    weight: Tensor,  # [V, D]
    target: Tensor,  # [...] int64
    *,
    bias: Tensor | None = None,  # [V]
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
    accumulate: Accumulate = "fp32",
    workspace_limit: int | None = None,
    config: Config | None = None,
    tile_skip: float | None = None,
    grad_weight_out: Tensor | None = None,  # [V, D]
    drop_ignored: bool = False,
    max_counted: int | None = None,
    process_group: ProcessGroup | None = None,
    vocab_range: tuple[int, int] | None = None,
    sequence_parallel: bool = False,
) -> Tensor | tuple[Tensor, Tensor] | LossOutputs:
    """``F.cross_entropy(F.linear(x, weight, bias), target)`` without storing the logits.

    Semantics are ``torch.nn.functional.cross_entropy``'s wherever that defines them; formulas of
    the rest are in docs/loss.md. Inputs may have any strides and are never written. Under
    autocast the GEMMs run in its dtype; outside it, mixed dtypes are promoted. Deterministic
    with every strategy but ``atomic``.

    Args:
        x: hidden states, any number of leading dimensions; bfloat16, float16, float32, float64.
        weight: the head's weight, laid out as in ``nn.Linear``.
        target: labels in [0, V), or ``ignore_index``. Others: IndexError on a CPU or with
            ``check_targets``; on a GPU NaN loss and gradients, without a synchronisation.
        bias: added to the logits; computed in the GEMMs' dtype.
        ignore_index: label of tokens that do not count: no loss, zero gradients.
        reduction: "mean" (over counted tokens, weighted as torch does), "sum" or "none".
        label_smoothing: ε in [0, 1], over counted tokens only.
        softcap: logits become cap·tanh(logits / cap).
        logit_scale: factor on the logits (1 / temperature), before the cap.
        z_loss: λ of the term λ·lse² added to each token's loss.
        class_weight: weight of each class, as torch's ``weight``; must not require grad.
        token_weight: weight of each token. mean divides by Σ token_weight·class_weight[target].
        divisor: what "mean" divides by instead, e.g. the number of tokens of all micro-batches.
        shift: x [..., T, D] at position t predicts target [..., T] at t + 1; x is not copied.
        outputs: statistics to return beside the loss, see LossOutputs; no extra pass.
        return_lse: return (loss, lse) with an lse that can be differentiated.
        check_targets: look for labels out of range; costs a synchronisation on a GPU.
        accumulate: "fp32", or "weight_dtype" to keep dW between chunks in the weight's dtype:
            less memory and time, errors that grow with the number of chunks.
        workspace_limit: bytes the op may hold beyond its inputs and gradients: the fastest config
            that fits is used, the smallest when none does. None: the smallest workspace within
            3 % of the fastest time.
        config: run exactly this config instead of asking the dispatcher.
        tile_skip: leave out of both gradient products the tiles of the softmax in which no token
            has this much probability, and put a product of rank one in their place: faster the
            better the model is trained. The loss stays exact; at 1e-4 the gradients' added error
            is below bfloat16's rounding (docs/tile_skip.md). None: nothing is left out. With
            reduction="none" or ``return_lse`` nothing is, either. Not with ``config`` or
            ``workspace_limit``.
        grad_weight_out: buffer, float32 or of weight's dtype, to which every backward through the
            loss adds weight's gradient; weight.grad is left alone. For gradient accumulation.
        drop_ignored: leave the ignored tokens out of the products, which then take as long as the
            counted ones need. Counting these is a host synchronisation.
        max_counted: with ``drop_ignored``, how many tokens count at most, to do without the
            synchronisation; a number that is too small gives NaN, never a wrong value.
        process_group: the classes are split over its ranks: weight, bias and grad_weight_out
            are this rank's rows, x, target and the rest are the same on every rank, and so are
            the loss and x's gradient. A DTensor weight with ``Shard(0)`` says this by itself.
        vocab_range: this rank's classes (start, stop), in the first rows of weight; further rows
            are padding. None: the rows of all ranks, one after the other.
        sequence_parallel: x is this rank's equal part of the first dimension: gathered before,
            its gradient reduce-scattered after; target and token_weight are of all tokens.

    Returns:
        The loss, float32 (float64 for float64 inputs): a scalar, or target's shape for "none".
        (loss, lse) with ``return_lse``; LossOutputs when ``outputs`` names any.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: a shape, device, option or combination that is not accepted.
        TargetOutOfRangeError: (an IndexError) see ``target``.
        InvalidConfigError: ``config`` cannot run on this problem and device.
        RankMismatchError: (a ValueError) the ranks of ``process_group`` make different calls.
    """
    loss = LossSpec(ignore_index, float(label_smoothing), softcap, logit_scale, float(z_loss))
    if tile_skip is not None:
        config = skipping_config(tile_skip, config, workspace_limit)
    if is_distributed(weight):
        from flce_tune.kernels.parallel.weights import local_part

        weight, bias, process_group, vocab_range = local_part(
            weight, bias, process_group, vocab_range
        )
    if process_group is not None:
        from flce_tune.kernels.parallel import linear as split

        if tile_skip is not None:
            raise ValueError("tile_skip does not go with process_group or a sharded weight")
        return split.linear_cross_entropy(
            split.LinearCall(
                x, weight, target, bias, class_weight, token_weight, loss, reduction, divisor,
                tuple(outputs), shift, return_lse, check_targets, accumulate, workspace_limit,
                config, grad_weight_out, drop_ignored, max_counted,
            ),
            split.Split(process_group, vocab_range, sequence_parallel),
        )  # fmt: skip
    check_unsplit(vocab_range, sequence_parallel=sequence_parallel)
    check_tensors(x, weight, target, bias, class_weight, token_weight)
    check_loss(loss, reduction, accumulate, outputs)
    if grad_weight_out is not None:
        check_grad_weight_out(grad_weight_out, weight)
    asked = Reduction.of_call(
        x, target, class_weight, token_weight, loss, reduction, divisor, outputs,
        return_lse=return_lse, shift=shift,
    )  # fmt: skip
    kept = counted_rows(
        asked.target, len(weight), ignore_index, check_targets=check_targets,
        drop_ignored=drop_ignored, max_counted=max_counted,
    )  # fmt: skip
    call = Call(
        x.reshape(-1, x.shape[-1]), weight, bias, asked, check_targets, accumulate,
        workspace_limit, config, grad_weight_out, kept,
    )  # fmt: skip
    differentiable_weights = token_weight is not None and token_weight.requires_grad
    if reduction == "none" or return_lse or differentiable_weights:
        return call.per_row(return_lse=return_lse)
    return call.reduced()


def linear_logprobs(
    x: Tensor,  # [..., D]
    weight: Tensor,  # [V, D]
    target: Tensor,  # [...] int64
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    entropy: bool = True,
    accumulate: Accumulate = "fp32",
    workspace_limit: int | None = None,
    config: Config | None = None,
    drop_ignored: bool = False,
    max_counted: int | None = None,
    process_group: ProcessGroup | None = None,
    vocab_range: tuple[int, int] | None = None,
    sequence_parallel: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Log-probability of each label, and entropy of each distribution, both differentiable.

    What policy-gradient and distillation code computes from full logits, without the logits:
    log softmax(x·Wᵀ / temperature)[target].

    Args:
        x, weight, target, bias, softcap, accumulate, workspace_limit, config, drop_ignored,
            max_counted, process_group, vocab_range, sequence_parallel: as in
            ``linear_cross_entropy``.
        temperature: divides the logits; positive.
        ignore_index: labels whose log-probability is 0 without a gradient.
        entropy: whether to return the entropy, in nats; ignored tokens have one too, unless they
            are dropped: then it is 0.

    Returns:
        (logprobs, entropy or None), float32, of target's shape.

    Raises:
        TypeError, ValueError, TargetOutOfRangeError, RankMismatchError: as
            ``linear_cross_entropy``.
    """
    if not temperature > 0.0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    loss = LossSpec(ignore_index, softcap=softcap, logit_scale=1.0 / temperature)
    outputs = ("entropy",) if entropy else ()
    if is_distributed(weight):
        from flce_tune.kernels.parallel.weights import local_part

        weight, bias, process_group, vocab_range = local_part(
            weight, bias, process_group, vocab_range
        )
    if process_group is not None:
        from flce_tune.kernels.parallel import linear as split

        rows, _, entropies, _ = split.token_losses(
            split.LinearCall(
                x, weight, target, bias, None, None, loss, "none", None, outputs, False, False,
                False, accumulate, workspace_limit, config, None, drop_ignored, max_counted,
            ),
            split.Split(process_group, vocab_range, sequence_parallel),
        )  # fmt: skip
        return -rows.view(target.shape), entropies.view(target.shape) if entropy else None
    check_unsplit(vocab_range, sequence_parallel=sequence_parallel)
    check_tensors(x, weight, target, bias, None, None)
    check_loss(loss, "none", accumulate, ())
    asked = Reduction.of_call(
        x, target, None, None, loss, "none", None, outputs,
        return_lse=False, shift=False,
    )  # fmt: skip
    kept = counted_rows(
        asked.target, len(weight), ignore_index, check_targets=False,
        drop_ignored=drop_ignored, max_counted=max_counted,
    )  # fmt: skip
    call = Call(
        x.reshape(-1, x.shape[-1]), weight, bias, asked, False, accumulate, workspace_limit, config,
        kept=kept,
    )  # fmt: skip
    rows, _, entropies, _ = call.rows()
    return -rows.view(target.shape), entropies.view(target.shape) if entropy else None
