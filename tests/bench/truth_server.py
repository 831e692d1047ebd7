"""A server whose answers are known: it does what each request's ``truth`` field says and notes when it did.

It speaks just enough HTTP to be able to break it: answers are bytes that it writes itself, at programmed times,
cut where told, ended as told. ``GET /truth/KEY`` gives the times of one request, in the monotonic clock that every
process of a machine shares. A request without ``truth`` gets its ``max_tokens`` tokens with the pauses of the
command line.

It is a process of its own (``TruthServer``), so that its times are not those of the tests' event loop, and so that
it can be killed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import cast

import msgspec
from msgspec import Struct

from tests.bench.truth_answers import CONTENT_KINDS, Pauses, Truth, plan_chunks, stream_pieces, whole_body

ROOT = Path(__file__).parents[2]


class Told(Struct):
    """What happened to one request, monotonic nanoseconds. ``first_byte_ns`` and ``received_ns``: the request's
    first and last bytes were read. ``chunk_ns``: just before the write that completed each chunk with content.
    ``end_ns``: just before the stream's end was written, or the connection ended; of a whole answer just after."""

    key: str
    connection: int
    first_byte_ns: int
    received_ns: int
    body: str = ""
    headers: dict[str, str] = {}
    headers_ns: int = 0
    chunk_ns: list[int] = []
    end_ns: int = 0
    tokens: int = 0
    streamed: bool = False


class _Request(Struct):
    model: str = "truth"
    max_tokens: int = 8
    stream: bool = True
    truth: Truth | None = None


class _Server:
    """What all connections share."""

    def __init__(self, pauses: Pauses, *, keep: bool) -> None:
        self.pauses = pauses
        self.keep = keep  # note what happened: a load test would fill the memory with it
        self.told: dict[str, Told] = {}
        self.connections = 0
        self.requests = 0


class _Connection(asyncio.Protocol):
    """One connection: requests one after the other."""

    def __init__(self, server: _Server) -> None:
        self._server = server
        self._buffer = b""
        self._first_byte_ns = 0
        self._task: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass
        self._number = self._server.connections
        self._server.connections += 1

    def connection_lost(self, exc: Exception | None) -> None:
        if self._task is not None:
            self._task.cancel()

    def data_received(self, data: bytes) -> None:
        now_ns = time.monotonic_ns()
        if not self._buffer:
            self._first_byte_ns = now_ns
        self._buffer += data
        head, found, rest = self._buffer.partition(b"\r\n\r\n")
        if not found:
            return
        lines = head.decode("latin-1").split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
        length = int(headers.get("content-length", "0"))
        if len(rest) < length:
            return
        self._buffer = b""
        method, path, _ = lines[0].split(" ")
        told = Told("", self._number, self._first_byte_ns, now_ns)
        if method == "GET":
            self._answer_get(path)
            return
        if self._server.keep:
            told.headers, told.body = headers, rest.decode("utf-8", "replace")
        self._server.requests += 1
        try:
            request = msgspec.json.decode(rest, type=_Request)
        except msgspec.DecodeError as error:
            body = json.dumps({"error": {"message": str(error), "type": "invalid_request_error"}})
            request = _Request(truth=Truth(status=400, body=body))
        self._task = asyncio.get_running_loop().create_task(self._play(request, told, chat="chat" in path))

    def _answer_get(self, path: str) -> None:
        server = self._server
        answer: object = {"requests": server.requests, "connections": server.connections}
        if path.startswith("/truth/"):
            answer = server.told.get(path.removeprefix("/truth/"))
        self._transport.write(_head(200, {"content-type": "application/json"}, msgspec.json.encode(answer)))

    async def _play(self, request: _Request, told: Told, *, chat: bool) -> None:
        truth = request.truth or Truth()
        told.key = truth.key or str(self._server.requests)
        if self._server.keep:
            self._server.told[told.key] = told
        await _pause(truth.headers_delay_ms / 1e3)
        if truth.end == "silent":
            self._transport.close()
            return
        if not request.stream or truth.body is not None or truth.status != 200:
            await self._play_whole(truth, request, told, chat=chat)
        else:
            await self._play_stream(truth, request, told, chat=chat)

    async def _play_whole(self, truth: Truth, request: _Request, told: Told, *, chat: bool) -> None:
        body = whole_body(truth, request.max_tokens, chat=chat)
        told.headers_ns = time.monotonic_ns()
        head = _head(truth.status, {"content-type": "application/json", **truth.headers}, body)
        self._transport.write(head.removesuffix(body))
        await _pause(truth.body_gap_ms / 1e3)
        told.chunk_ns = [time.monotonic_ns()]
        self._transport.write(body)
        self._finish(truth, told)

    async def _play_stream(self, truth: Truth, request: _Request, told: Told, *, chat: bool) -> None:
        chunks = plan_chunks(truth, request.max_tokens, self._server.pauses, chat=chat)
        told.streamed = True
        told.tokens = sum(chunk.tokens for chunk in chunks if chunk.kind in CONTENT_KINDS)
        headers = {"content-type": "text/event-stream", **truth.headers}
        headers |= {"transfer-encoding": "chunked"} if truth.chunked else {"connection": "close"}
        told.headers_ns = time.monotonic_ns()
        self._transport.write(_head(200, headers))
        for piece in stream_pieces(truth, chunks, chat=chat):
            await _pause(piece.pause_s)
            now_ns = time.monotonic_ns()
            if piece.data:
                self._transport.write(_framed(piece.data) if truth.chunked else piece.data)
            if piece.completes:
                told.chunk_ns.append(now_ns)
        self._finish(truth, told)

    def _finish(self, truth: Truth, told: Told) -> None:
        if truth.end != "stall":
            told.end_ns = time.monotonic_ns()
        if truth.end == "whole" and told.streamed:
            if truth.chunked:
                self._transport.write(b"0\r\n\r\n")
            else:
                self._transport.close()
        elif truth.end == "close":
            self._transport.close()
        elif truth.end == "rst":
            raw = self._transport.get_extra_info("socket")
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self._transport.abort()


async def _pause(seconds: float) -> None:
    if seconds > 0:
        await asyncio.sleep(seconds)


def _head(status: int, headers: dict[str, str], body: bytes | None = None) -> bytes:
    """A status line and headers, with the body when there is one."""
    lines = [f"HTTP/1.1 {status} Truth", *(f"{name}: {value}" for name, value in headers.items())]
    if body is not None:
        lines.append(f"content-length: {len(body)}")
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + (body or b"")


def _framed(data: bytes) -> bytes:
    return b"%x\r\n" % len(data) + data + b"\r\n"


async def _serve(port: int, pauses: Pauses, *, keep: bool) -> None:
    server = _Server(pauses, keep=keep)
    listening = await asyncio.get_running_loop().create_server(
        lambda: _Connection(server), "127.0.0.1", port, backlog=4096
    )
    print(listening.sockets[0].getsockname()[1], flush=True)
    await listening.serve_forever()


class TruthServer:
    """The server in a process of its own. ``first_ms`` and ``gap_ms``: pauses of answers without a ``truth``."""

    def __init__(self, *, port: int = 0, first_ms: float = 0, gap_ms: float = 0, keep: bool = True) -> None:
        command = [sys.executable, "-m", __name__, f"--port={port}", f"--first-ms={first_ms}", f"--gap-ms={gap_ms}"]
        self._process = subprocess.Popen(
            command if keep else [*command, "--forget", "--uvloop"], cwd=ROOT, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the truth server did not start")
        self.port = int(line)
        self.url = f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        return self._process.pid

    def told(self, key: str) -> Told:
        """What happened to the request with this key. Raises KeyError when it did not come."""
        found = msgspec.json.decode(self._get(f"/truth/{key}"), type=Told | None)
        if found is None:
            raise KeyError(key)
        return found

    def counts(self) -> dict[str, int]:
        """Requests and connections so far (this question is one of the connections)."""
        return msgspec.json.decode(self._get("/counts"), type=dict[str, int])

    def kill(self) -> None:
        """Like ``kill -9``."""
        os.kill(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        """End it, if it lives."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _get(self, path: str) -> bytes:
        request = urllib.request.Request(self.url + path, headers={"Connection": "close"})
        with urllib.request.urlopen(request, timeout=10) as answer:
            body: bytes = answer.read()
            return body


def main() -> None:
    """The process."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--first-ms", type=float, default=0)
    parser.add_argument("--gap-ms", type=float, default=0)
    parser.add_argument("--forget", action="store_true")
    parser.add_argument("--uvloop", action="store_true")
    options = parser.parse_args()
    serving = _serve(options.port, Pauses(options.first_ms, options.gap_ms), keep=not options.forget)
    if options.uvloop:
        import uvloop

        uvloop.run(serving)
    else:
        asyncio.run(serving)


if __name__ == "__main__":
    main()
