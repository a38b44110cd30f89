"""Prints the source keys of all Triton functions, hashed in one order or the other; a program.

python kernel_keys.py forwards
python kernel_keys.py backwards
"""

import importlib
import json
import pkgutil
import sys

from triton.runtime.jit import JITFunction

from flce_tune.kernels import triton as kernels


def main() -> None:
    functions = {}
    for module in pkgutil.iter_modules(kernels.__path__):
        names = vars(importlib.import_module(f"{kernels.__name__}.{module.name}"))
        mine = [value for value in names.values() if isinstance(value, JITFunction)]
        functions |= {f"{value.module}.{value.__name__}": value for value in mine}
    order = sorted(functions, reverse=sys.argv[1] == "backwards")
    print(json.dumps({name: functions[name].cache_key for name in order}))


if __name__ == "__main__":
    main()
