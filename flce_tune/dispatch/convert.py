"""Between the values of ``flce_tune.kernels`` and the records of ``flce_tune.tuning_db``.

Neither package knows the other; what one calls a Problem and the other a ProblemRecord meets here.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import re
from pathlib import Path
from typing import cast

import torch

import flce_tune.kernels
from flce_tune.kernels.config import Config
from flce_tune.kernels.limits import triton_version as triton_version
from flce_tune.kernels.problem import Accumulate, Device, Mode, Problem
from flce_tune.tuning_db.records import DeviceRecord, Measurement, ProblemRecord, ToolchainRecord


def device_record(device: Device) -> DeviceRecord:
    """The device as the database knows it."""
    major, minor = device.capability
    return DeviceRecord(
        kind=device.kind,
        name=device.name,
        capability=f"{major}.{minor}",
        sm_count=device.sm_count,
        shared_memory_per_block=device.shared_memory_per_block,
        memory_bytes=device.memory_bytes,
    )


def device_of(record: DeviceRecord) -> Device:
    """The device a record describes.

    Raises:
        ValueError: a kind other than "cuda" and "cpu", or a capability that is not "major.minor".
    """
    if record.kind not in ("cuda", "cpu"):
        raise ValueError(f"device kind must be 'cuda' or 'cpu', got {record.kind!r}")
    if not re.fullmatch(r"\d+\.\d+", record.capability):
        raise ValueError(f"capability must be 'major.minor', got {record.capability!r}")
    major, minor = record.capability.split(".")
    return Device(
        kind="cuda" if record.kind == "cuda" else "cpu",
        name=record.name,
        capability=(int(major), int(minor)),
        sm_count=record.sm_count,
        shared_memory_per_block=record.shared_memory_per_block,
        memory_bytes=record.memory_bytes,
    )


def device_slug(record: DeviceRecord) -> str:
    """The device's identity as one path segment, e.g. ``cuda-nvidia-h200-9.0-132-232448``."""
    identity = (
        f"{record.kind}-{record.name}-{record.capability}"
        f"-{record.sm_count}-{record.shared_memory_per_block}"
    )
    return re.sub(r"[^a-z0-9.]+", "-", identity.lower()).strip("-.")


def toolchain_slug(record: ToolchainRecord) -> str:
    """The toolchain as one word, e.g. ``torch-2.13.0-triton-3.7.1-cuda-13.0-driver-580.1-0f3a…``.

    Of the kernels' hash, the first twelve digits.
    """
    versions = {
        "torch": record.torch,
        "triton": record.triton,
        "cuda": record.cuda,
        "driver": record.driver,
    }
    parts = [f"{name}-{version}" for name, version in versions.items() if version]
    return re.sub(r"[^a-z0-9.+]+", "-", "-".join([*parts, record.kernel_hash[:12]]).lower())


def problem_record(problem: Problem) -> ProblemRecord:
    """The class of problems this one shares winners with."""
    return ProblemRecord(
        mode=problem.mode,
        dtype=problem.dtype,
        accumulate=problem.accumulate,
        hidden=problem.hidden,
        vocab=problem.vocab,
        token_bucket=problem.bucket,
        features=problem.features,
    )


def problem_of(record: ProblemRecord, tokens: int | None = None) -> Problem:
    """One problem of the class: with ``tokens`` tokens, by default as many as its bucket allows.

    Raises:
        ValueError: the record holds a dtype, feature or size that no problem can have.
    """
    return Problem(
        tokens=record.token_bucket if tokens is None else tokens,
        hidden=record.hidden,
        vocab=record.vocab,
        dtype=record.dtype,
        mode=cast(Mode, record.mode),
        accumulate=cast(Accumulate, record.accumulate),
        features=record.features,
    )


def config_of(measurement: Measurement) -> Config:
    """The config that was measured.

    Raises:
        InvalidConfigError: the stored config has unknown fields or impossible values.
    """
    return Config.from_dict(measurement.config)


def toolchain_record(device: torch.device) -> ToolchainRecord:
    """The software in use on ``device``. Launches nothing and creates no CUDA context."""
    on_gpu = device.type == "cuda"
    return ToolchainRecord(
        torch=torch.__version__,
        triton=triton_version(),
        cuda=(torch.version.cuda or "") if on_gpu else "",
        driver=_driver_version() if on_gpu else "",
        kernel_hash=kernel_hash(),
    )


@functools.cache
def kernel_hash() -> str:
    """SHA-256 over the names and contents of all sources of ``flce_tune.kernels``, in hex."""
    return hash_sources(Path(flce_tune.kernels.__path__[0]))


def hash_sources(folder: Path) -> str:
    """SHA-256 over the relative names and contents of the ``*.py`` below ``folder``, in hex."""
    digest = hashlib.sha256()
    sources = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*.py")}
    for name, path in sorted(sources.items()):
        source = path.read_bytes()
        digest.update(f"{name}\0{len(source)}\0".encode())
        digest.update(source)
    return digest.hexdigest()


@functools.cache
def _driver_version() -> str:
    """The NVIDIA driver's version as NVML tells it; "" where there is no NVML."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return ""
    if nvml.nvmlInit_v2() != 0:
        return ""
    buffer = ctypes.create_string_buffer(96)
    failed = nvml.nvmlSystemGetDriverVersion(buffer, ctypes.c_uint(len(buffer)))
    nvml.nvmlShutdown()
    return "" if failed else buffer.value.decode()
