"""``headrace serve`` in front of engines, as processes: no model, no vocabulary."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.harness import Served, headrace_server
from benchmarks.programmable_engine import EngineProcess
from tests.fleet.conftest import words

Servers = Callable[..., list[EngineProcess]]
FAST = "{window_s: 0.1, windows: 3, cool_down_s: 0.3, max_cool_down_s: 1}"


def text_of(engines: list[EngineProcess]) -> str:
    replicas = ", ".join(f"{{url: '{engine.url}'}}" for engine in engines)
    return (
        f"groups:\n  g: {{kind: vllm, model: m, replicas: [{replicas}], health: {{interval_s: 0.1}}}}\n"
        f"lanes:\n  interactive: {{breaker: {FAST}}}\n"
    )


def ask(served: Served, path: str, body: Any = None) -> tuple[int, Any]:
    data = None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(served.base_url + path, data=data), timeout=20) as response:
            return response.status, json.loads(response.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def chat(served: Served, max_tokens: int = 3) -> str:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": max_tokens}
    status, answer = ask(served, "/v1/chat/completions", body)
    assert status == 200, answer
    return str(answer["choices"][0]["message"]["content"])


def test_a_gateway_without_a_model_serves_reloads_rehearses_and_drains(servers: Servers, tmp_path: Path) -> None:
    """From start to SIGTERM."""
    one, two = servers(2, itl_s=0.005, tokens=400)
    config = tmp_path / "headrace.yaml"
    config.write_text(text_of([one]), encoding="utf-8")
    with headrace_server(["--config", str(config)], wait_s=30) as served:
        assert chat(served) == words(3)
        assert ask(served, "/v1/models")[1]["data"][0]["id"] == "m"
        status, refused = ask(served, "/tokenize", {"model": "m", "prompt": "x"})
        assert status == 400 and refused["error"]["code"] == "no_vocabulary"

        # A wrong file changes nothing, a right one adds a replica; streams go on.
        config.write_text("groups: {g: {kind: vllm}}\n", encoding="utf-8")
        served.process.send_signal(signal.SIGHUP)
        time.sleep(0.3)
        assert chat(served) == words(3)
        config.write_text(text_of([one, two]), encoding="utf-8")
        served.process.send_signal(signal.SIGHUP)
        while len(ask(served, "/admin/groups")[1]["groups"]["g"]["replicas"]) < 2:
            time.sleep(0.05)

        drill = subprocess.run(
            [sys.executable, "-m", "headrace", "drill", "--lane", "interactive", "--url", served.base_url],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert drill.returncode == 0, drill.stderr
        assert "breaker open after" in drill.stdout and "breaker closed" in drill.stdout
        unknown = subprocess.run(
            [sys.executable, "-m", "headrace", "drill", "--lane", "nobody", "--url", served.base_url],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert unknown.returncode == 1 and "no lane 'nobody'" in unknown.stderr

        served.process.send_signal(signal.SIGTERM)
        assert served.process.wait(timeout=20) == 0
        log = served.log_path.read_text()
    assert "Traceback" not in log and "Task was destroyed" not in log, log


def test_a_gateway_whose_engines_come_later_says_that_it_is_not_ready(servers: Servers, tmp_path: Path) -> None:
    """It listens at once, and serves as soon as an engine is there."""
    (engine,) = servers(1)
    engine.kill()
    config = tmp_path / "headrace.yaml"
    config.write_text(text_of([engine]), encoding="utf-8")
    port_file = tmp_path / "log"
    with port_file.open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "headrace", "serve", "--config", str(config), "--port", "0"],
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        while "listening on" not in (text := port_file.read_text()):
            assert process.poll() is None, text
            time.sleep(0.05)
        port = int(text.split("listening on http://127.0.0.1:")[1].split("/")[0])
        served = Served("127.0.0.1", port, process, 0.0, port_file)
        assert ask(served, "/health")[0] == 200
        assert ask(served, "/ready")[0] == 503
        engine.revive()
        while ask(served, "/ready")[0] != 200:
            time.sleep(0.05)
        assert chat(served) == words(3)
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=20) == 0
