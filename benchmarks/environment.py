"""Where and with what a result was measured, and how results are written."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

PACKAGES = (
    "torch",
    "triton",
    "liger-kernel",
    "cut-cross-entropy",
    "quack-kernels",
    "megatron-core",
    "nvidia-cutlass-dsl",
    "tokenizers",
    "transformers",
)


def describe(device: torch.device) -> dict[str, Any]:
    """Device, versions, date and command, JSON-ready."""
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join(["python", *sys.argv]),
        "device": _describe_device(device),
        "python": platform.python_version(),
        "versions": {"flce-tune": _own_version(), **_versions()},
    }


def _own_version() -> str:
    from flce_tune.version import __version__

    return __version__


def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    found["torch"] = torch.__version__  # with its build, which the metadata may lack
    return found


def _describe_device(device: torch.device) -> dict[str, Any]:
    if device.type != "cuda":
        return {
            "kind": device.type,
            "name": platform.processor() or platform.machine(),
            "threads": torch.get_num_threads(),
        }
    properties = torch.cuda.get_device_properties(device)
    return {
        "kind": "cuda",
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "sm_count": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "cuda": torch.version.cuda,
        "driver": _driver_version(),
    }


def _driver_version() -> str | None:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.splitlines()[0].strip() if answer.stdout else None


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    """Write a document whole or not at all, making its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(path.suffix + ".partial")
    partial.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")
    os.replace(partial, path)


def default_device() -> torch.device:
    """The first GPU, or the CPU where there is none."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
