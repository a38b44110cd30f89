"""What is compared: plain PyTorch, the published peers, and this project's choices.

Every implementation turns (x, weight, target) into the mean loss. Peers are imported when they
are built, so one that is not installed is reported and costs nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.nn.functional as F
from cases import Shape
from torch import Tensor

from flce_tune.kernels.config import Config
from flce_tune.kernels.problem import DTYPE_NAMES, Accumulate, Problem, describe_device

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
GemmWork = Literal["6NDV", "6-8NDV", "8NDV"]


@dataclass(frozen=True)
class Implementation:
    """One way to compute the loss, not yet imported."""

    name: str
    family: str  # the --implementations name it belongs to
    gemm_work: GemmWork  # FLOPs of forward plus backward
    build: Callable[[], Loss]
    details: Mapping[str, Any] = field(default_factory=dict)  # for the JSON


# plain PyTorch


def plain_loss(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """Logits in the inputs' dtype."""
    return F.cross_entropy(F.linear(x, weight), target)


def plain_loss_fp32_logits(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """Logits widened to fp32, as most training code writes it."""
    return F.cross_entropy(F.linear(x, weight).float(), target)


def _build_compiled() -> Loss:
    torch._dynamo.reset()
    compiled: Loss = torch.compile(plain_loss_fp32_logits, dynamic=False)
    return compiled


# published peers


def _build_liger(accum_dtype: torch.dtype | None) -> Loss:
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    def loss(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        # bias, class weight, ignore_index, z-loss, smoothing, reduction, softcap, return_z_loss
        options = (None, None, -100, 0.0, 0.0, "mean", None, False)
        value: Tensor = LigerFusedLinearCrossEntropyFunction.apply(
            x, weight, target, *options, accum_dtype
        )[0]
        return value

    return loss


def _build_cce(filter_eps: str | None) -> Loss:
    from cut_cross_entropy import linear_cross_entropy

    def loss(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        value: Tensor = linear_cross_entropy(x, weight, target, filter_eps=filter_eps)
        return value

    return loss


def _build_quack(shape: Shape, scaled_exp: bool) -> Loss:
    from quack.linear_cross_entropy import chunked_linear_cross_entropy

    # its scaled-exp path raises an error when a chunk has as many rows as D
    chunk = 2048 if scaled_exp and shape.hidden == 4096 else 4096

    def loss(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        value: Tensor = chunked_linear_cross_entropy(
            x, weight, target, chunk_size=chunk, use_scaled_exp=scaled_exp
        )
        return value

    return loss


def peers(shape: Shape) -> list[Implementation]:
    """Everything that is not ours."""
    make = Implementation
    return [
        make("PyTorch, logits as x", "eager", "6NDV", lambda: plain_loss),
        make("PyTorch, fp32 logits", "eager_fp32", "6NDV", lambda: plain_loss_fp32_logits),
        make("torch.compile", "compile", "6NDV", _build_compiled),
        make("Liger", "liger", "6NDV", lambda: _build_liger(None)),
        make("Liger, fp32 dW", "liger_fp32", "6NDV", lambda: _build_liger(torch.float32)),
        make("CCE", "cce", "8NDV", lambda: _build_cce("high")),
        make("CCE, no filter", "cce_exact", "8NDV", lambda: _build_cce(None)),
        make("quack", "quack", "6NDV", lambda: _build_quack(shape, False)),
        make("quack, scaled-exp", "quack_scaled", "6NDV", lambda: _build_quack(shape, True)),
    ]


# ours

GEMM_WORK: dict[str, GemmWork] = {"overlay": "6-8NDV", "recompute": "8NDV", "atomic": "8NDV"}
"""Of strategies that compute something twice."""
OURS = ("ours", "ours_weight_dtype", "ours_configs")


def ours(
    shape: Shape,
    dtype: torch.dtype,
    device: torch.device,
    limits: Iterable[int | None],
    accumulate: Accumulate,
) -> list[Implementation]:
    """The dispatcher's choice at every workspace limit (bytes; None: no limit), without repeats."""
    from flce_tune.dispatch import default_dispatcher

    problem = Problem(
        shape.tokens, shape.hidden, shape.vocab, DTYPE_NAMES[dtype], accumulate=accumulate
    )
    exact = accumulate == "fp32"
    found: dict[Config, Implementation] = {}
    for limit in limits:
        choice = default_dispatcher().choose(
            problem, describe_device(device), workspace_limit=limit
        )
        if choice.config not in found:
            found[choice.config] = _ours(
                name=f"flce-tune{'' if exact else ', dW in weight dtype'}, {size(limit)}",
                family="ours" if exact else "ours_weight_dtype",
                config=choice.config,
                accumulate=accumulate,
                details={"workspace_limit": limit, "rule": choice.rule, "detail": choice.detail},
            )
    return list(found.values())


def ours_from_configs(configs: Sequence[Config], accumulate: Accumulate) -> list[Implementation]:
    """Given configs, whatever the dispatcher would choose."""
    return [_ours(str(config), "ours_configs", config, accumulate, {}) for config in configs]


def _ours(
    name: str, family: str, config: Config, accumulate: Accumulate, details: Mapping[str, Any]
) -> Implementation:
    def build() -> Loss:
        from flce_tune import linear_cross_entropy

        def loss(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
            value = linear_cross_entropy(x, weight, target, config=config, accumulate=accumulate)
            assert isinstance(value, Tensor), "only the loss was asked for"
            return value

        return loss

    return Implementation(
        name=name,
        family=family,
        gemm_work=GEMM_WORK.get(config.strategy, "6NDV"),
        build=build,
        details={"config": config.to_dict(), "accumulate": accumulate, **details},
    )


# sizes

_UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def parse_size(text: str) -> int | None:
    """Read ``64MiB``, ``1.5GiB`` or ``none``."""
    if text == "none":
        return None
    for unit, factor in _UNITS.items():
        if text.endswith(unit):
            return int(float(text.removesuffix(unit)) * factor)
    raise ValueError(f"a size is a number with KiB, MiB or GiB, or 'none', got {text!r}")


def size(limit: int | None) -> str:
    """Write a workspace limit for a reader."""
    if limit is None:
        return "no limit"
    for unit in ("GiB", "MiB", "KiB"):
        if limit >= _UNITS[unit]:
            return f"{limit / _UNITS[unit]:g} {unit}"
    return f"{limit} B"
