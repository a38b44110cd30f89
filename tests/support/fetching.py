"""What a rank does in tests of snapshots that ranks share."""

from pathlib import Path
from typing import Any

import torch.distributed as dist

from flce_tune.dispatch.ranks import first_says
from flce_tune.dispatch.remote import RemoteSnapshots
from flce_tune.errors import ServiceError
from flce_tune.tuning_db.records import DeviceRecord


def fetch(_group: Any, url: str, folder: str, device: DeviceRecord) -> tuple[str, str, int]:
    """Fingerprint and source of this rank's snapshot, and how many copies its host has then."""
    cache = Path(folder) / f"host-{dist.get_rank()}"
    snapshot = RemoteSnapshots(url, cache, timeout_s=1.0).fetch(device)
    return snapshot.fingerprint, snapshot.source, len(list(cache.glob("*.json")))


def fail(_group: Any, url: str, folder: str, device: DeviceRecord) -> str:
    """What this rank is told when there is no snapshot."""
    try:
        fetch(_group, url, folder, device)
    except ServiceError as error:
        return str(error)
    return "no error"


def ask_beside_one_who_died(_group: Any, question: str) -> str:
    """What comes of a question that another rank took on and never answered."""
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        store.add(f"flce_tune/{question}/asked", 1)
    dist.barrier(_group)
    return first_says(question, lambda: f"rank {dist.get_rank()}", wait_s=0.1)
