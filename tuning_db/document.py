"""The export document: its schema, and reading one that may be larger than memory.

Rows name their device, toolchain, problem and measurement by position, and each is a line of its
own, so that files stay small and differences readable. What is read is validated, never
evaluated.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, BinaryIO, Literal, TypeVar

from pydantic import (
    AwareDatetime,
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    ValidationError,
    model_validator,
)
from typing_extensions import Self

from flce_tune.errors import InterchangeError
from flce_tune.tuning_db.json_rows import rows
from flce_tune.tuning_db.records import (
    DeviceRecord,
    Measurement,
    ProblemRecord,
    Status,
    ToolchainRecord,
    Winner,
)

SCHEMA = "flce-tune/1"

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

    def record(self) -> DeviceRecord:
        """As the database knows it."""
        return DeviceRecord(**self.model_dump())


class ToolchainPart(_Part):
    """A toolchain; see ``ToolchainRecord``."""

    torch: Text
    triton: Text
    cuda: Text
    driver: Text
    kernel_hash: Text

    def record(self) -> ToolchainRecord:
        """As the database knows it."""
        return ToolchainRecord(**self.model_dump())


class ProblemPart(_Part):
    """A problem; see ``ProblemRecord``."""

    mode: Text
    dtype: Text
    accumulate: Text
    hidden: Size
    vocab: Size
    token_bucket: BigSize
    features: tuple[Annotated[str, Field(pattern=r"^\w+$")], ...] = ()

    def record(self) -> ProblemRecord:
        """As the database knows it."""
        return ProblemRecord(**self.model_dump())


class MeasurementPart(_Part):
    """A measurement; see ``Measurement``. Its parents are positions in the document's lists."""

    device: Count
    toolchain: Count
    problem: Count
    tokens: BigSize
    config: dict[str, JsonValue]
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

    def record(
        self, device: DeviceRecord, toolchain: ToolchainRecord, problem: ProblemRecord
    ) -> Measurement:
        """As the database knows it."""
        parents = {"device": device, "toolchain": toolchain, "problem": problem}
        return Measurement(**vars(self) | parents)

    @model_validator(mode="after")
    def _record_holds(self) -> Self:
        self.record(*_SOME_PARENTS)
        return self


_SOME_PARENTS = (
    DeviceRecord("cpu", "", "0.0", 0, 0),
    ToolchainRecord("", "", "", "", ""),
    ProblemRecord("", "", "", 1, 1, 1),
)
"""Whether a measurement holds does not depend on them, and they may come later in the file."""


class WinnerPart(_Part):
    """A winner; its measurement is a position in the document's list."""

    measurement: Count
    default_ms: Milliseconds | None = None
    eager_ms: Milliseconds | None = None


Check = Callable[[int, Measurement], None]


@dataclass(slots=True)
class Document:
    """An export that has been validated as a whole. Measurements are read again when wanted."""

    source: str
    devices: list[DeviceRecord] = field(default_factory=list)
    toolchains: list[ToolchainRecord] = field(default_factory=list)
    problems: list[ProblemRecord] = field(default_factory=list)
    winners: list[WinnerPart] = field(default_factory=list)
    count: int = 0  # of measurements
    _file: BinaryIO | None = None

    @classmethod
    def read(cls, file: BinaryIO, source: str, check: Check | None = None) -> Document:
        """Validate a document.

        Args:
            file: seekable; must stay open for as long as measurements are wanted.
            source: where it comes from, for the message.
            check: called for each measurement, with its position; twice for some where
                measurements come before what they are of.

        Raises:
            InterchangeError: it does not validate; the message names source, place and reason.
                And whatever ``check`` raises.
        """
        document = cls(source, _file=file)
        unchecked = _Reading(document, check).run(file)
        if check is not None and unchecked:
            for position, measurement in enumerate(document.measurements()):
                check(position, measurement)
        return document

    def measurements(self, only: Collection[int] | None = None) -> Iterator[Measurement]:
        """Build the records of all measurements, or of those at some positions, in order."""
        assert self._file is not None
        self._file.seek(0)
        for member, position, text in rows(self._file):
            if member == "measurements" and position is not None:
                if only is not None and position not in only:
                    continue
                yield self.measurement_record(MeasurementPart.model_validate_json(text))

    def measurement_record(self, part: MeasurementPart) -> Measurement:
        """Build the record of a measurement.

        Raises:
            IndexError: its parents have not been read.
        """
        return part.record(
            self.devices[part.device],
            self.toolchains[part.toolchain],
            self.problems[part.problem],
        )

    def winner_records(self) -> list[Winner]:
        """Build the records of the winners; unverified, for they were not measured here."""
        if not self.winners:
            return []
        positions = sorted({winner.measurement for winner in self.winners})
        found = dict(zip(positions, self.measurements(set(positions)), strict=True))
        return [
            Winner(found[w.measurement], w.default_ms, w.eager_ms, verified=False)
            for w in self.winners
        ]


PartT = TypeVar("PartT", bound=_Part)
_STATUSES = list(Status)
_PARENTS = ("device", "toolchain", "problem")


class _Reading:
    """One pass over a file that fills a document in."""

    def __init__(self, document: Document, check: Check | None) -> None:
        self._document = document
        self._check = check
        self._unchecked = False
        self._begun: set[str] = set()
        self._statuses = bytearray()  # of each measurement, its status's position
        # The largest position named so far, and who named it: the lists may come later.
        self._named = dict.fromkeys(_PARENTS, (-1, 0))

    def run(self, file: BinaryIO) -> bool:
        """Read it all; whether measurements came before their parents, and are unchecked."""
        file.seek(0)
        try:
            for member, position, text in rows(file):
                if position is None:
                    self._begin(member, text)
                else:
                    self._take(member, position, text)
            self._end()
        except InterchangeError:
            raise
        except ValueError as error:
            raise InterchangeError(f"{self._document.source}: {error}") from error
        return self._unchecked

    def _begin(self, member: str, text: str) -> None:
        if member in self._begun:
            raise ValueError(f"{member} is there twice")
        self._begun.add(member)
        if member == "schema":
            _check_schema(text)
        elif member not in ("devices", "toolchains", "problems", "measurements", "winners"):
            raise ValueError(f"{member}: Extra inputs are not permitted")
        elif text != "[]":
            raise ValueError(f"{member}: must be a list")

    def _take(self, member: str, position: int, text: str) -> None:
        place = f"{member}[{position}]"
        document = self._document
        if member == "devices":
            document.devices.append(self._part(DevicePart, place, text).record())
        elif member == "toolchains":
            document.toolchains.append(self._part(ToolchainPart, place, text).record())
        elif member == "problems":
            document.problems.append(self._part(ProblemPart, place, text).record())
        elif member == "winners":
            document.winners.append(self._part(WinnerPart, place, text))
        else:
            self._note(position, self._part(MeasurementPart, place, text))

    def _part(self, kind: type[PartT], place: str, text: str) -> PartT:
        try:
            return kind.model_validate_json(text)
        except ValidationError as error:
            raise ValueError(_explain(error, place)) from error

    def _note(self, position: int, part: MeasurementPart) -> None:
        self._statuses.append(_STATUSES.index(part.status))
        for name in _PARENTS:
            self._named[name] = max(self._named[name], (getattr(part, name), position))
        self._document.count += 1
        if self._check is not None:
            try:
                record = self._document.measurement_record(part)
            except IndexError:
                self._unchecked = True
            else:
                self._check(position, record)

    def _end(self) -> None:
        document = self._document
        for member in ("schema", "devices", "toolchains", "problems", "measurements"):
            if member not in self._begun:
                raise ValueError(f"{member}: Field required")
        tables: tuple[list[Any], ...] = (document.devices, document.toolchains, document.problems)
        for name, table in zip(_PARENTS, tables, strict=True):
            named, position = self._named[name]
            _check_position(f"measurements[{position}].{name}", named, len(table))
        for number, winner in enumerate(document.winners):
            place = f"winners[{number}].measurement"
            _check_position(place, winner.measurement, document.count)
            status = _STATUSES[self._statuses[winner.measurement]]
            if status is not Status.OK:
                raise ValueError(f"{place}: a winner must be ok, this is {status.value}")


def _check_schema(text: str) -> None:
    given = json.loads(text)
    if given != SCHEMA:
        raise ValueError(
            f"schema: this flce-tune reads {SCHEMA!r}, not {given!r}; a newer version may: "
            f"pip install -U flce-tune"
        )


def _check_position(place: str, position: int, count: int) -> None:
    if position >= count:
        raise ValueError(f"{place} is {position}, but there are only {count}")


def _explain(error: ValidationError, place: str) -> str:
    first, *more = error.errors(include_url=False, include_context=False)
    place += "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in first["loc"])
    reason = first["msg"].removeprefix("Value error, ")
    others = f" (and {len(more)} more)" if more else ""
    return f"{place}: {reason}{others}"
