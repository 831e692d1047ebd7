"""The fleet behind the HTTP edge: what clients see."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec

from benchmarks.programmable_engine import EngineProcess
from headrace.control.breaker import BreakerConfig
from headrace.lanes.lane import Fallback
from tests.api.harness import events
from tests.fleet.conftest import config_of, group_of, words

Servers = Callable[..., list[EngineProcess]]


async def test_a_chat_is_answered_in_headraces_name(servers: Servers, door: Any) -> None:
    """Whole and streamed: the engine's id and headers stay inside, its counts come through."""
    async with door(config_of({"g": group_of(servers(1))})) as served:
        whole = await served.chat(max_tokens=5)
        body = whole.json()
        assert whole.status_code == 200 and body["choices"][0]["message"]["content"] == words(5)
        assert body["id"].startswith("chatcmpl-") and body["model"] == "m"
        assert body["usage"]["completion_tokens"] == 5 and whole.headers["x-headrace-lane"] == "chat"
        streamed = await served.chat(max_tokens=5, stream=True, stream_options={"include_usage": True})
        found = events(streamed.text)
        assert found[-1] == "[DONE]" and found[-2]["usage"]["completion_tokens"] == 5
        text = "".join(c["delta"].get("content") or "" for event in found[:-1] for c in event["choices"])
        assert text == words(5)
        assert {event["id"] for event in found[:-1]} == {found[0]["id"]} and found[0]["id"].startswith("chatcmpl-")


async def test_choices_and_log_probabilities_come_through(servers: Servers, door: Any) -> None:
    async with door(config_of({"g": group_of(servers(1))})) as served:
        body = (await served.chat(max_tokens=3, n=2, logprobs=True, top_logprobs=2)).json()
        assert [choice["index"] for choice in body["choices"]] == [0, 1]
        for choice in body["choices"]:
            entries = choice["logprobs"]["content"]
            assert [entry["token"] for entry in entries] == ["w0 ", "w1 ", "w2 "]
            assert all(len(entry["top_logprobs"]) == 2 for entry in entries)


async def test_text_completions_of_several_prompts(servers: Servers, door: Any) -> None:
    async with door(config_of({"g": group_of(servers(1))})) as served:
        asked = {"model": "m", "prompt": ["one", "two"], "max_tokens": 3, "echo": True}
        body = (await served.client.post("/v1/completions", json=asked)).json()
        assert [choice["text"] for choice in body["choices"]] == ["one" + words(3), "two" + words(3)]


async def test_a_refusal_is_told_in_the_engines_words(servers: Servers, door: Any) -> None:
    (server,) = servers(1)
    server.control(fault="status", fault_status=422)
    async with door(config_of({"g": group_of([server])})) as served:
        for stream in (False, True):
            answer = await served.chat(stream=stream)
            assert answer.status_code == 400
            assert "as programmed" in answer.json()["error"]["message"]


async def test_a_stream_that_breaks_and_cannot_be_continued_ends_with_an_error_event(
    servers: Servers, door: Any
) -> None:
    (server,) = servers(1)
    server.control(fault="cut", fault_after=3)
    async with door(config_of({"g": group_of([server])})) as served:
        answer = await served.chat(max_tokens=8, stream=True, tools=[{"type": "function"}])
        last = events(answer.text)[-1]
        assert answer.status_code == 200 and last["error"]["code"] == "engine_gone"


async def test_degraded_answers_say_so(servers: Servers, door: Any) -> None:
    """A header, and metrics."""
    config = config_of(
        {"g": group_of(servers(1)), "spare": group_of(servers(1))}, group="g", fallback=Fallback(group="spare")
    )
    async with door(config) as served:
        assert "x-headrace-degraded" not in (await served.chat()).headers
        served.fleet.force_open("g", "chat", "test")
        for stream in (False, True):
            assert (await served.chat(stream=stream)).headers["x-headrace-degraded"] == "group=spare"
        metrics = (await served.client.get("/metrics")).text
        assert 'headrace_lane_degraded{lane="chat"} 1.0' in metrics
        assert 'headrace_degraded_requests_total{lane="chat"} 2.0' in metrics


async def test_a_client_that_leaves_is_told_to_the_engine(servers: Servers, door: Any) -> None:
    (server,) = servers(1, itl_s=0.01, tokens=10_000)
    async with door(config_of({"g": group_of([server])})) as served:
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True}
        async with served.client.stream("POST", "/v1/chat/completions", json=body) as response:
            await anext(response.aiter_bytes())
        while server.stats()["live"]:
            await asyncio.sleep(0.01)
        assert server.stats()["aborted"] == 1


async def test_the_admin_api_shows_and_changes_replicas(servers: Servers, door: Any) -> None:
    one, two = servers(2)
    async with door(config_of({"g": group_of([one])})) as served:
        added = await served.client.post("/admin/groups/g/replicas", json={"url": two.url, "zone": "b"})
        assert added.status_code == 201
        name = added.json()["replica"]
        shown = (await served.client.get("/admin/groups")).json()
        assert shown["groups"]["g"]["replicas"][name]["source"] == "admin" and shown["integrity"] is None
        assert shown["lanes"]["chat"]["group"] == "g"
        changed = await served.client.patch(f"/admin/groups/g/replicas/{name}", json={"draining": True})
        assert changed.json()["draining"] is True
        assert (await served.client.delete(f"/admin/groups/g/replicas/{name}")).status_code == 200
        assert (await served.client.delete(f"/admin/groups/g/replicas/{name}")).status_code == 404
        bad = await served.client.post("/admin/groups/g/replicas", json={"url": "ftp://x"})
        assert bad.status_code == 400
        assert (await served.client.post("/admin/groups/no/replicas", json={"url": two.url})).status_code == 404


async def test_a_drill_opens_a_breaker_and_sees_it_close(servers: Servers, door: Any) -> None:
    """With nobody's help, and with every request of it served."""
    breaker = BreakerConfig(window_s=0.1, windows=3, cool_down_s=0.3, max_cool_down_s=1.0)
    config = config_of({"g": group_of(servers(2))}, breaker=breaker)
    async with door(config) as served:
        started = await served.client.post("/admin/drill", json={"lane": "chat"})
        assert started.status_code == 202
        again = await served.client.post("/admin/drill", json={"lane": "chat"})
        assert again.status_code == 400
        while (report := (await served.client.get("/admin/drill")).json())["stage"] not in ("recovered", "failed"):
            await asyncio.sleep(0.1)
        assert report["stage"] == "recovered" and report["recovered_after_s"] < 30
        assert report["served_degraded"] > 0


async def test_alerts_are_alertmanagers_json(servers: Servers) -> None:
    """One when it opens, one with an end when it closes."""
    from headrace.engines.fleet.alerts import Alert, Alerts

    sent: list[Any] = []

    async def post(body: bytes) -> int:
        sent.extend(msgspec.json.decode(body))
        return 200

    alerts = Alerts(post, version="1", sleep=asyncio.sleep)
    task = asyncio.create_task(alerts.run())
    alert = Alert("g", "r", "chat", "slow", 1_700_000_000.0)
    alerts.fire(alert)
    while not sent:
        await asyncio.sleep(0)
    alerts.resolve(alert.key, 1_700_000_010.0)
    while len(sent) < 2:
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    firing, resolved = sent
    assert firing["labels"] == {
        "alertname": "HeadraceBreakerOpen", "severity": "warning", "group": "g", "replica": "r", "lane": "chat",
    }  # fmt: skip
    assert firing["startsAt"] == "2023-11-14T22:13:20Z" and "endsAt" not in firing
    assert resolved["endsAt"] == "2023-11-14T22:13:30Z"


async def test_the_embedded_engine_and_a_remote_one_serve_side_by_side(servers: Servers, door: Any) -> None:
    """Each lane by its group: the embedded one from token ids, with exact counts."""
    import time

    from headrace.config.groups import GroupConfig
    from headrace.config.schema import Config, ModelConfig
    from headrace.engines.scripted import ScriptedEngine, ScriptedTokenizer, text_script
    from headrace.lanes.lane import Lane

    embedded = ScriptedEngine(text_script("from within"), clock=time.monotonic)
    await embedded.start()
    config = Config(
        model=ModelConfig(source="own"),
        groups={"own": GroupConfig(kind="embedded"), "far": group_of(servers(1))},
        lanes={"chat": Lane(group="own"), "remote": Lane(group="far")},
        default_lane="chat",
    )
    async with door(config, embedded, ScriptedTokenizer()) as served:
        near = (await served.chat(model="own")).json()
        assert near["choices"][0]["message"]["content"] == "from within"
        assert near["usage"]["prompt_tokens"] == len("user: hi\nassistant: ")
        far = await served.chat({"x-headrace-lane": "remote"}, model="own", max_tokens=3)
        assert far.json()["choices"][0]["message"]["content"] == words(3)
    await embedded.close()


async def test_a_request_leaves_no_cycles_behind(servers: Servers, door: Any) -> None:
    """Everything of it is freed when it ends: a collector that has nothing to find makes no pauses."""
    import gc
    import time

    from headrace.engines.remote.connection import Address, Pool, fetch

    body = msgspec.json.encode(
        {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "stream": True}
    )
    async with door(config_of({"g": group_of(servers(1))})) as served:
        pool = Pool(Address.of(served.url), clock=time.monotonic, connect_s=5.0)

        async def ask(times: int) -> None:
            for _ in range(times):
                status, _ = await fetch(
                    pool, "/v1/chat/completions", b"", body=body, limit_bytes=100_000, timeout_s=10.0
                )
                assert status == 200

        await ask(5)
        gc.collect()
        gc.disable()
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            await ask(20)
            gc.collect()
            left = [type(found).__name__ for found in gc.garbage if type(found).__module__.startswith("headrace")]
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()
            pool.close()
        assert left == []
