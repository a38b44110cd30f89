"""The values that cross a strategy's boundary, and the algebra behind them.

Everything the public op offers (reductions, smoothing, z-loss, weights, entropy, ...) reduces to
per-row statistics of the logits and one form of logit gradient. Per row i and column c, with
a = x·Wᵀ + b the raw logits and z = softcap(scale·a) the logits the loss sees,

    loss_i = (1-ε)·w_y·(lse_i - z_iy) + ε/V·(W1·lse_i - Σ_c w_c·z_ic) + λ·lse_i²
    G_ic   = ∂L/∂z_ic = p_ic·(A_i + C_i·z_ic) - B_i·[c = y_i] - E_i·w_c

with p = softmax(z), w the class weights (ones by default) and W1 = Σ_c w_c. For a loss that is
Σ_i r_i·loss_i:  A = r·((1-ε)·w_y + ε/V·W1 + 2λ·lse),  B = r·(1-ε)·w_y,  E = r·ε/V,  C = 0. An
upstream gradient on lse adds to A, one on the entropy adds to A and C (see ``loss.py``). So a
strategy knows statistics and the four row coefficients, and nothing of the loss's options.

One rounded lse would cost p a relative error of |lse|·2⁻²⁵, several times what plain torch loses.
So the rest, lse_low, is kept beside it: strategies compute p = exp(z - lse), whose difference is
exact where p is large, and the coefficients A and C that they get hold the factor exp(-lse_low).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True)
class LossSpec:
    """The scalars of the loss."""

    ignore_index: int = -100
    label_smoothing: float = 0.0  # ε
    softcap: float | None = None  # z = softcap·tanh(scale·a / softcap)
    logit_scale: float | None = None  # scale
    z_loss: float = 0.0  # λ


class Labels(Protocol):
    """What the loss knows of its inputs: the labels, how many classes there are, their weights."""

    @property
    def target(self) -> Tensor:
        """[N] int64."""

    @property
    def vocab(self) -> int:
        """V."""

    @property
    def class_weight(self) -> Tensor | None:
        """[V], statistics dtype."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """The tensors of the loss, prepared: 2-D, one compute dtype, unit last stride, one device."""

    x: Tensor  # [N, D]
    weight: Tensor  # [V, D]
    target: Tensor  # [N] int64
    bias: Tensor | None = None  # [V], compute dtype
    class_weight: Tensor | None = None  # [V], statistics dtype

    @property
    def vocab(self) -> int:
        """V."""
        return self.weight.shape[0]

    def rows(self, rows: slice) -> Inputs:
        """Restrict to some tokens."""
        if rows.start == 0 and rows.stop == len(self.x):
            return self
        # Not by ``replace``, which takes several times as long: chunks may be many and short.
        x, target = self.x[rows], self.target[rows]
        return Inputs(x, self.weight, target, self.bias, self.class_weight)

    def columns(self, columns: slice) -> Inputs:
        """Restrict to some of the vocabulary; targets stay global."""
        if columns.start == 0 and columns.stop == len(self.weight):
            return self
        return replace(
            self,
            weight=self.weight[columns],
            bias=None if self.bias is None else self.bias[columns],
            class_weight=None if self.class_weight is None else self.class_weight[columns],
        )


@dataclass(frozen=True, slots=True)
class GivenLogits:
    """Logits somebody else computed, and their labels: 2-D, unit last stride, one device."""

    raw: Tensor  # [N, V]
    target: Tensor  # [N] int64
    class_weight: Tensor | None = None  # [V], statistics dtype

    @property
    def vocab(self) -> int:
        """V."""
        return self.raw.shape[1]

    def rows(self, rows: slice) -> GivenLogits:
        """Restrict to some tokens."""
        return replace(self, raw=self.raw[rows], target=self.target[rows])


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which outputs somebody will use; the others are not computed and take no memory."""

    dx: bool = False
    dw: bool = False
    db: bool = False
    entropy: bool = False
    prediction: bool = False


@dataclass(frozen=True, slots=True)
class Statistics:
    """Per row, float32 (float64 for float64 inputs). Rows that are ignored hold finite values."""

    lse: Tensor  # [N], rounded
    lse_low: Tensor  # [N], what the rounding of lse left out
    target_logit: Tensor  # [N] z_iy; NaN where the label is out of range
    logit_sum: Tensor | None = None  # [N] Σ_c w_c·z_ic; only under label smoothing
    mean_logit: Tensor | None = None  # [N] Σ_c p_ic·z_ic; entropy is lse - mean_logit
    prediction: Tensor | None = None  # [N] int64, the first column of the largest logit


@dataclass(frozen=True, slots=True)
class Coefficients:
    """The row coefficients of G, each [N] in the statistics' dtype; None is all zeros.

    A and C hold the factor exp(-lse_low) that p lacks.
    """

    a: Tensor
    b: Tensor
    c: Tensor | None = None
    e: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Gradients:
    """Of x [N, D], weight [V, D], bias [V]; None where not wanted.

    In the compute dtype, except for float16 inputs: there they are float32 and the caller scales
    and rounds them, because 1/N underflows in float16.
    """

    dx: Tensor | None = None
    dw: Tensor | None = None
    db: Tensor | None = None
