"""The op as an ``nn.Module``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from flce_tune.kernels.arguments import check_loss
from flce_tune.kernels.config import Config
from flce_tune.kernels.op import linear_cross_entropy
from flce_tune.kernels.problem import Accumulate
from flce_tune.kernels.reduction import LossOutputs
from flce_tune.kernels.values import LossSpec

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class LinearCrossEntropy(nn.Module):
    """``linear_cross_entropy`` as a module without parameters: the options, held.

    Takes the keyword options of ``linear_cross_entropy`` that are not tensors of one batch;
    ``class_weight`` becomes a buffer. Call it with x, weight, target and, per batch, ``bias``,
    ``token_weight``, ``divisor``, ``grad_weight_out`` and ``max_counted``.
    """

    class_weight: Tensor | None

    def __init__(
        self,
        *,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        softcap: float | None = None,
        logit_scale: float | None = None,
        z_loss: float = 0.0,
        class_weight: Tensor | None = None,
        shift: bool = False,
        outputs: Sequence[str] = (),
        return_lse: bool = False,
        check_targets: bool = False,
        accumulate: Accumulate = "fp32",
        workspace_limit: int | None = None,
        config: Config | None = None,
        tile_skip: float | None = None,
        drop_ignored: bool = False,
        process_group: ProcessGroup | None = None,
        vocab_range: tuple[int, int] | None = None,
        sequence_parallel: bool = False,
    ) -> None:
        super().__init__()
        loss = LossSpec(ignore_index, label_smoothing, softcap, logit_scale, z_loss)
        check_loss(loss, reduction, accumulate, outputs)
        self.register_buffer("class_weight", class_weight, persistent=False)
        self.options: dict[str, Any] = {
            "ignore_index": ignore_index,
            "reduction": reduction,
            "label_smoothing": label_smoothing,
            "softcap": softcap,
            "logit_scale": logit_scale,
            "z_loss": z_loss,
            "shift": shift,
            "outputs": tuple(outputs),
            "return_lse": return_lse,
            "check_targets": check_targets,
            "accumulate": accumulate,
            "workspace_limit": workspace_limit,
            "config": config,
            "tile_skip": tile_skip,
            "drop_ignored": drop_ignored,
            "process_group": process_group,
            "vocab_range": vocab_range,
            "sequence_parallel": sequence_parallel,
        }

    def forward(
        self,
        x: Tensor,  # [..., D]
        weight: Tensor,  # [V, D]
        target: Tensor,  # [...]
        *,
        bias: Tensor | None = None,
        token_weight: Tensor | None = None,
        divisor: Tensor | float | None = None,
        grad_weight_out: Tensor | None = None,
        max_counted: int | None = None,
    ) -> Tensor | tuple[Tensor, Tensor] | LossOutputs:
        """Compute the loss; see ``linear_cross_entropy``."""
        return linear_cross_entropy(
            x, weight, target, bias=bias, token_weight=token_weight, divisor=divisor,
            class_weight=self.class_weight, grad_weight_out=grad_weight_out,
            max_counted=max_counted, **self.options,
        )  # fmt: skip

    def extra_repr(self) -> str:
        """Show the options that differ from a plain mean."""
        return ", ".join(
            f"{name}={value!r}"
            for name, value in self.options.items()
            if value not in (None, False, ())
        )
