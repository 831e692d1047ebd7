"""Scheduling changed while a real server is under load: nothing restarts, no request is lost."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from benchmarks.harness import Served, headrace_server
from headrace.models.tiny import make_tiny_gguf

CLIENTS = 6
OUTPUT_TOKENS = 24


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The synthetic model's file."""
    return make_tiny_gguf(tmp_path_factory.mktemp("tiny") / "tiny.gguf")


@contextmanager
def served_tiny(folder: Path, model: Path) -> Iterator[tuple[Served, Path]]:
    """A server of the synthetic model with one thread, and its configuration file."""
    file = folder / "headrace.yaml"
    file.write_text(yaml.safe_dump(document()))
    arguments = ["--config", str(file), "--model", str(model)]
    with headrace_server(arguments, environment={"XDG_STATE_HOME": str(folder)}) as served:
        yield served, file


def document(threads: int = 1, **scheduling: Any) -> dict[str, Any]:
    bands = [{"max_context_tokens": 512, "max_sequences": 8}, {"max_context_tokens": 2048, "max_sequences": 2}]
    return {
        "model": {"name": "tiny"},
        # However slow this machine is at the moment, nothing is to be shed.
        "lanes": {"interactive": {"overload": "queue"}},
        "engine": {"threads": threads, "self_measure": False, "bands": bands, "scheduling": scheduling},
    }


async def headrace_knobs(served: Served, *words: str) -> str:
    """``headrace knobs`` in a process of its own; its output. Raises AssertionError when it fails."""
    command = [sys.executable, "-m", "headrace", "knobs", words[0], "--url", served.base_url, *words[1:]]
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    output, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()
    return output.decode()


async def one_stream(client: httpx.AsyncClient, number: int) -> int:
    """One streaming request, read to its end; how many tokens came. Raises when it is refused or cut."""
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": f"Number {number}: " + "the water of the river " * (number % 5)}],
        "max_tokens": OUTPUT_TOKENS,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    events: list[str] = []
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data: "):
                events.append(line.removeprefix("data: "))
    assert events[-1] == "[DONE]", events[-1]
    return int(json.loads(events[-2])["usage"]["completion_tokens"])


async def test_knobs_set_under_load_lose_no_request_and_restart_nothing(tmp_path: Path, tiny_gguf: Path) -> None:
    """Requests come all the time while every kind of knob is moved by the command; each answer is whole."""
    rounds = [
        ["set", "max_prefill_tokens=64", "step_tokens=96"],
        ["set", "max_num_seqs=2", "lane_caps.interactive=3"],
        ["set", "band_caps.0=1", "lane_weights.interactive=2"],
        ["set", "strategy=continuous", "max_num_seqs=null", "lane_caps.interactive=null"],
        ["reset"],
    ]
    with served_tiny(tmp_path, tiny_gguf) as (served, _):
        engine_pid = served.engine_pid()
        tokens: list[int] = []
        moving = True

        async def client_of(number: int, client: httpx.AsyncClient) -> None:
            while moving:
                tokens.append(await one_stream(client, number))

        async with httpx.AsyncClient(base_url=served.base_url, timeout=60) as client:
            load = [asyncio.create_task(client_of(number, client)) for number in range(CLIENTS)]
            for words in rounds:
                before = len(tokens)
                assert "->" in await headrace_knobs(served, *words)
                # Each setting is lived with: requests begin and end under it.
                while len(tokens) < before + CLIENTS:
                    assert not any(task.done() for task in load), await asyncio.gather(*load)
                    await asyncio.sleep(0.005)
            moving = False
            await asyncio.gather(*load)
            metrics = (await client.get("/metrics")).text
        assert served.engine_pid() == engine_pid
    assert set(tokens) == {OUTPUT_TOKENS}
    assert f'headrace_requests_total{{lane="interactive",outcome="ok"}} {len(tokens):.1f}' in metrics
    assert 'headrace_knob_changes_total{knob="max_prefill_tokens"} 2.0' in metrics


async def test_what_was_set_survives_the_engines_death(tmp_path: Path, tiny_gguf: Path) -> None:
    with served_tiny(tmp_path, tiny_gguf) as (served, _):
        await headrace_knobs(served, "set", "max_num_seqs=2")
        async with httpx.AsyncClient(base_url=served.base_url, timeout=60) as client:
            os.kill(served.engine_pid(), signal.SIGKILL)
            while (await client.get("/ready")).status_code == 200:
                await asyncio.sleep(0.005)
            while (await client.get("/ready")).status_code != 200:
                await asyncio.sleep(0.005)
            assert await one_stream(client, 1) == OUTPUT_TOKENS
        told = json.loads(await headrace_knobs(served, "get", "--json", "max_num_seqs"))
    assert (told["max_num_seqs"]["value"], told["max_num_seqs"]["layer"]) == (2, "live")


async def test_sighup_changes_scheduling_and_refuses_what_needs_a_restart(tmp_path: Path, tiny_gguf: Path) -> None:
    with served_tiny(tmp_path, tiny_gguf) as (served, file):

        async def linger_s() -> Any:
            return json.loads(await headrace_knobs(served, "get", "--json", "linger_s"))["linger_s"]["value"]

        async def until_logged(text: str) -> None:
            while text not in served.log_path.read_text():
                await asyncio.sleep(0.005)

        async with httpx.AsyncClient(base_url=served.base_url, timeout=60) as client:
            running = asyncio.create_task(one_stream(client, 1))
            file.write_text(yaml.safe_dump(document(linger_s=7)))
            os.kill(served.pid, signal.SIGHUP)
            await until_logged("configuration read again")
            assert await linger_s() == 7.0
            file.write_text(yaml.safe_dump(document(threads=2, linger_s=8)))
            os.kill(served.pid, signal.SIGHUP)
            await until_logged("engine.threads changed, which needs a restart; nothing was reloaded")
            assert await linger_s() == 7.0
            assert await running == OUTPUT_TOKENS
