"""A site of several places that are all this CPU, for the process of a job."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from flce_tune.sweep.places import LocalPlace, Place


@dataclass(frozen=True)
class ManyCpus:
    names: tuple[str, ...]

    @contextmanager
    def places(self, problems: int) -> Iterator[Sequence[Place]]:
        cpu = torch.device("cpu")
        names = self.names[:problems]
        yield [LocalPlace(cpu, name=name, shares=len(names)) for name in names]
