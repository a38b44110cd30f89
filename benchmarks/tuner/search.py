"""How much of the best is found with a part of the evaluations: Optuna, the walk, and chance.

    python benchmarks/tuner/search.py collect --out grid.json --preset demo
    python benchmarks/tuner/search.py replay grid.json

``collect`` times every combination of a problem's proposed values (on a CPU, where few are
proposed, of many more chunks and slabs), in turns, without checks; ``replay`` searches in what it
stored, with several seeds. Regret: how much longer the best config found takes than the best.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import runs

from flce_tune.kernels import strategies
from flce_tune.kernels.config import Config
from flce_tune.kernels.problem import describe_device
from flce_tune.sweep.candidates import combinations, groups, in_turns, walk
from flce_tune.sweep.measure import OpBench
from flce_tune.sweep.sampling import sampled

SHARES = (0.05, 0.1, 0.25, 0.5)
FINE_STEPS = 32  # chunks, and slabs, on a CPU

Times = dict[Config, float]
Search = Callable[[Times, int], Iterator[Config]]


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


def chance(times: Times, seed: int) -> Iterator[Config]:
    yield from random.Random(seed).sample(list(times), len(times))


def tpe(times: Times, seed: int) -> Iterator[Config]:
    yield from sampled(list(times), [], times.get, seed)


def walk_then_tpe(times: Times, seed: int) -> Iterator[Config]:
    """As a sweep with a budget; each group's walk starts at a config that the seed chooses."""
    chooser = random.Random(seed)
    walks = {
        (group[0].strategy, group[0].accumulator): walk(
            group, chooser.choice(group), times.get, times.__contains__
        )
        for group in groups(list(times))
    }
    seen: dict[Config, None] = {}
    for batch in in_turns(walks, times.get, set()):
        for config in batch:
            if config not in seen:
                seen[config] = None
                yield config
    yield from sampled(list(times), seen, times.get, seed)


SEARCHES: dict[str, Search] = {"chance": chance, "TPE": tpe, "walk, then TPE": walk_then_tpe}


def regrets(times: Times, search: Search, seed: int, counts: Sequence[int]) -> list[float]:
    found = [times[c] for c in itertools.islice(search(times, seed), max(counts))]
    best = min(times.values())
    return [min(found[:count]) / best - 1 for count in counts]


def replay(arguments: argparse.Namespace) -> None:
    document = json.loads(arguments.table.read_text())
    times = {Config.from_dict(row["config"]): row["ms"] for row in document["table"]}
    counts = [max(1, round(share * len(times))) for share in SHARES]
    best, middle = min(times.values()), statistics.median(times.values())
    runs.say(
        f"{len(times)} configs; the best takes {best:.3f} ms, the median config "
        f"{middle / best - 1:.1%} more. Regret, mean (worst) over {arguments.seeds} seeds:"
    )
    heads = (f" {s:.0%} ({c}) |" for s, c in zip(SHARES, counts, strict=True))
    runs.say("| evaluations |" + "".join(heads))
    runs.say("|---|" + "---|" * len(SHARES))
    for name, search in SEARCHES.items():
        rows = [regrets(times, search, seed, counts) for seed in range(arguments.seeds)]
        cells = (f" {statistics.mean(c):.2%} ({max(c):.2%}) |" for c in zip(*rows, strict=True))
        runs.say(f"| {name} |" + "".join(cells))


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
    replaying.add_argument("--seeds", type=int, default=10)
    replaying.set_defaults(run=replay)
    arguments = parser.parse_args()
    arguments.run(arguments)


if __name__ == "__main__":
    main()
