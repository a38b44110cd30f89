"""Where output goes: results to stdout, everything else to stderr.

Rich leaves colours out where they are not wanted (no terminal, ``NO_COLOR``, ``TERM=dumb``).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

PIPED_WIDTH = 200
"""Columns of tables that no terminal limits: wide enough not to fold a config."""


def results() -> Console:
    """The console of results: stdout."""
    return _console(stderr=False)


def messages() -> Console:
    """The console of progress, notes and errors: stderr."""
    return _console(stderr=True)


def _console(*, stderr: bool) -> Console:
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else PIPED_WIDTH
    return Console(stderr=stderr, width=width, highlight=False, markup=False, emoji=False)


def print_json(value: object) -> None:
    """Write a value to stdout as JSON."""
    sys.stdout.write(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def print_error(message: str) -> None:
    """Write one error to stderr."""
    print_text(messages(), Text.assemble(("error: ", "bold red"), (message, "red")))


def print_note(message: str) -> None:
    """Write something worth knowing, but not the result, to stderr."""
    print_text(messages(), Text(message, style="dim"))


def print_text(console: Console, text: str | Text) -> None:
    """Write text, wrapped between words on a terminal and not at all elsewhere."""
    console.print(text, soft_wrap=not console.is_terminal)


def table(*columns: str, title: str | None = None, right: Sequence[str] = ()) -> Table:
    """An empty table; ``right`` names the columns of numbers, which never fold."""
    made = Table(
        title=title,
        box=box.SIMPLE_HEAD,
        title_justify="left",
        title_style="bold",
        pad_edge=False,
    )
    for name in columns:
        if name in right:
            made.add_column(name, justify="right", no_wrap=True)
        else:
            made.add_column(name, overflow="fold")
    return made
