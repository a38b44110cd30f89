"""Every error this package raises on purpose.

    FlceTuneError
    ├── InvalidConfigError       (also ValueError)  a config that cannot run on problem and device
    ├── UnknownStrategyError     (also ValueError)  a strategy name nobody registered
    ├── TargetOutOfRangeError    (also IndexError)  a label outside [0, V) that is not ignore_index
    ├── RankMismatchError        (also ValueError)  ranks of a process group that call differently
    ├── StoreError               the tuning database cannot be used
    │   ├── StoreUnavailableError    it cannot be opened, read or written
    │   ├── StoreCorruptError        it is not a database, or a damaged one
    │   └── SchemaMismatchError      its schema is older or newer than this version's
    ├── InterchangeError         (also ValueError)  an export file that does not validate
    ├── SweepError               a sweep that could not produce a result
    └── ServiceError             something about the service
        ├── RefusedError             it refused a request
        └── UnreachableError         it gave no answer in time

Wrong arguments to the op raise plain TypeError or ValueError naming the argument, what came and
what is accepted.
"""


class FlceTuneError(Exception):
    """Base of all errors raised on purpose by flce-tune."""


class InvalidConfigError(FlceTuneError, ValueError):
    """A config that cannot run on the given problem and device; the message says which limit."""


class UnknownStrategyError(FlceTuneError, ValueError):
    """A strategy name nobody registered; the message lists the registered ones."""


class TargetOutOfRangeError(FlceTuneError, IndexError):
    """A label outside [0, V) that is not ignore_index; the message names the label and V."""


class RankMismatchError(FlceTuneError, ValueError):
    """Ranks of a process group that make different calls; the message says what differs."""


class StoreError(FlceTuneError):
    """The tuning database cannot be used."""


class StoreUnavailableError(StoreError):
    """The tuning database cannot be opened, read or written."""


class StoreCorruptError(StoreError):
    """The file is not a database, or is a damaged one; the message says how to set it aside."""


class SchemaMismatchError(StoreError):
    """The schema is older or newer than this version's; the message says which command helps."""


class InterchangeError(FlceTuneError, ValueError):
    """An export file that does not validate; the message names the place."""


class SweepError(FlceTuneError):
    """A sweep that could not produce a result."""


class ServiceError(FlceTuneError):
    """The service refused a request, could not be reached, or is told what it cannot do."""


class RefusedError(ServiceError):
    """The service refused a request; the message is the service's own and says what to do.

    Attributes:
        status: of the HTTP answer.
        kind: stable name of the reason, e.g. "unknown-job".
    """

    def __init__(self, message: str, *, status: int, kind: str) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind


class UnreachableError(ServiceError):
    """The service gave no answer in time; the message says where it was looked for."""
