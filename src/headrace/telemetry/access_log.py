"""One structured log line per request: never a key, a prompt or an answer."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import msgspec

_logger = logging.getLogger("headrace.access")


@dataclass(frozen=True, slots=True)
class AccessRecord:
    """What the line says; times in seconds, None where there is nothing to say."""

    request_id: str
    method: str
    path: str
    status: int
    outcome: str
    tenant: str | None
    lane: str | None
    lane_rule: str | None
    prompt_tokens: int
    output_tokens: int
    ttft_s: float | None
    e2e_s: float


def log_access(record: AccessRecord, *, level: int = logging.INFO) -> None:
    """Write the line as one JSON object."""
    if _logger.isEnabledFor(level):
        _logger.log(level, "%s", msgspec.json.encode(record).decode())
