"""What the ranks of one training job must hear alike: the first to ask tells the others.

Through the key-value store that the job's processes met at, not by a collective: not every rank
comes here, and those that do come when they like.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Protocol

_PREFIX = "flce_tune"


class _Store(Protocol):
    """The part of torch.distributed.Store used here; may raise RuntimeError."""

    def add(self, key: str, amount: int, /) -> int: ...
    def set(self, key: str, value: str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def wait(self, keys: list[str], timeout: timedelta, /) -> None: ...


def first_says(question: str, ask: Callable[[], str], *, wait_s: float) -> str:
    """What ``ask`` answers on the first rank that comes with this question.

    Outside of ``torch.distributed``, and where the other rank's answer does not come, it is this
    process that asks.

    Args:
        question: equal on all ranks.
        ask: gives the answer, which is not empty; raises nothing.
        wait_s: how long the others wait for the first.
    """
    store = _store()
    if store is None:
        return ask()
    key = f"{_PREFIX}/{question}"
    try:
        if store.add(f"{key}/asked", 1) == 1:
            answer = ask()
            store.set(key, answer)
            return answer
        store.wait([key], timedelta(seconds=wait_s))
        return store.get(key).decode() or ask()
    except RuntimeError:  # DistError, of which a time-out is one
        return ask()


def _store() -> _Store | None:
    """The store of the default process group; None without one."""
    distributed = sys.modules.get("torch.distributed")  # never imported: not used either
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    if distributed.get_world_size() == 1:
        return None
    store: _Store = distributed.distributed_c10d._get_default_store()
    return store
