"""The rules that turn a problem, a device and a snapshot into a choice.

Tried in this order, each over Pareto fronts from near to far, each front from its fastest winner
on; the first config that is valid here and fits the workspace limit is taken. Without a limit,
winners at most FRUGAL slower than their front's fastest go first, the smallest workspace before the
others: nobody wants to pay gigabytes for a percent.

1. **exact**: this device, this class of problems.
2. **nearest tokens**: this device, the same D and V.
3. **nearest shape**: this device, another D or V.
4. **pretuned**: rules 1 to 3 over the files shipped with the package.
5. **same architecture**: another device of the same compute capability, measured or shipped.
6. **default**: chosen by analysis alone.

What may differ: nothing in mode, dtype, accumulate, per_token and architecture, ever. Of the other
features the stored problem may lack some: a config that is fast without a bias is a good guess with
one. It may have none that are not wanted. The distance of two problems is the sum of |log2| of the
ratios of their N buckets, D and V, plus one for each missing feature. Further than MAX_RATIO on any
axis, a winner says less than the analysis of the default.

A winner's time counts with the products that its strategy needs here: ``overlay`` recomputes more
of longer batches than it did where it was measured.

A choice is made for the upper end of the problem's bucket, so that it holds for every N in it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from flce_tune.dispatch.choice import Choice, Explanation, Rule, Skipped, Step
from flce_tune.dispatch.convert import config_of, device_record, problem_record
from flce_tune.dispatch.snapshot import Snapshot
from flce_tune.errors import InvalidConfigError, UnknownStrategyError
from flce_tune.kernels import strategies
from flce_tune.kernels.config import Config
from flce_tune.kernels.problem import Device, Problem
from flce_tune.tuning_db.records import (
    DeviceRecord,
    Measurement,
    ProblemRecord,
    ToolchainRecord,
    Winner,
    canonical_config,
)

MAX_RATIO = 8
FRUGAL = 1.03


@dataclass(frozen=True, slots=True)
class Query:
    """What a config is wanted for, and what is known about failures and software here."""

    problem: Problem
    device: Device
    workspace_limit: int | None  # bytes
    failed: Mapping[Config, str]  # configs that failed to run on this device: why
    stale: Callable[[ToolchainRecord], str]  # how a toolchain differs from this one; "" if not


@dataclass(frozen=True, slots=True)
class _Front:
    """A Pareto front, and how it relates to the query."""

    winners: tuple[Winner, ...]
    relation: str  # for a reader
    exact: bool = False
    shipped: bool = False


@dataclass(slots=True)
class _Search:
    """One walk through the rules."""

    query: Query
    live: Problem  # at the upper end of its bucket
    too_large: list[tuple[int, Config]] = field(default_factory=list)  # workspace, valid config


def resolve(measured: Snapshot, shipped: Snapshot, query: Query) -> Explanation:
    """Walk through the rules until one has a config. Never raises for what a snapshot holds."""
    search = _Search(query, replace(query.problem, tokens=query.problem.bucket))
    steps: list[Step] = []
    choice: Choice | None = None
    stale = ""
    for rule, fronts in _rules(measured, shipped, query):
        if choice is not None:
            steps.append(Step(rule, "not needed", ""))
            continue
        step, choice, stale = _try_rule(rule, fronts(), search)
        steps.append(step)
    if choice is None:
        choice = _default(search)
        steps.append(Step("default", "chosen", choice.detail))
    else:
        steps.append(Step("default", "not needed", ""))
    return Explanation(
        problem=query.problem,
        device=query.device,
        workspace_limit=query.workspace_limit,
        source=f"{measured.source}; {shipped.source}",
        steps=tuple(steps),
        choice=choice,
        stale=stale,
    )


def usable_front(measured: Snapshot, shipped: Snapshot, query: Query) -> list[Config]:
    """List the configs of the nearest front that can run here: what a sweep should look at first.

    Empty where nothing comparable was measured.
    """
    search = _Search(query, query.problem)
    for _, fronts in _rules(measured, shipped, query):
        for front in fronts():
            judged = [_judge(winner, front, search) for winner in front.winners]
            if configs := [config for config in judged if isinstance(config, Config)]:
                return configs
    return []


def _rules(
    measured: Snapshot, shipped: Snapshot, query: Query
) -> tuple[tuple[Rule, Callable[[], Iterable[_Front]]], ...]:
    """The rules but the last, each with its fronts from near to far."""
    return (
        ("exact", lambda: _exact(measured, query)),
        ("nearest tokens", lambda: _nearest(measured, query, same_shape=True)),
        ("nearest shape", lambda: _nearest(measured, query, same_shape=False)),
        ("pretuned", lambda: _shipped(shipped, query)),
        ("same architecture", lambda: _same_architecture(measured, shipped, query)),
    )


def _try_rule(
    rule: Rule, fronts: Iterable[_Front], search: _Search
) -> tuple[Step, Choice | None, str]:
    skipped: list[Skipped] = []
    found = 0
    for front in fronts:
        for winner in _in_order(front.winners, search):
            found += 1
            config = _judge(winner, front, search)
            if isinstance(config, Skipped):
                skipped.append(config)
                continue
            stale = search.query.stale(winner.measurement.toolchain)
            time = winner.measurement.median_ms or 0.0
            detail = f"{front.relation}, {time:.3g} ms when measured"
            step = Step(rule, "chosen", detail, tuple(skipped))
            return step, Choice(config, rule, detail, winner), "" if front.shipped else stale
    detail = (
        f"All {found} stored configs are skipped." if found else "Nothing comparable was measured."
    )
    return Step(rule, "nothing usable", detail, tuple(skipped)), None, ""


def _in_order(winners: Sequence[Winner], search: _Search) -> list[Winner]:
    """The winners of a front in the order they are tried."""
    timed = [(_expected_ms(winner.measurement, search), winner) for winner in winners]
    timed.sort(key=lambda pair: pair[0])
    ordered = [winner for _, winner in timed]
    if search.query.workspace_limit is not None or not winners:
        return ordered
    close = sum(ms <= FRUGAL * timed[0][0] for ms, _ in timed)
    frugal = sorted(ordered[:close], key=lambda winner: winner.measurement.workspace_bytes or 0)
    return frugal + ordered[close:]


def _expected_ms(measurement: Measurement, search: _Search) -> float:
    """The measured time, with the products that the config needs for the problem at hand.

    Comparable within a front alone: what all its winners have in common is left out.
    """
    of = measurement.problem
    measured = replace(search.live, tokens=measurement.tokens, hidden=of.hidden, vocab=of.vocab)
    time = measurement.median_ms or math.inf
    try:
        config = config_of(measurement)
        now, then = (strategies.products(config, p) for p in (search.live, measured))
    except (InvalidConfigError, UnknownStrategyError):  # which is told when it is its turn
        return time
    return time * now / then


def _judge(winner: Winner, front: _Front, search: _Search) -> Config | Skipped:
    """The winner's config, or why it cannot be taken here."""
    query, limit = search.query, search.query.workspace_limit
    try:
        config = config_of(winner.measurement)
    except InvalidConfigError as error:
        stored = canonical_config(winner.measurement.config)
        return Skipped(stored, front.relation, str(error), broken=True)

    def skip(reason: str, *, broken: bool = False) -> Skipped:
        return Skipped(str(config), front.relation, reason, broken)

    if (failure := query.failed.get(config)) is not None:
        return skip(f"failed in this process: {failure}")
    if (reason := strategies.reject(config, search.live, query.device)) is not None:
        return skip(reason, broken=front.exact)
    if limit is not None and (needed := strategies.workspace(config, search.live)) > limit:
        search.too_large.append((needed, config))
        return skip(f"its workspace of {needed:,} bytes exceeds {limit:,}")
    return config


def _default(search: _Search) -> Choice:
    """The analytic default, or under a limit nothing fits in the config that needs least."""
    query, limit = search.query, search.query.workspace_limit
    config = strategies.default(search.live, query.device, limit)
    if config in query.failed:
        config = next(_other_defaults(search), config)
    if limit is None or strategies.workspace(config, search.live) <= limit:
        return Choice(config, "default", "no stored config serves; chosen by analysis")
    candidates = [(strategies.workspace(config, search.live), config), *search.too_large]
    needed, config = min(candidates, key=lambda candidate: candidate[0])
    detail = f"nothing fits in {limit:,} bytes; this needs least, {needed:,} bytes"
    return Choice(config, "default", detail)


def _other_defaults(search: _Search) -> Iterator[Config]:
    """What the other strategies would choose, where the default itself failed to run."""
    for name in strategies.names():
        config = strategies.get(name).default(search.live, search.query.device)
        rejected = strategies.reject(config, search.live, search.query.device)
        if rejected is None and config not in search.query.failed:
            yield config


def _exact(snapshot: Snapshot, query: Query) -> Iterator[_Front]:
    fronts = snapshot.fronts.get(device_record(query.device), {})
    winners = fronts.get(problem_record(query.problem), ())
    if winners:
        yield _Front(winners, "this device and problem", exact=True)


def _nearest(snapshot: Snapshot, query: Query, *, same_shape: bool) -> list[_Front]:
    """Fronts of this device for other problems, nearest first."""
    wanted = problem_record(query.problem)
    fronts = snapshot.fronts.get(device_record(query.device), {})
    near = [
        problem
        for problem in fronts
        if problem != wanted
        and comparable(problem, wanted)
        and ((problem.hidden, problem.vocab) == (wanted.hidden, wanted.vocab)) is same_shape
    ]
    near.sort(key=lambda problem: distance(problem, wanted))
    return [_Front(fronts[problem], f"this device, {_differences(problem)}") for problem in near]


def _shipped(snapshot: Snapshot, query: Query) -> Iterator[_Front]:
    for front in _exact(snapshot, query):
        yield replace(front, shipped=True)
    for same_shape in (True, False):
        for front in _nearest(snapshot, query, same_shape=same_shape):
            yield replace(front, shipped=True)


def _same_architecture(measured: Snapshot, shipped: Snapshot, query: Query) -> list[_Front]:
    """Fronts of other devices of this compute capability: likest device first, then problem."""
    here, wanted = device_record(query.device), problem_record(query.problem)
    found = [
        (
            (device_distance(device, here), distance(problem, wanted), is_shipped),
            _Front(front, f"{device.name}, {_differences(problem)}", shipped=is_shipped),
        )
        for snapshot, is_shipped in ((measured, False), (shipped, True))
        for device, fronts in snapshot.fronts.items()
        if device != here and device.architecture == here.architecture
        for problem, front in fronts.items()
        if comparable(problem, wanted)
    ]
    found.sort(key=lambda entry: entry[0])
    return [front for _, front in found]


def comparable(stored: ProblemRecord, wanted: ProblemRecord) -> bool:
    """Whether a winner for ``stored`` may serve ``wanted`` at all."""
    return (
        (stored.mode, stored.dtype, stored.accumulate)
        == (wanted.mode, wanted.dtype, wanted.accumulate)
        and set(stored.features) <= set(wanted.features)
        and ("per_token" in stored.features) == ("per_token" in wanted.features)
        and max(_log_ratios(stored, wanted)) <= math.log2(MAX_RATIO)
    )


def distance(stored: ProblemRecord, wanted: ProblemRecord) -> tuple[float, int, int]:
    """How far two comparable problems are apart; ties go to fewer missing features, smaller N."""
    missing = len(wanted.features) - len(stored.features)
    return sum(_log_ratios(stored, wanted)) + missing, missing, stored.token_bucket


def _log_ratios(a: ProblemRecord, b: ProblemRecord) -> tuple[float, float, float]:
    return (
        abs(math.log2(a.token_bucket / b.token_bucket)),
        abs(math.log2(a.hidden / b.hidden)),
        abs(math.log2(a.vocab / b.vocab)),
    )


def device_distance(a: DeviceRecord, b: DeviceRecord) -> tuple[float, int]:
    """How far two devices of one architecture are apart; 0 for one chip under two names."""
    sm_ratio = abs(math.log2(max(a.sm_count, 1) / max(b.sm_count, 1)))
    return sm_ratio, abs(a.shared_memory_per_block - b.shared_memory_per_block)


def _differences(problem: ProblemRecord) -> str:
    features = f" with {', '.join(problem.features)}" if problem.features else ""
    return f"N≤{problem.token_bucket} D={problem.hidden} V={problem.vocab}{features}"
