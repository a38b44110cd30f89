"""Kernels that are launched again without binding their arguments again.

``JITFunction.run`` inspects every argument and builds a key of strings before it finds the binary
that it launched the last time: two thirds of what a launch costs the host. Here the binary is found
by a smaller key, which tells apart all that Triton compiles apart, and launched as Triton offers,
``compiled[grid](*arguments)``. What has no key yet goes through ``run``, which compiles.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from triton.runtime import driver
from triton.runtime.jit import JITFunction

INT32 = 1 << 31
INT64 = 1 << 63


class Relaunched:
    """A kernel, launched as ``kernel[grid](*arguments, **constants)``: the rest is the kernel's."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self._names = [parameter.name for parameter in kernel.params]
        self._found: dict[Any, tuple[Any, tuple[Any, ...]]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.kernel, name)

    def __getitem__(self, grid: Sequence[int]) -> Callable[..., Any]:
        return functools.partial(self.launch, grid)

    def launch(self, grid: Sequence[int], *arguments: Any, **constants: Any) -> None:
        """Launch, and compile if need be; constants are the compile-time ones and the options."""
        key = (driver.active.get_current_device(), *kinds_of(arguments), *constants.items())
        found = self._found.get(key)
        if found is None:
            compiled = self.kernel[grid](*arguments, **constants)
            if hasattr(compiled, "_init_handles"):  # else it is compiled elsewhere, or not yet
                rest = tuple(constants[name] for name in self._names[len(arguments) :])
                self._found[key] = compiled, rest
            return
        compiled, rest = found
        compiled[(*grid, 1, 1)[:3]](*arguments, *rest)


def relaunched(kernel: Any) -> Any:
    """Decorate a compiled kernel; an interpreted one is left alone."""
    return Relaunched(kernel) if isinstance(kernel, JITFunction) else kernel


def kinds_of(arguments: Sequence[Any]) -> list[Any]:
    """What of the arguments a binary depends on, or more."""
    kinds: list[Any] = []
    add = kinds.append
    for argument in arguments:
        kind = type(argument)
        if argument is None or kind is float or kind is bool:
            add(kind)
        elif kind is int:
            add(_kind_of_int(argument))
        elif isinstance(argument, Tensor):
            add(argument.dtype)
            add(argument.data_ptr() % 16 == 0)
        elif hasattr(argument, "block_shape"):
            add((kind, argument.base.dtype, *argument.block_shape, getattr(argument, "layout", 0)))
        else:
            raise TypeError(f"no kernel takes a {kind.__name__}: {argument!r}")
    return kinds


@functools.lru_cache(4096)
def _kind_of_int(value: int) -> tuple[bool, ...]:
    return (
        value == 1,
        value % 16 == 0,
        -INT32 <= value < INT32,
        -INT64 <= value < INT64,
    )
