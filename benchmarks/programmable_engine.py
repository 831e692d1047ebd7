"""An OpenAI-compatible engine without a model, as a real process: latency, tokens, errors and junk are programmed.

``python -m benchmarks.programmable_engine --port 0`` prints the port it listens on. ``POST /control`` changes what it
does from then on (the fields of ``Program``), ``GET /stats`` says what it has seen. Its answer to any prompt is the
same list of numbered words, and goes on where a prompt's own text ends, so that an answer pieced together from two
engines can be compared with a whole one.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import re
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, cast

import httptools
import msgspec

WORD: Final = re.compile(r"w(\d+) ")
_DONE: Final = b"data: [DONE]\n\n"
_HIGH_WATER_BYTES: Final = 256 * 1024


class Program(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the engine does. ``tokens`` are generated where a request has no limit. ``places`` run at once, the rest
    waits. ``step_s_per_running`` makes every gap longer by so much for each running stream.

    ``fault`` applies to requests that begin from then on, the first ``fault_count`` of them (None: all):

    - ``status``: answer with the status ``fault_status``; ``hang``: accept and never answer; ``close``: close at once
    - ``cut``: close after ``fault_after`` tokens; ``stall``: stop after so many; ``error_event``: an error event then
    - ``bad_json``, ``html``, ``giant_header``, ``bad_chunk``, ``binary``, ``giant_event``: junk after ``fault_after``
      tokens, or in place of the head
    - ``split``: one byte a packet; ``crlf``: CRLF lines; ``together``: several events in one packet; ``comments``:
      comment lines and fields between events; ``no_done``: end without ``[DONE]``
    """

    ttft_s: float = 0.0
    itl_s: float = 0.0
    step_s_per_running: float = 0.0
    tokens: int = 16
    places: int = 256
    fault: str = ""
    fault_status: int = 500
    fault_after: int = 3
    fault_count: int | None = None
    max_context_tokens: int = 32_768
    kv_usage: float | None = None
    health_status: int = 200


class _Stats(msgspec.Struct):
    requests: int = 0
    finished: int = 0
    aborted: int = 0
    live: int = 0
    waiting: int = 0
    most_live: int = 0
    connections: int = 0
    tokens: int = 0


class Backend:
    """What all connections of one process share."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.stats = _Stats()
        self.waiting: deque[_Stream] = deque()
        self.bodies: deque[dict[str, Any]] = deque(maxlen=64)
        self.faults_left = program.fault_count

    def take_fault(self) -> str:
        """The fault of the request that begins now."""
        if not self.program.fault:
            return ""
        if self.faults_left is None:
            return self.program.fault
        if self.faults_left <= 0:
            return ""
        self.faults_left -= 1
        return self.program.fault

    def gap_s(self) -> float:
        return self.program.itl_s + self.program.step_s_per_running * self.stats.live

    def control(self, body: bytes) -> None:
        changed = msgspec.json.decode(body, type=dict[str, Any])
        self.program = msgspec.convert({**msgspec.to_builtins(self.program), **changed}, Program)
        self.faults_left = self.program.fault_count

    def free_place(self) -> None:
        self.stats.live -= 1
        while self.waiting and self.stats.live < self.program.places:
            stream = self.waiting.popleft()
            self.stats.waiting -= 1
            stream.start()

    def metrics(self) -> bytes:
        kv = self.program.kv_usage
        used = min(1.0, self.stats.live / self.program.places) if kv is None else kv
        lines = [
            f'vllm:num_requests_running{{model_name="m"}} {self.stats.live}',
            f'vllm:num_requests_waiting{{model_name="m"}} {self.stats.waiting}',
            f'vllm:kv_cache_usage_perc{{model_name="m"}} {used}',
        ]
        return ("\n".join(lines) + "\n").encode()


class _Stream:
    """One answer on its way."""

    def __init__(self, connection: _Connection, request: dict[str, Any], fault: str) -> None:
        self.connection = connection
        self.backend = connection.backend
        self.request = request
        self.fault = fault
        self.chat = "messages" in request
        self.stream = bool(request.get("stream"))
        prompt = request.get("prompt")
        self.prompt_tokens = len(prompt) if isinstance(prompt, list) else max(1, len(_text(request)) // 4)
        self.first = len(WORD.findall(_continued(request)))
        limit = request.get("max_completion_tokens") or request.get("max_tokens")
        endless = bool(request.get("ignore_eos")) and limit is None
        wanted = self.backend.program.tokens if limit is None else int(limit)
        if not request.get("ignore_eos"):
            wanted = min(wanted, max(1, self.backend.program.tokens - self.first))
            self.finish = "length" if limit is not None and int(limit) <= wanted else "stop"
        else:
            self.finish = "length"
        self.tokens = 10**9 if endless else wanted
        stop = request.get("stop") or []
        self.stop = [stop] if isinstance(stop, str) else list(stop)
        self.sent = 0
        self.text = ""
        self.handle: asyncio.TimerHandle | None = None
        self.running = False
        name = b'"chat.completion.chunk"' if self.chat else b'"text_completion"'
        self.head = b'data: {"id":"x","object":%b,"created":1,"model":"m","choices":[{"index":0,' % name
        self.ids = bool(request.get("return_token_ids"))
        self.logprobs = request.get("logprobs")

    def start(self) -> None:
        stats = self.backend.stats
        stats.live += 1
        stats.most_live = max(stats.most_live, stats.live)
        self.running = True
        loop = self.connection.loop
        self.handle = loop.call_later(self.backend.program.ttft_s, self.begin)

    def end(self, *, aborted: bool) -> None:
        if self.handle is not None:
            self.handle.cancel()
        stats = self.backend.stats
        if aborted:
            stats.aborted += 1
        else:
            stats.finished += 1
        if self.running:
            self.running = False
            self.backend.free_place()
        elif self in self.backend.waiting:
            self.backend.waiting.remove(self)
            stats.waiting -= 1

    def begin(self) -> None:
        if not self.stream:
            self.whole()
            return
        fault = self.fault
        kind = b"text/html" if fault == "html" else b"text/event-stream; charset=utf-8"
        head = b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\n" % kind
        if fault == "giant_header":
            head += b"x-junk: " + b"j" * 400_000 + b"\r\n"
        self.connection.write(head + b"transfer-encoding: chunked\r\n\r\n")
        if fault == "html":
            self.connection.chunk(b"<html><body>bad gateway</body></html>")
            self.connection.finish_stream()
            return
        if self.chat:
            self.event(self.head + b'"delta":{"role":"assistant","content":""},"finish_reason":null}]}\n\n')
        self.step()

    def step(self) -> None:
        """One token, and the next one's time."""
        connection, gap_s = self.connection, self.backend.gap_s()
        while self.sent < self.tokens:
            if self.sent == self.backend.program.fault_after and self.fault and not self.strange():
                return
            self.token()
            if connection.paused or gap_s > 0 or connection.closed:
                break
            if self.sent % 64 == 0:
                self.handle = connection.loop.call_soon(self.step)  # type: ignore[assignment]
                return
        if connection.closed or self.finished():
            return
        if connection.paused:
            connection.resumed = self.step
            return
        self.handle = connection.loop.call_later(gap_s, self.step)

    def token(self) -> None:
        number = self.first + self.sent
        self.sent += 1
        self.backend.stats.tokens += 1
        text = b"w%d " % number
        part = text
        if self.stop:
            self.text += text.decode()
            found = [self.text.find(stop) for stop in self.stop if stop in self.text]
            if found:
                at = min(found)
                part = self.text[len(self.text) - len(text) : at].encode() if at > len(self.text) - len(text) else b""
                self.tokens, self.finish = self.sent, "stop"
        extra = b',"token_ids":[%d]' % number if self.ids else b""
        if self.logprobs:
            extra += b',"logprobs":' + self.logprobs_of(text.decode())
        last = self.sent >= self.tokens
        ending = b'"%b"' % self.finish.encode() if last else b"null"
        if last and self.stop and self.finish == "stop":
            extra += b',"stop_reason":' + msgspec.json.encode(self.stop[0])
        body = b'"delta":{"content":"%b"}' % part if self.chat else b'"text":"%b"' % part
        self.event(self.head + body + extra + b',"finish_reason":' + ending + b"}]}\n\n")

    def logprobs_of(self, text: str) -> bytes:
        count = self.request.get("top_logprobs", 0) if self.chat else int(self.logprobs or 0)
        tops = [(f"{text}{rank}" if rank else text, -0.5 - rank) for rank in range(int(count))]
        if self.chat:
            top = [{"token": token, "logprob": value, "bytes": list(token.encode())} for token, value in tops]
            entry = {"token": text, "logprob": -0.5, "bytes": list(text.encode()), "top_logprobs": top}
            return msgspec.json.encode({"content": [entry]})
        return msgspec.json.encode(
            {"tokens": [text], "token_logprobs": [-0.5], "top_logprobs": [dict(tops)], "text_offset": [0]}
        )

    def finished(self) -> bool:
        if self.sent < self.tokens:
            return False
        if (self.request.get("stream_options") or {}).get("include_usage"):
            usage = msgspec.json.encode(self.usage())
            self.event(b'data: {"id":"x","object":"chunk","created":1,"model":"m","choices":[],"usage":%b}\n\n' % usage)
        if self.fault != "no_done":
            self.event(_DONE)
        self.connection.finish_stream()
        return True

    def usage(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.sent,
            "total_tokens": self.prompt_tokens + self.sent,
            "prompt_tokens_details": {"cached_tokens": 0},
        }

    def whole(self) -> None:
        text = "".join(f"w{self.first + index} " for index in range(self.tokens))
        self.sent = self.tokens
        choice: dict[str, Any] = {"index": 0, "finish_reason": self.finish}
        choice |= {"message": {"role": "assistant", "content": text}} if self.chat else {"text": text}
        body = {"id": "x", "object": "chat.completion", "created": 1, "model": "m"}
        self.connection.answer(200, msgspec.json.encode({**body, "choices": [choice], "usage": self.usage()}))
        self.connection.end_stream(aborted=False)

    def event(self, data: bytes) -> None:
        connection = self.connection
        match self.fault:
            case "split":
                for index in range(len(data)):
                    connection.chunk(data[index : index + 1])
            case "crlf":
                connection.chunk(data.replace(b"\n", b"\r\n"))
            case "comments":
                connection.chunk(b": ping\n\nevent: message\nid: 7\n" + data)
            case "together":
                connection.held += data
                if len(connection.held) > 700 or data is _DONE:
                    connection.chunk(connection.held)
                    connection.held = b""
            case _:
                connection.chunk(data)

    def strange(self) -> bool:
        """Do what the fault says in the middle of a stream; whether the stream goes on."""
        connection = self.connection
        match self.fault:
            case "cut":
                connection.transport.abort()
            case "stall":
                pass
            case "error_event":
                connection.chunk(b'data: {"error":{"message":"out of memory","type":"server_error","code":500}}\n\n')
                connection.finish_stream()
            case "bad_json":
                connection.chunk(b'data: {"choices":[{"index":0,"delta":{"content":"x}\n\n')
            case "binary":
                connection.chunk(b"data: \xff\xfe\x00\x01\n\n")
            case "bad_chunk":
                connection.write(b"zz\r\nnot a chunk\r\n")
            case "giant_event":
                connection.chunk(b"data: " + b"x" * 4_000_000)
            case _:
                return True
        return False


class _Connection(asyncio.Protocol):
    """One client's connection."""

    transport: asyncio.Transport

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.loop = asyncio.get_running_loop()
        self.parser = httptools.HttpRequestParser(self)
        self.url = b""
        self.body = b""
        self.stream: _Stream | None = None
        self.paused = False
        self.closed = False
        self.resumed: Callable[[], None] | None = None
        self.held = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.transport.set_write_buffer_limits(high=_HIGH_WATER_BYTES)
        self.backend.stats.connections += 1

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        self.backend.stats.connections -= 1
        self.end_stream(aborted=True)

    def pause_writing(self) -> None:
        self.paused = True

    def resume_writing(self) -> None:
        self.paused = False
        resumed, self.resumed = self.resumed, None
        if resumed is not None:
            resumed()

    def data_received(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError:
            self.transport.abort()

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        url, body = self.url, self.body
        self.url, self.body = b"", b""
        match url:
            case b"/control":
                self.backend.control(body)
                self.answer(200, b"{}")
            case b"/stats":
                self.answer(200, msgspec.json.encode(self.backend.stats))
            case b"/bodies":
                self.answer(200, msgspec.json.encode(list(self.backend.bodies)))
            case b"/health":
                self.answer(self.backend.program.health_status, b"{}")
            case b"/metrics":
                self.answer(200, self.backend.metrics(), b"text/plain")
            case b"/v1/models":
                model = {"id": "m", "object": "model", "max_model_len": self.backend.program.max_context_tokens}
                self.answer(200, msgspec.json.encode({"object": "list", "data": [model]}))
            case b"/v1/embeddings":
                self.embed(body)
            case b"/v1/chat/completions" | b"/v1/completions":
                self.generate(body)
            case _:
                self.answer(404, b'{"error":{"message":"nothing there"}}')

    def embed(self, body: bytes) -> None:
        """One number for each input: how long it is."""
        backend = self.backend
        request = msgspec.json.decode(body, type=dict[str, Any])
        backend.bodies.append(request)
        if backend.take_fault() == "status":
            self.answer(backend.program.fault_status, b'{"error":{"message":"as programmed","code":"programmed"}}')
            return
        inputs = request["input"] if isinstance(request["input"], list) else [request["input"]]
        data = [
            {"object": "embedding", "index": index, "embedding": [float(len(text))]}
            for index, text in enumerate(inputs)
        ]
        usage = {"prompt_tokens": len(inputs), "total_tokens": len(inputs)}
        self.answer(200, msgspec.json.encode({"object": "list", "data": data, "model": "m", "usage": usage}))

    def generate(self, body: bytes) -> None:
        backend = self.backend
        backend.stats.requests += 1
        request = msgspec.json.decode(body, type=dict[str, Any])
        backend.bodies.append(request)
        fault = backend.take_fault()
        match fault:
            case "status":
                self.answer(backend.program.fault_status, b'{"error":{"message":"as programmed","code":"programmed"}}')
                return
            case "hang":
                return
            case "close":
                self.transport.abort()
                return
        stream = _Stream(self, request, fault)
        if stream.prompt_tokens > backend.program.max_context_tokens:
            self.answer(400, b'{"error":{"message":"the prompt is too long","type":"BadRequestError","code":400}}')
            return
        self.stream = stream
        if backend.stats.live < backend.program.places:
            stream.start()
        else:
            backend.stats.waiting += 1
            backend.waiting.append(stream)

    def answer(self, status: int, body: bytes, kind: bytes = b"application/json") -> None:
        self.write(
            b"HTTP/1.1 %d X\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n%b" % (status, kind, len(body), body)
        )

    def write(self, data: bytes) -> None:
        if not self.closed:
            self.transport.write(data)

    def chunk(self, data: bytes) -> None:
        self.write(b"%x\r\n%b\r\n" % (len(data), data))

    def finish_stream(self) -> None:
        if self.held:
            self.chunk(self.held)
            self.held = b""
        self.write(b"0\r\n\r\n")
        self.end_stream(aborted=False)

    def end_stream(self, *, aborted: bool) -> None:
        stream, self.stream = self.stream, None
        if stream is not None:
            stream.end(aborted=aborted)


def _text(request: dict[str, Any]) -> str:
    if "messages" in request:
        return "".join(str(message.get("content")) for message in request["messages"])
    prompt = request.get("prompt", "")
    return prompt if isinstance(prompt, str) else ""


def _continued(request: dict[str, Any]) -> str:
    """The text of this answer that the prompt holds already."""
    messages = request.get("messages")
    if messages:
        return str(messages[-1].get("content")) if request.get("continue_final_message") else ""
    return _text(request)


async def serve(port: int, program: Program) -> tuple[asyncio.Server, int]:
    """Listen on loopback; the server and its port."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    backend = Backend(program)
    server = await asyncio.get_running_loop().create_server(lambda: _Connection(backend), sock=listener, backlog=1024)
    return server, int(listener.getsockname()[1])


async def _main(port: int, program: Program) -> None:
    server, bound = await serve(port, program)
    print(bound, flush=True)
    async with server:
        await server.serve_forever()


class EngineProcess:
    """One of these engines in a process of its own, and a way to tell it what to do."""

    def __init__(self, program: Mapping[str, Any] | None = None, *, port: int = 0) -> None:
        self.program = dict(program or {})
        self.port = port
        self.process = self._start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def _start(self) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "benchmarks.programmable_engine",
                "--port",
                str(self.port),
                "--program",
                json.dumps(self.program),
            ],
            cwd=Path(__file__).parent.parent,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise RuntimeError("the programmable engine ended early")
        self.port = int(line)
        return process

    def control(self, **fields: Any) -> None:
        """Do something else from now on."""
        self.ask("POST", "/control", json.dumps(fields))

    def stats(self) -> dict[str, int]:
        """What it has seen."""
        found: dict[str, int] = self.ask("GET", "/stats")
        return found

    def bodies(self) -> list[dict[str, Any]]:
        """The latest requests."""
        found: list[dict[str, Any]] = self.ask("GET", "/bodies")
        return found

    def ask(self, method: str, path: str, body: str | None = None) -> Any:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        try:
            connection.request(method, path, body)
            return json.loads(connection.getresponse().read())
        finally:
            connection.close()

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        """End it at once (SIGKILL), stopped or not."""
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def revive(self) -> None:
        """Start again at the same port."""
        self.process = self._start()


def main() -> None:
    """Serve until killed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--program", default="{}", help="the fields of Program, as JSON")
    arguments = parser.parse_args()
    program = msgspec.json.decode(arguments.program, type=Program)
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_main(arguments.port, program))


if __name__ == "__main__":
    main()
