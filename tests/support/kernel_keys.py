"""Prints the source keys of all Triton functions, hashed in one order or the other; a program.

python kernel_keys.py forwards
python kernel_keys.py backwards
"""

import importlib
import json
import pkgutil
import sys

from triton.runtime.jit import JITFunction

from flce_tune.kernels import hopper, triton
from flce_tune.kernels.triton.relaunch import Relaunched


def main() -> None:
    functions = {}
    for package in (triton, hopper):
        for module in pkgutil.iter_modules(package.__path__):
            names = vars(importlib.import_module(f"{package.__name__}.{module.name}"))
            for held in names.values():
                value = held.kernel if isinstance(held, Relaunched) else held
                if isinstance(value, JITFunction):
                    kind = type(value).__name__
                    functions[f"{value.module}.{value.__name__} {kind}"] = value
    order = sorted(functions, reverse=sys.argv[1] == "backwards")
    print(json.dumps({name: functions[name].cache_key for name in order}))


if __name__ == "__main__":
    main()
