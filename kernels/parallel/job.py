"""One agreed call of the split op: its tensors prepared, its options, its config."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flce_tune.kernels import strategies
from flce_tune.kernels.arguments import prepare, problem_of
from flce_tune.kernels.backends import backend_of
from flce_tune.kernels.config import Config
from flce_tune.kernels.parallel.agreement import agreed_config
from flce_tune.kernels.parallel.hidden import all_tokens
from flce_tune.kernels.parallel.merge import merge, nothing, recomputed_logits
from flce_tune.kernels.parallel.shard import GlobalLabels, Shard
from flce_tune.kernels.problem import Accumulate
from flce_tune.kernels.values import Coefficients, Gradients, Inputs, LossSpec, Statistics, Wanted


@dataclass(frozen=True, slots=True)
class Job:
    """What the ranks have agreed to compute."""

    shard: Shard
    labels: GlobalLabels
    loss: LossSpec
    accumulate: Accumulate
    workspace_limit: int | None
    config: Config | None
    sequence_parallel: bool
    grad_weight_out: Tensor | None = None

    def inputs(
        self,
        x: Tensor,  # [N, D], or this rank's tokens of them
        weight: Tensor,  # [rows, D]
        bias: Tensor | None,  # [rows]
    ) -> Inputs:
        """This rank's columns of the problem, padding rows left out, labels counted from them."""
        width = self.shard.width
        return prepare(
            all_tokens(self.shard, x, sequence_parallel=self.sequence_parallel),
            weight[:width],
            self.shard.local(self.labels.target),
            None if bias is None else bias[:width],
            self.shard.columns(self.labels.class_weight),
        )

    def choose(self, inputs: Inputs, wanted: Wanted, *, per_token: bool) -> Config:
        """The config of all ranks: that of the widest shard."""
        widest = torch.empty(self.shard.widest, inputs.x.shape[1], device="meta")
        problem = problem_of(
            replace(inputs, weight=widest), self.loss, wanted, self.accumulate, per_token=per_token
        )
        return agreed_config(
            self.shard, problem, inputs.x.device, self.workspace_limit, self.config
        )

    def evaluate(self, inputs: Inputs, wanted: Wanted, config: Config) -> Statistics:
        """Statistics over the whole vocabulary, without storing logits where the config can."""
        if self.shard.width:
            strategy = strategies.get(config.strategy)
            local = strategy.evaluate(inputs, self.loss, wanted, config)
        else:
            local = nothing(len(inputs.x), inputs.x, self.loss, wanted)
        largest = recomputed_logits(inputs, local, self.loss)
        return merge(self.shard, self.labels, local, largest)

    def coefficients(
        self, merged: Statistics, row_weight: Tensor, rows: slice = slice(None)
    ) -> tuple[Statistics, Coefficients]:
        """What this rank's gradient of Σ_i r_i·loss_i is computed from."""
        labels = self.labels.rows(rows)
        given = backend_of(merged.lse).coefficients(labels, merged, row_weight, self.loss)
        return self.shard.gradient_inputs(labels, merged, given, self.loss)

    def padded(self, gradients: Gradients, rows: int) -> Gradients:
        """Gradients of all rows of weight; padding rows have none."""

        def pad(gradient: Tensor | None) -> Tensor | None:
            if gradient is None or len(gradient) == rows:
                return gradient
            whole = gradient.new_zeros(rows, *gradient.shape[1:])
            whole[: len(gradient)] = gradient
            return whole

        return replace(gradients, dw=pad(gradients.dw), db=pad(gradients.db))
