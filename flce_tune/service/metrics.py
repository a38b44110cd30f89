"""What Prometheus scrapes; each application has numbers of its own."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timezone

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from flce_tune.errors import StoreError
from flce_tune.tuning_db.store import Store

_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)


class Metrics:
    """Counters of this process, and what the database says when asked. Thread-safe."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._latency = Histogram(
            "flce_tune_request_seconds",
            "Time until an answer begins.",
            ("method", "route", "status"),
            buckets=_BUCKETS,
            registry=self._registry,
        )
        self.lease_losses = Counter(
            "flce_tune_lease_losses",
            "Jobs this process ran and lost to another, or might have.",
            registry=self._registry,
        )
        self.refused_tokens = Counter(
            "flce_tune_refused_tokens",
            "Requests whose token was missing, wrong or revoked, or had too small a scope.",
            registry=self._registry,
        )

    def watch(self, store: Store) -> None:
        """Have every scrape read the database, too."""
        self._registry.register(_StoreCollector(store))

    def observe_request(self, method: str, route: str, status: int, seconds: float) -> None:
        """Count one answer."""
        self._latency.labels(method, route, str(status)).observe(seconds)

    def text(self) -> bytes:
        """The page to scrape, in Prometheus' text format."""
        return generate_latest(self._registry)


class _StoreCollector(Collector):
    """A database that is away costs its own figures only."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def describe(self) -> list[Metric]:
        """Nothing, so that registering it does not read the database."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Read the figures."""
        up = GaugeMetricFamily("flce_tune_database_up", "Whether the database answers.")
        try:
            yield from self._read()
            up.add_metric([], 1)
        except StoreError:
            up.add_metric([], 0)
        yield up

    def _read(self) -> list[Metric]:
        counts = self._store.count_jobs()
        jobs = GaugeMetricFamily("flce_tune_jobs", "Jobs by state.", labels=["state"])
        for state, count in counts.items():
            jobs.add_metric([state.value], count)
        age = GaugeMetricFamily(
            "flce_tune_queue_age_seconds", "How long the oldest queued job has waited; 0: none."
        )
        age.add_metric([], _seconds_since(self._store.oldest_queued()))
        measurements = GaugeMetricFamily("flce_tune_measurements", "Measurements stored.")
        measurements.add_metric([], self._store.count_measurements())
        return [jobs, age, measurements]


def _seconds_since(time: datetime | None) -> float:
    return 0.0 if time is None else max(0.0, (datetime.now(timezone.utc) - time).total_seconds())
