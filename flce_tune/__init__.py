"""flce-tune: linear cross-entropy without the logits, with configs a tuner remembers.

Names are imported on first use, so that ``import flce_tune`` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from flce_tune.version import __version__

if TYPE_CHECKING:
    from flce_tune.api import (
        Config,
        LinearCrossEntropy,
        LossOutputs,
        Tile,
        cross_entropy,
        explain,
        gathered_weight,
        linear_cross_entropy,
        linear_logprobs,
        prefetch,
    )

__all__ = [
    "Config",
    "LinearCrossEntropy",
    "LossOutputs",
    "Tile",
    "__version__",
    "cross_entropy",
    "explain",
    "gathered_weight",
    "linear_cross_entropy",
    "linear_logprobs",
    "prefetch",
]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module("flce_tune.api"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
