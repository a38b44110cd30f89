"""Checks a config's outputs against a wide-precision reference, before its time is believed.

The gradients are compared through their products with a few random directions U: the reference
needs G·(W·U) and Gᵀ·(x·U), so all rows of dX and dW are covered at the cost of one logits GEMM
and without holding [N, V] or a second [V, D]. An error E shows in E·U with its own relative size.

The yardstick is plain PyTorch in the same dtype on the same inputs: a candidate may be wrong by
1.25 times as much, plus a little. Each block of rows is compared as well, because a single
wrong tile hardly moves the norm of the whole.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flce_tune.errors import FlceTuneError
from flce_tune.kernels.problem import Problem
from flce_tune.sweep.inputs import ProblemInputs, plain_loss

DIRECTIONS = 16  # columns of U
BLOCK_ROWS = 128  # rows of a gradient judged together
CHUNK_ELEMENTS = 1 << 25  # of the reference's logits held at once
ERROR_RATIO = 1.25  # of plain PyTorch's error
BLOCK_ERROR_RATIO = 2.0  # likewise, of its worst block
EPSILON = {"bfloat16": 2**-11, "float16": 2**-14, "float32": 2**-20, "float64": 2**-46}

Errors = dict[str, float]


class WrongResultError(FlceTuneError):
    """A config that computed something else; ``errors`` are relative, by output name."""

    def __init__(self, message: str, errors: Mapping[str, float]) -> None:
        super().__init__(message, errors)
        self.errors = dict(errors)

    def __str__(self) -> str:
        return str(self.args[0])


class Checker:
    """The reference of one problem and plain PyTorch's own errors on it; made once, used often."""

    def __init__(self, problem: Problem, inputs: ProblemInputs, seed: int) -> None:
        self._epsilon = EPSILON[problem.dtype]
        self._ratio = ERROR_RATIO
        if problem.accumulate == "weight_dtype":
            # Asked for: dW is rounded after each chunk, which plain PyTorch never does.
            self._ratio, self._epsilon = 4.0, 16 * self._epsilon
        wide = torch.float32 if inputs.x.dtype.itemsize == 2 else torch.float64
        device = inputs.x.device
        generator = torch.Generator(device).manual_seed(seed)
        self._directions = torch.randn(
            problem.hidden, DIRECTIONS, dtype=wide, device=device, generator=generator
        )
        self._reference = reference(inputs, self._directions)
        self.plain = self._plain_errors(inputs)

    def errors(self, outputs: Mapping[str, Tensor]) -> Errors:
        """Measure the relative errors of a config's outputs.

        Raises:
            WrongResultError: an output is missing, not finite, or too far off.
        """
        errors: Errors = {}
        for name, expected in self._reference.items():
            if name not in outputs:
                raise WrongResultError(f"there is no {name}", errors)
            got = self._project(name, outputs[name])
            if got.shape != expected.shape:
                raise WrongResultError(
                    f"{name} has shape {list(outputs[name].shape)}, which is not the problem's",
                    errors,
                )
            if bad := int((~torch.isfinite(got)).reshape(len(got), -1).any(1).sum()):
                raise WrongResultError(
                    f"{name} is NaN or infinite in {bad} of {len(got)} rows", errors
                )
            errors |= _relative_errors(name, got, expected)
        self._judge(errors)
        return errors

    def _judge(self, errors: Errors) -> None:
        for name, error in errors.items():
            if name.endswith("_block"):
                limit = BLOCK_ERROR_RATIO * self._ratio * self.plain[name] + 8 * self._epsilon
            else:
                limit = self._ratio * self.plain[name] + self._epsilon
            if not error <= limit:
                raise WrongResultError(
                    f"{name}: relative error {error:.2e}, plain PyTorch's is "
                    f"{self.plain[name]:.2e} and at most {limit:.2e} is accepted",
                    errors,
                )

    def _plain_errors(self, inputs: ProblemInputs) -> Errors:
        """Measure plain PyTorch on as many rows as have room for its logits."""
        n, v = len(inputs.x), len(inputs.weight)
        rows = min(n, max(1, _room(inputs.x.device) // (16 * v)))
        expected = self._reference
        if rows < n:
            inputs = inputs.slice(rows)
            expected = reference(inputs, self._directions)
        outputs = inputs.outputs(plain_loss(inputs))
        errors: Errors = {}
        for name, wanted in expected.items():
            errors |= _relative_errors(name, self._project(name, outputs[name]), wanted)
        return errors

    def _project(self, name: str, output: Tensor) -> Tensor:
        wide = self._directions.dtype
        if name not in ("dx", "dw"):
            return output.to(wide).reshape(-1)
        if output.ndim != 2 or output.shape[1] != len(self._directions):
            return output.new_empty(0, dtype=wide)
        step = max(1, CHUNK_ELEMENTS // output.shape[1])
        return torch.cat([part.to(wide) @ self._directions for part in torch.split(output, step)])


@torch.no_grad()
def reference(inputs: ProblemInputs, directions: Tensor) -> dict[str, Tensor]:
    """Compute the loss, dX·U, dW·U and db in the directions' dtype, chunk by chunk of rows.

    ``directions`` is U [D, k]. Only the outputs that ``inputs`` want are computed.
    """
    wide = directions.dtype
    x, target = inputs.x.detach(), inputs.target
    weight = inputs.weight.detach().to(wide)
    bias = None if inputs.bias is None else inputs.bias.detach().to(wide)
    row_weight = _row_weight(inputs, wide)
    weight_u = weight @ directions
    losses, dx = [], []
    dw = torch.zeros_like(weight_u)
    db = torch.zeros_like(weight[:, 0])
    step = max(1, CHUNK_ELEMENTS // len(weight))
    for start in range(0, len(x), step):
        rows = slice(start, start + step)
        x_rows = x[rows].to(wide)
        raw = F.linear(x_rows, weight, bias)
        loss, gradient = _loss_and_gradient(inputs, raw, target[rows], row_weight[rows])
        losses.append(loss)
        dx.append(gradient @ weight_u)
        dw += gradient.T @ (x_rows @ directions)
        db += gradient.sum(0)
    loss = torch.cat(losses)
    outputs = {"loss": loss if inputs.upstream.ndim else _mean(inputs, loss).reshape(1)}
    gradients = {"dx": torch.cat(dx), "dw": dw, "db": db}
    return outputs | {name: gradients[name] for name in inputs.leaves}


def _loss_and_gradient(
    inputs: ProblemInputs, raw: Tensor, target: Tensor, row_weight: Tensor
) -> tuple[Tensor, Tensor]:
    """Per-row losses [n], and the gradient [n, V] of their weighted sum by the raw logits."""
    class_weight = inputs.class_weight
    with torch.enable_grad():
        raw.requires_grad_()
        logits = raw
        if inputs.softcap is not None:
            logits = inputs.softcap * torch.tanh(raw / inputs.softcap)
        loss = F.cross_entropy(
            logits,
            target,
            weight=None if class_weight is None else class_weight.to(raw.dtype),
            label_smoothing=inputs.label_smoothing,
            reduction="none",
        )
        (gradient,) = torch.autograd.grad(loss, raw, row_weight)
    return loss.detach(), gradient


def _row_weight(inputs: ProblemInputs, dtype: torch.dtype) -> Tensor:
    """How much each row's loss counts, times the upstream gradient, [N]."""
    if inputs.upstream.ndim:
        return inputs.upstream.to(dtype)
    total = _class_weight_of_rows(inputs, dtype).sum()
    return (inputs.upstream.to(dtype) / total).expand(len(inputs.target))


def _mean(inputs: ProblemInputs, loss: Tensor) -> Tensor:
    return loss.sum() / _class_weight_of_rows(inputs, loss.dtype).sum()


def _class_weight_of_rows(inputs: ProblemInputs, dtype: torch.dtype) -> Tensor:
    if inputs.class_weight is None:
        return torch.ones(len(inputs.target), dtype=dtype, device=inputs.target.device)
    return inputs.class_weight.to(dtype)[inputs.target]


def _relative_errors(name: str, got: Tensor, expected: Tensor) -> Errors:
    """Frobenius error over Frobenius norm: of all rows, and of the worst block of rows."""
    difference = got - expected
    errors = {name: float(difference.norm() / expected.norm())}
    if name in ("dx", "dw"):
        error, norm = _block_norms(difference), _block_norms(expected)
        # A block without a gradient worth the name has no relative error worth the name.
        floor = 1e-6 * norm.max()
        errors[f"{name}_block"] = float((error / norm.clamp(min=floor)).max())
    return errors


def _block_norms(values: Tensor) -> Tensor:
    blocks = math.ceil(len(values) / BLOCK_ROWS)
    padded = F.pad(values, (0, 0, 0, blocks * BLOCK_ROWS - len(values)))
    norms: Tensor = torch.linalg.vector_norm(padded.reshape(blocks, -1), dim=1)
    return norms


def _room(device: torch.device) -> int:
    """Bytes that plain PyTorch may take for its logits and their gradients."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] // 2
    return 1 << 30


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Fill all uninitialised memory that Python code asks torch for with NaN meanwhile.

    So an output that is not fully written cannot pass by luck. Replaces functions of torch for the
    whole process: for a worker process, not for one that trains.
    """
    owners = (
        (torch, ("empty", "empty_like", "empty_strided")),
        (torch.Tensor, ("new_empty", "new_empty_strided")),
    )
    saved = [(owner, name, vars(owner).get(name)) for owner, names in owners for name in names]

    def poison(function: Any) -> Any:
        def filled(*args: object, **kwargs: object) -> Tensor:
            tensor: Tensor = function(*args, **kwargs)
            return tensor.fill_(math.nan) if tensor.is_floating_point() else tensor

        return filled

    try:
        for owner, name, _ in saved:
            setattr(owner, name, poison(getattr(owner, name)))
        yield
    finally:
        for owner, name, original in saved:
            if original is None:
                delattr(owner, name)
            else:
                setattr(owner, name, original)
