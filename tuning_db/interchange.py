"""Measurements and winners as JSON: for other databases, for people, and the pre-tuned files.

Rows name their device, toolchain, problem and measurement by position, and each is a line of its
own, so that files stay small and differences readable. What is read is validated, never
evaluated.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    AwareDatetime,
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    ValidationError,
    model_validator,
)

from flce_tune.errors import InterchangeError
from flce_tune.tuning_db.records import (
    DeviceRecord,
    Measurement,
    ProblemRecord,
    Status,
    ToolchainRecord,
    Winner,
    canonical_config,
)
from flce_tune.tuning_db.store import Store

SCHEMA: Literal["flce-tune/1"] = "flce-tune/1"

Count = Annotated[int, Field(ge=0, lt=2**31)]
BigCount = Annotated[int, Field(ge=0, lt=2**63)]
Size = Annotated[int, Field(ge=1, lt=2**31)]
BigSize = Annotated[int, Field(ge=1, lt=2**63)]
Milliseconds = Annotated[float, Field(gt=0)]
Text = Annotated[str, Field(pattern=r"^[^\x00]*$")]  # PostgreSQL stores no NUL


class _Part(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, populate_by_name=True
    )


class DevicePart(_Part):
    """A device model; see ``DeviceRecord``."""

    kind: Literal["cuda", "cpu"]
    name: Text
    capability: Annotated[str, Field(pattern=r"^\d+\.\d+$")]
    sm_count: Count
    shared_memory_per_block: Count
    memory_bytes: BigCount = 0


class ToolchainPart(_Part):
    """A toolchain; see ``ToolchainRecord``."""

    torch: Text
    triton: Text
    cuda: Text
    driver: Text
    kernel_hash: Text


class ProblemPart(_Part):
    """A problem; see ``ProblemRecord``."""

    mode: Text
    dtype: Text
    accumulate: Text
    hidden: Size
    vocab: Size
    token_bucket: BigSize
    features: tuple[Annotated[str, Field(pattern=r"^\w+$")], ...] = ()


def _plain(config: dict[str, JsonValue]) -> dict[str, JsonValue]:
    canonical_config(config)
    return config


class MeasurementPart(_Part):
    """A measurement; see ``Measurement``. Its parents are positions in the document's lists."""

    device: Count
    toolchain: Count
    problem: Count
    tokens: BigSize
    config: Annotated[dict[str, JsonValue], AfterValidator(_plain)]
    status: Status
    samples_ms: tuple[float, ...] = ()
    median_ms: Milliseconds | None = None
    spread_ms: float | None = None
    workspace_bytes: BigCount | None = None
    registers: Count | None = None
    spills: Count | None = None
    shared_memory: Count | None = None
    errors: dict[str, float] = {}
    clocks_mhz: Count | None = None
    message: Text = ""
    created_at: AwareDatetime


class WinnerPart(_Part):
    """A winner; its measurement is a position in the document's list."""

    measurement: Count
    default_ms: Milliseconds | None = None
    eager_ms: Milliseconds | None = None


class Document(_Part):
    """One export file."""

    format: Literal["flce-tune/1"] = Field(alias="schema")
    devices: tuple[DevicePart, ...]
    toolchains: tuple[ToolchainPart, ...]
    problems: tuple[ProblemPart, ...]
    measurements: tuple[MeasurementPart, ...]
    winners: tuple[WinnerPart, ...] = ()

    @model_validator(mode="after")
    def _positions_and_records_hold(self) -> Document:
        for number in range(len(self.measurements)):
            self.measurement(number)
        for number, winner in enumerate(self.winners):
            place = f"winners[{number}].measurement"
            measured = _at(self.measurements, winner.measurement, place)
            if measured.status is not Status.OK:
                raise ValueError(f"{place}: a winner must be ok, this is {measured.status.value}")
        return self

    @functools.cached_property
    def parents(
        self,
    ) -> tuple[tuple[DeviceRecord, ...], tuple[ToolchainRecord, ...], tuple[ProblemRecord, ...]]:
        """The records that measurements refer to by position."""
        return (
            tuple(DeviceRecord(**part.model_dump()) for part in self.devices),
            tuple(ToolchainRecord(**part.model_dump()) for part in self.toolchains),
            tuple(ProblemRecord(**part.model_dump()) for part in self.problems),
        )

    def measurement(self, number: int) -> Measurement:
        """Build the record of a measurement.

        Raises:
            ValueError: a position that is not there, or a time where none can be.
        """
        part, place = self.measurements[number], f"measurements[{number}]"
        fields = {name: getattr(part, name) for name in MeasurementPart.model_fields}
        devices, toolchains, problems = self.parents
        fields["device"] = _at(devices, part.device, f"{place}.device")
        fields["toolchain"] = _at(toolchains, part.toolchain, f"{place}.toolchain")
        fields["problem"] = _at(problems, part.problem, f"{place}.problem")
        try:
            return Measurement(**fields)
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from error

    def records(self) -> tuple[list[Measurement], list[Winner]]:
        """Build all records. Winners count as unverified: they were not measured here."""
        measurements = [self.measurement(number) for number in range(len(self.measurements))]
        winners = [
            Winner(measurements[w.measurement], w.default_ms, w.eager_ms, verified=False)
            for w in self.winners
        ]
        return measurements, winners


@dataclass(frozen=True, slots=True)
class ImportReport:
    """What an import did."""

    measurements: int  # added
    winners: int  # added
    skipped: int  # measurements and winners that were there already, or better ones


def export_json(
    store: Store, *, device: DeviceRecord | None = None, winners_only: bool = False
) -> str:
    """Write what a store holds (of one device) as a document.

    With ``winners_only``, only the measurements that won.
    """
    winners = store.winners(device=device)
    if winners_only:
        return dump([winner.measurement for winner in winners], winners)
    return dump(store.measurements(device=device), winners)


def dump(measurements: Sequence[Measurement], winners: Iterable[Winner]) -> str:
    """Write records as a document; measurements must come from a store and hold the winners'."""
    devices, toolchains, problems = _Table(), _Table(), _Table()
    lines = []
    for m in measurements:
        row = asdict(m) | {
            "device": devices.position(m.device),
            "toolchain": toolchains.position(m.toolchain),
            "problem": problems.position(m.problem),
            "status": m.status.value,
            "created_at": m.created_at and m.created_at.isoformat(),
        }
        del row["id"]
        lines.append(
            {name: value for name, value in row.items() if value not in (None, "", (), {})}
        )
    positions = {m.id: number for number, m in enumerate(measurements)}
    won = [
        {
            "measurement": positions[winner.measurement.id],
            "default_ms": winner.default_ms,
            "eager_ms": winner.eager_ms,
        }
        for winner in winners
    ]
    tables = {
        "devices": devices.rows(),
        "toolchains": toolchains.rows(),
        "problems": problems.rows(),
        "measurements": lines,
        "winners": won,
    }
    parts = [f'"schema": {json.dumps(SCHEMA)}']
    parts += [f'"{name}": [\n{_lines(rows)}]' for name, rows in tables.items()]
    return "{\n" + ",\n".join(parts) + "\n}\n"


def parse(text: str, source: str) -> Document:
    """Read a document.

    Args:
        text: the JSON.
        source: where it comes from, for the message.

    Raises:
        InterchangeError: it does not validate; the message names source, place and reason.
    """
    try:
        return Document.model_validate_json(text)
    except ValidationError as error:
        raise InterchangeError(_explain(error, source)) from error


def parse_winners(text: str, source: str) -> list[Winner]:
    """Read the winners of a document without a database; unverified, without ids.

    Raises:
        InterchangeError: see ``parse``.
    """
    return parse(text, source).records()[1]


def import_json(store: Store, text: str, *, source: str) -> ImportReport:
    """Bring a document into a store, in one transaction; again changes nothing.

    Imported winners are unverified, and do not replace verified ones.

    Raises:
        InterchangeError: see ``parse``.
    """
    measurements, winners = parse(text, source).records()
    added, won = store.merge(measurements, winners)
    return ImportReport(added, won, len(measurements) - added + len(winners) - won)


class _Table:
    """Distinct records in the order they were first seen."""

    def __init__(self) -> None:
        self._positions: dict[Any, int] = {}

    def position(self, record: object) -> int:
        return self._positions.setdefault(record, len(self._positions))

    def rows(self) -> list[dict[str, Any]]:
        return [asdict(record) for record in self._positions]


Part = TypeVar("Part")


def _at(parts: Sequence[Part], position: int, place: str) -> Part:
    if position >= len(parts):
        raise ValueError(f"{place} is {position}, but there are only {len(parts)}")
    return parts[position]


def _lines(rows: Iterable[dict[str, Any]]) -> str:
    text = ",\n".join(json.dumps(row, allow_nan=False, sort_keys=True) for row in rows)
    return text + "\n" if text else ""


def _explain(error: ValidationError, source: str) -> str:
    first, *more = error.errors(include_url=False, include_context=False)
    place = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in first["loc"]).lstrip(".")
    reason = first["msg"].removeprefix("Value error, ")
    if place == "schema" and isinstance(first["input"], str):
        reason = (
            f"this flce-tune reads {SCHEMA!r}, not {first['input']!r}; a newer version may: "
            f"pip install -U flce-tune"
        )
    others = f" (and {len(more)} more)" if more else ""
    return f"{source}: {place or 'document'}: {reason}{others}"
