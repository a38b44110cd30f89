"""What an untuned neighbour loses: another N, and another D and V.

    python benchmarks/tuner/neighbours.py --preset llama3-8b --tokens 4096

Sweeps the problem quickly; asks the dispatcher, which knows only that, for the neighbours; sweeps
each neighbour, too; and times, in turns, what the dispatcher chose before, what it chooses after,
the neighbour's fastest winner and the default config.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from dataclasses import replace

import runs

from flce_tune.dispatch.choice import Choice
from flce_tune.dispatch.convert import config_of
from flce_tune.dispatch.rules import Query, resolve
from flce_tune.dispatch.snapshot import Snapshot
from flce_tune.kernels import strategies
from flce_tune.kernels.problem import Problem, describe_device
from flce_tune.sweep.events import SweepOptions
from flce_tune.tuning_db.store import Store


def choice(store: Store, problem: Problem) -> Choice:
    """What the dispatcher takes from this store alone."""
    query = Query(problem, describe_device(runs.device()), None, {}, lambda _: "")
    return resolve(Snapshot.from_store(store), Snapshot.empty(), query).choice


def neighbours(problem: Problem, arguments: argparse.Namespace) -> list[Problem]:
    return [
        replace(problem, tokens=arguments.other_tokens or problem.tokens * 3 // 2 - 144),
        replace(
            problem,
            hidden=arguments.other_hidden or problem.hidden * 7 // 8,
            vocab=arguments.other_vocab or problem.vocab * 5 // 4,
        ),
    ]


def main() -> None:
    parser = runs.parser(__doc__)
    runs.add_problem(parser)
    parser.add_argument("--other-tokens", type=int, help="default: 3/2 of N, less 144")
    parser.add_argument("--other-hidden", type=int, help="default: 7/8 of D")
    parser.add_argument("--other-vocab", type=int, help="default: 5/4 of V")
    parser.add_argument("--full", action="store_true", help="full sweeps instead of quick ones")
    arguments = parser.parse_args()
    problem = runs.problem_of(arguments)
    options = SweepOptions(quick=not arguments.full)
    device = describe_device(runs.device())
    rows = []
    with (
        tempfile.TemporaryDirectory() as folder,
        Store.open(f"sqlite:///{folder}/tuning.sqlite3") as store,
    ):
        report = runs.fresh_sweep(problem, options, store)
        runs.say(f"N={problem.tokens} D={problem.hidden} V={problem.vocab}: {report.seconds:.1f} s")
        asked = [(one, choice(store, one)) for one in neighbours(problem, arguments)]
        for neighbour, before in asked:
            swept = runs.fresh_sweep(neighbour, options, store)
            after = choice(store, neighbour)
            fastest = config_of(swept.winners[0].measurement)
            configs = {
                f"before ({before.rule})": before.config,
                f"after ({after.rule})": after.config,
                "fastest": fastest,
                "default": strategies.default(neighbour, device),
            }
            samples = runs.side_by_side(neighbour, list(dict.fromkeys(configs.values())))
            medians = {config: statistics.median(times) for config, times in samples.items()}
            runs.say(
                f"N={neighbour.tokens} D={neighbour.hidden} V={neighbour.vocab}: "
                f"swept in {swept.seconds:.1f} s"
            )
            for name, config in configs.items():
                runs.say(f"  {name:24s} {runs.summary(samples[config])}  {config}")
            loss = medians[before.config] / medians[after.config] - 1
            to_fastest = medians[before.config] / medians[fastest] - 1
            runs.say(f"  untuned, it loses {loss:.1%}; {to_fastest:.1%} against its fastest config")
            rows.append(
                {
                    "tokens": neighbour.tokens,
                    "hidden": neighbour.hidden,
                    "vocab": neighbour.vocab,
                    "loss": loss,
                    "loss_against_fastest": to_fastest,
                    "configs": {
                        name: {"config": config.to_dict(), "samples_ms": samples[config]}
                        for name, config in configs.items()
                    },
                }
            )
    runs.write(arguments.out, problem, {"neighbours": rows})


if __name__ == "__main__":
    main()
