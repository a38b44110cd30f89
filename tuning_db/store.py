"""The store: everything the rest of flce-tune reads from and writes to the tuning database."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy.orm import Session

from flce_tune.tuning_db import (
    jobs,
    leases,
    measurements,
    merging,
    rows,
    tokens,
    trimming,
    winners,
)
from flce_tune.tuning_db.engine import Database
from flce_tune.tuning_db.faults import reading_rows
from flce_tune.tuning_db.measurements import Parents
from flce_tune.tuning_db.migrations import ensure_head
from flce_tune.tuning_db.models import JobRow
from flce_tune.tuning_db.records import (
    DeviceRecord,
    Job,
    JobEvent,
    JobState,
    Measurement,
    Miss,
    ProblemRecord,
    Scope,
    Status,
    SweepLease,
    Token,
    ToolchainRecord,
    Winner,
)
from flce_tune.tuning_db.trimming import TrimReport


class Store:
    """One tuning database. Thread-safe; open one per process and URL.

    Every method is one transaction. Each may raise StoreUnavailableError (locked for longer than
    its wait, unreachable, not writable) or StoreCorruptError (damaged); a reader never waits for a
    writer. All times are UTC.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    @classmethod
    def open(
        cls,
        url: str,
        *,
        create: bool = True,
        read_only: bool = False,
        wait_seconds: float | None = None,
    ) -> Store:
        """Open the database at a SQLAlchemy URL.

        Args:
            url: ``sqlite:///file`` or ``postgresql://user:password@host/database``.
            create: make what is missing: folders, file and tables. An empty file counts as
                missing, since SQLite makes one before it writes.
            read_only: never write; implies ``create=False``.
            wait_seconds: how long to wait for other writers before giving up; None: 60 s.

        Raises:
            StoreUnavailableError: it cannot be opened or created, or is not there.
            StoreCorruptError: it is no database, or a damaged one.
            SchemaMismatchError: its schema is not this version's.
        """
        database = Database(url, create=create, read_only=read_only, wait_seconds=wait_seconds)
        try:
            ensure_head(database, create=create and not read_only)
        except BaseException:
            database.close()
            raise
        return cls(database)

    @property
    def url(self) -> str:
        """The URL, normalised, with its password: for another ``open``, not for display."""
        return self._database.url.render_as_string(hide_password=False)

    def close(self) -> None:
        """Close all connections."""
        self._database.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    # Measurements

    def add_measurement(self, measurement: Measurement) -> Measurement:
        """Append a measurement; returns it with its id and, if it had none, creation time."""
        with self._database.writing() as session:
            return rows.measurement_record(measurements.add(session, measurement))

    def add_measurements(self, records: Iterable[Measurement]) -> int:
        """Append many measurements, all or none; returns how many."""
        with self._database.writing() as session:
            return len(measurements.add_all(session, records))

    def measurements(
        self,
        *,
        device: DeviceRecord | None = None,
        problem: ProblemRecord | None = None,
        status: Status | None = None,
        after_id: int = 0,
        limit: int | None = None,
    ) -> list[Measurement]:
        """List measurements by id, which is the order they were stored in."""
        where = measurements.matching(device, problem, status, after_id)
        with self._reading() as session:
            return measurements.find(session, where, limit)

    def count_measurements(
        self,
        *,
        device: DeviceRecord | None = None,
        problem: ProblemRecord | None = None,
        status: Status | None = None,
        after_id: int = 0,
    ) -> int:
        """Count what ``measurements`` would list."""
        where = measurements.matching(device, problem, status, after_id)
        with self._reading() as session:
            return measurements.count(session, where)

    def last_measurement_id(self) -> int:
        """Say the largest id of a measurement; 0 without any."""
        with self._reading() as session:
            return measurements.last_id(session)

    def parents(
        self, *, device: DeviceRecord | None, problem: ProblemRecord | None, up_to: int
    ) -> list[Parents]:
        """List what measurements with ids up to ``up_to`` are of, as they first came by."""
        with self._reading() as session:
            return measurements.parents(session, device, problem, up_to)

    def measured_configs(
        self, device: DeviceRecord, problem: ProblemRecord, tokens: int, toolchain: ToolchainRecord
    ) -> dict[str, Measurement]:
        """Find the latest measurement of each config, keyed by ``canonical_config``."""
        with self._reading() as session:
            return measurements.latest_by_config(session, device, problem, tokens, toolchain)

    def fastest(
        self, toolchain: ToolchainRecord, device: DeviceRecord | None = None
    ) -> list[Measurement]:
        """List what a toolchain ran fastest of each device and problem, winner or not."""
        with self._reading() as session:
            return measurements.fastest(session, toolchain, device)

    def devices(self) -> list[DeviceRecord]:
        """List all devices, by name."""
        with self._reading() as session:
            return measurements.devices(session)

    def problems(self, device: DeviceRecord | None = None) -> list[ProblemRecord]:
        """List all problems, or those measured on a device, by V, D and N."""
        with self._reading() as session:
            return measurements.problems(session, device)

    def toolchains(self) -> list[ToolchainRecord]:
        """List all toolchains, oldest first."""
        with self._reading() as session:
            return measurements.toolchains(session)

    # Winners

    def set_winners(
        self, device: DeviceRecord, problem: ProblemRecord, front: Sequence[Winner]
    ) -> None:
        """Replace the winners of a device and problem by ``front``, all or none.

        Raises:
            ValueError: a winner's measurement is not stored, not ok, or of another device or
                problem.
        """
        with self._database.writing() as session:
            winners.replace_winners(session, device, problem, front)

    def winners(
        self,
        *,
        device: DeviceRecord | None = None,
        architecture: str | None = None,
        problem: ProblemRecord | None = None,
    ) -> list[Winner]:
        """List winners, fastest first."""
        with self._reading() as session:
            return winners.find_winners(session, device, architecture, problem)

    def winners_version(self) -> int:
        """Read a number that grows whenever winners change; cheap."""
        with self._reading() as session:
            return winners.version(session)

    def merge(
        self, measurements: Iterable[Measurement], winners: Iterable[Winner] = ()
    ) -> tuple[int, int]:
        """Add the measurements that are not there yet, then the winners, whose must be there.

        In batches, between which others may write; repeating it adds nothing. Winners replace the
        front of their device and problem unless that has a verified one.

        Returns:
            How many measurements and how many winners were added.
        """
        contents, added, left = merging.Contents(), 0, iter(measurements)
        while batch := list(itertools.islice(left, merging.BATCH)):
            with self._reading() as session:
                contents.load(session, batch)
            with self._database.writing() as session:
                added += contents.add(session, batch)
        with self._database.writing() as session:
            return added, merging.merge_winners(session, winners)

    def trim(
        self,
        *,
        older_than: timedelta | None = None,
        in_use: Collection[ToolchainRecord] = (),
        dry_run: bool = False,
    ) -> TrimReport:
        """Delete measurements that nothing needs any more. Winners always stay.

        Those of a toolchain without winners go, failures included, once they are a day old; and
        timed ones older than ``older_than``. Failures of toolchains with winners stay: they are
        why the same config is not tried again.

        Args:
            older_than: age from which a timed measurement that is no winner goes; None: any stays.
            in_use: toolchains that count as if they had winners.
            dry_run: delete nothing, count only.
        """
        session = self._reading() if dry_run else self._database.writing()
        with session as opened:
            return trimming.trim(opened, older_than=older_than, in_use=in_use, dry_run=dry_run)

    # Misses

    def note_misses(self, misses: Iterable[Miss]) -> None:
        """Add to the counts of what the dispatcher had no exact winner for."""
        with self._database.writing() as session:
            winners.note_misses(session, misses)

    def misses(self, device: DeviceRecord | None = None, limit: int = 100) -> list[Miss]:
        """List misses, most frequent first."""
        with self._reading() as session:
            return winners.find_misses(session, device, limit)

    def clear_miss(self, device: DeviceRecord, problem: ProblemRecord) -> None:
        """Forget a miss, if there is one."""
        with self._database.writing() as session:
            winners.clear_miss(session, device, problem)

    # Leases of sweeps

    def now(self) -> datetime:
        """Read the clock that leases go by."""
        with self._reading() as session:
            return rows.now(session)

    def claim_sweep(
        self,
        device: DeviceRecord,
        problem: ProblemRecord,
        owner: str,
        seconds: float,
        *,
        dead_owner: str | None = None,
    ) -> SweepLease:
        """Ask to be the only one who sweeps a problem on a kind of device, for ``seconds``.

        Granted if the returned lease has this ``owner``; else it tells who has it. An owner that
        is known not to exist any more can be named as ``dead_owner``: its lease counts as run out.
        """
        with self._database.writing() as session:
            return rows.lease_record(
                leases.claim(session, device, problem, owner, seconds, dead_owner)
            )

    def renew_sweep(
        self, device: DeviceRecord, problem: ProblemRecord, owner: str, seconds: float
    ) -> bool:
        """Extend a lease from now on; False if it is not this owner's any more."""
        with self._database.writing() as session:
            return leases.renew(session, device, problem, owner, seconds)

    def release_sweep(
        self,
        device: DeviceRecord,
        problem: ProblemRecord,
        owner: str,
        *,
        finished: str | None = None,
    ) -> bool:
        """Give a lease back; False if it is not this owner's any more.

        ``finished`` describes a sweep that has ended, for others that wanted to do the same.
        """
        with self._database.writing() as session:
            return leases.release(session, device, problem, owner, finished)

    # Jobs

    def submit_job(
        self, spec: Mapping[str, Any], *, priority: int = 0, idempotency_key: str | None = None
    ) -> Job:
        """Queue a job; with a key seen before, return the job it made then."""
        with self._database.writing() as session:
            return rows.job_record(jobs.submit(session, spec, priority, idempotency_key))

    def job(self, job_id: str) -> Job | None:
        """Find a job."""
        with self._reading() as session:
            return _job(jobs.get(session, job_id))

    def jobs(
        self,
        *,
        states: Collection[JobState] | None = None,
        before: str | None = None,
        limit: int = 50,
    ) -> list[Job]:
        """List jobs, newest first.

        Args:
            states: only these; None: all.
            before: id of the last job of the page before; none follow an unknown one.
            limit: how many at most.
        """
        with self._reading() as session:
            return [rows.job_record(row) for row in jobs.find(session, states, before, limit)]

    def count_jobs(self) -> dict[JobState, int]:
        """Count the jobs of each state."""
        with self._reading() as session:
            return jobs.count_by_state(session)

    def oldest_queued(self) -> datetime | None:
        """Say when the oldest queued job was submitted; None: none is queued."""
        with self._reading() as session:
            return jobs.oldest_queued(session)

    def claim_job(
        self, owner: str, lease_seconds: float, devices: Collection[str] | None = None
    ) -> Job | None:
        """Take the next job, or one whose worker let its lease expire; None: nothing to do.

        A job that keeps losing its workers before they measure anything fails instead.
        No two owners get the same job while its lease lasts; an owner that has one gets it again.
        Waits for no other owner's claim, nor for other writers (SQLite: for all of them).

        Args:
            owner: unique to one start of one worker, which does one job at a time.
            lease_seconds: how long the job is its, unless renewed.
            devices: only jobs whose spec has one of these as its "device"; None: any.
        """
        with self._database.claiming(owner) as session:
            return _job(jobs.claim(session, owner, lease_seconds, devices))

    def renew_lease(self, job_id: str, owner: str, lease_seconds: float) -> Job | None:
        """Extend a lease from now on; None: the job was taken over or is finished."""
        with self._database.writing() as session:
            return _job(jobs.renew(session, job_id, owner, lease_seconds))

    def report_job(
        self,
        job_id: str,
        owner: str,
        lease_seconds: float,
        events: Iterable[tuple[int, str, Mapping[str, Any]]] = (),
    ) -> Job | None:
        """Extend a lease and record what happened, unless it is recorded already.

        Args:
            job_id: the job.
            owner: who claimed it.
            lease_seconds: as in ``claim_job``.
            events: number, kind and data of each; numbers grow from one to the next of an owner.

        Returns:
            The job; None: it was taken over or is finished.

        Raises:
            ValueError: the data of an event is not plain JSON (NaN is not).
        """
        with self._database.writing() as session:
            return _job(jobs.report(session, job_id, owner, lease_seconds, events))

    def add_results(
        self,
        job_id: str,
        owner: str,
        measurements: Sequence[Measurement],
        fronts: Sequence[Winner],
    ) -> bool:
        """Add what the job's worker measured, unless done before, and replace the fronts it won.

        Each measurement must have its creation time; those of ``fronts`` must be stored or among
        ``measurements``. A miss of what has a front now is forgotten.

        Returns:
            False, and nothing is stored, if the job was taken over or is finished.

        Raises:
            ValueError: see ``set_winners``.
        """
        with self._database.writing() as session:
            if jobs.leased(session, job_id, owner) is None:
                return False
            merging.add_batch(session, measurements)
            merging.replace_fronts(session, fronts)
            return True

    def release_job(self, job_id: str, owner: str) -> bool:
        """Give a job back for the next claim; False if it was taken over or is finished."""
        with self._database.writing() as session:
            return jobs.release(session, job_id, owner)

    def finish_job(self, job_id: str, owner: str, state: JobState, message: str = "") -> bool:
        """End a job; False if it was taken over or is finished already.

        Raises:
            ValueError: ``state`` is not a final one.
        """
        if not state.final:
            raise ValueError(f"a job ends succeeded, failed or cancelled, not {state.value}")
        with self._database.writing() as session:
            return jobs.finish(session, job_id, owner, state, message)

    def request_cancel(self, job_id: str) -> Job | None:
        """Cancel a queued job at once, ask a running one's worker to; None: no such job."""
        with self._database.writing() as session:
            return _job(jobs.request_cancel(session, job_id))

    def add_event(self, job_id: str, kind: str, data: Mapping[str, Any]) -> JobEvent:
        """Record that something happened to a job.

        Raises:
            ValueError: no such job, or ``data`` is not plain JSON (NaN is not).
        """
        with self._database.writing() as session:
            if jobs.lock(session, job_id) is None:
                raise ValueError(f"there is no job {job_id!r}")
            return rows.event_record(jobs.add_event(session, job_id, kind, data))

    def events(self, job_id: str, after_id: int = 0, limit: int = 1000) -> list[JobEvent]:
        """List the events of a job after ``after_id``, oldest first."""
        with self._reading() as session:
            found = jobs.find_events(session, job_id, after_id, limit)
            return [rows.event_record(row) for row in found]

    def latest_event(self, job_id: str, kinds: Collection[str]) -> JobEvent | None:
        """Find the last event of a job that is of one of these kinds; None: there is none."""
        with self._reading() as session:
            row = jobs.find_latest_event(session, job_id, kinds)
            return None if row is None else rows.event_record(row)

    # Tokens of the service

    def create_token(self, name: str, scope: Scope) -> str:
        """Make a token and return it; it cannot be had again, only its digest is stored.

        Raises:
            ValueError: there is one of that name, revoked or not.
        """
        secret = tokens.generate()
        with self._database.writing() as session:
            tokens.add(session, name, tokens.digest(secret), scope)
        return secret

    def tokens(self) -> list[Token]:
        """List all tokens, revoked ones too, oldest first."""
        with self._reading() as session:
            return [rows.token_record(row) for row in tokens.find_all(session)]

    def revoke_token(self, name: str) -> Token | None:
        """Make a token useless for good; None: there is none of that name."""
        with self._database.writing() as session:
            row = tokens.revoke(session, name)
            return None if row is None else rows.token_record(row)

    @contextmanager
    def _reading(self) -> Iterator[Session]:
        with self._database.reading() as session, reading_rows(self._database.url):
            yield session


def _job(row: JobRow | None) -> Job | None:
    return None if row is None else rows.job_record(row)
