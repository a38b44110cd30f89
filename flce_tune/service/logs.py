"""Logs as one JSON object a line, each with the id of the request it belongs to."""

from __future__ import annotations

import contextvars
import json
import logging
from datetime import datetime, timezone

request_id: contextvars.ContextVar[str | None] = contextvars.ContextVar("request_id", default=None)
"""Of the request being answered; threads that work for it see it, too."""


class JsonFormatter(logging.Formatter):
    """Time, level, logger, message, request id; then what came as ``extra={"fields": {...}}``."""

    def format(self, record: logging.LogRecord) -> str:
        """Write one line."""
        time = datetime.fromtimestamp(record.created, timezone.utc)
        line: dict[str, object] = {
            "time": time.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if (current := request_id.get()) is not None:
            line["request_id"] = current
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def configure() -> None:
    """Send the logs of this process, uvicorn's included, to stderr as JSON lines."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    for chatty in ("httpx", "alembic"):  # a line per request, and per revision of each job's file
        logging.getLogger(chatty).setLevel(logging.WARNING)
