"""A GPU whose configs take what was recorded on an H200, on a clock of its own."""

import math
from dataclasses import dataclass, field
from pathlib import Path

from flce_tune.dispatch.convert import config_of, device_of, problem_of
from flce_tune.kernels import strategies
from flce_tune.sweep.candidates import differing, distance
from flce_tune.sweep.measure import Trial
from flce_tune.tuning_db.interchange import parse_winners

START_S = 7.0  # of the measuring worker, its inputs and the reference
NEIGHBOUR_S = 1.5  # the same for the ragged neighbour
CALL_S = 0.06  # of a trial, beyond its runs: launching, checking, storing
FLUSH_S = 0.003
COMPILERS = 15
COMPILERS_START_S = 5.0
COMPILE_S = 4.0  # of the kernels of one config
PER_FIELD = 0.02  # that a config which was not recorded is slower, for each unlike field


RECORDED = Path(__file__).with_name("recorded-h200.json")  # not what ships, which changes


def winners():
    """What one comparison on an H200 measured, winners and others."""
    return parse_winners(RECORDED.read_text(), RECORDED.name)


class Clock:
    """Seconds, which pass when somebody says so."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


class Table:
    """Times of all configs of one problem: the recorded ones', and others by likeness to those."""

    def __init__(self, problem, recorded):
        self.problem = problem
        self.recorded = recorded

    def ms(self, config):
        if config in self.recorded:
            return self.recorded[config]
        alike = [c for c in self.recorded if c.strategy == config.strategy]
        if not alike:
            return 1.4 * max(self.recorded.values())
        near = min(alike, key=lambda c: (distance(c, config), str(c)))
        slower = PER_FIELD * len(differing(near, config)) + 0.1 * distance(near, config)
        return self.recorded[near] * (1 + slower)

    def best(self, limit=math.inf):
        """The fastest recorded time within a workspace, in ms."""
        return min(ms for c, ms in self.recorded.items() if self.bytes(c) <= limit)

    def bytes(self, config):
        return strategies.workspace(config, self.problem)


def h200_tables():
    """What was recorded, problem by problem."""
    tables = {}
    for winner in winners():
        one = winner.measurement
        if "H200" in one.device.name and one.problem.mode == "train":
            tables.setdefault((one.problem, one.tokens), {})[config_of(one)] = one.median_ms
    return [Table(problem_of(record, tokens), t) for (record, tokens), t in tables.items()]


def h200():
    """The device they were recorded on."""
    return next(
        device_of(w.measurement.device) for w in winners() if "H200" in w.measurement.device.name
    )


@dataclass
class SimulatedPlace:
    """A place of one table; its runner passes the time that a measurement takes."""

    table: Table
    clock: Clock
    device: object
    toolchain: object
    name: str = "simulated"
    calls: list = field(default_factory=list)  # method and config

    def open(self, should_stop):
        pass

    def close(self):
        pass

    def compilers(self):
        return 1

    def compiler(self, make_bench, problem, should_stop=None):
        return _Compiler()

    def runner(self, make_bench, problem, seed, should_stop=None):
        return _Runner(self)


class _Compiler:
    """Compiles in no time: the runner waits for what it needs first."""

    def call(self, method, *args, timeout_s):
        assert method == "compile"

    def close(self):
        pass


class _Runner:
    def __init__(self, place):
        self.place = place
        self.started = self.neighbour = False
        self.compiled = set()
        self.batches = {False: 0, True: 0}
        self.began = place.clock.now

    def prepare(self):
        pass

    def close(self):
        pass

    def pass_s(self, seconds):
        self.place.clock.now += seconds

    def compile(self, config, ragged):
        """Wait for the compilers, who work side by side, for the neighbour in the end."""
        tiles = [tile for tile in (config.logits, config.dx, config.dw) if tile]
        kernels = {(ragged, config.strategy, tile) for tile in tiles}
        if kernels - self.compiled:
            self.compiled |= kernels
            self.batches[ragged] += 1
            rounds = 1 + self.batches[ragged] // COMPILERS + int(ragged)
            done = self.began + COMPILERS_START_S + COMPILE_S * rounds
            self.place.clock.now = max(self.place.clock.now, done)

    def call(self, method, config=None, *, timeout_s):
        table = self.place.table
        self.place.calls.append((method, config))
        self.pass_s(0 if self.started else START_S)
        self.started = True
        ms = table.ms(config) if config else 1.02 * table.best()
        match method:
            case "trial":
                self.compile(config, False)
                self.neighbour = False
                self.pass_s(2 * ms / 1e3 + CALL_S)
                return Trial(ms, table.bytes(config), {"loss": 1e-7})
            case "check_ragged":
                self.compile(config, True)
                self.pass_s(0 if self.neighbour else NEIGHBOUR_S)
                self.neighbour = True
                self.pass_s(1.2 * ms / 1e3 + CALL_S)
                return None
            case "time" | "time_plain":
                self.neighbour = False
                self.pass_s(ms / 1e3 + FLUSH_S)
                return ms
