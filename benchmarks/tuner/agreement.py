"""Do sweeps of one problem agree, and what does a quick one lose?

    python benchmarks/tuner/agreement.py --preset llama3-8b --tokens 4096

Five full sweeps, then two quick ones, each into a database of its own; then all their fastest
winners in turns. Two sweeps agree if they found the same config, or if the intervals of their
winners overlap. Each sweep is printed when it is done. ``--cold`` adds quick sweeps that find
nothing compiled; ``--join`` adds the sweeps of earlier runs, of another GPU of the host, say.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import runs

from flce_tune.dispatch.convert import config_of
from flce_tune.kernels.config import Config
from flce_tune.kernels.problem import Problem
from flce_tune.sweep.events import SweepOptions
from flce_tune.sweep.interval import median_interval, overlap

COLD = "quick, nothing compiled"


@dataclass(frozen=True)
class Outcome:
    """One sweep's fastest winner."""

    kind: str
    config: Config
    samples_ms: tuple[float, ...]
    front: int  # winners
    seconds: float
    stages: dict[str, float]

    @property
    def interval(self) -> tuple[float, float] | None:
        return median_interval(self.samples_ms)

    @classmethod
    def of_view(cls, view: dict[str, Any]) -> Outcome:
        return cls(
            view["kind"],
            Config.from_dict(view["config"]),
            tuple(view["samples_ms"]),
            view["winners"],
            view["seconds"],
            view["stages"],
        )

    def view(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "config": self.config.to_dict(),
            "samples_ms": self.samples_ms,
            "median_ms": statistics.median(self.samples_ms),
            "interval_ms": self.interval,
            "winners": self.front,
            "seconds": self.seconds,
            "stages": self.stages,
        }


@contextlib.contextmanager
def nothing_compiled() -> Iterator[None]:
    """An empty Triton cache for the processes that are started inside."""
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.dict(os.environ, TRITON_CACHE_DIR=folder),
    ):
        yield


def run_sweep(problem: Problem, kind: str, seed: int) -> Outcome:
    with nothing_compiled() if kind == COLD else contextlib.nullcontext():
        report = runs.fresh_sweep(problem, SweepOptions(quick=kind != "full", seed=seed))
    if report.error:
        raise SystemExit(f"{kind} sweep: {report.error}")
    fastest = report.winners[0].measurement
    outcome = Outcome(
        kind,
        config_of(fastest),
        fastest.samples_ms,
        len(report.winners),
        report.seconds,
        {str(stage): seconds for stage, seconds in report.stages.items()},
    )
    stages = ", ".join(f"{stage} {seconds:.1f}" for stage, seconds in outcome.stages.items())
    runs.say(f"{kind:5s} {report.seconds:6.1f} s ({stages}), {report.measured} configs")
    runs.say(f"      {runs.summary(outcome.samples_ms)}  {outcome.config}")
    return outcome


def agree(a: Outcome, b: Outcome) -> bool:
    return a.config == b.config or bool(overlap(a.interval, b.interval))


def say_speeds(medians: dict[Config, float], full: list[Outcome], quick: list[Outcome]) -> None:
    """How far the full sweeps' winners are apart, and the quick ones from them."""
    speeds = [medians[one.config] for one in full]
    spread = max(speeds) / min(speeds) - 1
    runs.say(f"the slowest winner of a full sweep takes {spread:.2%} longer than the fastest")
    for one in quick:
        runs.say(
            f"{one.kind}: {statistics.median(speeds) / medians[one.config]:.1%} of the full "
            f"sweeps' speed, in {one.seconds:.1f} s against "
            f"{statistics.median(o.seconds for o in full):.1f} s"
        )


def main() -> None:
    parser = runs.parser(__doc__)
    runs.add_problem(parser)
    parser.add_argument("--sweeps", type=int, default=5, help="full sweeps")
    parser.add_argument("--quick", type=int, default=2, help="quick sweeps")
    parser.add_argument("--cold", type=int, default=0, help="quick sweeps, nothing compiled")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--join", type=Path, nargs="*", default=[], help="results to add")
    arguments = parser.parse_args()
    problem = runs.problem_of(arguments)
    kinds = ["full"] * arguments.sweeps + ["quick"] * arguments.quick + [COLD] * arguments.cold
    seeds = itertools.count(arguments.first_seed)
    outcomes: list[Outcome] = []
    for kind, seed in zip(kinds, seeds, strict=False):
        outcomes.append(run_sweep(problem, kind, seed))
        runs.write(arguments.out, problem, {"sweeps": [one.view() for one in outcomes]})
    for path in arguments.join:
        outcomes += [Outcome.of_view(one) for one in json.loads(path.read_text())["sweeps"]]

    full = [one for one in outcomes if one.kind == "full"]
    pairs = list(itertools.combinations(full, 2))
    same = sum(a.config == b.config for a, b in pairs)
    agreeing = sum(agree(a, b) for a, b in pairs)
    runs.say(f"full sweeps: {agreeing} of {len(pairs)} pairs agree, {same} on the same config")

    samples = runs.side_by_side(problem, list(dict.fromkeys(one.config for one in outcomes)))
    runs.say("all their winners in turns:")
    for config, times in sorted(samples.items(), key=lambda item: statistics.median(item[1])):
        found_by = ", ".join(f"{i} {o.kind}" for i, o in enumerate(outcomes) if o.config == config)
        runs.say(f"      {runs.summary(times)}  {config}  (sweep {found_by})")
    medians = {config: statistics.median(times) for config, times in samples.items()}
    if full:
        say_speeds(medians, full, [one for one in outcomes if one.kind != "full"])
    results = {
        "sweeps": [one.view() for one in outcomes],
        "agreeing_pairs": agreeing,
        "pairs": len(pairs),
        "in_turns": [
            {"config": config.to_dict(), "samples_ms": times} for config, times in samples.items()
        ],
    }
    runs.write(arguments.out, problem, results)


if __name__ == "__main__":
    main()
