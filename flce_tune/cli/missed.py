"""``flce-tune sweep --missed``: from recorded misses to problems."""

from __future__ import annotations

import torch
import typer

from flce_tune.cli.console import print_note
from flce_tune.cli.database import open_for_reading
from flce_tune.cli.exits import NothingFoundError
from flce_tune.cli.selection import NO_SELECTION, Selection
from flce_tune.cli.views import problem_text
from flce_tune.dispatch.convert import device_record, problem_of
from flce_tune.kernels.problem import Problem, describe_device
from flce_tune.tuning_db.records import Miss


def missed_problems(selection: Selection, device: torch.device) -> list[Problem]:
    """The problems recorded as missed on ``device``, the most frequent first.

    Raises:
        NothingFoundError: there are none.
        typer.BadParameter: ``selection`` names a problem as well.
    """
    if selection != NO_SELECTION:
        raise typer.BadParameter(
            "--missed takes the problems from the database; leave out the options of a problem"
        )
    record = device_record(describe_device(device))
    store = open_for_reading()
    misses: list[Miss] = []
    if store is not None:
        with store:
            misses = store.misses(record)
    problems = [problem for miss in misses if (problem := _problem(miss)) is not None]
    if not problems:
        raise NothingFoundError(
            f"no missed problems are recorded for {record.name}; training records them when it "
            "ends, in a database file that is there already"
        )
    return problems


def _problem(miss: Miss) -> Problem | None:
    try:
        return problem_of(miss.problem, miss.tokens)
    except ValueError as error:
        print_note(f"left out {problem_text(miss.problem)}: {error}")
        return None
