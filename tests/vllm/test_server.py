"""A real vLLM server on this machine's CPU: same texts as stock, caps and knobs over HTTP, metrics, keys."""

from __future__ import annotations

import random
import re
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from benchmarks.vllm_model import checkpoint
from benchmarks.vllm_server import Refused, VllmServer, lane_body, vllm_server
from tests.vllm.harness import needs_vllm

pytestmark = [needs_vllm, pytest.mark.slow, pytest.mark.model, pytest.mark.timeout(280)]
KEY = "a-key-for-tests"
CHAT = {"lane": "chat", "first_token_in_s": 2.0, "tpot_s": 0.3}
DOCUMENTS = {"lane": "documents", "priority": 90}


@pytest.fixture(scope="module", name="model")
def model_checkpoint() -> Path:
    return checkpoint(Path(sys.prefix) / "smollm2-f32")


@pytest.fixture(scope="module", name="server")
def steered_server(model: Path) -> Iterator[VllmServer]:
    settings = {"knobs": {"urgent_step_s": 0.2}, "admin_keys": [KEY]}
    with vllm_server("headrace", model, settings) as one:
        yield one


def texts(server: VllmServer, kind: Any, bodies: list[tuple[list[int], int, dict[str, Any]]]) -> list[list[int]]:
    """Token ids of all, sent at once."""

    def one(body: tuple[list[int], int, dict[str, Any]]) -> list[int]:
        answer = server.send("/v1/completions", lane_body(body[0], body[1], kind, body[2]))
        return list(answer["choices"][0]["token_ids"])

    with ThreadPoolExecutor(len(bodies)) as pool:
        return list(pool.map(one, bodies))


def status(server: VllmServer) -> dict[str, Any]:
    answer: dict[str, Any] = server.send("/headrace/status", {}, method="GET", key=KEY)
    return dict(answer["engines"][0])


def change(server: VllmServer, **knobs: Any) -> Any:
    return server.send("/headrace/knobs", knobs, method="PATCH", key=KEY)


def prompts(count: int, seed: int) -> list[tuple[list[int], int, dict[str, Any]]]:
    draw = random.Random(seed)
    found = []
    for index in range(count):
        long = index % 4 == 0
        prompt = [draw.randrange(1000, 40000) for _ in range(700 if long else 40 + index)]
        found.append((prompt, 12, DOCUMENTS if long else CHAT))
    return found


def test_every_text_is_that_of_stock_vllm(server: VllmServer, model: Path) -> None:
    """Greedy, float32, twelve requests at once, long and short: token for token what vLLM alone generates. Also while
    the plug-in is off."""
    bodies = prompts(12, seed=1)
    ours = texts(server, "headrace", bodies)
    counts = status(server)["counts"]
    assert counts["failures"] == 0 and counts["steps"] > 0
    change(server, enabled=False)
    off = texts(server, "headrace", bodies)
    change(server, enabled=True)
    with vllm_server("stock", model) as stock:
        assert texts(stock, "stock", bodies) == ours == off


def watch(server: VllmServer, done: threading.Event, seen: list[tuple[int, int]]) -> None:
    """How many documents run and wait, again and again."""
    while not done.is_set():
        now = status(server)
        seen.append((now["running_by_lane"].get("documents", 0), now["waiting_by_lane"].get("documents", 0)))
        time.sleep(0.05)


def test_a_lanes_cap_holds_and_is_live(server: VllmServer) -> None:
    """Never more than two documents run, whatever waits; turned to one, never more than one from then on."""
    for cap in (2, 1):
        change(server, lane_caps={"documents": cap})
        seen: list[tuple[int, int]] = []
        done = threading.Event()
        watcher = threading.Thread(target=watch, args=(server, done, seen))
        watcher.start()
        draw = random.Random(cap)
        texts(
            server, "headrace", [([draw.randrange(1000, 40000) for _ in range(150)], 10, DOCUMENTS) for _ in range(5)]
        )
        done.set()
        watcher.join()
        assert max(running for running, _ in seen) == cap
        assert max(waiting for _, waiting in seen) >= 1
    change(server, lane_caps={})


def test_a_victim_resumes_with_identical_tokens(server: VllmServer) -> None:
    """One place, held by a document, when a chat comes: the document gives way and ends with the same text."""
    draw = random.Random(7)
    document = [draw.randrange(1000, 40000) for _ in range(200)]
    (alone,) = texts(server, "headrace", [(document, 40, DOCUMENTS)])
    change(server, max_num_seqs=1)
    before = status(server)["counts"]["victims"]
    with ThreadPoolExecutor(2) as pool:
        slow = pool.submit(texts, server, "headrace", [(document, 40, DOCUMENTS)])
        time.sleep(0.8)
        quick = pool.submit(texts, server, "headrace", [(document[:30], 4, {**CHAT, "first_token_in_s": 0.4})])
        quick.result()
        assert slow.result() == [alone]
    assert status(server)["counts"]["victims"] > before
    change(server, max_num_seqs=None)


def test_knobs_need_the_key_and_wrong_ones_change_nothing(server: VllmServer) -> None:
    """401 without it, 400 with what is wrong."""
    with pytest.raises(Refused) as refused:
        server.send("/headrace/knobs", {"linger_s": 1.0}, method="PATCH")
    assert refused.value.code == 401
    with pytest.raises(Refused) as wrong:
        change(server, linger_s=1.0, max_num_seqs=10_000)
    assert wrong.value.code == 400
    assert "at most 16" in str(wrong.value)
    assert status(server)["knobs"]["linger_s"] == 2.0


def test_metrics_stand_beside_vllms_own(server: VllmServer) -> None:
    """In one scrape, of this moment."""
    page = server.get("/metrics")
    assert "vllm:num_requests_running" in page
    steps = re.search(r'^headrace_vllm_steps_total\{engine="0"\} (\S+)', page, re.MULTILINE)
    assert steps is not None and float(steps[1]) == status(server)["counts"]["steps"]
    assert "headrace_vllm_failures_total" in page
