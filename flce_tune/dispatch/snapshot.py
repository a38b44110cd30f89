"""Snapshots: the winners a process chooses from, read once and never changed."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING

from flce_tune import pretuned
from flce_tune.tuning_db.records import (
    DeviceRecord,
    Measurement,
    ProblemRecord,
    Status,
    Winner,
    canonical_config,
)

if TYPE_CHECKING:
    from flce_tune.tuning_db.store import Store

Fronts = Mapping[DeviceRecord, Mapping[ProblemRecord, tuple[Winner, ...]]]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The Pareto fronts of every device and problem somebody measured, fastest winner first."""

    fronts: Fronts
    source: str  # where it came from, for a reader

    @classmethod
    def empty(cls, source: str = "nothing measured") -> Snapshot:
        """A snapshot without winners."""
        return cls(MappingProxyType({}), source)

    @classmethod
    def from_winners(cls, winners: Iterable[Winner], source: str) -> Snapshot:
        """Index winners by device and problem. Failures and impossible sizes are left out."""
        fronts: dict[DeviceRecord, dict[ProblemRecord, list[Winner]]] = {}
        for winner in winners:
            measured = winner.measurement
            if _usable(measured):
                of_device = fronts.setdefault(measured.device, {})
                of_device.setdefault(measured.problem, []).append(winner)
        return cls(
            MappingProxyType(
                {
                    device: MappingProxyType(
                        {
                            problem: tuple(sorted(front, key=_milliseconds))
                            for problem, front in of_device.items()
                        }
                    )
                    for device, of_device in fronts.items()
                }
            ),
            source,
        )

    @classmethod
    def from_store(cls, store: Store) -> Snapshot:
        """All winners of a database.

        Raises:
            StoreError: it cannot be read.
        """
        return cls.from_winners(store.winners(), without_password(store.url))

    @classmethod
    def from_json(cls, text: str, source: str) -> Snapshot:
        """The winners of an export document.

        Raises:
            InterchangeError: it does not validate; the message names ``source`` and the place.
        """
        from flce_tune.tuning_db.interchange import parse_winners  # pydantic, only for documents

        return cls.from_winners(parse_winners(text, source), source)

    @classmethod
    def from_pretuned(cls) -> Snapshot:
        """The winners that ship with the package.

        Raises:
            InterchangeError: a shipped file does not validate.
        """
        return cls.from_winners(pretuned.winners(), "pre-tuned files of the package")

    def over(self, other: Snapshot) -> Snapshot:
        """Both snapshots; where both have a front of one device and problem, this one's."""
        devices = {**other.fronts, **self.fronts}
        return Snapshot(
            MappingProxyType(
                {
                    device: MappingProxyType(
                        {**other.fronts.get(device, {}), **self.fronts.get(device, {})}
                    )
                    for device in devices
                }
            ),
            f"{self.source}; {other.source}",
        )

    @property
    def fingerprint(self) -> str:
        """SHA-256 in hex of what decides a choice: equal fingerprints choose equally."""
        digest = hashlib.sha256()
        for line in sorted(
            f"{replace(device, memory_bytes=0)!r} {problem!r} {rank}"
            f" {canonical_config(winner.measurement.config)}"
            for device, of_device in self.fronts.items()
            for problem, front in of_device.items()
            for rank, winner in enumerate(front)
        ):
            digest.update(line.encode() + b"\n")
        return digest.hexdigest()

    def __len__(self) -> int:
        return sum(len(front) for of_device in self.fronts.values() for front in of_device.values())


def _milliseconds(winner: Winner) -> float:
    time = winner.measurement.median_ms
    return math.inf if time is None else time


def _usable(measured: Measurement) -> bool:
    problem = measured.problem
    return (
        measured.status is Status.OK
        and min(problem.token_bucket, problem.hidden, problem.vocab) > 0
    )


def without_password(url: str) -> str:
    """The URL with its password masked, fit for messages."""
    return re.sub(r"(://[^:/@]*):[^/]*@", r"\1:***@", url)
