"""What is being computed, and on what: the two values every choice of config depends on."""

from __future__ import annotations

import functools
import platform
from dataclasses import dataclass
from typing import Literal

import torch

Mode = Literal["train", "train_frozen_weight", "eval"]
Accumulate = Literal["fp32", "weight_dtype"]

DTYPES: dict[str, torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float64,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

FEATURES = ("bias", "softcap", "label_smoothing", "class_weight", "per_token", "statistics")
"""What changes the kernels beyond shape and dtype.

``per_token``: the upstream gradient is one value per token (``reduction="none"``, a
differentiable lse), so the gradients cannot be computed before backward. ``statistics``: outputs
that need more than the lse (entropy, predicted token).
"""


@dataclass(frozen=True, slots=True)
class Problem:
    """One linear cross-entropy: its sizes, dtype, and what is wanted of it."""

    tokens: int  # N
    hidden: int  # D
    vocab: int  # V
    dtype: str = "bfloat16"  # of x and weight inside the GEMMs
    mode: Mode = "train"
    accumulate: Accumulate = "fp32"
    features: tuple[str, ...] = ()  # sorted subset of FEATURES

    def __post_init__(self) -> None:
        if min(self.tokens, self.hidden, self.vocab) < 1:
            raise ValueError(
                f"tokens, hidden and vocab must be at least 1, got "
                f"{self.tokens}, {self.hidden}, {self.vocab}"
            )
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {sorted(DTYPES)}, got {self.dtype!r}")
        unknown = set(self.features) - set(FEATURES)
        if unknown:
            raise ValueError(f"features must be among {FEATURES}, got {sorted(unknown)}")
        if tuple(sorted(self.features)) != self.features:
            object.__setattr__(self, "features", tuple(sorted(self.features)))

    @property
    def itemsize(self) -> int:
        """Bytes of one element of x, weight and logits."""
        return DTYPES[self.dtype].itemsize

    @property
    def bucket(self) -> int:
        """N rounded up to 2^k or 3·2^(k-1): problems of one bucket share a winner."""
        return token_bucket(self.tokens)

    @property
    def flops(self) -> int:
        """FLOPs of the dense GEMMs without recomputation: 6NDV in training, 2NDV in eval."""
        gemms = {"train": 6, "train_frozen_weight": 4, "eval": 2}[self.mode]
        return gemms * self.tokens * self.hidden * self.vocab


def sizes(
    x: torch.Tensor,  # [N, D]
    vocab: int,
) -> Problem:
    """What decides how a training problem is cut: N, D, V and the dtype."""
    return Problem(x.shape[0], x.shape[1], vocab, DTYPE_NAMES[x.dtype])


def token_bucket(tokens: int) -> int:
    """Round a token count up to the next 2^k or 3·2^(k-1)."""
    if tokens <= 2:
        return max(tokens, 1)
    power = 1 << (tokens - 1).bit_length()
    return power * 3 // 4 if tokens <= power * 3 // 4 else power


@dataclass(frozen=True, slots=True)
class Device:
    """What about a device decides which configs run and which are fast."""

    kind: Literal["cuda", "cpu"]
    name: str  # normalised product name, e.g. "NVIDIA H200"
    capability: tuple[int, int]  # compute capability; (0, 0) on a CPU
    sm_count: int  # multiprocessors, or CPU cores
    shared_memory_per_block: int  # bytes a block may opt in to; 0 on a CPU
    memory_bytes: int

    @property
    def architecture(self) -> str:
        """``sm_90``, or ``cpu``."""
        return f"sm_{self.capability[0]}{self.capability[1]}" if self.kind == "cuda" else "cpu"


@functools.cache
def describe_device(device: torch.device) -> Device:
    """Describe a torch device (``cuda`` with an index, or ``cpu``)."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return Device(
            kind="cuda",
            name=" ".join(properties.name.split()),
            capability=(properties.major, properties.minor),
            sm_count=properties.multi_processor_count,
            shared_memory_per_block=int(properties.shared_memory_per_block_optin),  # type: ignore[attr-defined]
            memory_bytes=properties.total_memory,
        )
    if device.type == "cpu":
        return Device(
            kind="cpu",
            name=platform.machine() or "cpu",
            capability=(0, 0),
            sm_count=torch.get_num_threads(),
            shared_memory_per_block=0,
            memory_bytes=0,
        )
    raise ValueError(f"device must be a cuda or cpu device, got {device}")
