"""What training asks and tells a service.

Snapshots are fetched once, kept on disk, and used from there when the service is away. Misses are
sent when the process ends.

With the standard library, not ``flce_tune.client``: training needs no HTTP package, and this
never tries twice, for a training job does not wait.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import cast

from flce_tune.dispatch import ranks
from flce_tune.dispatch.convert import device_slug
from flce_tune.dispatch.snapshot import Snapshot, without_password
from flce_tune.errors import ServiceError
from flce_tune.tuning_db.records import DeviceRecord, Miss

TIMEOUT_S = 2.0  # for the connection, and for each wait for more data
DEADLINE_S = 2.0  # for the whole answer, once it begins
_SLACK_S = 1.0  # for reading it, before the other ranks ask for themselves
_BLOCK = 1 << 16
_BATCH = 500  # misses at once: the service takes 1,000, and 1 MiB


@dataclass(frozen=True, slots=True)
class _Copy:
    """A document as the service sent it."""

    etag: str
    document: str


@dataclass(frozen=True, slots=True)
class _Told:
    """What came of asking, as ranks tell it to each other."""

    source: str = ""
    document: str | None = None  # None: there is nothing for this device
    etag: str | None = None  # of a document that is new
    error: str | None = None


class RemoteSnapshots:
    """Reads ``GET {base_url}/v1/snapshots/{device_slug}``.

    Args:
        base_url: of the service, http or https.
        cache_dir: where copies are kept; one that cannot be written is done without.
        token: sent as bearer token, to that service alone.
    """

    def __init__(
        self,
        base_url: str,
        cache_dir: Path,
        *,
        token: str | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self._base_url = base_url.rstrip("/")
        self._cache_dir = cache_dir
        self._token = token
        self._timeout_s = timeout_s

    def fetch(self, device: DeviceRecord) -> Snapshot:
        """The service's snapshot for a device, or the copy of it from last time.

        Ranks of one job get the same: the first to come here asks.

        Raises:
            ServiceError: the service gives no usable answer and there is no copy either.
        """
        url = f"{self._base_url}/v1/snapshots/{device_slug(device)}"
        name = hashlib.sha256(url.encode()).hexdigest()[:16]
        path = self._cache_dir / f"{name}.json"
        patience = DEADLINE_S + self._timeout_s + _SLACK_S
        text = ranks.first_says(f"snapshot/{name}", lambda: self._ask(url, path), wait_s=patience)
        told = _Told(**json.loads(text))
        if told.error is not None:
            raise ServiceError(told.error)
        if told.document is None:
            return Snapshot.empty(told.source)
        snapshot = Snapshot.from_json(told.document, told.source)
        if told.etag is not None:
            _write_copy(path, _Copy(told.etag, told.document))
        return snapshot

    def _ask(self, url: str, path: Path) -> str:
        """Ask the service, and write down what came of it."""
        shown = without_password(url)
        copy = _read_copy(path)
        try:
            answer = self._get(url, shown, copy)
        except (OSError, HTTPException, ValueError) as error:
            if copy is None:
                told = _Told(error=f"no snapshot from {shown}, nor a copy of one: {error}")
            else:
                told = _Told(f"{shown} (copy from last time)", copy.document)
        else:
            if answer is None:
                told = _Told(f"{shown} (nothing for this device)")
            elif answer is copy:
                told = _Told(f"{shown} (unchanged since last time)", answer.document)
            else:
                told = _Told(shown, answer.document, answer.etag)
        return json.dumps(asdict(told))

    def _get(self, url: str, shown: str, copy: _Copy | None) -> _Copy | None:
        """Ask the service; ``copy`` itself if it is still right, None for an unknown device."""
        request = _request(url, self._token)
        if copy is not None and copy.etag:
            request.add_header("If-None-Match", copy.etag)
        try:
            opened = urllib.request.urlopen(request, timeout=self._timeout_s)
        except urllib.error.HTTPError as error:
            with error:
                if error.code == 304 and copy is not None:
                    return copy
                if error.code == 404 and _is_problem(error):
                    return None
                raise
        with cast(HTTPResponse, opened) as response:
            document = _read_within(response, DEADLINE_S).decode()
            etag = response.headers.get("ETag", "")
        Snapshot.from_json(document, shown)  # one that cannot be read is no answer
        return _Copy(etag, document)


def report_misses(
    base_url: str,
    misses: Sequence[Miss],
    *,
    token: str | None = None,
    timeout_s: float = TIMEOUT_S,
) -> None:
    """Send misses to ``POST {base_url}/v1/misses``, in batches.

    Raises:
        OSError, HTTPException, ValueError: the service did not take them, or not all.
    """
    for start in range(0, len(misses), _BATCH):
        told = [_told(miss) for miss in misses[start : start + _BATCH]]
        request = _request(f"{base_url.rstrip('/')}/v1/misses", token)
        request.add_header("Content-Type", "application/json")
        request.data = json.dumps({"misses": told}).encode()
        urllib.request.urlopen(request, timeout=timeout_s).close()


def _told(miss: Miss) -> dict[str, object]:
    problem = asdict(miss.problem)
    del problem["token_bucket"]
    return {
        "device": asdict(miss.device),
        "problem": problem | {"tokens": miss.tokens},
        "count": miss.count,
    }


def _request(url: str, token: str | None) -> urllib.request.Request:
    if not url.startswith(("http://", "https://")):
        raise ValueError("the service's URL must begin with http:// or https://")
    request = urllib.request.Request(url, headers={"Accept": "application/json"})
    if token is not None:
        request.add_unredirected_header("Authorization", f"Bearer {token}")
    return request


def _is_problem(error: urllib.error.HTTPError) -> bool:
    """Whether our service said so, rather than whatever else lives at a mistyped URL."""
    return str(error.headers.get("Content-Type", "")).startswith("application/problem+json")


def _read_within(response: HTTPResponse, seconds: float) -> bytes:
    end = time.monotonic() + seconds
    blocks = []
    while block := response.read1(_BLOCK):
        blocks.append(block)
        if time.monotonic() > end:
            raise TimeoutError(f"the answer took longer than {seconds} s")
    return b"".join(blocks)


def _read_copy(path: Path) -> _Copy | None:
    """The copy at ``path``; None if there is none, or a damaged one."""
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        copy = _Copy(str(stored["etag"]), str(stored["document"]))
        Snapshot.from_json(copy.document, str(path))
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return copy


def _write_copy(path: Path, copy: _Copy) -> None:
    """Replace the copy in one step; a folder that cannot be written is no fault."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, draft = tempfile.mkstemp(dir=path.parent, suffix=".part")
    except OSError:
        return
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(asdict(copy), file)
        os.replace(draft, path)
    except OSError:
        Path(draft).unlink(missing_ok=True)
