"""Sixteen writers and sixteen readers on one database for a while: nobody fails, no row is lost."""

import multiprocessing
import time
from collections import Counter

import pytest

from flce_tune.tuning_db.maintenance import check_integrity
from flce_tune.tuning_db.records import Winner
from flce_tune.tuning_db.store import Store

FORK = multiprocessing.get_context("fork")
EACH = 16


@pytest.mark.timeout(300)
@pytest.mark.parametrize("seconds", [2, pytest.param(60, marks=pytest.mark.soak)])
def test_sixteen_writers_and_sixteen_readers(url, measured, device, problem, seconds):
    Store.open(url).close()
    together = FORK.Barrier(2 * EACH)

    def write(number, pipe):
        with Store.open(url) as store:
            together.wait(60)
            end, rows, longest = time.monotonic() + seconds, 0, 0.0
            while (start := time.monotonic()) < end:
                stored = store.add_measurement(measured(1.0 + rows, message=f"{number}/{rows}"))
                rows += 1
                if rows % 10 == 0:
                    store.set_winners(device, problem, [Winner(stored)])
                longest = max(longest, time.monotonic() - start)
        pipe.send((rows, longest))

    def read(_, pipe):
        with Store.open(url, create=False, read_only=True) as store:
            together.wait(60)
            end, seen, longest = time.monotonic() + seconds, [0], 0.0
            while (start := time.monotonic()) < end:
                seen.append(store.count_measurements())
                store.winners(device=device, problem=problem)
                longest = max(longest, time.monotonic() - start)
        assert seen == sorted(seen), "what was there once is there for good"
        pipe.send((len(seen) - 1, longest))

    started = []
    for target, number in [(role, n) for role in (write, read) for n in range(EACH)]:
        ours, theirs = FORK.Pipe(duplex=False)
        process = FORK.Process(target=target, args=(number, theirs), daemon=True)
        process.start()
        theirs.close()
        started.append((process, ours))
    results = [pipe.recv() for _, pipe in started]  # EOFError: that process failed, see stderr
    for process, _ in started:
        process.join()
        assert process.exitcode == 0
    written, reads = results[:EACH], results[EACH:]
    assert all(rows > 0 for rows, _ in results), "everybody got on"
    with Store.open(url) as store:
        found = Counter(m.message for m in store.measurements())
    assert found == {f"{n}/{r}": 1 for n, (rows, _) in enumerate(written) for r in range(rows)}
    assert check_integrity(url) == []
    for name, counts in (("rows", written), ("reads", reads)):
        rate = sum(count for count, _ in counts) / seconds
        longest = max(wait for _, wait in counts)
        print(f"{rate:.0f} {name}/s by {EACH} processes, the longest took {longest:.2f} s")
