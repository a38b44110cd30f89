"""The command line: ``flce-tune``."""

from __future__ import annotations


def main() -> None:
    """Run ``flce-tune`` with the arguments of this process; exits with a code of ``exits``."""
    from flce_tune.cli.app import app

    app()
