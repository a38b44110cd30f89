from collections.abc import Iterator

import pytest
from ranks import Ranks


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Three processes, for groups of one, two or three."""
    processes = Ranks(3, tmp_path_factory.mktemp("ranks") / "rendezvous")
    yield processes
    processes.close()
