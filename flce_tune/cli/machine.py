"""``flce-tune devices``, ``presets`` and ``space``: what there is to tune."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from flce_tune.cli import options

if TYPE_CHECKING:
    from flce_tune.kernels.config import Config
    from flce_tune.kernels.problem import Device, Problem

REASONS_SHOWN = 5
"""Of each strategy, unless --list asks for all."""


def devices(as_json: options.JsonOption = False) -> None:
    """List the devices of this machine, and those with stored or shipped results."""
    import torch

    from flce_tune.cli.console import print_json, results, table
    from flce_tune.cli.database import open_for_reading
    from flce_tune.cli.targets import known_devices
    from flce_tune.cli.units import format_bytes
    from flce_tune.cli.views import device_view
    from flce_tune.dispatch.convert import device_record
    from flce_tune.kernels.problem import describe_device

    here: dict[str, list[str]] = {}
    records = {}
    names = [*(f"cuda:{index}" for index in range(torch.cuda.device_count())), "cpu"]
    for name in names:
        record = device_record(describe_device(torch.device(name)))
        view = device_view(record)
        records[view["id"]] = record
        here.setdefault(view["id"], []).append(name)
    store = open_for_reading()
    counts: dict[str, int] = {}
    try:
        for record in known_devices(store):
            slug = device_view(record)["id"]
            records.setdefault(slug, record)
            counts[slug] = store.count_measurements(device=record) if store is not None else 0
    finally:
        if store is not None:
            store.close()
    views = [
        device_view(record) | {"here": here.get(slug, []), "measurements": counts.get(slug, 0)}
        for slug, record in records.items()
    ]
    if as_json:
        print_json(views)
        return
    numbers = ("SMs", "memory", "measurements")
    made = table("here as", "device", "architecture", *numbers, "id", right=numbers)
    for view in views:
        made.add_row(
            ", ".join(view["here"]) or "–",
            view["name"],
            view["architecture"],
            str(view["sm_count"]),
            format_bytes(view["memory_bytes"] or None),
            str(view["measurements"]),
            view["id"],
        )
    results().print(made)


def presets(as_json: options.JsonOption = False) -> None:
    """List the models that --preset knows."""
    from flce_tune.cli.console import print_json, results, table
    from flce_tune.sweep.presets import PRESETS

    if as_json:
        print_json(
            [
                {
                    "name": preset.name,
                    "hidden": preset.hidden,
                    "vocab": preset.vocab,
                    "softcap": preset.softcap,
                    "logit_scale": preset.logit_scale,
                    "tokens": list(preset.tokens),
                    "dtype": preset.dtype,
                    "features": list(preset.features),
                }
                for preset in PRESETS.values()
            ]
        )
        return
    numbers = ("D", "V", "softcap")
    made = table("preset", *numbers, "dtype", "tokens", right=numbers)
    for preset in PRESETS.values():
        made.add_row(
            preset.name,
            str(preset.hidden),
            str(preset.vocab),
            "–" if preset.softcap is None else f"{preset.softcap:g}",
            preset.dtype,
            ", ".join(map(str, preset.tokens)),
        )
    results().print(made)


def space(
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
    strategy: options.StrategyOption = None,
    list_all: Annotated[bool, typer.Option("--list", help="Every config.")] = False,
    as_json: options.JsonOption = False,
) -> None:
    """Say which configs the strategies propose for a sweep, and what was pruned and why.

    Where GEMMs have tiles, a sweep also measures combinations of the proposed ones.
    """
    from flce_tune.cli.console import print_json, results
    from flce_tune.cli.database import open_for_reading
    from flce_tune.cli.selection import Selection
    from flce_tune.cli.targets import find_device, known_devices
    from flce_tune.cli.units import split_commas
    from flce_tune.cli.views import problem_text
    from flce_tune.kernels import strategies

    problem = Selection(
        preset, from_model, tokens, hidden, vocab, dtype, mode, accumulate, features
    ).problem()
    store = open_for_reading()
    try:
        target = find_device(device, known_devices(store))
    finally:
        if store is not None:
            store.close()
    found = {
        name: strategies.space_with_reasons(problem, target, strategy=name)
        for name in split_commas(strategy) or strategies.names()
    }
    if as_json:
        print_json(_space_view(problem, target, found))
        return
    results().print(f"{problem_text(problem)} on {target.name} ({target.architecture})")
    for name, proposed in found.items():
        _print_strategy(name, proposed, problem, list_all)


def _print_strategy(
    name: str, proposed: list[tuple[Config, str | None]], problem: Problem, list_all: bool
) -> None:
    from collections import Counter

    from flce_tune.cli.console import print_text, results
    from flce_tune.cli.units import format_bytes
    from flce_tune.kernels import strategies

    console = results()
    reasons = Counter(reason for _, reason in proposed if reason is not None)
    pruned = reasons.total()
    console.print(f"{name}: {len(proposed) - pruned} proposed, {pruned} pruned", style="bold")
    if list_all:
        for config, reason in proposed:
            note = format_bytes(strategies.workspace(config, problem)) if reason is None else reason
            print_text(console, f"  {config}: {note}")
        return
    for reason, count in reasons.most_common(REASONS_SHOWN):
        print_text(console, f"  {count} × {reason}")
    if len(reasons) > REASONS_SHOWN:
        console.print(f"  and {len(reasons) - REASONS_SHOWN} more reasons; --list shows all")


def _space_view(
    problem: Problem, device: Device, found: dict[str, list[tuple[Config, str | None]]]
) -> dict[str, object]:
    from flce_tune.cli.views import device_view, problem_view
    from flce_tune.dispatch.convert import device_record
    from flce_tune.kernels import strategies

    return {
        "problem": problem_view(problem),
        "device": device_view(device_record(device)),
        "strategies": {
            name: {
                "configs": [
                    {
                        "config": config.to_dict(),
                        "workspace_bytes": strategies.workspace(config, problem),
                    }
                    for config, reason in proposed
                    if reason is None
                ],
                "pruned": [
                    {"config": config.to_dict(), "reason": reason}
                    for config, reason in proposed
                    if reason is not None
                ],
            }
            for name, proposed in found.items()
        },
    }
