"""Spares Triton's interpreter what it does anew at each call of a jitted function.

For every call inside a kernel, it goes through ``triton.language`` again to replace the builtins,
which the kernel's launch has replaced already: a third of the time of tests that run in it. What it
computes with is the same.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

NOTHING = SimpleNamespace(restore=lambda: None)


def install() -> None:
    """Do so from now on, in this process."""
    import triton.language as tl
    from triton.runtime import interpreter

    replace, dtype_of = interpreter._patch_lang, interpreter._get_np_dtype
    known: dict[int, tuple[dict[str, Any], list[Any]]] = {}
    dtypes: dict[Any, Any] = {}

    def replace_once(fn: Callable[..., Any]) -> Any:
        seen = fn.__globals__
        if id(seen) not in known:
            modules = filter(inspect.ismodule, seen.values())
            known[id(seen)] = seen, [module for module in modules if module in (tl, tl.core)]
        languages = known[id(seen)][1]
        if languages and not any(tl.core.is_builtin(language.load) for language in languages):
            return NOTHING
        return replace(fn)

    def known_dtype(dtype: Any) -> Any:
        name = str(dtype)
        if name not in dtypes:
            dtypes[name] = dtype_of(dtype)
        return dtypes[name]

    interpreter._patch_lang = replace_once
    interpreter._get_np_dtype = known_dtype
