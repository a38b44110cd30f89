"""``flce-tune diff``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flce_tune.cli import options
from flce_tune.cli.exits import NothingFoundError

if TYPE_CHECKING:
    from flce_tune.sweep.comparison import Difference
    from flce_tune.tuning_db.records import Winner

_SIDE = "An export file, or (part of) the name of a device with stored results."


def diff(
    a: Annotated[str, typer.Argument(help=_SIDE)],
    b: Annotated[str, typer.Argument(help=_SIDE)],
    as_json: options.JsonOption = False,
) -> None:
    """Compare the winners of two exports, or of two devices.

    Above 1×, B is faster; ≈ where the confidence intervals overlap.
    """
    from flce_tune.cli.console import print_json
    from flce_tune.sweep.comparison import compare

    left, right = _winners(a), _winners(b)
    differences = compare(left, right)
    if as_json:
        print_json([_as_json(one) for one in differences])
    else:
        _print(differences)
    if not any(one.a and one.b for one in differences):
        raise NothingFoundError(
            f"no problem has winners in both: {len(left)} winners in {a}, {len(right)} in {b}"
        )


def _winners(side: str) -> list[Winner]:
    """The winners of a file if there is one called so, else of a device."""
    from flce_tune.cli.database import open_for_reading
    from flce_tune.cli.interchange import read_export
    from flce_tune.cli.targets import filter_record
    from flce_tune.tuning_db.interchange import parse_winners

    if side == "-" or Path(side).is_file():
        return parse_winners(read_export(Path(side)), "stdin" if side == "-" else side)
    store = open_for_reading()
    if store is None:
        raise NothingFoundError(
            f"{side} is no file, and there is no tuning database yet; flce-tune sweep makes one"
        )
    with store:
        return store.winners(device=filter_record(side, store.devices()))


def _print(differences: list[Difference]) -> None:
    from flce_tune.cli.console import results, table
    from flce_tune.cli.units import format_ms, format_speedup
    from flce_tune.cli.views import config_text, problem_text

    numbers = ("A ms", "B ms", "A/B")
    made = table("problem", *numbers, "A's config", "B's config", right=numbers)
    for one in differences:
        a, b = (side.measurement if side else None for side in (one.a, one.b))
        ratio = format_speedup(a.median_ms if a else None, b.median_ms if b else None)
        title = problem_text(one.problem) + (f" on {one.device.name}" if one.device else "")
        made.add_row(
            title,
            format_ms(a.median_ms if a else None),
            format_ms(b.median_ms if b else None),
            f"≈ {ratio}" if one.within_noise else ratio,
            config_text(a) if a else "–",
            ("the same" if one.same_config else config_text(b)) if b else "–",
        )
    results().print(made)


def _as_json(one: Difference) -> dict[str, Any]:
    from flce_tune.cli.views import problem_record_view, winner_view
    from flce_tune.dispatch.convert import device_slug

    return {
        "problem": problem_record_view(one.problem),
        "device": device_slug(one.device) if one.device else None,
        "a": winner_view(one.a) if one.a else None,
        "b": winner_view(one.b) if one.b else None,
        "ratio": one.ratio,
        "within_noise": one.within_noise,
        "same_config": one.same_config,
    }
