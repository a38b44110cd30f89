"""``flce-tune best`` and ``flce-tune explain``."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from flce_tune.cli import options
from flce_tune.cli.exits import NothingFoundError

if TYPE_CHECKING:
    from flce_tune.dispatch.choice import Explanation
    from flce_tune.kernels.problem import Problem
    from flce_tune.tuning_db.records import Winner
    from flce_tune.tuning_db.store import Store


def best(
    preset: options.PresetOption = None,
    from_model: options.FromModelOption = None,
    tokens: options.TokensOption = None,
    hidden: options.HiddenOption = None,
    vocab: options.VocabOption = None,
    dtype: options.DtypeOption = None,
    mode: options.ModeOption = "train",
    accumulate: options.AccumulateOption = "fp32",
    features: options.FeaturesOption = None,
    device: options.DeviceOption = None,
    workspace_limit: options.WorkspaceLimitOption = None,
    as_json: options.JsonOption = False,
) -> None:
    """Say the best config that was measured for a problem.

    Exits with 4 if nothing measured applies; the op then uses a default that explain shows.
    """
    from flce_tune.cli.console import print_json, results, table
    from flce_tune.cli.selection import Selection
    from flce_tune.cli.views import WINNER_COLUMNS, WINNER_NUMBERS, problem_text, winner_cells

    selection = Selection(
        preset, from_model, tokens, hidden, vocab, dtype, mode, accumulate, features
    )
    explanation, front = _explain(selection.problem(), device, workspace_limit)
    choice = explanation.choice
    if choice.winner is None:
        raise NothingFoundError(
            f"nothing measured applies to {problem_text(explanation.problem)} on "
            f"{explanation.device.name}; measure it with flce-tune sweep. Until then the op uses "
            f"{choice.config}"
        )
    if as_json:
        print_json(_best_view(explanation, choice.winner, front))
        return
    console = results()
    console.print(f"{choice.config}\n{choice.rule}: {choice.detail}")
    measured = choice.winner.measurement
    title = f"{problem_text(measured.problem)} on {measured.device.name}"
    made = table("", *WINNER_COLUMNS, title=title, right=WINNER_NUMBERS)
    for winner in front:
        made.add_row("→" if winner == choice.winner else "", *winner_cells(winner))
    console.print(made)


def explain(
    preset: options.PresetOption = None,
    from_model: options.FromModelOption = None,
    tokens: options.TokensOption = None,
    hidden: options.HiddenOption = None,
    vocab: options.VocabOption = None,
    dtype: options.DtypeOption = None,
    mode: options.ModeOption = "train",
    accumulate: options.AccumulateOption = "fp32",
    features: options.FeaturesOption = None,
    device: options.DeviceOption = None,
    workspace_limit: options.WorkspaceLimitOption = None,
    as_json: options.JsonOption = False,
) -> None:
    """Say which config the op uses for a problem, and which rules led there."""
    from flce_tune.cli.console import print_json, print_text, results
    from flce_tune.cli.selection import Selection

    selection = Selection(
        preset, from_model, tokens, hidden, vocab, dtype, mode, accumulate, features
    )
    explanation, _ = _explain(selection.problem(), device, workspace_limit)
    if as_json:
        print_json(explanation.to_dict())
    else:
        print_text(results(), explanation.to_text())


def _explain(
    problem: Problem, device_name: str | None, workspace_limit: int | None
) -> tuple[Explanation, list[Winner]]:
    """What the dispatcher of a training process says, and the Pareto front behind it."""
    from flce_tune.cli.database import load_settings, open_for_reading
    from flce_tune.cli.targets import find_device, known_devices
    from flce_tune.dispatch.default import build_dispatcher

    config = load_settings()
    limit = config.workspace_limit if workspace_limit is None else workspace_limit
    store = open_for_reading()
    with store or nullcontext():
        device = find_device(device_name, known_devices(store))
        explanation = build_dispatcher(config).explain(problem, device, workspace_limit=limit)
        winner = explanation.choice.winner
        return explanation, _front_of(winner, store) if winner is not None else []


def _front_of(winner: Winner, store: Store | None) -> list[Winner]:
    from flce_tune import pretuned

    device, problem = winner.measurement.device, winner.measurement.problem
    stored = store.winners(device=device, problem=problem) if store is not None else []
    shipped = [
        other
        for other in pretuned.winners()
        if (other.measurement.device, other.measurement.problem) == (device, problem)
    ]
    for front in (stored, shipped):
        if winner in front:
            return front
    return [winner]


def _best_view(explanation: Explanation, winner: Winner, front: list[Winner]) -> dict[str, Any]:
    from flce_tune.cli.views import device_view, problem_view, winner_view
    from flce_tune.dispatch.convert import device_record
    from flce_tune.kernels import strategies

    choice = explanation.choice
    return {
        "config": choice.config.to_dict(),
        "rule": choice.rule,
        "detail": choice.detail,
        "expected_ms": winner.measurement.median_ms,
        "workspace_bytes": strategies.workspace(choice.config, explanation.problem),
        "device": device_view(device_record(explanation.device)),
        "problem": problem_view(explanation.problem),
        "winner": winner_view(winner),
        "front": [winner_view(other) for other in front],
    }
