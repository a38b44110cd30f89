"""Answers about configs, from the stored winners and the ones that ship with the package."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

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
MAX_ANSWERS = 4096


class Lookup:
    """A dispatcher over the store's winners, ``MAX_AGE_SECONDS`` old, and the answers it gave.

    Winners are read only when the store's version of them has changed. Thread-safe.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._shipped = Snapshot.from_pretuned()
        self._lock = threading.Lock()
        self._version: int | None = None
        self._devices: list[DeviceRecord] = []
        self._snapshot = self._shipped
        self._dispatcher = Dispatcher(Snapshot.empty(), shipped=self._shipped)
        self._answers: dict[bytes, bytes] = {}
        self._read_at: float | None = None

    def dispatcher(self) -> Dispatcher:
        """The dispatcher to ask now.

        Raises:
            StoreError: the winners cannot be read.
        """
        with self._lock:
            self._refresh()
            return self._dispatcher

    def snapshot(self) -> Snapshot:
        """All winners there are now: the stored ones, and those that ship where there are none.

        Raises:
            StoreError: the winners cannot be read.
        """
        with self._lock:
            self._refresh()
            return self._snapshot

    def forget(self) -> None:
        """Look for changes before the next answer: there are some."""
        with self._lock:
            self._read_at = None

    def known_answer(self, question: bytes) -> bytes | None:
        """An answer that was given before and still holds; waits for nothing.

        While one thread looks for changes, the others' answers may be twice as old.
        """
        read_at = self._read_at
        if read_at is None:
            return None
        allowed = MAX_AGE_SECONDS * (2 if self._lock.locked() else 1)
        if time.monotonic() - read_at > allowed:
            return None
        return self._answers.get(question)

    def answer(self, question: bytes, work_out: Callable[[], bytes]) -> bytes:
        """The answer to a question, worked out if there is none that still holds.

        Raises:
            StoreError: the winners cannot be read; and what ``work_out`` raises.
        """
        with self._lock:
            self._refresh()
            answers = self._answers  # of the winners known now; replaced when they change
        known = answers.get(question)
        if known is None:
            known = work_out()
            if len(answers) >= MAX_ANSWERS:
                answers.clear()
            answers[question] = known
        return known

    def device(self, query: DeviceQuery) -> DeviceRecord:
        """The device a query means; by default the one this service runs on.

        Raises:
            ApiError: nothing is known of such a device, or several have that name.
            StoreError: the devices cannot be read.
        """
        if query.device is None and query.architecture is None:
            return this_machine()
        with self._lock:
            self._refresh()
            known = [*self._devices, *self._shipped.fronts, this_machine()]
        if query.device is not None:
            return find_device(known, query.device)
        assert query.architecture is not None
        return find_architecture(known, query.architecture)

    def _refresh(self) -> None:
        now = time.monotonic()
        if self._read_at is not None and now - self._read_at <= MAX_AGE_SECONDS:
            return
        version, devices = self._store.winners_version(), self._store.devices()
        if version != self._version:
            winners = self._store.winners()
            snapshot = Snapshot.from_winners(winners, "this service's database")
            self._snapshot = snapshot.over(self._shipped)
            self._dispatcher = Dispatcher(snapshot, shipped=self._shipped)
        if (version, devices) != (self._version, self._devices):
            self._answers = {}
        self._version, self._devices, self._read_at = version, devices, now


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
