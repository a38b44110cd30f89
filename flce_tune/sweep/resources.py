"""Registers, spills and shared memory of the Triton kernels that a config launches."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class KernelResources:
    """The largest of all kernels launched; None while there was none."""

    registers: int | None = None  # per thread
    spills: int | None = None  # of registers, per thread
    shared_memory: int | None = None  # bytes per block

    def add(self, registers: int, spills: int, shared_memory: int) -> None:
        """Count in one kernel."""
        self.registers = max(self.registers or 0, registers)
        self.spills = max(self.spills or 0, spills)
        self.shared_memory = max(self.shared_memory or 0, shared_memory)


@contextlib.contextmanager
def watched_kernels() -> Iterator[KernelResources]:
    """Collect the resources of the Triton kernels launched meanwhile, as Triton loaded them.

    Replaces a method of Triton's for the whole process; without Triton nothing is collected.
    """
    resources = KernelResources()
    try:
        from triton.compiler import CompiledKernel
    except ImportError:
        yield resources
        return
    original = CompiledKernel.launch_metadata

    def noted(kernel: Any, *args: Any) -> Any:
        metadata = original(kernel, *args)
        _ = kernel.run  # loads the binary, which tells its registers
        resources.add(kernel.n_regs, kernel.n_spills, kernel.metadata.shared)
        return metadata

    CompiledKernel.launch_metadata = noted
    try:
        yield resources
    finally:
        CompiledKernel.launch_metadata = original
