"""Winners measured by us, shipped as JSON documents of ``flce_tune.tuning_db.interchange``."""

from __future__ import annotations

import importlib.resources

from flce_tune.tuning_db.records import Winner


def winners() -> list[Winner]:
    """Read every shipped file.

    Raises:
        InterchangeError: one does not validate; the message names the file and the place.
    """
    folder = importlib.resources.files(__name__)
    files = [file for file in folder.iterdir() if file.name.endswith(".json")]
    if not files:
        return []
    from flce_tune.tuning_db.interchange import parse_winners  # pydantic, only for documents

    return [
        winner
        for file in sorted(files, key=lambda file: file.name)
        for winner in parse_winners(file.read_text(encoding="utf-8"), file.name)
    ]
