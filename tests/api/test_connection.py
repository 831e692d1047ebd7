"""Connections that stall or talk nonsense."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.api.harness import HELLO, MODEL, chat_body, config, post, serving


async def test_a_body_that_does_not_arrive_is_408(tmp_path: Path) -> None:
    async with serving(tmp_path, config(body_timeout_s=0.1)) as served:
        reader, writer = await served.connect()
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
        answer = await reader.read()
    assert answer.startswith(b"HTTP/1.1 408")
    assert b'"code":"request_timeout"' in answer


async def test_a_head_that_does_not_arrive_closes_the_connection(tmp_path: Path) -> None:
    async with serving(tmp_path, config(body_timeout_s=0.1)) as served:
        silent, _ = await served.connect()
        slow, slow_writer = await served.connect()
        slow_writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n")
        for reader in (silent, slow):
            assert await reader.read() == b""


async def test_a_kept_connection_may_not_trickle_a_second_head(tmp_path: Path) -> None:
    async with serving(tmp_path, config(body_timeout_s=0.1)) as served:
        reader, writer = await served.connect()
        writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        await reader.readuntil(b'{"status":"ok"}')
        writer.write(b"\r\n")
        assert await reader.read() == b""


async def test_a_head_without_end_is_431(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        reader, writer = await served.connect()
        writer.write(b"GET /health HTTP/1.1\r\nx-long: " + b"a" * 70_000)
        answer = await reader.read()
    assert answer.startswith(b"HTTP/1.1 431")


async def test_bytes_that_are_no_http_are_400_in_json(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        reader, writer = await served.connect()
        writer.write(b"\x16\x03\x01 nonsense\r\n\r\n")
        answer = await reader.read()
    assert answer.startswith(b"HTTP/1.1 400")
    assert msgspec.json.decode(answer.split(b"\r\n\r\n", 1)[1])["error"]["type"] == "invalid_request_error"


async def test_a_body_too_large_is_413_by_announced_and_by_counted_length(tmp_path: Path) -> None:
    async def endless() -> Any:
        for _ in range(100):
            yield b"x" * 1000

    async with serving(tmp_path, config(max_body_bytes=10_000)) as served:
        announced = await served.chat("x" * 20_000)
        counted = await served.client.post("/v1/chat/completions", content=endless())
        after = await served.chat()
    assert (announced.status_code, counted.status_code, after.status_code) == (413, 413, 200)
    assert "10000 bytes" in announced.json()["error"]["message"]
    assert counted.json()["error"]["code"] == "body_too_large"


async def test_a_large_body_in_many_pieces_arrives_whole(tmp_path: Path) -> None:
    async with serving(tmp_path, max_context_tokens=500_000) as served:
        response = await served.complete("x" * 300_000, max_tokens=1)
    assert response.json()["usage"]["prompt_tokens"] == 300_000


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_does_not_read_is_dropped(tmp_path: Path, stream: bool) -> None:
    settings = config(write_timeout_s=0.2)
    async with serving(tmp_path, settings, script=lambda _: [97] * 4000) as served:
        reader, writer = await served.connect(receive_buffer=4096)
        body = {"model": MODEL, "prompt": "a", "logprobs": 20, "max_tokens": 4000, "n": 8, "stream": stream}
        writer.write(post("/v1/completions", body))
        reader._transport.pause_reading()  # type: ignore[attr-defined]
        await served.until(lambda: len(served.engine.submitted) == 8)
        await served.until(lambda: served.deps.gateway.ledger.empty and not served.server.server_state.tasks)
        await served.until(lambda: len(served.server.server_state.connections) == 0)
        assert (await served.chat(max_tokens=1)).status_code == 200


async def test_a_client_that_reads_slowly_gets_everything(tmp_path: Path) -> None:
    async with serving(tmp_path, config(write_timeout_s=5.0), script=lambda _: [97] * 2000) as served:
        reader, writer = await served.connect(receive_buffer=4096)
        writer.write(post("/v1/completions", {"model": MODEL, "prompt": "a", "logprobs": 20, "max_tokens": 2000,
                                              "stream": True}, "connection: close"))  # fmt: skip
        received = bytearray()
        while piece := await reader.read(8192):
            received += piece
            await asyncio.sleep(0)
    assert received.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    assert received.count(b'"token_logprobs"') == 2000


async def test_one_connection_serves_many_requests(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        reader, writer = await served.connect()
        for _ in range(3):
            writer.write(post("/v1/chat/completions", chat_body(max_tokens=1)))
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            assert b'"chat.completion"' in await reader.readexactly(length)


@pytest.mark.parametrize("protocol", ["h2c", "websocket"])
async def test_an_offer_to_change_the_protocol_is_ignored(tmp_path: Path, protocol: str) -> None:
    async with serving(tmp_path) as served:
        reader, writer = await served.connect()
        offer = ["Connection: Upgrade, HTTP2-Settings, close", f"Upgrade: {protocol}", "HTTP2-Settings: AAEA"]
        writer.write(post("/v1/chat/completions", chat_body(), *offer))
        answer = await reader.read()
    assert answer.startswith(b"HTTP/1.1 200")
    assert HELLO.encode() in answer


async def test_requests_and_connections_leave_nothing_to_the_collector(tmp_path: Path) -> None:
    """Answered, refused, streamed, or left by the client: when it is over, no part of it waits in a reference cycle.
    Cycles are found only now and then, and memory grows until then."""
    async with serving(tmp_path) as served:
        await served.chat()  # imports and caches
        gc.collect()
        gc.disable()
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            for _ in range(5):
                await served.chat()
                await served.chat(stream=True)
                await served.client.post("/v1/chat/completions", content=b"{")
                _, writer = await served.connect()
                writer.write(post("/v1/chat/completions", chat_body(stream=True)))
                await writer.drain()
                writer.transport.abort()
            await served.until(lambda: not served.engine.live_requests and served.deps.gateway.ledger.empty)
            await served.client.aclose()
            await asyncio.sleep(0)
            gc.collect()
            kept = [one for one in gc.garbage if type(one).__module__.startswith(("headrace.", "uvicorn."))]
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()
    assert not kept, {type(one).__qualname__ for one in kept}
