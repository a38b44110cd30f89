"""Which device or toolchain a query means."""

from __future__ import annotations

import functools
import json
import re
import subprocess
from collections.abc import Iterable
from dataclasses import asdict

import torch

from flce_tune.dispatch.convert import device_record, device_slug, toolchain_slug
from flce_tune.kernels.problem import describe_device
from flce_tune.service import child
from flce_tune.service.errors import ApiError, not_found
from flce_tune.tuning_db.records import DeviceRecord, ToolchainRecord


@functools.cache
def this_machine() -> DeviceRecord:
    """The first GPU here, else the CPU.

    A GPU is described in another process: asking it needs a CUDA context, which costs memory on
    the GPU for as long as the process lives.
    """
    if torch.cuda.device_count() == 0:
        return device_record(describe_device(torch.device("cpu")))
    described = subprocess.run(
        child.command(__name__, print_gpu.__name__), stdout=subprocess.PIPE, check=True
    )
    return DeviceRecord(**json.loads(described.stdout))


def print_gpu(_argument: str) -> None:
    """Print the first GPU's record as JSON; runs in a process of its own."""
    print(json.dumps(asdict(device_record(describe_device(torch.device("cuda", 0))))))


def find_device(known: Iterable[DeviceRecord], wanted: str) -> DeviceRecord:
    """The one device that has the given id, or the given name in any spelling.

    Raises:
        ApiError: 404 if there is none, 409 if the name fits several.
    """
    records = list(dict.fromkeys(known))
    for record in records:
        if device_slug(record) == wanted:
            return record
    named = [record for record in records if _simple(record.name) == _simple(wanted)]
    if len(named) == 1:
        return named[0]
    ids = ", ".join(sorted(map(device_slug, named or records))) or "none yet"
    if named:
        raise ApiError(409, "ambiguous-device", f"several devices are called {wanted!r}: {ids}")
    raise not_found("unknown-device", f"no device {wanted!r}; known are: {ids}")


def find_toolchain(known: Iterable[ToolchainRecord], wanted: str) -> ToolchainRecord:
    """The one toolchain whose id is, or contains, what is wanted, e.g. ``triton-3.7``.

    Raises:
        ApiError: 404 if there is none, 409 if there are several.
    """
    ids = {toolchain_slug(record): record for record in known}
    if wanted in ids:
        return ids[wanted]
    fitting = [name for name in ids if wanted.lower() in name]
    if len(fitting) == 1:
        return ids[fitting[0]]
    there = ", ".join(sorted(fitting or ids)) or "none yet"
    if fitting:
        raise ApiError(409, "ambiguous-toolchain", f"several toolchains fit {wanted!r}: {there}")
    raise not_found("unknown-toolchain", f"no toolchain {wanted!r}; known are: {there}")


def find_architecture(known: Iterable[DeviceRecord], wanted: str) -> DeviceRecord:
    """Any device of the given architecture, e.g. ``sm_90``.

    Raises:
        ApiError: 404 if there is none.
    """
    records = list(known)
    for record in records:
        if record.architecture == wanted:
            return record
    there = ", ".join(sorted({record.architecture for record in records})) or "none yet"
    detail = f"no device of architecture {wanted!r}; known are: {there}"
    raise not_found("unknown-architecture", detail)


def _simple(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
