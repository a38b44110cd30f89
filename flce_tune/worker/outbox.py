"""What a job's own database holds that the service has not got yet."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TypeVar

from flce_tune.tuning_db.records import DeviceRecord, JobEvent, Measurement, ProblemRecord, Winner
from flce_tune.tuning_db.store import Store

MOST = 200  # measurements or events sent at once
MOST_BYTES = 500_000  # of them, about: the service takes a million

Key = tuple[DeviceRecord, ProblemRecord]
Front = tuple[Winner, ...]
Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Letter:
    """Something to send; measurements before the fronts and events that are about them."""

    measurements: Sequence[Measurement] = ()
    fronts: Mapping[Key, Front] = field(default_factory=dict)
    events: Sequence[JobEvent] = ()


class Outbox:
    """Of what is stored after this was made, what has not been sent. For one thread.

    Args:
        store: the job's own database; what it holds now is the service's.
        job_id: the job's name there.
    """

    def __init__(self, store: Store, job_id: str) -> None:
        self._store = store
        self._job_id = job_id
        self._measurement = store.last_measurement_id()
        self._event = 0
        self._version = store.winners_version()
        self._fronts = _fronts(store)

    def letters(self) -> Iterator[Letter]:
        """What there is to send now, in order; ask for the next when one has arrived."""
        # What comes first is read last, so that nothing is sent before what it is about.
        version = self._store.winners_version()
        fronts = {} if version == self._version else self._changed_fronts()
        events = self._store.events(self._job_id, self._event)
        while measured := self._store.measurements(after_id=self._measurement, limit=MOST):
            for part in _parts(measured, lambda m: 1000 + len(m.message)):
                yield Letter(measurements=part)
                self._measurement = part[-1].id or 0
        if fronts:
            yield Letter(fronts=fronts)
            self._fronts |= fronts
        self._version = version
        for told in _parts(events, lambda event: len(json.dumps(event.data))):
            if said := [event for event in told if event.kind != "state"]:
                yield Letter(events=said)
            self._event = told[-1].id

    @property
    def has_results(self) -> bool:
        """Whether measurements or fronts are waiting."""
        return (
            self._store.last_measurement_id() > self._measurement
            or self._store.winners_version() != self._version
        )

    def _changed_fronts(self) -> dict[Key, Front]:
        now = _fronts(self._store)
        return {key: front for key, front in now.items() if self._fronts.get(key) != front}


def _fronts(store: Store) -> dict[Key, Front]:
    def key(winner: Winner) -> Key:
        return winner.measurement.device, winner.measurement.problem

    ordered = sorted(store.winners(), key=lambda winner: repr(key(winner)))
    return {of: tuple(front) for of, front in groupby(ordered, key)}


def _parts(items: Sequence[Item], size: Callable[[Item], int]) -> Iterator[list[Item]]:
    """The same items, a few at a time."""
    part: list[Item] = []
    total = 0
    for item in items:
        if part and (len(part) == MOST or total + size(item) > MOST_BYTES):
            yield part
            part, total = [], 0
        part.append(item)
        total += size(item)
    if part:
        yield part
