"""At which clock a GPU runs, and what holds it down, as NVML says."""

from __future__ import annotations

import torch

THROTTLE_BITS = {
    0x04: "power cap",
    0x08: "hardware slowdown",
    0x20: "thermal slowdown by software",
    0x40: "thermal slowdown by hardware",
    0x80: "power brake",
}
"""nvmlClocksThrottleReason*; idleness and clocks that somebody has set are none."""


def clock_mhz(device: torch.device) -> int | None:
    """The SM clock now; None on a CPU and where NVML's Python bindings are missing."""
    if device.type != "cuda":
        return None
    try:
        return torch.cuda.clock_rate(device)
    except (ImportError, RuntimeError):
        return None


def throttle_reasons(device: torch.device) -> tuple[str, ...]:
    """What lowers the clocks now; empty on a CPU and where NVML cannot be asked."""
    if device.type != "cuda":
        return ()
    try:
        import pynvml

        pynvml.nvmlInit()
        uuid = str(torch.cuda.get_device_properties(device).uuid)
        uuid = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        bits: int = pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
    except Exception:  # noqa: BLE001 - a remark about a measurement must not cost it
        return ()
    return tuple(reason for bit, reason in THROTTLE_BITS.items() if bits & bit)
