"""TRL's SFTTrainer with this project's loss.

    from flce_tune.integrations.trl import apply

    trainer = SFTTrainer(...)
    apply(trainer)
    trainer.train()

SFTTrainer asks its model for the log-probability, entropy and hit of each label instead of a loss,
and answers that by a kernel of its own. ``apply`` lets the model answer through
``linear_cross_entropy``, with the config that was tuned for this GPU.
"""

from __future__ import annotations

import functools
import types
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor

from flce_tune.api import cross_entropy
from flce_tune.integrations import transformers as causal_models
from flce_tune.integrations.deferred import DeferredLogits
from flce_tune.kernels.problem import Accumulate

Trainer = TypeVar("Trainer")

IGNORED = -100


def apply(
    trainer: Trainer,
    *,
    workspace_limit: int | None = None,
    accumulate: Accumulate = "fp32",
    drop_ignored: bool = False,
    tile_skip: float | None = None,
) -> Trainer:
    """Let the model of an SFTTrainer compute its loss without storing the logits.

    Loss, gradients and logged metrics are the trainer's own.

    Args:
        trainer: a ``trl.SFTTrainer``, before ``train()``. Its model is changed in place.
        workspace_limit, accumulate, drop_ignored, tile_skip: as in ``linear_cross_entropy``.

    Returns:
        The same trainer.

    Raises:
        TypeError: another trainer; those of TRL that sample ask for other statistics.
        ValueError: a head that cannot be left to the loss; the message says which and why.
    """
    from trl import SFTTrainer

    if not isinstance(trainer, SFTTrainer):
        raise TypeError(f"apply takes a trl.SFTTrainer, got {type(trainer).__name__}")
    model = trainer.model
    causal_models.apply(
        model,
        workspace_limit=workspace_limit,
        accumulate=accumulate,
        drop_ignored=drop_ignored,
        tile_skip=tile_skip,
    )
    inner = causal_models.language_model(model)
    if "_flce_tune_logits_forward" not in inner.__dict__:
        inner._flce_tune_logits_forward = inner.forward
        inner.forward = types.MethodType(_forward_for(type(inner)), inner)
    return trainer


@dataclass
class _Answer:
    """A model's loss function that keeps what TRL asks for per token."""

    log_probs: Tensor | None = None
    entropy: Tensor | None = None
    is_top1: Tensor | None = None
    label_mask: Tensor | None = None

    def __call__(
        self,
        logits: Any,  # [B, T, V]
        labels: Tensor,  # [B, T]
        vocab_size: int,
        num_items_in_batch: Tensor | int | None = None,
        shift_labels: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        shift = shift_labels is None
        target = (labels if shift_labels is None else shift_labels).to(logits.device)
        deferred = isinstance(logits, DeferredLogits)
        loss_of: Any = (
            logits.cross_entropy if deferred else functools.partial(cross_entropy, logits)
        )
        result = loss_of(target, shift=shift, reduction="none", outputs=("entropy", "prediction"))
        counted = target[..., 1:] if shift else target
        self.label_mask = counted != IGNORED
        self.log_probs = -result.loss
        self.entropy = result.entropy * self.label_mask
        self.is_top1 = (result.prediction == counted) & self.label_mask
        if num_items_in_batch is None:
            num_items_in_batch = self.label_mask.sum().clamp(min=1)
        loss: Tensor = result.loss.sum() / num_items_in_batch
        return loss


def _forward_for(kind: Any) -> Any:
    @causal_models.standing_in_for(kind.forward)
    def forward(self: Any, *args: Any, fused_lm_head: bool = False, **kwargs: Any) -> Any:
        logits_forward = self._flce_tune_logits_forward
        if not fused_lm_head:
            return logits_forward(*args, **kwargs)
        if not self._flce_tune.active:  # undone since then
            return logits_forward(*args, fused_lm_head=True, **kwargs)
        from trl.trainer.utils import FusedCausalLMOutput

        answer, usual = _Answer(), self.loss_function
        self.loss_function = answer
        try:
            outputs = logits_forward(*args, **{**kwargs, "use_cache": False})
        finally:
            self.loss_function = usual
        return FusedCausalLMOutput(
            loss=outputs.loss, log_probs=answer.log_probs, entropy=answer.entropy,
            is_top1=answer.is_top1, label_mask=answer.label_mask,
            aux_loss=getattr(outputs, "aux_loss", None),
        )  # fmt: skip

    return forward
