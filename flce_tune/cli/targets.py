"""From ``--device`` to a device: one of this machine, or one that results are stored for."""

from __future__ import annotations

import re
from collections.abc import Iterable

import torch
import typer

from flce_tune import pretuned
from flce_tune.cli.units import split_commas
from flce_tune.dispatch.convert import device_of, device_record, device_slug
from flce_tune.kernels.problem import Device, describe_device
from flce_tune.tuning_db.records import DeviceRecord
from flce_tune.tuning_db.store import Store


def local_device(name: str | None) -> torch.device:
    """A device of this machine; None: the first GPU, else the CPU.

    Raises:
        typer.BadParameter: this machine has no such device.
    """
    if name is None:
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    match = re.fullmatch(r"cpu|cuda(?::(\d+))?", name)
    if match is None:
        raise typer.BadParameter(f"{name!r} is not a device; write cpu, cuda or cuda:1")
    if name == "cpu":
        return torch.device("cpu")
    index, count = int(match[1] or 0), torch.cuda.device_count()
    if index >= count:
        there = f"it has {count}" if count else "torch sees none here"
        raise typer.BadParameter(f"this machine has no GPU {index}: {there}")
    return torch.device("cuda", index)


def chosen_devices(device: str | None, names: str | None) -> list[torch.device]:
    """What ``--device`` or ``--devices`` means: ``all`` GPUs, or a list such as ``cuda:0,cuda:1``.

    Raises:
        typer.BadParameter: this machine has no such device, one is named twice, or both options
            are given.
    """
    if names is None:
        return [local_device(device)]
    if device is not None:
        raise typer.BadParameter("--device names one device, --devices several; use one of them")
    if names == "all":
        devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
        if not devices:
            raise typer.BadParameter("--devices all means all GPUs, and torch sees none here")
        return devices
    devices = [local_device(name) for name in split_commas([names])]
    if len(set(devices)) < len(devices) or not devices:
        raise typer.BadParameter(f"--devices takes all, or each device once, got {names!r}")
    return devices


def known_devices(store: Store | None) -> list[DeviceRecord]:
    """Devices with stored or shipped results."""
    shipped = [winner.measurement.device for winner in pretuned.winners()]
    return list(dict.fromkeys([*(store.devices() if store else ()), *shipped]))


def find_device(name: str | None, known: Iterable[DeviceRecord]) -> Device:
    """A device of this machine, or the one known device whose name contains ``name``.

    Raises:
        typer.BadParameter: none is called so, or several are.
    """
    if name is None or re.fullmatch(r"cpu|cuda(:\d+)?", name):
        return describe_device(local_device(name))
    return device_of(find_record(name, known))


def find_record(name: str, known: Iterable[DeviceRecord]) -> DeviceRecord:
    """The one known device whose id is, or name contains, ``name``.

    Raises:
        typer.BadParameter: none is called so, or several are.
    """
    records = list(known)
    for record in records:
        if device_slug(record) == name:
            return record
    found = [record for record in records if name.lower() in record.name.lower()]
    if len(found) == 1:
        return found[0]
    ids = ", ".join(sorted(map(device_slug, found or records))) or "none yet"
    if found:
        raise typer.BadParameter(f"several devices match {name!r}; name one: {ids}")
    raise typer.BadParameter(f"no results of a device called {name!r}; known are: {ids}")


def filter_record(name: str | None, known: Iterable[DeviceRecord]) -> DeviceRecord | None:
    """As ``find_record``, for filters: None is no filter, ``cpu`` and ``cuda`` are this machine's.

    Raises:
        typer.BadParameter: as ``find_record`` and ``local_device``.
    """
    if name is None:
        return None
    if re.fullmatch(r"cpu|cuda(:\d+)?", name):
        return device_record(describe_device(local_device(name)))
    return find_record(name, known)
