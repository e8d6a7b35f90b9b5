"""Log lines to stderr, for people or as JSON. One line per request; never a body, a key or a header value."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any

from ..errors import KVStreamError
from .stream import Stream, outcome_of, outcome_of_refusal

request_log = logging.getLogger("kvstream.request")


class JsonFormatter(logging.Formatter):
    """One JSON object per line; ``extra={"fields": {...}}`` of a record becomes keys."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{record.msecs:03.0f}Z",
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        line.update(getattr(record, "fields", {}))
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class TextFormatter(logging.Formatter):
    """``12:30:01 INFO  engine  message``, with the fields of a record appended as ``key=value``."""

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        text = f"{clock} {record.levelname:<7} {record.name.removeprefix('kvstream.'):<8} {record.getMessage()}"
        fields = getattr(record, "fields", {})
        if fields:
            # the outcome is the message already
            text += " " + " ".join(f"{k}={v}" for k, v in fields.items() if v is not None and k != "outcome")
        if record.exc_info:
            text += "\n" + self.formatException(record.exc_info)
        return text.replace("\r", " ")


def set_up_logging(level: str, style: str) -> None:
    """Send ``kvstream`` loggers to stderr. Other libraries are heard from WARNING on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if style == "json" else TextFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("kvstream").setLevel(level)


def backend_logger(name: str) -> logging.Logger:
    """What a lane says about its backend; its name is in the logger's."""
    return logging.getLogger("kvstream.backend" if name in ("", "default") else f"kvstream.backend.{name}")


def log_request(stream: Stream, error: KVStreamError | None, backend: str) -> None:
    """The one line per request: what it was, how it ended, how long it waited, what it cost. ``backend`` is its
    lane's name."""
    if not request_log.isEnabledFor(logging.INFO):
        return

    def ms(end: float | None, start: float | None) -> int | None:
        return None if end is None or start is None else round((end - start) * 1000)

    usage, lease = stream.usage, stream.lease
    stood_s = stream.stood_s + (0.0 if stream.stopped_at is None or stream.ended is None
                                else stream.ended - stream.stopped_at)
    outcome = outcome_of(stream, error)
    request_log.info("%s", outcome, extra={"fields": {
        "id": stream.name, "backend": backend, "route": stream.request.route, "outcome": outcome,
        "error": error.code if error else None,
        "phase": stream.phase,
        "stream": stream.request.stream, "queue_ms": ms(stream.granted or stream.ended, stream.arrived),
        "ttft_ms": ms(stream.first_token, stream.arrived), "total_ms": ms(stream.ended, stream.arrived),
        "prompt_tokens": usage.prompt if usage else stream.tokens_prompt, "counted": stream.count_source.value,
        "cached_expected": lease.tokens_cached if lease else None, "cached": usage.cached if usage else None,
        "answer_tokens": usage.completion if usage else stream.tokens, "finish": stream.finish_reason,
        "prompt_from": stream.how, "preempted": stream.preempted or None,
        "stood_ms": round(stood_s * 1000) if stream.preempted else None,
    }})


def log_passed(name: str, route: str, seconds: float, outcome: str = "served") -> None:
    """The same for a call that needed no seat."""
    request_log.info("%s", outcome, extra={"fields": {
        "id": name, "route": route, "outcome": outcome, "total_ms": round(seconds * 1000)}})


def log_turned_away(name: str, route: str, error: KVStreamError) -> None:
    """The same for a request that never had a place in the queue."""
    outcome = outcome_of_refusal(error)
    request_log.info("%s", outcome, extra={"fields": {
        "id": name, "route": route, "outcome": outcome, "error": error.code, "status": error.status}})


def log_shared(name: str, route: str, outcome: str, *, source: str) -> None:
    """The same for a request that had no call of its own; ``source`` is the one whose call it shared, or the cache."""
    request_log.info("%s", outcome, extra={"fields": {"id": name, "route": route, "outcome": outcome, "from": source}})
