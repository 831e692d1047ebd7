"""KV memory seen from outside: refusals with their headers, /admin/kv, metrics, log."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.config.schema import Config
from headrace.engines.scripted import LearnedRates
from headrace.telemetry.kv_events import KvEvents
from headrace.telemetry.metrics import Metrics
from tests.api.harness import config, serving
from tests.api.test_overload import behind_a_long_prompt
from tests.telemetry.test_moment import LOAD, samples

SCARCE = LearnedRates(kv_level="refuse", kv_drain_s=41.2)


def settings(long_tokens: int = 512) -> Config:
    base = config()
    scheduling = msgspec.structs.replace(base.engine.scheduling, kv_long_tokens=long_tokens)
    return msgspec.structs.replace(base, engine=msgspec.structs.replace(base.engine, scheduling=scheduling))


async def test_a_long_request_is_refused_with_level_and_time_while_memory_is_scarce(tmp_path: Path) -> None:
    """As the engine's latest report says; short ones come in."""
    async with behind_a_long_prompt(tmp_path, settings(), learned=SCARCE) as (served, gate):
        gate.open(1)
        await served.until(lambda: served.engine.load is not None)
        shed = await served.complete("x" * 900, max_tokens=4)
        gate.open(1000)
        short = await served.complete("x" * 20, max_tokens=4)
        text = (await served.client.get("/metrics")).text
    assert (shed.status_code, short.status_code) == (429, 200)
    assert shed.headers["x-headrace-shed-reason"] == "kv_memory"
    assert shed.headers["x-headrace-kv-level"] == "refuse"
    assert shed.headers["retry-after"] == "42"
    assert "KV memory is scarce" in shed.json()["error"]["message"]
    assert 'headrace_sheds_total{lane="interactive",reason="kv_memory"} 1.0' in text
    assert 'headrace_kv_level{level="refuse"} 1.0' in text and 'headrace_kv_level{level="normal"} 0.0' in text


async def test_other_refusals_have_no_level(tmp_path: Path) -> None:
    async with behind_a_long_prompt(tmp_path, config(max_queue=1)) as (served, _):
        shed = await served.complete("x" * 100)
    assert shed.status_code == 429 and "x-headrace-kv-level" not in shed.headers


async def test_admin_tells_the_level_its_marks_and_the_account(tmp_path: Path) -> None:
    async with serving(tmp_path, settings(), learned=SCARCE) as served:
        assert (await served.complete("hi", max_tokens=2)).status_code == 200
        answer = (await served.client.get("/admin/kv")).json()
        served.engine.kill()
        down = await served.client.get("/admin/kv")
        served.engine.revive()
    assert answer["level"] == "refuse" and answer["drain_s"] == 41.2
    assert answer["marks"] == {"warn": 0.7, "refuse": 0.85, "move": 0.95, "gap": 0.05, "long_tokens": 512}
    assert set(answer["places"]) == {"live", "idle", "ram", "disk", "stored_ram", "stored_disk"}
    assert answer["integrity"] is None and answer["holdings"] == []
    assert down.status_code == 503


def test_changes_of_the_level_and_parked_sequences_are_logged_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    """The engine counts: what came and went between two reports is counted too, and a restart takes nothing away."""
    metrics = Metrics("1")
    events = KvEvents(metrics)
    reports: tuple[dict[str, Any], ...] = (
        {},
        {"kv_level": "refuse", "kv_level_entries": {"warn": 1, "refuse": 2, "move": 1}, "kv_parked": 1},
        {"kv_level": "refuse", "kv_level_entries": {"warn": 1, "refuse": 2, "move": 1}, "kv_parked": 1},
        {"kv_level": "normal", "kv_level_entries": {"warn": 1}},
    )
    with caplog.at_level(logging.INFO):
        for report in reports:
            events.seen(msgspec.structs.replace(LOAD, **report))
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING", "INFO"]
    assert "1 sequences parked to make room" in caplog.messages[0]
    assert "level refuse after normal" in caplog.messages[1]
    values = samples(metrics)
    assert values["headrace_kv_level_entered_total", "refuse"] == 2
    assert values["headrace_kv_level_entered_total", "warn"] == 1
