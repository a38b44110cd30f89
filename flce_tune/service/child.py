"""Commands that run a function of this package in a new interpreter.

Not ``multiprocessing``, which would import the program that serves a second time. The garbage
collector rests during the imports, which leave it nothing and cost a fifth more with it.
"""

from __future__ import annotations

import sys

_BOOT = (
    "import gc, importlib, sys; "
    "gc.disable(); "
    "module, function, argument = sys.argv[1:4]; "
    "sys.path[:] = sys.argv[4:]; "
    "run = getattr(importlib.import_module(module), function); "
    "gc.freeze(); "
    "gc.enable(); "
    "run(argument)"
)


def command(module: str, function: str, argument: str = "") -> list[str]:
    """The command that calls ``module.function(argument)`` with this process's import path."""
    return [sys.executable, "-c", _BOOT, module, function, argument, *filter(None, sys.path)]
