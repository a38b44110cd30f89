"""Sweeps on several places: fake devices, which are all this CPU."""

import dataclasses
import threading
from collections import Counter

import pytest

from flce_tune.dispatch.convert import config_of
from flce_tune.errors import StoreError, SweepError
from flce_tune.sweep.events import SweepEvents, SweepOptions
from flce_tune.sweep.places import LocalPlace, PlaceLostError, works
from flce_tune.sweep.sweep import sweep
from flce_tune.sweep.worker import Worker

HERE = SweepOptions(isolate=False)


class Place(LocalPlace):
    """This CPU under another name; its runners obey ``broken``, a function of how often called."""

    def __init__(self, cpu, name, broken=None, kind=None):
        super().__init__(cpu, name=name, isolate=False)
        self.calls = Counter()
        self.threads = set()
        self.broken = broken
        if kind:
            self.device = dataclasses.replace(self.device, name=kind)

    def runner(self, make_bench, problem, seed, should_stop=None):
        return Runner(self, super().runner(make_bench, problem, seed, should_stop), problem)


class Runner:
    def __init__(self, place, inner, problem):
        self.place, self.inner, self.problem = place, inner, problem

    def call(self, method, *args, timeout_s):
        self.place.calls[self.problem] += 1
        self.place.threads.add(threading.current_thread().name)
        if self.place.broken is not None:
            self.place.broken(self.place.calls.total(), self.problem)
        return self.inner.call(method, *args, timeout_s=timeout_s)

    def prepare(self):
        self.inner.prepare()

    def close(self):
        self.inner.close()


class Recorder(SweepEvents):
    def __init__(self, place="all", everything=None):
        self.place = place
        self.everything = [] if everything is None else everything

    def at(self, place):
        return Recorder(place, self.everything)

    def on_measurement(self, measurement, done, total):
        self.everything.append((self.place, measurement))

    def on_place_lost(self, place, reason, dropped):
        self.everything.append((place, "dropped" if dropped else "lost"))

    def losses(self):
        return [one for one in self.everything if isinstance(one[1], str)]


@pytest.fixture
def problems(problem):
    return [dataclasses.replace(problem, hidden=hidden) for hidden in (16, 24, 32, 40, 48, 56)]


@pytest.fixture
def run(store, problems, planted):
    def run(places, **more):
        arguments = {"events": Recorder(), "make_bench": planted.Impatient} | more
        return sweep(problems, store, places, HERE, **arguments)

    return run


def dead(*_):
    raise SweepError("the problem cannot be set up: no device")


def gone(*_):
    raise PlaceLostError("the host is gone")


def test_each_problem_is_measured_on_one_place(cpu, store, run, problems):
    together = threading.Barrier(3)

    def all_at_once(calls, _):
        if calls == 1:
            together.wait(20)  # broken unless three places run at the same time

    places = [Place(cpu, f"fake {i}", all_at_once) for i in range(3)]
    events = Recorder()
    report = run(places, events=events)
    assert [r.problem for r in report.problems] == problems
    assert all(r.winners for r in report.problems)
    where = {}
    for place, measurement in events.everything:
        where.setdefault(measurement.problem, set()).add(place)
    assert len(where) == len(problems)
    assert all(len(names) == 1 for names in where.values())
    assert sum(len(place.calls) for place in places) == len(problems)
    assert [place.threads for place in places] == [{"fake 0"}, {"fake 1"}, {"fake 2"}]


@pytest.mark.parametrize("failure", [dead, gone])
def test_what_a_failing_place_leaves_is_done_elsewhere(cpu, run, problems, failure):
    failing = Place(cpu, "failing", lambda calls, _: calls > 5 and failure())
    events = Recorder()
    report = run([failing, Place(cpu, "good")], events=events)
    assert [bool(r.winners) for r in report.problems] == [True] * len(problems)
    assert events.losses() == [("failing", "lost"), ("failing", "dropped")]


def test_nothing_that_was_measured_is_measured_again_elsewhere(cpu, store, run):
    run([Place(cpu, "failing", lambda calls, _: calls > 3 and gone()), Place(cpu, "good")])
    once = [m for m in store.measurements() if len(m.samples_ms) == 1]
    assert max(Counter((m.problem, config_of(m)) for m in once).values()) == 1


def test_a_place_that_recovers_goes_on(cpu, run, problems):
    def once(calls, _):
        if calls == 4:
            gone()

    events = Recorder()
    report = run([Place(cpu, "shaky", once)], events=events)
    assert all(r.winners for r in report.problems)
    assert events.losses() == [("shaky", "lost")]


def test_without_any_place_left_the_report_says_why(cpu, run, problems):
    with pytest.raises(SweepError, match=r"nothing is left to measure it on: a: .*no device"):
        run([Place(cpu, "a", dead), Place(cpu, "b", dead)])

    report = run([place := Place(cpu, "a", lambda calls, _: len(place.calls) > 1 and gone())])
    assert report.problems[0].winners
    assert "nothing is left to measure it on: a: the host is gone" in report.problems[-1].error


def test_a_problem_that_brings_down_every_place_is_given_up(cpu, store, problem, planted):
    bad, good = problem, dataclasses.replace(problem, hidden=32)
    places = [Place(cpu, f"fake {i}", lambda _, asked: asked == bad and gone()) for i in range(4)]
    report = sweep([bad, good], store, places, HERE, make_bench=planted.Impatient)
    first, second = report.problems
    assert "given up after 3 attempts; the last: the host is gone" in first.error
    assert second.winners


def test_a_bad_problem_is_no_fault_of_the_place(cpu, run, problems, planted):
    def bench(asked, device, seed):
        kind = planted.Unable if asked == problems[0] else planted.Impatient
        return kind(asked, device, seed)

    events = Recorder()
    report = run([Place(cpu, "a"), Place(cpu, "b")], make_bench=bench, events=events)
    assert "the inputs do not fit" in report.problems[0].error
    assert all(r.winners for r in report.problems[1:])
    assert events.losses() == []


def test_every_kind_of_device_tunes_every_problem(cpu, store, run, problems):
    places = [
        Place(cpu, name, kind=kind) for name, kind in [("a", "big"), ("b", "big"), ("c", "small")]
    ]
    report = run(places)
    assert [(r.device.name, r.problem) for r in report.problems if r.winners] in (
        [(kind, p) for kind in order for p in problems]
        for order in (("big", "small"), ("small", "big"))
    )
    assert {w.measurement.device.name for w in store.winners()} == {"big", "small"}


def test_a_stop_ends_all_places_and_keeps_what_is_stored(cpu, store, run):
    events = Recorder()
    report = run(
        [Place(cpu, "a"), Place(cpu, "b")],
        events=events,
        should_stop=lambda: len(events.everything) > 4,
    )
    assert report.interrupted
    assert sum(r.measured for r in report.problems) == len(events.everything)
    assert store.count_measurements() >= len(events.everything)
    assert all(run([Place(cpu, "a"), Place(cpu, "b")]).problems)


def test_what_ends_one_place_ends_the_sweep(cpu, run):
    class Full(Recorder):
        def on_measurement(self, measurement, done, total):
            raise StoreError("the disk is full")

        def at(self, place):
            return Full() if place == "b" else Recorder()

    with pytest.raises(StoreError, match="the disk is full"):
        run([Place(cpu, "a"), Place(cpu, "b")], events=Full())
    assert not [t for t in threading.enumerate() if t.name in ("a", "b", "sweep leases")]


def test_works_tells_a_broken_place_from_a_sound_one(cpu):
    assert works(LocalPlace(cpu, isolate=False))
    assert not works(Place(cpu, "dead", dead))
    assert not works(Place(cpu, "gone", gone))


def test_a_worker_sees_the_device_it_is_given_and_no_other(planted, problem, cpu):
    place = LocalPlace(cpu, visible="GPU-1234")
    runner = place.runner(planted.Puppet, problem, 0)
    assert isinstance(runner, Worker)
    assert runner.call("time", "environment", "CUDA_VISIBLE_DEVICES", timeout_s=60) == "GPU-1234"
    runner.close()
