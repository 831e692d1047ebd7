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
from collections.abc import Iterator
from itertools import pairwise
from typing import Literal, NamedTuple, cast

import msgspec
from msgspec import Struct

ChunkKind = Literal["content", "reasoning", "tool", "role", "empty", "comment", "error", "error_event", "broken", "raw"]


class Chunk(Struct, forbid_unknown_fields=True):
    """One event. It begins ``gap_ms`` after the one before; ``split`` are byte offsets at which it is cut, with
    ``pause_ms`` before each further part. ``raw``: ``text`` is written as it is."""

    gap_ms: float = 0
    tokens: int = 1
    text: str = "word "
    kind: ChunkKind = "content"
    split: list[int] = []
    pause_ms: float = 0


class Truth(Struct, forbid_unknown_fields=True):
    """What to do. ``chunks``, or ``tokens`` in chunks of ``tokens_per_chunk`` every ``gap_ms``, the first after
    ``first_ms``. ``body`` is an answer that is no stream. ``end``: how it ends after the last chunk: ``whole``
    (with a finish reason and, unless ``done`` is false, ``[DONE]``), or at once with the connection closed, reset,
    or left open for ever; ``silent`` closes before any answer. ``usage``: where the token counts stand."""

    key: str = ""
    status: int = 200
    headers: dict[str, str] = {}
    headers_delay_ms: float = 0
    body: str | None = None
    body_gap_ms: float = 0
    role_first: bool = True
    chunks: list[Chunk] | None = None
    tokens: int | None = None
    tokens_per_chunk: int = 1
    first_ms: float = 0
    gap_ms: float = 0
    usage: Literal["end", "never", "first", "each", "with_last", "after_done"] = "end"
    prompt_tokens: int = 7
    cached_tokens: int = 3
    finish: bool = True
    done: bool = True
    stay_open_ms: float = 0
    end: Literal["whole", "close", "rst", "stall", "silent"] = "whole"
    chunked: bool = True


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


class _Piece(NamedTuple):
    """Bytes written in one go after a pause; ``completes`` says that a chunk with content ends here."""

    pause_s: float
    data: bytes
    completes: bool = False


class _Pauses(NamedTuple):
    first_ms: float
    gap_ms: float


_CONTENT = ("content", "reasoning", "tool")


def plan_chunks(truth: Truth, max_tokens: int, pauses: _Pauses, *, chat: bool) -> list[Chunk]:
    """The chunks of a stream, all written out."""
    if truth.chunks is not None:
        chunks = truth.chunks
    else:
        tokens = max_tokens if truth.tokens is None else truth.tokens
        sizes = [min(truth.tokens_per_chunk, tokens - done) for done in range(0, tokens, truth.tokens_per_chunk)]
        first_ms, gap_ms = truth.first_ms or pauses.first_ms, truth.gap_ms or pauses.gap_ms
        chunks = [Chunk(gap_ms if place else first_ms, size, "word " * size) for place, size in enumerate(sizes)]
    return [Chunk(kind="role", tokens=0), *chunks] if truth.role_first and chat else chunks


def stream_pieces(truth: Truth, chunks: list[Chunk], *, chat: bool) -> Iterator[_Piece]:
    """A stream's body as it is written."""
    total = sum(chunk.tokens for chunk in chunks if chunk.kind in _CONTENT)
    tokens = 0
    last = max((place for place, chunk in enumerate(chunks) if chunk.kind in _CONTENT), default=-1)
    first = min((place for place, chunk in enumerate(chunks) if chunk.kind in _CONTENT), default=-1)
    for place, chunk in enumerate(chunks):
        content = chunk.kind in _CONTENT
        tokens += chunk.tokens if content else 0
        usage = None
        if truth.usage == "each" and chunk.kind in (*_CONTENT, "role", "empty"):
            usage = tokens
        elif content and (
            (truth.usage == "first" and place == first) or (truth.usage == "with_last" and place == last)
        ):
            usage = total
        data = _event(chunk, _usage(truth, usage), chat=chat)
        yield from _parts(chunk, data, content)
    if truth.end != "whole":
        return
    tail = b""
    if truth.finish:
        choice: dict[str, object] = {"index": 0, "finish_reason": "stop", **({"delta": {}} if chat else {"text": ""})}
        tail += _data({"id": "truth-1", "choices": [choice]})
    usage_event = _data({"id": "truth-1", "choices": [], "usage": _usage(truth, total)})
    if truth.usage == "end":
        tail += usage_event
    if truth.done:
        tail += b"data: [DONE]\n\n"
    yield _Piece(0, tail)
    if truth.usage == "after_done":
        yield _Piece(truth.stay_open_ms / 1e3, usage_event)
    elif truth.stay_open_ms:
        yield _Piece(truth.stay_open_ms / 1e3, b"")


def whole_body(truth: Truth, max_tokens: int, *, chat: bool) -> bytes:
    """An answer that is no stream."""
    if truth.body is not None:
        return truth.body.encode()
    tokens = max_tokens if truth.tokens is None else truth.tokens
    text = "word " * tokens
    said: dict[str, object] = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
    answer: dict[str, object] = {"id": "truth-1", "choices": [{"index": 0, "finish_reason": "length", **said}]}
    if truth.usage != "never":
        answer["usage"] = _usage(truth, tokens)
    return msgspec.json.encode(answer)


def _usage(truth: Truth, tokens: int | None) -> dict[str, object] | None:
    if tokens is None:
        return None
    return {
        "prompt_tokens": truth.prompt_tokens,
        "completion_tokens": tokens,
        "prompt_tokens_details": {"cached_tokens": truth.cached_tokens},
    }


def _event(chunk: Chunk, usage: dict[str, object] | None, *, chat: bool) -> bytes:
    match chunk.kind:
        case "raw":
            return chunk.text.encode()
        case "comment":
            return b": keep-alive\n\n"
        case "error":
            return _data({"error": {"message": chunk.text, "code": 500}})
        case "error_event":
            return b"event: error\n" + _data({"message": chunk.text})
        case "broken":
            return b'data: {"choices": [{]}\n\n'
    delta: dict[str, object] = {}
    if chunk.kind == "role":
        delta = {"role": "assistant", "content": ""}
    elif chunk.kind == "reasoning":
        delta = {"reasoning_content": chunk.text}
    elif chunk.kind == "tool":
        delta = {"tool_calls": [{"index": 0, "function": {"arguments": chunk.text}}]}
    elif chunk.kind == "content":
        delta = {"content": chunk.text}
    choice: dict[str, object] = {"index": 0, "finish_reason": None}
    choice |= {"delta": delta} if chat else {"text": delta.get("content", "")}
    fields: dict[str, object] = {"id": "truth-1", "object": "chat.completion.chunk", "choices": [choice]}
    return _data(fields if usage is None else {**fields, "usage": usage})


def _data(fields: dict[str, object]) -> bytes:
    return b"data: " + msgspec.json.encode(fields) + b"\n\n"


def _parts(chunk: Chunk, data: bytes, content: bool) -> Iterator[_Piece]:
    edges = [0, *chunk.split, len(data)]
    for place, (start, end) in enumerate(pairwise(edges)):
        pause_ms = chunk.pause_ms if place else chunk.gap_ms
        yield _Piece(pause_ms / 1e3, data[start:end], content and end == len(data))


class _Server:
    """What all connections share."""

    def __init__(self, pauses: _Pauses, *, keep: bool) -> None:
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
        told.tokens = sum(chunk.tokens for chunk in chunks if chunk.kind in _CONTENT)
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


async def _serve(port: int, pauses: _Pauses, *, keep: bool) -> None:
    server = _Server(pauses, keep=keep)
    listening = await asyncio.get_running_loop().create_server(
        lambda: _Connection(server), "127.0.0.1", port, backlog=4096
    )
    print(listening.sockets[0].getsockname()[1], flush=True)
    await listening.serve_forever()


class TruthServer:
    """The server in a process of its own. ``first_ms`` and ``gap_ms``: pauses of answers without a ``truth``."""

    def __init__(self, *, port: int = 0, first_ms: float = 0, gap_ms: float = 0, keep: bool = True) -> None:
        command = [sys.executable, __file__, f"--port={port}", f"--first-ms={first_ms}", f"--gap-ms={gap_ms}"]
        self._process = subprocess.Popen(
            command if keep else [*command, "--forget", "--uvloop"], stdout=subprocess.PIPE, text=True
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
    serving = _serve(options.port, _Pauses(options.first_ms, options.gap_ms), keep=not options.forget)
    if options.uvloop:
        import uvloop

        uvloop.run(serving)
    else:
        asyncio.run(serving)


if __name__ == "__main__":
    main()
