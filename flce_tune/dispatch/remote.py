"""Snapshots from a service: fetched once, kept on disk, used from there when it is away.

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
from dataclasses import dataclass, replace
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import cast

from flce_tune.dispatch.convert import device_slug
from flce_tune.dispatch.snapshot import Snapshot, without_password
from flce_tune.errors import ServiceError
from flce_tune.tuning_db.records import DeviceRecord

TIMEOUT_S = 2.0  # for the connection, and for each wait for more data
DEADLINE_S = 10.0  # for the whole answer
_BLOCK = 1 << 16


@dataclass(frozen=True, slots=True)
class _Answer:
    """A document as the service sent it, and what it says."""

    etag: str
    document: str
    snapshot: Snapshot


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

        Raises:
            ServiceError: the service gives no usable answer and there is no copy either.
        """
        url = f"{self._base_url}/v1/snapshots/{device_slug(device)}"
        shown = without_password(url)
        path = self._cache_dir / f"{hashlib.sha256(url.encode()).hexdigest()[:16]}.json"
        copy = _read_copy(path, f"{shown} (copy from last time)")
        try:
            answer = self._get(url, shown, copy)
        except (OSError, HTTPException, ValueError) as error:
            if copy is not None:
                return copy.snapshot
            raise ServiceError(f"no snapshot from {shown}, nor a copy of one: {error}") from error
        if answer is None:
            return Snapshot.empty(f"{shown} (nothing for this device)")
        if answer is copy:
            return replace(answer.snapshot, source=f"{shown} (unchanged since last time)")
        _write_copy(path, answer)
        return answer.snapshot

    def _get(self, url: str, shown: str, copy: _Answer | None) -> _Answer | None:
        """Ask the service; ``copy`` itself if it is still right, None for an unknown device."""
        if not url.startswith(("http://", "https://")):
            raise ValueError("the service's URL must begin with http:// or https://")
        request = urllib.request.Request(url, headers={"Accept": "application/json"})
        if copy is not None and copy.etag:
            request.add_header("If-None-Match", copy.etag)
        if self._token is not None:
            request.add_unredirected_header("Authorization", f"Bearer {self._token}")
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
        return _Answer(etag, document, Snapshot.from_json(document, shown))


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


def _read_copy(path: Path, source: str) -> _Answer | None:
    """The copy at ``path``; None if there is none, or a damaged one."""
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        etag, document = str(stored["etag"]), str(stored["document"])
        return _Answer(etag, document, Snapshot.from_json(document, source))
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _write_copy(path: Path, answer: _Answer) -> None:
    """Replace the copy in one step; a folder that cannot be written is no fault."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, draft = tempfile.mkstemp(dir=path.parent, suffix=".part")
    except OSError:
        return
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump({"etag": answer.etag, "document": answer.document}, file)
        os.replace(draft, path)
    except OSError:
        Path(draft).unlink(missing_ok=True)
