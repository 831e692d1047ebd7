"""Connections that do not come about, die, or are encrypted."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import shutil
import socket
import ssl
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from headrace.bench.drive.send_times import Attempt, Resent
from headrace.bench.records import GENERATOR_FAULT, new_record
from tests.bench.asking import PLANNED, client_of, closed_port, send, wire
from tests.bench.truth_answers import Truth
from tests.bench.truth_server import TruthServer


async def test_a_closed_port_is_refused() -> None:
    async with client_of(f"http://127.0.0.1:{closed_port()}") as client:
        record = (await send(client, wire())).record
    assert (record.outcome, record.status, record.headers_ns, record.connected_ns) == ("refused", None, None, None)
    assert record.sent_ns is not None
    assert record.end_ns is not None
    assert "Connect call failed" in (record.error or "")


async def test_a_connection_that_does_not_come_about_is_a_timeout() -> None:
    with contextlib.ExitStack() as stack:
        listening = stack.enter_context(socket.socket())
        listening.bind(("127.0.0.1", 0))
        listening.listen(0)
        # The backlog is full after this; further handshakes are not answered.
        for _ in range(4):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                filler.connect(listening.getsockname())
        async with client_of(f"http://127.0.0.1:{listening.getsockname()[1]}", connect_timeout_s=0.2) as client:
            record = (await send(client, wire())).record
    assert (record.outcome, record.connected_ns) == ("timeout", None)
    assert record.error == "connecting took more than 0.2 s"


async def test_no_file_descriptor_left_is_the_generators_fault(server: TruthServer) -> None:
    async with client_of(server.url) as client:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        with socket.socket() as probe:
            lowest_free = probe.fileno()
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
            record = (await send(client, wire())).record
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert record.outcome == "refused"
    assert (record.error or "").startswith(GENERATOR_FAULT)


@contextlib.asynccontextmanager
async def raw_server(answer: bytes, context: ssl.SSLContext | None = None) -> AsyncIterator[int]:
    """Answers everything with these bytes and closes."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    try:
        yield listening.sockets[0].getsockname()[1]
    finally:
        listening.close()


async def test_an_answer_that_is_not_http_is_an_error() -> None:
    async with raw_server(b"SSH-2.0-hello\r\n\r\n") as port, client_of(f"http://127.0.0.1:{port}") as client:
        record = (await send(client, wire())).record
    assert record.outcome == "error"
    assert (record.error or "").startswith("the answer is none")


# Nothing twice


async def test_a_kept_connection_that_dies_is_cut_and_its_request_not_repeated(server: TruthServer) -> None:
    async with client_of(server.url) as client:
        assert (await send(client, wire(Truth(key="alive", tokens=1)))).record.outcome == "ok"
        before = server.counts()["requests"]
        record = (await send(client, wire(Truth(key="dies", end="silent")))).record
        after = server.counts()["requests"]
    assert server.told("alive").connection == server.told("dies").connection
    assert (record.outcome, record.connected_ns, record.status) == ("cut", None, None)
    assert after == before + 1


def test_a_second_attempt_is_stopped() -> None:
    attempt = Attempt(new_record(PLANNED, 0, 0), iter([5, 9]).__next__, 0)
    attempt.take_connection(new=False)
    with pytest.raises(Resent):
        attempt.take_connection(new=True)


async def test_the_run_s_end_cancels_and_keeps_what_came(server: TruthServer) -> None:
    async with client_of(server.url) as client:
        task = asyncio.ensure_future(send(client, wire(Truth(key="cancelled", tokens=3, end="stall"))))
        while client.chunks_seen < 3:
            await asyncio.sleep(0.005)
        task.cancel()
        record = (await task).record
    assert (record.outcome, record.output_tokens, record.status) == ("cancelled", 3, 200)
    assert record.end_ns is not None


# https


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate for 127.0.0.1 that nobody trusts, and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificate")
    folder = tmp_path_factory.mktemp("tls")
    paths = folder / "cert.pem", folder / "key.pem"
    command = f"openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=t -out {paths[0]} -keyout {paths[1]}"
    subprocess.run([*command.split(), "-addext", "subjectAltName=IP:127.0.0.1"], check=True, capture_output=True)
    return paths


WHOLE_ANSWER = b'{"choices": [{"message": {"content": "hi"}, "finish_reason": "stop"}]}'


HTTP_ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(WHOLE_ANSWER) + WHOLE_ANSWER


async def test_https_trusts_whom_the_system_trusts_and_nobody_else(
    certificate: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)  # the server sees a broken handshake
    async with raw_server(HTTP_ANSWER, context) as port:
        async with client_of(f"https://127.0.0.1:{port}/v1") as client:
            record = (await send(client, wire())).record
        assert record.outcome == "refused"
        assert "certificate" in (record.error or "").lower()
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate[0]))
        async with client_of(f"https://127.0.0.1:{port}/v1") as client:
            assert (await send(client, wire())).record.outcome == "ok"
