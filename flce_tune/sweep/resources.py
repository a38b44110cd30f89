"""The Triton kernels that a config launches: their binaries, registers, spills, shared memory."""

from __future__ import annotations

import contextlib
import hashlib
import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from flce_tune.errors import FlceTuneError

HOPELESS_SPILLS = 256
"""Registers a thread that a kernel keeps in memory. Winners have up to 14; what a whole accumulator
spills is many times slower than its neighbours."""

Launch = tuple[str, tuple[int, ...]]
"""A kernel's binary, as its SHA-256, and its grid."""


class HopelessKernelError(FlceTuneError):
    """A kernel that compiled and cannot be fast."""


@dataclass(slots=True)
class KernelResources:
    """All launches in order, and the largest of the kernels; None while there was none."""

    registers: int | None = None  # per thread
    spills: int | None = None  # of registers, per thread
    shared_memory: int | None = None  # bytes per block
    launches: list[Launch] = field(default_factory=list)

    def add(self, launch: Launch, registers: int, spills: int, shared_memory: int) -> None:
        """Count in one launch."""
        self.launches.append(launch)
        self.registers = max(self.registers or 0, registers)
        self.spills = max(self.spills or 0, spills)
        self.shared_memory = max(self.shared_memory or 0, shared_memory)

    def require_hope(self) -> None:
        """Refuse what spills so much that timing it would only cost time.

        Raises:
            HopelessKernelError: a kernel spills more than HOPELESS_SPILLS.
        """
        if (self.spills or 0) > HOPELESS_SPILLS:
            raise HopelessKernelError(
                f"a kernel spills {self.spills} registers a thread; "
                f"at most {HOPELESS_SPILLS} are tried"
            )


def usage(binary: bytes) -> tuple[int, int]:
    """Registers and spilled registers, per thread, of a CUDA binary with one kernel.

    What the driver tells once it has loaded it: there, too, all of the stack counts as spills.

    Raises:
        OSError, subprocess.CalledProcessError: the tool that comes with Triton cannot read it.
        ValueError: it says something else than it used to.
    """
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", told)
    if found is None:
        raise ValueError(f"no resource usage in what cuobjdump says: {told!r}")
    registers, stack, local = map(int, found.groups())  # the latter two in bytes
    return registers, (stack + local) // 4


@contextlib.contextmanager
def watched_kernels() -> Iterator[KernelResources]:
    """Collect the resources of the Triton kernels launched meanwhile, as its driver tells them.

    Replaces a method of Triton's for the whole process; without Triton nothing is collected.
    """
    resources = KernelResources()
    try:
        from triton.compiler import CompiledKernel
    except ImportError:
        yield resources
        return
    original = CompiledKernel.launch_metadata
    digests: dict[int, str] = {}

    def noted(kernel: Any, grid: Sequence[int], *args: Any) -> Any:
        metadata = original(kernel, grid, *args)
        _ = kernel.run  # loads the binary, which tells its registers
        if id(kernel) not in digests:
            digests[id(kernel)] = hashlib.sha256(kernel.kernel).hexdigest()
        launch = digests[id(kernel)], tuple(map(int, grid))
        resources.add(launch, kernel.n_regs, kernel.n_spills, kernel.metadata.shared)
        return metadata

    CompiledKernel.launch_metadata = noted
    try:
        yield resources
    finally:
        CompiledKernel.launch_metadata = original
