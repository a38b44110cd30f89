"""A day of a team's requests and jobs, compressed: what the service holds must not grow.

    python benchmarks/service/soak.py sqlite:////tmp/soak.sqlite3
    python benchmarks/service/soak.py postgresql://user@host/an_empty_database

Asks for configs, results, snapshots and pages, reports misses, submits jobs (``fake_jobs``: they
write rows like a sweep's), follows events, and asks wrongly, too. The
problems are always the same few, as a team's are, so that after a while there is nothing new to
remember. Prints a JSON object with the service's memory and open files, database connections and
sockets among them, after each twentieth, and how fast the memory grew in the second half.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from client import Connection, events
from load import free_port, machine, until_ready

from flce_tune.tuning_db.store import Store

SERVICE = Path(__file__).with_name("fake_jobs.py")
SAMPLES = 20


def main() -> None:
    """Serve, ask, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("url", help="of a new database")
    parser.add_argument("--requests", type=int, default=40_000)
    parser.add_argument("--jobs", type=int, default=400)
    parser.add_argument("--problems", type=int, default=40, help="that jobs are about")
    parser.add_argument("--connections", type=int, default=8)
    options = parser.parse_args()
    Store.open(options.url).close()
    port = free_port()
    settings = {"database_url": options.url, "port": port, "poll_seconds": 0.2}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-P", str(SERVICE), json.dumps(settings), folder]
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        try:
            asyncio.run(until_ready(port))
            soak = Soak(port, process.pid, options.requests, options.jobs, options.problems)
            asyncio.run(soak.run(options.connections))
            ended = wait_for_jobs(options.url)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait()
    found = {**machine(), "requests": options.requests, "answers": soak.answers, "jobs": ended}
    found["kib_per_1000_requests"] = growth(soak.samples[SAMPLES // 2 :])
    print(json.dumps(found | {"samples": soak.samples}, indent=1))


class Soak:
    """So many requests of all kinds from some connections, and what the service holds meanwhile."""

    def __init__(self, port: int, pid: int, requests: int, jobs: int, problems: int) -> None:
        self._port = port
        self._pid = pid
        self._requests = requests
        self._left = iter(range(requests))
        self._every = max(1, requests // jobs)
        self._problems = problems
        self._began = time.monotonic()
        self._last_job = ""
        self.answers: Counter[str] = Counter()
        self.samples: list[dict[str, float]] = []

    async def run(self, connections: int) -> None:
        self._sample(0)
        await asyncio.gather(*(self._keep_asking() for _ in range(connections)))
        await asyncio.sleep(2)
        self._sample(self._requests)

    async def _keep_asking(self) -> None:
        for number in self._left:  # with a new connection after one that was idle for too long
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
                await self._ask_on_one_connection(number)

    async def _ask_on_one_connection(self, first: int) -> None:
        async with Connection(self._port) as connection:
            for number in itertools.chain([first], self._left):
                method, path, body = self._next(number)
                status, answer = await connection.ask(method, path, body)
                assert status < 500, (status, path, answer)
                self.answers[f"{status // 100}xx"] += 1
                if status == 202:
                    self._last_job = json.loads(answer)["id"]
                if number % 500 == 0 and self._last_job:
                    await self._follow(self._last_job)
                if number and number % (self._requests // SAMPLES) == 0:
                    self._sample(number)

    def _next(self, number: int) -> tuple[str, str, bytes]:
        if number % self._every == 0:
            vocab = 1000 + number // self._every % self._problems
            problem = {"tokens": 64, "hidden": 32, "vocab": vocab, "dtype": "float32"}
            body = {"device": "cpu", "problems": [problem]}
            return "POST", "/v1/jobs", json.dumps(body).encode()
        vocab = 1000 + random.randrange(self._requests)
        best = f"/v1/configs/best?hidden=32&vocab={vocab}&tokens=64&dtype=float32"
        choices = [
            *[("GET", best, b"")] * 12,
            ("GET", best.replace("configs/best", "explain"), b""),
            ("GET", "/v1/devices", b""),
            ("GET", f"/v1/winners?vocab={vocab}", b""),
            ("GET", "/v1/measurements?limit=20", b""),
            ("GET", "/v1/jobs?limit=20", b""),
            ("GET", "/metrics", b""),
            ("GET", "/v1/configs/best?tokens=0", b""),
            ("GET", "/v1/snapshots/nobody", b""),
            ("GET", "/nowhere", b""),
            ("POST", "/v1/jobs", b"{"),
            ("POST", "/v1/misses", miss(vocab)),
        ]
        return random.choice(choices)

    async def _follow(self, job: str) -> None:
        """Listen for a moment, and go without a word, as browsers do."""
        stream = events(self._port, f"/v1/jobs/{job}/events")
        await anext(stream)
        await stream.aclose()

    def _sample(self, number: int) -> None:
        self.samples.append(
            {
                "requests": number,
                "seconds": round(time.monotonic() - self._began),
                "mib": round(resident_kib(self._pid) / 1024, 1),
                "files": len(os.listdir(f"/proc/{self._pid}/fd")),
            }
        )


def resident_kib(pid: int) -> int:
    """Memory a process holds, in KiB."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE") >> 10


def growth(samples: list[dict[str, float]]) -> float:
    """KiB per 1,000 requests, of a straight line through the samples."""
    requests, mib = ([sample[name] for sample in samples] for name in ("requests", "mib"))
    return round(statistics.linear_regression(requests, mib).slope * 1024 * 1000, 1)


def miss(vocab: int) -> bytes:
    """A report of a problem nothing was tuned for."""
    device = {"kind": "cpu", "name": "Soak", "capability": "0.0", "sm_count": 1}
    problem = {"tokens": 64, "hidden": 16, "vocab": vocab % 1000 + 1}
    one = {"device": device | {"shared_memory_per_block": 0}, "problem": problem}
    return json.dumps({"misses": [one]}).encode()


def wait_for_jobs(url: str) -> dict[str, int]:
    """Jobs by state, once all have ended."""
    with Store.open(url) as store:
        while True:
            counts = {state.value: count for state, count in store.count_jobs().items() if count}
            if not counts.keys() & {"queued", "running"}:
                return counts
            time.sleep(0.5)


if __name__ == "__main__":
    main()
