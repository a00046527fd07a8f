"""The log of a process, as lines for people or as one JSON object a line; and what the log says of a request."""

from __future__ import annotations

import json
import logging
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from archerfish.errors import ArcherfishError

if TYPE_CHECKING:
    from starlette.types import Scope

access_logger = logging.getLogger("archerfish.access")
MAX_SHOWN = 200  # characters of a member in a line for people, and of an error message


class JSONFormatter(logging.Formatter):
    """Writes a record as a JSON object: its attribute `members`, or else its message."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self.process = process

    def format(self, record: logging.LogRecord) -> str:
        moment = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        head = {"time": moment, "level": record.levelname.lower(), "process": self.process, "logger": record.name}
        found = {**head, **(getattr(record, "members", None) or {"message": record.getMessage()})}
        if record.exc_info:
            found["exception"] = self.formatException(record.exc_info)
        return json.dumps(found, default=str)


def set_up_log(process: str, log_format: str, level: str = "info") -> None:
    """Send the log of this process to standard error. process: its name in the lines."""
    handler, plain = logging.StreamHandler(), logging.Formatter(f"%(asctime)s {process} %(levelname)s %(message)s")
    handler.setFormatter(JSONFormatter(process) if log_format == "json" else plain)
    logging.basicConfig(level=level.upper(), handlers=[handler])


@dataclass(slots=True)
class EngineTimes:
    """Where the time of one request to the engine went. Moments are by time.monotonic of this process; 0: not yet.

    The engine states durations by its own clock. For an answer that was broken off after its first part, decode is
    taken from this process's clock.
    """

    sent_at: float = 0.0
    first_at: float = 0.0  # of the first message that came back
    last_at: float = 0.0
    stated_ms: dict[str, float] | None = None

    def received(self, metrics: dict[str, float]) -> None:
        """A message has come, with these metrics of the engine."""
        self.last_at = time.monotonic()
        self.first_at = self.first_at or self.last_at
        if metrics:
            self.stated_ms = metrics

    def phases_ms(self) -> dict[str, float]:
        """The durations of queue, prefill and decode; empty if the engine has stated none."""
        stated = self.stated_ms
        if not stated:
            return {}
        decode_ms = stated.get("decode_ms", 1000 * (self.last_at - self.first_at))
        return {"queue_ms": stated["queue_ms"], "prefill_ms": stated["prefill_ms"], "decode_ms": decode_ms}


def last_times(scope: Scope) -> EngineTimes | None:
    """The times of the request to the engine whose answer ended last."""
    found: list[EngineTimes] = scope["state"]["engine_times"]
    return max(found, key=lambda times: times.last_at, default=None)


def request_members(scope: Scope, status: int, seconds: float) -> dict[str, Any]:
    """What the log says of a request, without what it asked. network_ms: what the engine's phases leave of ms."""
    state = scope["state"]
    tenant = state["tenant"]
    error = state["error"]
    times = last_times(scope)
    members: dict[str, Any] = {"id": state["request_id"], "method": scope["method"], "path": scope["path"]}
    members |= {"route": getattr(scope.get("route"), "path", "other"), "status": status}
    members |= {"tenant": "-" if tenant is None else tenant.name, **state["log"], "ms": round(1000 * seconds, 3)}
    phases = {} if times is None else {name: round(ms, 3) for name, ms in times.phases_ms().items()}
    if phases:
        members |= {**phases, "network_ms": round(members["ms"] - sum(phases.values()), 3)}
    if error is not None:
        members["code"] = error if isinstance(error, str) else getattr(error, "code", type(error).__name__)
        if isinstance(error, ArcherfishError):
            members["reason"] = error.message[:MAX_SHOWN]
    return members


def access_line(members: dict[str, Any]) -> str:
    """The members of a request in a line for people. Callers' characters are escaped."""
    apart = ("id", "code", "method", "path", "route", "status", "reason")
    rest = {
        name: members[name]
        for name in (*(name for name in members if name not in apart), "id", "code")
        if name in members
    }
    shown = [f"{name}={quote(str(value)[:MAX_SHOWN], '/:,')}" for name, value in rest.items()]
    reason = f" reason={json.dumps(members['reason'])}" if "reason" in members else ""
    return f"{members['method']} {quote(members['path'][:MAX_SHOWN])} {members['status']} {' '.join(shown)}{reason}"


def log_request(members: dict[str, Any]) -> None:
    """Write the line of a request."""
    if access_logger.isEnabledFor(logging.INFO):
        access_logger.info("%s", access_line(members), extra={"members": members})
