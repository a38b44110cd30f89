"""Real text that comes with every Python: the topics of its manual that help() shows."""

from __future__ import annotations

import random
from pydoc_data.topics import topics

import torch
from torch import Tensor


def articles() -> list[tuple[str, str]]:
    """(name, text) of each topic, in an order that is random but always the same."""
    found = sorted(topics.items())
    random.Random(0).shuffle(found)
    return found


def byte_windows(length: int) -> Tensor:
    """The whole text as windows of byte values, [windows, length] int64."""
    raw = "\n\n".join(text for _, text in articles()).encode()
    ids = torch.frombuffer(bytearray(raw), dtype=torch.uint8).long()
    return ids[: len(ids) // length * length].view(-1, length)
