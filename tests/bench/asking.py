"""A client's requests to the truth server, and how its times are held against the server's own."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from headrace.bench.drive.client import Client, ClientSettings, Sent
from headrace.bench.drive.target import parse_target
from headrace.bench.planned import PlannedRequest
from headrace.bench.records import RequestRecord
from headrace.bench.requests.bodies import Wire
from tests.bench.truth_answers import Truth
from tests.bench.truth_server import Told, TruthServer

ANY_ERROR_NS = 100_000_000


PLANNED = PlannedRequest(
    index=3,
    class_name="chat",
    input_tokens=11,
    output_tokens=5,
    lane="live",
    session="s-1",
    turn=2,
    user=4,
)


WALL_S = 1_700_000_000.0


@contextlib.asynccontextmanager
async def client_of(url: str, *, key: str | None = None, **settings: Any) -> AsyncIterator[Client]:
    async with Client(
        parse_target(url),
        ClientSettings(**settings),
        api_key=key,
        clock=time.monotonic_ns,
        wall_clock=lambda: WALL_S,
    ) as client:
        yield client


def wire(truth: Truth | None = None, path: str = "/v1/chat/completions", **fields: Any) -> Wire:
    body = {"model": "truth", "stream": True, **fields}
    if truth is not None:
        body["truth"] = truth
    return Wire(path, {"content-type": "application/json"}, msgspec.json.encode(body))


async def send(client: Client, request: Wire, *, keep_text: bool = False) -> Sent:
    now_ns = time.monotonic_ns()
    return await client.send(PLANNED, request, due_ns=now_ns, ready_ns=now_ns, keep_text=keep_text)


_keys = iter(range(1_000_000))


async def ask(server: TruthServer, truth: Truth, *, path: str = "/v1/chat/completions", **settings: Any) -> Asked:
    """One request on a connection of its own."""
    truth.key = f"k{next(_keys)}"
    stream = settings.pop("stream", True)
    async with client_of(server.url, **settings) as client:
        sent = await send(client, wire(truth, path, stream=stream), keep_text=True)
    return Asked(sent, server.told(truth.key))


class Asked:
    """What the client says and what the server knows."""

    def __init__(self, sent: Sent, told: Told) -> None:
        self.record: RequestRecord = sent.record
        self.text = sent.text
        self.told = told


def assert_after(told_ns: int, seen_ns: int | None) -> None:
    assert seen_ns is not None
    assert told_ns <= seen_ns <= told_ns + ANY_ERROR_NS


def assert_times_are_the_servers(asked: Asked) -> None:
    record, told = asked.record, asked.told
    assert record.sent_ns is not None
    assert record.ready_ns <= record.sent_ns <= told.first_byte_ns
    assert told.first_byte_ns - record.sent_ns <= ANY_ERROR_NS
    assert_after(told.headers_ns, record.headers_ns)
    assert len(record.chunk_ns) == len(told.chunk_ns)
    for told_ns, seen_ns in zip(told.chunk_ns, record.chunk_ns, strict=True):
        assert_after(told_ns, seen_ns)
    assert record.first_ns == (record.chunk_ns[0] if record.chunk_ns else None)


def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
