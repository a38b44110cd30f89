"""``flce-tune gc``."""

from __future__ import annotations

from typing import Annotated

import typer

from flce_tune.cli import options
from flce_tune.cli.exits import NothingFoundError


def gc(
    older_than: Annotated[
        float | None,
        typer.Option(
            "--older-than",
            metavar="DAYS",
            min=0,
            help="Also timed measurements of this age that are no winners. Default: only those of "
            "kernels and libraries that no winner was measured with.",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say how many, and delete nothing.")
    ] = False,
    as_json: options.JsonOption = False,
) -> None:
    """Delete measurements that nothing needs any more.

    Winners stay, and so do failures that keep the next sweep from trying the same again.
    """
    import dataclasses
    from datetime import timedelta

    import torch

    from flce_tune.cli.console import print_json, results
    from flce_tune.cli.database import open_for_reading, open_for_writing
    from flce_tune.cli.targets import local_device
    from flce_tune.dispatch.convert import toolchain_record

    store = open_for_reading()
    if store is None:
        raise NothingFoundError("there is no tuning database yet; flce-tune sweep makes one")
    if not dry_run:
        store.close()
        store = open_for_writing()
    here = {toolchain_record(device) for device in (torch.device("cpu"), local_device(None))}
    age = None if older_than is None else timedelta(days=older_than)
    with store:
        report = store.trim(older_than=age, in_use=here, dry_run=dry_run)
    if as_json:
        print_json({**dataclasses.asdict(report), "dry_run": dry_run})
        return
    results().print(
        f"{'would delete' if dry_run else 'deleted'} {report.abandoned} measurements of toolchains "
        f"without winners and {report.old} old ones, {report.kept} stay"
    )
