"""SIGHUP under load, as processes: what is wrong is refused with its reason, what is right holds from then on, and no
request is lost."""

from __future__ import annotations

import asyncio
import json
import signal
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.harness import Served, headrace_server
from benchmarks.programmable_engine import EngineProcess
from tests.fleet.conftest import chat, config_of, group_of, outputs, running, text, words

Servers = Callable[..., list[EngineProcess]]
KEY, SECOND_KEY, TOKENS = "sk-of-the-load-itself", "sk-of-a-tenant-with-limits", 12


def text_of(groups: dict[str, list[EngineProcess]], tenants: str = "", more: str = "") -> str:
    """A configuration in which lane ``batch`` goes to the last group and everything else to the first."""
    lines = ["groups:"]
    for name, engines in groups.items():
        replicas = ", ".join(f"{{url: '{engine.url}'}}" for engine in engines)
        lines.append(f"  {name}: {{kind: vllm, model: m, replicas: [{replicas}], health: {{interval_s: 0.1}}}}")
    first, last = next(iter(groups)), list(groups)[-1]
    lines += [f"default_group: {first}", "lanes:", f"  batch: {{group: {last}}}"]
    lines += ["log_level: debug", "tenants:", f"  load: {{api_keys: ['{KEY}']}}", tenants, more]
    return "\n".join(lines) + "\n"


def ask(served: Served, key: str, lane: str = "interactive", stream: bool = False) -> tuple[int, str, dict[str, str]]:
    """One chat: status, text, headers."""
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": TOKENS, "stream": stream}
    headers = {"authorization": f"Bearer {key}", "x-headrace-lane": lane}
    request = urllib.request.Request(
        served.base_url + "/v1/chat/completions", data=json.dumps(body).encode(), headers=headers
    )
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            return response.status, _text(response.read().decode(), stream), dict(response.headers)
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode(), dict(error.headers)


def _text(answer: str, stream: bool) -> str:
    if not stream:
        return str(json.loads(answer)["choices"][0]["message"]["content"])
    events = [line.removeprefix("data: ") for line in answer.splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]", answer
    pieces = [choice["delta"].get("content", "") for event in events[:-1] for choice in json.loads(event)["choices"]]
    return "".join(piece or "" for piece in pieces)


@contextmanager
def load(served: Served, threads: int = 4) -> Iterator[Counter[Any]]:
    """Clients that ask all the time; what came of it, by status and whether the text was whole."""
    outcomes: Counter[Any] = Counter()
    stop = threading.Event()

    def work(number: int) -> None:
        count = 0
        while not stop.is_set():
            count += 1
            lane = "batch" if count % 3 == 0 else "interactive"
            try:
                status, text, _ = ask(served, KEY, lane, stream=number % 2 == 0)
            except (OSError, AssertionError, ValueError) as error:
                outcomes["lost", repr(error)[:200]] += 1
                continue
            outcomes["whole" if text == words(TOKENS) else text[:200], status] += 1

    workers = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    for worker in workers:
        worker.start()
    try:
        yield outcomes
    finally:
        stop.set()
        for worker in workers:
            worker.join()


class Reloads:
    """Puts files in place and waits for what the server says of them."""

    def __init__(self, served: Served, config: Path) -> None:
        self._served = served
        self._config = config

    def put(self, text: str | None) -> str:
        """The log lines of one reload, to its end."""
        before = len(self._served.log_path.read_text())
        if text is None:
            self._config.unlink()
        else:
            new = self._config.with_suffix(".new")
            new.write_text(text, encoding="utf-8")
            new.replace(self._config)
        self._served.process.send_signal(signal.SIGHUP)
        deadline_s = time.monotonic() + 30
        while time.monotonic() < deadline_s:
            said = self._served.log_path.read_text()[before:]
            if "configuration read again" in said or "was not reloaded" in said:
                time.sleep(0.05)  # a reason of several lines is written line by line
                return self._served.log_path.read_text()[before:]
            time.sleep(0.02)
        raise AssertionError("the server says nothing of the reload")


def test_reloads_under_load_lose_nothing_and_bad_files_change_nothing(servers: Servers, tmp_path: Path) -> None:
    """Groups, replicas, lanes and tenants come and go while clients ask; every request is answered whole."""
    one, two, three = servers(3, itl_s=0.004, tokens=400)
    keys, config = tmp_path / "keys", tmp_path / "headrace.yaml"
    keys.write_text(SECOND_KEY, encoding="utf-8")
    narrow = f"  small: {{api_keys: ['file:{keys}'], lanes: [batch], requests_per_min: 2}}"
    wide = f"  small: {{api_keys: ['file:{keys}'], requests_per_min: 1000}}"
    good = [
        text_of({"a": [one]}),
        text_of({"a": [one, two]}, narrow),
        text_of({"a": [one], "b": [three]}, narrow),
        text_of({"b": [two, three]}, wide),
        text_of({"c": [three], "a": [one]}, wide, "server: {body_timeout_s: 20, max_queue: 200}"),
    ]
    bad = {
        "groups: {a: [\n": "headrace.yaml",
        text_of({"a": [one]}, more="nonsense: 1"): "nonsense: unknown key",
        text_of({"a": [one]}, "  small: {api_keys: ['file:/nowhere/at/all']}"): "cannot be read",
        text_of({"a": [one]}, "  small: {requests_per_min: -1}"): "tenants.small.requests_per_min: -1 is out of range",
        text_of({"a": [one]}, "  small: {lanes: [nobody]}"): "there is no lane 'nobody'",
        text_of({"a": [one]}, more="server: {tls: {certificate: x, key: y}}"): "needs a restart",
        text_of({"a": [one]}).replace("group: a", "group: nowhere"): "nowhere",
    }
    config.write_text(good[0], encoding="utf-8")
    with headrace_server(["--config", str(config)], wait_s=60) as served:
        reloads = Reloads(served, config)
        with load(served) as outcomes:
            for turn, (text, reason) in enumerate(bad.items()):
                assert "configuration read again" in reloads.put(good[turn % len(good)])
                said = reloads.put(text)
                assert "the configuration was not reloaded, the old one stays" in said and reason in said, said
            assert "cannot be read" in reloads.put(None)

            assert "configuration read again" in reloads.put(good[1])
            statuses = [ask(served, SECOND_KEY, "batch") for _ in range(3)]
            assert [status for status, _, _ in statuses] == [200, 200, 429]
            assert statuses[2][2]["x-headrace-shed-reason"] == "tenant_requests"
            assert ask(served, SECOND_KEY, "interactive")[0] in (403, 429)
            # What the tenant used stays with it: under the old limit it waits, under the new one it goes on.
            reloads.put("groups: 1")
            assert ask(served, SECOND_KEY, "batch")[0] == 429
            reloads.put(good[3])
            assert ask(served, SECOND_KEY, "interactive")[0] == 200
            reloads.put(good[0])
            assert ask(served, SECOND_KEY, "batch")[0] == 401
            for _ in range(10):  # one after the other, without waiting for what came of it
                served.process.send_signal(signal.SIGHUP)
            reloads.put(good[0])
        served.process.send_signal(signal.SIGTERM)
        assert served.process.wait(timeout=30) == 0
        log = served.log_path.read_text()
    assert set(outcomes) == {("whole", 200)}, outcomes
    assert outcomes.total() > 50
    assert "Traceback" not in log and "Task was destroyed" not in log, log[-5000:]
    for secret in (KEY, SECOND_KEY):
        assert secret not in log


async def test_whoever_waits_in_the_line_of_a_group_that_is_gone_is_served_by_the_next(servers: Servers) -> None:
    """One request runs in the old group, one waits behind it; the reload takes the group away. Both end whole."""
    one, two = servers(2, itl_s=0.01, places=1, tokens=400)
    old = config_of({"old": group_of([one], max_in_flight=1)})
    new = config_of({"new": group_of([two])})
    async with running(old) as fleet:
        first = asyncio.create_task(outputs(fleet, chat(40)))
        group = fleet.groups["old"]
        (replica,) = group.replicas.values()
        while not replica.in_flight:
            await asyncio.sleep(0.005)
        second = asyncio.create_task(outputs(fleet, chat(5)))
        while not group.waiting:
            await asyncio.sleep(0.005)
        fleet.reconfigure(new)
        assert list(fleet.groups) == ["new"]
        assert text(await second) == words(5)
        assert text(await first) == words(40)
        assert group.waiting == 0
