"""``flce-tune regret``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flce_tune.cli import options
from flce_tune.cli.exits import NothingFoundError

if TYPE_CHECKING:
    from flce_tune.sweep.regret import Regret


def regret(device: options.DeviceOption = None, as_json: options.JsonOption = False) -> None:
    """Say what it would cost to leave each swept problem to the dispatcher's fallback rules.

    Each problem is taken for one that was not swept. Without --device those of all devices.
    """
    from flce_tune.cli.console import print_json
    from flce_tune.cli.database import open_for_reading
    from flce_tune.cli.targets import filter_record
    from flce_tune.sweep.regret import regrets

    store = open_for_reading()
    if store is None:
        raise NothingFoundError("there is no tuning database yet; flce-tune sweep makes one")
    with store:
        record = filter_record(device, store.devices())
        found = regrets(store.measurements(device=record), store.winners())
    if not found:
        raise NothingFoundError("no problem has winners yet; flce-tune sweep finds them")
    if as_json:
        print_json([_as_json(one) for one in found])
    else:
        _print(found)


def _print(found: list[Regret]) -> None:
    import statistics

    from flce_tune.cli.console import print_text, results, table
    from flce_tune.cli.units import format_ms
    from flce_tune.cli.views import problem_text

    numbers = ("ms", "best ms", "cost")
    made = table("problem", "rule", "its choice", *numbers, right=numbers)
    for one in found:
        made.add_row(
            f"{problem_text(one.problem)} on {one.device.name}",
            one.rule,
            str(one.config),
            format_ms(one.ms),
            format_ms(one.best_ms),
            "not measured" if one.cost is None else f"{one.cost:.1%}",
        )
    console = results()
    console.print(made)
    for rule in dict.fromkeys(one.rule for one in found):
        asked = [one for one in found if one.rule == rule]
        costs = [one.cost for one in asked if one.cost is not None]
        text = f"{rule}: {len(costs)} of {len(asked)} choices were measured"
        if costs:
            middle, worst = statistics.median(costs), max(costs)
            text += f"; they cost {middle:.1%} in the median, {worst:.1%} at most"
        print_text(console, text)


def _as_json(one: Regret) -> dict[str, Any]:
    from flce_tune.cli.views import problem_record_view
    from flce_tune.dispatch.convert import device_slug

    return {
        "device": device_slug(one.device),
        "problem": problem_record_view(one.problem),
        "rule": one.rule,
        "config": one.config.to_dict(),
        "ms": one.ms,
        "best_ms": one.best_ms,
        "cost": one.cost,
    }
