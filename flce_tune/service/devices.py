"""Which device or toolchain a query means."""

from __future__ import annotations

import functools
import json
import re
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

import torch

from flce_tune.dispatch.convert import device_record, device_slug, toolchain_slug
from flce_tune.kernels.problem import describe_device
from flce_tune.service import child
from flce_tune.service.errors import ApiError, not_found
from flce_tune.tuning_db.records import DeviceRecord, ToolchainRecord


def this_machine() -> DeviceRecord:
    """The first GPU here, else the CPU."""
    return next(iter(local_devices().values()))


@functools.cache
def local_devices() -> dict[str, DeviceRecord]:
    """What can be tuned here, by the name torch has for it: all GPUs, then the CPU.

    GPUs are described in another process: asking one needs a CUDA context, which costs memory on
    it for as long as the process lives.
    """
    gpus: list[dict[str, Any]] = []
    if torch.cuda.device_count() > 0:
        described = subprocess.run(
            child.command(__name__, print_gpus.__name__), stdout=subprocess.PIPE, check=True
        )
        gpus = json.loads(described.stdout)
    found = {f"cuda:{index}": DeviceRecord(**gpu) for index, gpu in enumerate(gpus)}
    return found | {"cpu": device_record(describe_device(torch.device("cpu")))}


def print_gpus(_argument: str) -> None:
    """Print the GPUs' records as JSON; runs in a process of its own."""
    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    print(json.dumps([asdict(device_record(describe_device(device))) for device in devices]))


def selectors(devices: Mapping[str, DeviceRecord]) -> list[str]:
    """What a job may ask for so that one of these devices, by torch's names, does it."""
    wanted = {"auto"}
    for name, record in devices.items():
        wanted |= {name, record.kind, record.architecture, device_slug(record)}
    return sorted(wanted)


def select(wanted: str, devices: Mapping[str, DeviceRecord]) -> str | None:
    """The name of the first of these devices that a job's selector means; None: there is none."""
    for name, record in devices.items():
        if wanted in selectors({name: record}):
            return name
    return None


def means(wanted: str, device: DeviceRecord) -> bool:
    """Whether a job's selector may lead to such a device, on whatever machine."""
    return wanted.partition(":")[0] in selectors({device.kind: device})


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
