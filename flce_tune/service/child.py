"""Commands that run a function of this package in a new interpreter.

Not ``multiprocessing``, which would import the program that serves a second time.
"""

from __future__ import annotations

import sys

_BOOT = (
    "import importlib, sys; "
    "module, function, argument = sys.argv[1:4]; "
    "sys.path[:] = sys.argv[4:]; "
    "getattr(importlib.import_module(module), function)(argument)"
)


def command(module: str, function: str, argument: str = "") -> list[str]:
    """The command that calls ``module.function(argument)`` with this process's import path."""
    return [sys.executable, "-c", _BOOT, module, function, argument, *filter(None, sys.path)]
