"""Alerts to a webhook in Alertmanager's JSON: one when a breaker opens, again while it is open, one when it closes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

_logger = logging.getLogger(__name__)

RESEND_S: Final = 60.0
"""Alertmanager takes an alert for over when it is not repeated for a while."""

Post = Callable[[bytes], Awaitable[int]]
"""Sends JSON to the webhook and returns the status; raises EngineError or OSError."""


@dataclass(frozen=True, slots=True)
class Alert:
    """One breaker's. ``resolved_at_s`` None: it fires. Wall clock."""

    group: str
    replica: str
    lane: str
    reason: str
    since_s: float
    resolved_at_s: float | None = None

    @property
    def key(self) -> tuple[str, str, str]:
        return self.group, self.replica, self.lane


def alertmanager_json(alerts: list[Alert], version: str) -> bytes:
    """The body of a POST to Alertmanager's /api/v2/alerts."""
    return msgspec.json.encode([_one(alert, version) for alert in alerts])


def _one(alert: Alert, version: str) -> dict[str, Any]:
    described: dict[str, Any] = {
        "labels": {
            "alertname": "HeadraceBreakerOpen",
            "severity": "warning",
            "group": alert.group,
            "replica": alert.replica,
            "lane": alert.lane,
        },
        "annotations": {
            "summary": f"lane {alert.lane} is degraded on {alert.group}/{alert.replica}",
            "description": alert.reason,
        },
        "startsAt": _time(alert.since_s),
        "generatorURL": f"urn:headrace:{version}",
    }
    if alert.resolved_at_s is not None:
        described["endsAt"] = _time(alert.resolved_at_s)
    return described


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


class Alerts:
    """What fires, and the task that tells the webhook. ``post`` None: only the log hears of it."""

    def __init__(self, post: Post | None, *, version: str, sleep: Callable[[float], Awaitable[None]]) -> None:
        self._post = post
        self._version = version
        self._sleep = sleep
        self._firing: dict[tuple[str, str, str], Alert] = {}
        self._to_send: dict[tuple[str, str, str], Alert] = {}
        self._news = asyncio.Event()
        self.sent = 0
        self.failed = 0

    def fire(self, alert: Alert) -> None:
        _logger.warning("lane %s on %s/%s: breaker open: %s", alert.lane, alert.group, alert.replica, alert.reason)
        self._firing[alert.key] = self._to_send[alert.key] = alert
        self._news.set()

    def resolve(self, key: tuple[str, str, str], at_s: float) -> None:
        alert = self._firing.pop(key, None)
        if alert is not None:
            _logger.warning("lane %s on %s/%s: breaker closed", alert.lane, alert.group, alert.replica)
            self._to_send[key] = Alert(*alert.key, alert.reason, alert.since_s, at_s)
            self._news.set()

    async def run(self) -> None:
        """Send what is new at once and what fires again and again, until cancelled. A webhook that does not answer is
        tried again with pauses that grow; nothing else waits for it."""
        pause_s = 1.0
        while True:
            try:
                async with asyncio.timeout(RESEND_S):
                    await self._news.wait()
            except TimeoutError:
                self._to_send = {**self._firing, **self._to_send}
            self._news.clear()
            batch, self._to_send = self._to_send, {}
            if not batch or self._post is None:
                continue
            try:
                status = await self._post(alertmanager_json(list(batch.values()), self._version))
                if status >= 300:
                    raise OSError(f"the webhook answers {status}")
            except OSError as error:
                self.failed += 1
                _logger.error("alerts could not be sent: %s", error)
                self._to_send = {**batch, **self._to_send}
                await self._sleep(pause_s)
                pause_s = min(RESEND_S, pause_s * 2)
                self._news.set()
            else:
                self.sent += len(batch)
                pause_s = 1.0
