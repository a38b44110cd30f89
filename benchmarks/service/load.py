"""Put the service under load from a second process, and say what came of it.

    python benchmarks/service/load.py sqlite:////tmp/load.sqlite3
    python benchmarks/service/load.py postgresql://user@host/an_empty_database

The database must be new: it is filled with measurements through POST /v1/import. Configs are asked
of one service process, then of two at addresses of their own, as behind a proxy. Prints a JSON
object; times are milliseconds unless they say otherwise.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

from client import Connection, events, quantile
from document import write_document

from flce_tune.tuning_db.records import Winner
from flce_tune.tuning_db.store import Store

SERVE = """
import json, sys
from flce_tune.service.app import run
from flce_tune.service.settings import ServiceSettings
run(ServiceSettings(**json.loads(sys.argv[1])))
"""

JOB = json.dumps(
    {"device": "cpu", "problems": [{"tokens": 64, "hidden": 32, "vocab": 128, "dtype": "float32"}]}
).encode()


def main() -> None:
    """Fill, serve, ask, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("url", help="of a new database")
    parser.add_argument("--measurements", type=int, default=100_000)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--connections", type=int, default=16)
    parser.add_argument("--processes", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--listeners", type=int, default=200)
    options = parser.parse_args()
    Store.open(options.url).close()
    found = machine() | {"import": fill(options.url, options.measurements)}
    for count in options.processes:
        with serving(options.url, count) as (ports, _):
            best = asyncio.run(ask_for_configs(ports, options.seconds, options.connections))
            found[f"best, {count} processes"] = best
    with serving(options.url, 1) as ((port,), (process,)):
        found["jobs"] = asyncio.run(submit_jobs(port, options.jobs))
        found["events"] = asyncio.run(listen(port, options.url, options.listeners))
        found["service_mib"] = resident_mib(process.pid)
    found["load_after"] = os.getloadavg()[0]
    print(json.dumps(found, indent=2))


def fill(url: str, count: int) -> list[dict[str, object]]:
    """Upload a tenth of the measurements, all of them, and all again, each to a new service."""
    reports = []
    for part in (count // 10, count, count):
        path = Path(f"/tmp/flce-tune-load-{os.getpid()}.json")
        write_document(path, part)
        with serving(url, 1) as ((port,), (process,)):
            before, worked = resident_mib(process.pid), cpu_seconds(process.pid)
            report = asyncio.run(import_(port, path.read_bytes()))
            report["cpu_seconds"] = round(cpu_seconds(process.pid) - worked, 1)
            report |= {"mib_before": before, "peak_mib": peak_mib(process.pid)}
        reports.append({"measurements": part, **report})
        path.unlink()
    with Store.open(url) as store:
        for device in store.devices():
            for problem in store.problems(device):
                first = store.measurements(device=device, problem=problem, limit=3)
                store.set_winners(device, problem, [Winner(m, 20.0, 25.0) for m in first])
    return reports


@contextmanager
def serving(url: str, count: int) -> Iterator[tuple[list[int], list[subprocess.Popen[bytes]]]]:
    """Services, each a process of its own; they take no jobs, so that those stay queued."""
    ports, processes = [], []
    try:
        for _ in range(count):
            port = free_port()
            settings = {"database_url": url, "port": port, "run_jobs": False}
            command = [sys.executable, "-P", "-c", SERVE, json.dumps(settings)]
            processes.append(subprocess.Popen(command, stderr=subprocess.DEVNULL))
            ports.append(port)
        for port in ports:
            asyncio.run(until_ready(port))
        yield ports, processes
    finally:
        for process in processes:
            process.send_signal(signal.SIGTERM)
            process.wait()


def free_port() -> int:
    """A port nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def machine() -> dict[str, object]:
    """Where and when this was measured."""
    return {
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, Python {sys.version.split()[0]}",
        "load_before": os.getloadavg()[0],
    }


async def until_ready(port: int) -> None:
    while True:
        try:
            async with Connection(port) as connection:
                if (await connection.ask("GET", "/readyz"))[0] == 200:
                    return
        except OSError:
            await asyncio.sleep(0.1)


async def import_(port: int, document: bytes) -> dict[str, object]:
    """Upload a document; how long that took, and how many of its measurements were new."""
    async with Connection(port) as connection:
        began = time.perf_counter()
        status, body = await connection.ask("POST", "/v1/import", document)
        seconds = time.perf_counter() - began
    assert status == 200, body
    return {"added": json.loads(body)["measurements"], "seconds": round(seconds, 1)}


QUESTIONS = [
    f"/v1/configs/best?device=Load+GPU+{gpu}&hidden=4096&vocab={vocab}&tokens={tokens}"
    for gpu in range(4)
    for vocab in (32000, 128256)
    for tokens in (1000, 3000, 4096, 9000, 16384)
]


async def ask_for_configs(ports: list[int], seconds: float, connections: int) -> dict[str, object]:
    """Connections that ask one question after the other, of a kind that repeats."""
    end = time.perf_counter() + seconds
    times: list[float] = []

    async def keep_asking(number: int) -> None:
        async with Connection(ports[number % len(ports)]) as connection:
            while (began := time.perf_counter()) < end:
                number += 1
                status, _ = await connection.ask("GET", QUESTIONS[number % len(QUESTIONS)])
                assert status == 200
                times.append(time.perf_counter() - began)

    await asyncio.gather(*(keep_asking(n) for n in range(connections)))
    return {
        "connections": connections,
        "requests": len(times),
        "per_second": round(len(times) / seconds),
        "p50": quantile(times, 0.5),
        "p99": quantile(times, 0.99),
        "max": quantile(times, 1.0),
    }


async def submit_jobs(port: int, count: int) -> dict[str, object]:
    """Queue jobs from eight connections, then list them all."""
    left = iter(range(count))
    began = time.perf_counter()

    async def submit() -> None:
        async with Connection(port) as connection:
            for _ in left:
                status, _ = await connection.ask("POST", "/v1/jobs", JOB)
                assert status == 202

    await asyncio.gather(*(submit() for _ in range(8)))
    submitted = time.perf_counter() - began
    began, seen, page = time.perf_counter(), 0, "/v1/jobs?state=queued&limit=200"
    async with Connection(port) as connection:
        cursor: str | None = ""
        while cursor is not None:
            _, body = await connection.ask("GET", page + (f"&cursor={cursor}" if cursor else ""))
            answer = json.loads(body)
            seen, cursor = seen + len(answer["items"]), answer["next"]
    listed = time.perf_counter() - began
    return {
        "submitted": count,
        "seconds": round(submitted, 1),
        "listed": seen,
        "listing": round(listed * 1000),
    }


async def listen(port: int, url: str, count: int) -> dict[str, object]:
    """Many listeners of one job; how late each hears of each of ten events."""
    with Store.open(url) as store:
        job = store.jobs(limit=1)[0].id
        streams = [events(port, f"/v1/jobs/{job}/events") for _ in range(count)]
        for stream in streams:
            await anext(stream)  # its "queued": it listens
        delays = []
        for _ in range(10):
            await asyncio.sleep(random.uniform(0.5, 1.5))  # at no particular moment of the poll
            began = time.perf_counter()
            await asyncio.to_thread(store.add_event, job, "progress", {"done": 1})

            async def hear(stream: AsyncIterator[bytes], began: float = began) -> float:
                await anext(stream)
                return time.perf_counter() - began

            delays += await asyncio.gather(*(hear(stream) for stream in streams))
        for stream in streams:
            await stream.aclose()
    return {
        "listeners": count,
        "heard": len(delays),
        "mean": round(statistics.mean(delays) * 1000),
        "p99": quantile(delays, 0.99),
    }


def resident_mib(pid: int) -> int:
    """Memory a process holds, in MiB."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE") >> 20


def cpu_seconds(pid: int) -> float:
    """Processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def peak_mib(pid: int) -> int:
    """The most memory a process ever held, in MiB."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) >> 10


if __name__ == "__main__":
    main()
