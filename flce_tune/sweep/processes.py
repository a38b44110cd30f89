"""Names for processes, from which others on the same host can tell that one is gone, and cores."""

from __future__ import annotations

import os
import socket
import time
import uuid
from pathlib import Path

PROC = Path("/proc")


def unique_owner() -> str:
    """Make a name for something this process owns, different on every call."""
    return f"{socket.gethostname()} {_space()} {os.getpid()}.{_started(os.getpid())} {uuid.uuid4()}"


def is_gone(owner: str) -> bool:
    """Whether the process that made this name is known not to run any more.

    False for other hosts, for other containers, and where there is no /proc to ask.
    """
    match owner.split():
        case [_, space, process, _] if space == _space() != "?":
            pid, _, started = process.partition(".")
            return pid.isdecimal() and _started(int(pid)) != started
    return False


def usable_cores() -> int:
    """The cores this process may run on, which may be fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def age_s() -> float:
    """Seconds since this process was started; 0 where there is no /proc to ask."""
    try:
        now = time.clock_gettime(time.CLOCK_BOOTTIME)
        return max(0.0, now - int(_started(os.getpid())) / os.sysconf("SC_CLK_TCK"))
    except (AttributeError, ValueError, OSError):
        return 0.0


def _space() -> str:
    """Within which process ids are unique: this boot of this kernel, this container."""
    try:
        boot = (PROC / "sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}.{(PROC / 'self/ns/pid').stat().st_ino}"
    except OSError:
        return "?"


def _started(pid: int) -> str:
    """When a process started, in clock ticks since the boot; "" if there is none."""
    try:
        after_name = (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    state, started = after_name[0], after_name[19]
    return "" if state in "ZX" else started
