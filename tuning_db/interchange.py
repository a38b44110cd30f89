"""Measurements and winners as JSON: for other databases, for people, and the pre-tuned files.

Both ways work in pieces: neither a document nor a database need fit into memory.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, BinaryIO

from flce_tune.tuning_db.document import SCHEMA, Check, Document
from flce_tune.tuning_db.records import DeviceRecord, Measurement, ProblemRecord, Winner
from flce_tune.tuning_db.store import Store

_PAGE = 1000


@dataclass(frozen=True, slots=True)
class ImportReport:
    """What an import did."""

    measurements: int  # added
    winners: int  # added
    skipped: int  # measurements and winners that were there already, or better ones


def export_pieces(
    store: Store,
    *,
    device: DeviceRecord | None = None,
    problem: ProblemRecord | None = None,
    winners_only: bool = False,
) -> Iterator[str]:
    """Write what a store holds (of one device, of one problem) as a document, piece by piece.

    With ``winners_only``, only the measurements that won. What is stored meanwhile is left out.

    Raises:
        StoreError: the store cannot be read.
    """
    winners = store.winners(device=device, problem=problem)
    if winners_only:
        won = [winner.measurement for winner in winners]
        parents = [(m.device, m.toolchain, m.problem) for m in won]
        return _pieces(parents, won, winners)
    last = store.last_measurement_id()  # after the winners: it covers theirs
    parents = store.parents(device=device, problem=problem, up_to=last)
    return _pieces(parents, _all(store, device, problem, last), winners)


def export_json(
    store: Store, *, device: DeviceRecord | None = None, winners_only: bool = False
) -> str:
    """Write a document as ``export_pieces`` does, at once."""
    return "".join(export_pieces(store, device=device, winners_only=winners_only))


def dump(measurements: Sequence[Measurement], winners: Iterable[Winner]) -> str:
    """Write records as a document; measurements must come from a store and hold the winners'."""
    parents = [(m.device, m.toolchain, m.problem) for m in measurements]
    return "".join(_pieces(parents, measurements, list(winners)))


def parse_winners(text: str, source: str) -> list[Winner]:
    """Read the winners of a document without a database; unverified, without ids.

    Raises:
        InterchangeError: see ``Document.read``.
    """
    return Document.read(_file(text), source).winner_records()


def import_json(store: Store, text: str, *, source: str) -> ImportReport:
    """Bring a document into a store; see ``import_file``."""
    return import_file(store, _file(text), source=source)


def import_file(
    store: Store,
    file: BinaryIO,
    *,
    source: str,
    check: Check | None = None,
) -> ImportReport:
    """Bring a document into a store.

    It is validated as a whole before anything is written, then written in pieces, between which
    others may write. After an interruption the same import goes on; a finished one changes
    nothing when repeated. Imported winners are unverified, and do not replace verified ones.

    Args:
        store: where to.
        file: seekable.
        source: where it comes from, for messages.
        check: called for each measurement, with its position, before anything is written.

    Raises:
        InterchangeError: see ``Document.read``; and whatever ``check`` raises.
        StoreError: the store failed.
    """
    document = Document.read(file, source, check)
    winners = document.winner_records()
    added, won = store.merge(document.measurements(), winners)
    return ImportReport(added, won, document.count - added + len(winners) - won)


def _file(text: str) -> BinaryIO:
    return io.BytesIO(text.encode("utf-8", "surrogatepass"))


def _all(
    store: Store, device: DeviceRecord | None, problem: ProblemRecord | None, last: int
) -> Iterator[Measurement]:
    after = 0
    while page := store.measurements(device=device, problem=problem, after_id=after, limit=_PAGE):
        for measurement in page:
            if (after := measurement.id or 0) > last:
                return
            yield measurement


def _pieces(
    parents: Iterable[tuple[Any, Any, Any]],
    measurements: Iterable[Measurement],
    winners: list[Winner],
) -> Iterator[str]:
    tables = (_Table(), _Table(), _Table())
    for trio in parents:
        for table, record in zip(tables, trio, strict=True):
            table.position(record)
    yield f'{{\n"schema": {json.dumps(SCHEMA)}'
    for name, table in zip(("devices", "toolchains", "problems"), tables, strict=True):
        yield from _list(name, table.rows())
    positions: dict[int | None, int] = {winner.measurement.id: -1 for winner in winners}
    yield from _list("measurements", _measurement_rows(measurements, tables, positions))
    # One that was replaced and deleted while this was written is left out.
    won = [
        {"measurement": position, "default_ms": winner.default_ms, "eager_ms": winner.eager_ms}
        for winner in winners
        if (position := positions[winner.measurement.id]) >= 0
    ]
    yield from _list("winners", won)
    yield "\n}\n"


def _list(name: str, rows: Iterable[dict[str, Any]]) -> Iterator[str]:
    yield f',\n"{name}": [\n'
    before = ""
    for row in rows:
        yield before + json.dumps(row, allow_nan=False, sort_keys=True)
        before = ",\n"
    yield "\n]" if before else "]"


def _measurement_rows(
    measurements: Iterable[Measurement],
    tables: tuple[_Table, _Table, _Table],
    positions: dict[int | None, int],
) -> Iterator[dict[str, Any]]:
    """Rows of measurements; fills in the positions of those that are asked for."""
    devices, toolchains, problems = tables
    for number, m in enumerate(measurements):
        row = asdict(m) | {
            "device": devices.position(m.device),
            "toolchain": toolchains.position(m.toolchain),
            "problem": problems.position(m.problem),
            "status": m.status.value,
            "created_at": m.created_at and m.created_at.isoformat(),
        }
        if row.pop("id") in positions:
            positions[m.id] = number
        yield {name: value for name, value in row.items() if value not in (None, "", (), {})}


class _Table:
    """Distinct records in the order they were first seen."""

    def __init__(self) -> None:
        self._positions: dict[Any, int] = {}

    def position(self, record: object) -> int:
        return self._positions.setdefault(record, len(self._positions))

    def rows(self) -> list[dict[str, Any]]:
        return [asdict(record) for record in self._positions]
