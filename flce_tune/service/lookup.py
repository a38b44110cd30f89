"""Answers about configs, from the stored winners and the ones that ship with the package."""

from __future__ import annotations

import threading
import time

from flce_tune.dispatch.dispatcher import Dispatcher
from flce_tune.dispatch.snapshot import Snapshot
from flce_tune.kernels.problem import Problem
from flce_tune.service.devices import find_architecture, find_device, this_machine
from flce_tune.service.errors import not_found
from flce_tune.service.schemas import ConfigQuery, DeviceQuery
from flce_tune.sweep.presets import Preset, get_preset
from flce_tune.tuning_db.records import DeviceRecord
from flce_tune.tuning_db.store import Store

MAX_AGE_SECONDS = 1.0


class Lookup:
    """A dispatcher over the store's winners, at most ``MAX_AGE_SECONDS`` old. Thread-safe."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._shipped = Snapshot.from_pretuned()
        self._lock = threading.Lock()
        self._snapshot = Snapshot.empty()
        self._dispatcher = Dispatcher(self._snapshot, shipped=self._shipped)
        self._read_at: float | None = None

    def dispatcher(self) -> Dispatcher:
        """The dispatcher to ask now.

        Raises:
            StoreError: the winners cannot be read.
        """
        with self._lock:
            now = time.monotonic()
            if self._read_at is None or now - self._read_at > MAX_AGE_SECONDS:
                self._read()
                self._read_at = now
            return self._dispatcher

    def forget(self) -> None:
        """Read the winners again before the next answer: they have changed."""
        with self._lock:
            self._read_at = None

    def device(self, query: DeviceQuery) -> DeviceRecord:
        """The device a query means; by default the one this service runs on.

        Raises:
            ApiError: nothing is known of such a device, or several have that name.
        """
        if query.device is None and query.architecture is None:
            return this_machine()
        known = [*self._store.devices(), *self._shipped.fronts, this_machine()]
        if query.device is not None:
            return find_device(known, query.device)
        assert query.architecture is not None
        return find_architecture(known, query.architecture)

    def _read(self) -> None:
        snapshot = Snapshot.from_winners(self._store.winners(), "this service's database")
        if snapshot.fronts != self._snapshot.fronts:
            self._snapshot = snapshot
            self._dispatcher = Dispatcher(snapshot, shipped=self._shipped)


def preset_of(name: str) -> Preset:
    """Look up a preset.

    Raises:
        ApiError: 404 if there is none of that name.
    """
    try:
        return get_preset(name)
    except ValueError as error:
        raise not_found("unknown-preset", str(error)) from error


def problem_of(query: ConfigQuery) -> Problem:
    """The problem a query asks about.

    Raises:
        ApiError: 404 for an unknown preset.
    """
    dtype: str | None = query.dtype
    features: set[str] = set(query.features)
    if query.preset is not None:
        preset = preset_of(query.preset)
        hidden, vocab = preset.hidden, preset.vocab
        dtype = dtype or preset.dtype
        features |= set(preset.features)
    else:
        assert query.hidden is not None
        assert query.vocab is not None
        hidden, vocab = query.hidden, query.vocab
    return Problem(
        tokens=query.tokens,
        hidden=hidden,
        vocab=vocab,
        dtype=dtype or "bfloat16",
        mode=query.mode,
        accumulate=query.accumulate,
        features=tuple(sorted(features)),
    )
