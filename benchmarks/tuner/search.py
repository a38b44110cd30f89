"""How much of the best is found with a part of the evaluations: Optuna, the walk, and chance.

    python benchmarks/tuner/search.py collect --out grid.json --preset demo
    python benchmarks/tuner/search.py replay grid.json

``collect`` times every combination of a problem's proposed values (on a CPU, where few are
proposed, of many more chunks and slabs), in turns, without checks; ``replay`` searches in what it
stored, with several seeds. Regret: how much longer the best config found takes than the best.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import runs

from flce_tune.kernels import strategies
from flce_tune.kernels.config import Config
from flce_tune.kernels.problem import Device, Problem, describe_device
from flce_tune.sweep.candidates import combinations, groups, in_turns, nearest, walk
from flce_tune.sweep.measure import OpBench
from flce_tune.sweep.sampling import kind_of, sampled

SHARES = (0.05, 0.1, 0.25, 0.5)
FINE_STEPS = 32  # chunks, and slabs, on a CPU

Times = dict[Config, float]
Search = Callable[[Times, Sequence[Config], int], Iterator[Config]]


def collect(arguments: argparse.Namespace) -> None:
    problem, device = runs.problem_of(arguments), describe_device(runs.device())
    names = arguments.strategies.split(",") if arguments.strategies else strategies.names()
    space = [c for name in names for c in strategies.space(problem, device, strategy=name)]
    if device.kind == "cpu":
        steps = range(1, FINE_STEPS + 1)
        space += [Config("chunked", chunk=problem.tokens * i // FINE_STEPS) for i in steps]
        space += [Config("recompute", slab=problem.vocab * i // FINE_STEPS) for i in steps]

    def valid(config: Config) -> bool:
        return strategies.reject(config, problem, device) is None

    grid = combinations(list(dict.fromkeys(filter(valid, space))), valid)
    runs.say(f"{len(grid)} configs, {arguments.rounds} rounds")
    bench = OpBench(problem, runs.device(), seed=0)

    def run(config: Config) -> float | None:
        start = time.process_time()
        try:
            ms = bench.time(config)
        except Exception as error:  # noqa: BLE001 - a config that cannot run is none of the table
            runs.say(f"{config}: {error}")
            return None
        return (time.process_time() - start) * 1e3 if arguments.cpu_time else ms

    samples = runs.interleave(grid, arguments.rounds, run)
    table = [
        {"config": config.to_dict(), "ms": statistics.median(times)}
        for config, times in samples.items()
    ]
    runs.write(arguments.out, problem, {"rounds": arguments.rounds, "table": table})


def chance(times: Times, starts: Sequence[Config], seed: int) -> Iterator[Config]:
    yield from random.Random(seed).sample(list(times), len(times))


def tpe(times: Times, starts: Sequence[Config], seed: int) -> Iterator[Config]:
    yield from sampled(list(times), [], times.get, seed)


def as_a_sweep(times: Times, starts: Sequence[Config], seed: int) -> Iterator[Config]:
    """What a sweep with a budget does: the strategies' defaults, the walk from there, TPE.

    Where nothing has tiles there is no walk.
    """
    seen = dict.fromkeys(starts)
    yield from starts
    if any(config.logits or config.dx or config.dw for config in times):
        by_kind = {kind_of(c): c for c in starts}
        walks = {
            kind: walk(group, by_kind[kind], times.get, times.__contains__)
            for group in groups(list(times))
            if (kind := kind_of(group[0]))
        }
        for config in itertools.chain.from_iterable(in_turns(walks, times.get, set())):
            if config not in seen:
                seen[config] = None
                yield config
    yield from sampled(list(times), seen, times.get, seed)


SEARCHES: dict[str, Search] = {"chance": chance, "TPE": tpe, "as a sweep": as_a_sweep}


def starts_in(times: Times, document: dict[str, Any]) -> list[Config]:
    """The configs of a table that are most like the strategies' defaults on its problem."""
    fields = document["problem"]
    problem = Problem(**{**fields, "features": tuple(fields["features"])})
    stored = document["device"]
    capability = tuple(map(int, stored["capability"].split(".")))
    names = [field.name for field in dataclasses.fields(Device)]
    device = Device(**{n: stored[n] for n in names if n in stored} | {"capability": capability})
    return [
        nearest(group, strategies.get(group[0].strategy).default(problem, device))
        for group in groups(list(times))
    ]


def regrets(
    times: Times, starts: Sequence[Config], search: Search, seed: int, counts: Sequence[int]
) -> list[float]:
    found = [times[c] for c in itertools.islice(search(times, starts, seed), max(counts))]
    best = min(times.values())
    return [min(found[:count]) / best - 1 for count in counts]


def replay(arguments: argparse.Namespace) -> None:
    document = json.loads(arguments.table.read_text())
    times = {Config.from_dict(row["config"]): row["ms"] for row in document["table"]}
    starts = starts_in(times, document)
    counts = [max(1, round(share * len(times))) for share in SHARES]
    best, middle = min(times.values()), statistics.median(times.values())
    runs.say(
        f"{len(times)} configs; the best takes {best:.3f} ms, the median config "
        f"{middle / best - 1:.1%} more. Regret, mean (median, 90th percentile, worst) over "
        f"{arguments.seeds} seeds:"
    )
    heads = (f" {s:.0%} ({c}) |" for s, c in zip(SHARES, counts, strict=True))
    runs.say("| evaluations |" + "".join(heads))
    runs.say("|---|" + "---|" * len(SHARES))
    for name, search in SEARCHES.items():
        rows = [regrets(times, starts, search, seed, counts) for seed in range(arguments.seeds)]
        runs.say(f"| {name} |" + "".join(map(_cell, zip(*rows, strict=True))))


def _cell(found: Sequence[float]) -> str:
    ranked = sorted(found)
    spread = (statistics.median(ranked), ranked[int(0.9 * (len(ranked) - 1))], ranked[-1])
    return f" {statistics.mean(ranked):.1%} ({', '.join(f'{one:.1%}' for one in spread)}) |"


def main() -> None:
    parser = runs.parser(__doc__)
    commands = parser.add_subparsers(required=True)
    collecting = commands.add_parser("collect")
    runs.add_problem(collecting)
    collecting.add_argument(
        "--cpu-time", action="store_true", help="of the process, where others load the machine"
    )
    collecting.add_argument("--rounds", type=int, default=3)
    collecting.add_argument("--strategies", help="comma-separated; default: all")
    collecting.set_defaults(run=collect)
    replaying = commands.add_parser("replay")
    replaying.add_argument("table", type=Path)
    replaying.add_argument("--seeds", type=int, default=50)
    replaying.set_defaults(run=replay)
    arguments = parser.parse_args()
    arguments.run(arguments)


if __name__ == "__main__":
    main()
