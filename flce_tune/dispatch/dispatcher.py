"""The dispatcher: from a problem and a device to the config to run, in microseconds."""

from __future__ import annotations

import threading
from collections.abc import Callable

from flce_tune.dispatch import convert
from flce_tune.dispatch.choice import Choice, Explanation
from flce_tune.dispatch.misses import Misses
from flce_tune.dispatch.notices import Notices
from flce_tune.dispatch.rules import Query, resolve
from flce_tune.dispatch.snapshot import Snapshot
from flce_tune.kernels.config import Config
from flce_tune.kernels.problem import Device, Problem, token_bucket
from flce_tune.tuning_db.records import DeviceRecord, ToolchainRecord

_Key = tuple[int, int, int, str, str, str, tuple[str, ...], Device, int | None]

MEMO_CAPACITY = 4096


class Dispatcher:
    """Chooses configs from one snapshot and remembers its choices. Thread-safe.

    Never measures, never raises for what the snapshot holds, never writes anywhere.

    Args:
        snapshot: winners of the user's own sweeps.
        shipped: winners that ship with the package.
        fetch: called at most once per device, before its first choice; its winners go before
            those of ``snapshot``.
        kernel_hash: of the kernels in use; None: of the installed sources.
        triton_version: the Triton in use; None: the installed one.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        *,
        shipped: Snapshot | None = None,
        fetch: Callable[[DeviceRecord], Snapshot] | None = None,
        kernel_hash: str | None = None,
        triton_version: str | None = None,
        notices: Notices | None = None,
    ) -> None:
        self.misses = Misses()
        self._snapshot = snapshot
        self._shipped = Snapshot.empty("no pre-tuned files") if shipped is None else shipped
        self._fetch = fetch
        self._fetched: dict[Device, Snapshot] = {}
        self._kernel_hash = kernel_hash
        self._triton_version = triton_version
        self._notices = Notices() if notices is None else notices
        self._failed: dict[Device, dict[Config, str]] = {}
        self._memo: dict[_Key, Choice] = {}
        self._lock = threading.RLock()

    def choose(
        self, problem: Problem, device: Device, *, workspace_limit: int | None = None
    ) -> Choice:
        """The config to run for ``problem`` on ``device``; after the first time one dict lookup.

        All N of one bucket get the same choice, valid and within ``workspace_limit`` (bytes
        beyond inputs and returned gradients) for each of them. If nothing fits the limit, the
        config that needs least is chosen and the choice's detail says so.
        """
        key = (
            token_bucket(problem.tokens),
            problem.hidden,
            problem.vocab,
            problem.dtype,
            problem.mode,
            problem.accumulate,
            problem.features,
            device,
            workspace_limit,
        )
        choice = self._memo.get(key)
        return choice if choice is not None else self._resolve(key, problem, device)

    def prepare(self, device: Device) -> None:
        """Fetch a device's winners now, if at all, rather than at its first use."""
        with self._lock:
            self._snapshot_for(device)

    def explain(
        self, problem: Problem, device: Device, *, workspace_limit: int | None = None
    ) -> Explanation:
        """Every rule tried for this problem, what it found, and what ``choose`` answers."""
        with self._lock:
            query = Query(
                problem=problem,
                device=device,
                workspace_limit=workspace_limit,
                failed=self._failed.get(device, {}),
                stale=lambda toolchain: self._staleness(toolchain, device),
            )
            return resolve(self._snapshot_for(device), self._shipped, query)

    def quarantine(
        self,
        config: Config,
        problem: Problem,
        device: Device,
        reason: str,
        *,
        workspace_limit: int | None = None,
    ) -> Choice:
        """Record that ``config`` failed to run on ``device``, and choose anew.

        The config is not chosen again for any problem on that device in this process, and one
        warning says so. If nothing else is left the same config comes back: the caller should
        then raise the failure.
        """
        with self._lock:
            self._failed.setdefault(device, {})[config] = reason
            self._memo.clear()
        self._notices.once(
            f"quarantine {config} {device}",
            f"flce-tune: the config '{config}' failed on {device.name} and is not used again in"
            f" this process: {reason}. Re-measure with 'flce-tune sweep'.",
        )
        return self.choose(problem, device, workspace_limit=workspace_limit)

    def _resolve(self, key: _Key, problem: Problem, device: Device) -> Choice:
        with self._lock:
            if (choice := self._memo.get(key)) is not None:
                return choice
            explanation = self.explain(problem, device, workspace_limit=key[-1])
            choice = explanation.choice
            if len(self._memo) >= MEMO_CAPACITY:
                self._memo.clear()
            self._memo[key] = choice
        self._note_miss(explanation)
        self._report(explanation)
        return choice

    def _note_miss(self, explanation: Explanation) -> None:
        winner = explanation.choice.winner
        device = convert.device_record(explanation.device)
        problem = convert.problem_record(explanation.problem)
        measured = winner.measurement if winner is not None else None
        if measured is None or (measured.device, measured.problem) != (device, problem):
            self.misses.note(device, problem, explanation.problem.tokens)

    def _report(self, explanation: Explanation) -> None:
        if broken := explanation.broken:
            first = broken[0]
            self._notices.once(
                "broken",
                f"flce-tune: skipped a stored config that cannot be used here: {first.config}"
                f" ({first.origin}): {first.reason}. 'flce-tune explain' shows all of them;"
                " re-measure with 'flce-tune sweep'.",
            )
        if explanation.stale:
            self._notices.once(
                "stale",
                f"flce-tune: using results that may be out of date: {explanation.stale}."
                " Check them with 'flce-tune verify' or re-measure with 'flce-tune sweep'.",
            )

    def _snapshot_for(self, device: Device) -> Snapshot:
        if self._fetch is None:
            return self._snapshot
        if device not in self._fetched:
            fetched = self._fetch(convert.device_record(device))
            self._fetched[device] = fetched.over(self._snapshot)
        return self._fetched[device]

    def _staleness(self, measured_with: ToolchainRecord, device: Device) -> str:
        if self._kernel_hash is None:
            self._kernel_hash = convert.kernel_hash()
        if self._triton_version is None:
            self._triton_version = convert.triton_version()
        if measured_with.kernel_hash != self._kernel_hash:
            return "measured with other kernel sources"
        if device.kind == "cuda" and measured_with.triton != self._triton_version:
            return f"measured with Triton {measured_with.triton}, here is {self._triton_version}"
        return ""
