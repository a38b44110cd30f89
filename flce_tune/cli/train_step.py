"""One training step through the op, and an account of the config it ran with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flce_tune import linear_cross_entropy
from flce_tune.dispatch.choice import Choice
from flce_tune.dispatch.default import default_dispatcher, reset_default_dispatcher
from flce_tune.kernels.problem import Problem, describe_device
from flce_tune.sweep.inputs import ProblemInputs, make_inputs, plain_loss

LEARNING_RATE = 5.0


@dataclass(frozen=True, slots=True)
class TrainStep:
    """What the step did."""

    choice: Choice
    loss: float
    plain_loss: float  # as plain PyTorch computes it
    loss_after: float  # of the same batch, once the head was updated

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "config": self.choice.config.to_dict(),
            "rule": self.choice.rule,
            "detail": self.choice.detail,
            "loss": self.loss,
            "plain_loss": self.plain_loss,
            "loss_after": self.loss_after,
        }


def why_not(problem: Problem) -> str | None:
    """Say why a step cannot be shown for this kind of problem, or None if it can."""
    if problem.mode != "train":
        return f"a training step needs mode train, got {problem.mode}"
    if special := {"per_token", "statistics"} & {*problem.features}:
        return f"a training step has one loss and nothing else; leave out {', '.join(special)}"
    return None


def train_step(problem: Problem, device: torch.device) -> TrainStep:
    """Train a random head on a random batch for one step, with the config stored for it."""
    reset_default_dispatcher()  # the sweep before us has stored new winners
    inputs = make_inputs(problem, device, seed=0)
    head = [tensor for name, tensor in inputs.leaves.items() if name in ("dw", "db")]
    optimizer = torch.optim.SGD(head, lr=LEARNING_RATE)
    loss = _loss(inputs, problem)
    torch.autograd.backward(loss)
    with torch.no_grad():
        plain = plain_loss(inputs).item()
    optimizer.step()
    with torch.no_grad():
        after = _loss(inputs, problem).item()
    choice = default_dispatcher().choose(problem, describe_device(device))
    return TrainStep(choice, loss.item(), plain, after)


def _loss(inputs: ProblemInputs, problem: Problem) -> Tensor:
    loss = linear_cross_entropy(
        inputs.x,
        inputs.weight,
        inputs.target,
        bias=inputs.bias,
        label_smoothing=inputs.label_smoothing,
        softcap=inputs.softcap,
        class_weight=inputs.class_weight,
        accumulate=problem.accumulate,
    )
    assert isinstance(loss, Tensor)
    return loss
