"""Requests that servers could understand differently are refused, and nothing after them on their connection is
answered."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from headrace.config.schema import Tenant
from tests.api.harness import Gate, chat_body, config, post, serving

HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n"
NEXT = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"

AMBIGUOUS = {
    "both lengths": HEAD + b"content-length: 4\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "both lengths, other order": HEAD + b"transfer-encoding: chunked\r\ncontent-length: 4\r\n\r\n0\r\n\r\n",
    "two lengths": HEAD + b"content-length: 2\r\ncontent-length: 3\r\n\r\n{}",
    "the same length twice": HEAD + b"content-length: 2\r\ncontent-length: 2\r\n\r\n{}",
    "a list of lengths": HEAD + b"content-length: 2, 2\r\n\r\n{}",
    "a signed length": HEAD + b"content-length: +2\r\n\r\n{}",
    "a negative length": HEAD + b"content-length: -2\r\n\r\n{}",
    "a length in hexadecimal": HEAD + b"content-length: 0x2\r\n\r\n{}",
    "an empty length": HEAD + b"content-length: \r\n\r\n",
    "a length beyond every number": HEAD + b"content-length: 99999999999999999999999\r\n\r\n{}",
    "two codings": HEAD + b"transfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "another coding": HEAD + b"transfer-encoding: gzip\r\n\r\n0\r\n\r\n",
    "another coding before chunked": HEAD + b"transfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "chunked not last": HEAD + b"transfer-encoding: chunked, identity\r\n\r\n0\r\n\r\n",
    "chunked twice": HEAD + b"transfer-encoding: chunked, chunked\r\n\r\n0\r\n\r\n",
    "a coding that only looks like chunked": HEAD + b"transfer-encoding: xchunked\r\n\r\n0\r\n\r\n",
    "a coding in HTTP/1.0": HEAD.replace(b"1.1", b"1.0") + b"transfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "a space before the colon": HEAD + b"content-length : 2\r\n\r\n{}",
    "a space before the name": HEAD + b" content-length: 2\r\n\r\n{}",
    "a folded line": HEAD + b"x-a: 1\r\n folded\r\n\r\n",
    "no colon": HEAD + b"content-length\r\n\r\n",
    "a bare carriage return": HEAD + b"x-a: 1\rtransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "a zero byte in a value": HEAD + b"x-a: 1\x00\r\n\r\n",
    "a zero byte in a name": HEAD + b"x\x00a: 1\r\n\r\n",
    "a chunk of negative size": HEAD + b"transfer-encoding: chunked\r\n\r\n-1\r\n\r\n",
    "a chunk of no size": HEAD + b"transfer-encoding: chunked\r\n\r\n;\r\n\r\n0\r\n\r\n",
    "a chunk of a size beyond every number": HEAD + b"transfer-encoding: chunked\r\n\r\nfffffffffffffffff1\r\n{}\r\n",
    "a chunk that is longer than it says": HEAD + b"transfer-encoding: chunked\r\n\r\n2\r\n{}}\r\n0\r\n\r\n",
    "no host": b"GET /health HTTP/1.1\r\n\r\n",
    "two hosts": b"GET /health HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n",
    "another protocol": b"GET /health HTTP/3.7\r\nhost: x\r\n\r\n",
    "no protocol": b"GET /health\r\nhost: x\r\n\r\n",
    "a method that is none": b"G T /health HTTP/1.1\r\nhost: x\r\n\r\n",
    "a tunnel": b"CONNECT other:443 HTTP/1.1\r\nhost: other:443\r\n\r\n",
}


@pytest.mark.parametrize("name", AMBIGUOUS)
async def test_an_ambiguous_request_is_400_and_the_last_on_its_connection(tmp_path: Path, name: str) -> None:
    """What follows it could be somebody else's request by another server's reading: it is not looked at."""
    async with serving(tmp_path, config(body_timeout_s=2.0)) as served:
        reader, writer = await served.connect()
        writer.write(AMBIGUOUS[name] + NEXT)
        answer = await reader.read()
    assert answer.startswith(b"HTTP/1.1 400 "), answer
    assert answer.count(b"HTTP/1.1 ") == 1 and b"connection: close" in answer and b'"status":"ok"' not in answer


@pytest.mark.parametrize(
    "head",
    [
        b"".join(b"x-%d: 1\r\n" % number for number in range(200)),
        b"x-long: " + b"a" * 70_000 + b"\r\n",
        b"x-" + b"a" * 70_000 + b": 1\r\n",
    ],
)
async def test_headers_beyond_bounds_are_431(tmp_path: Path, head: bytes) -> None:
    async with serving(tmp_path) as served:
        reader, writer = await served.connect()
        writer.write(HEAD + head + b"content-length: 2\r\n\r\n{}" + NEXT)
        answer = await reader.read()
    assert answer.startswith(b"HTTP/1.1 431 ") and answer.count(b"HTTP/1.1 ") == 1


async def test_trailers_are_no_headers(tmp_path: Path) -> None:
    """A proxy filters headers; what comes behind the body must not say who asks or in which lane."""
    settings = config()
    settings = type(settings)(model=settings.model, server=settings.server, tenants={"acme": Tenant()})
    body = b'{"model":"scripted","messages":[{"role":"user","content":"hi"}]}'
    async with serving(tmp_path, settings) as served:
        reader, writer = await served.connect()
        writer.write(
            HEAD + b"transfer-encoding: chunked\r\nconnection: close\r\n\r\n%x\r\n%b\r\n0\r\n" % (len(body), body)
        )
        writer.write(b"x-headrace-lane: batch\r\nx-tenant-id: acme\r\n\r\n")
        answer = await reader.read()
    assert answer.startswith(b"HTTP/1.1 200 ") and b"x-headrace-lane: interactive\r\n" in answer
    assert served.engine.submitted[0].tenant is None


async def test_trailers_without_end_end_the_request(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        reader, writer = await served.connect()
        writer.write(HEAD + b"transfer-encoding: chunked\r\n\r\n0\r\n" + b"x-a: 1234567890\r\n" * 5_500)
        answer = await reader.read()
    assert answer.startswith(b"HTTP/1.1 431 ")


async def test_nonsense_behind_a_running_request_is_not_taken_for_its_answer(tmp_path: Path) -> None:
    """The request before gets its own answer, whole, and the connection ends after it."""
    gate = Gate()
    async with serving(tmp_path, pace=gate) as served:
        reader, writer = await served.connect()
        writer.write(post("/v1/chat/completions", chat_body(stream=True)))
        await served.until(lambda: bool(served.engine.live_requests))
        writer.write(b"\x16\x03\x01 nonsense\r\n\r\n" + NEXT)
        await asyncio.sleep(0.05)  # long enough for the bytes to arrive over loopback; the answer must not depend on it
        gate.open(1000)
        answer = await reader.read()
    assert answer.startswith(b"HTTP/1.1 200 ") and answer.count(b"HTTP/1.1 ") == 1
    assert answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


async def test_a_broken_body_behind_its_own_answer_ends_the_connection_silently(tmp_path: Path) -> None:
    """The answer was given already (413): a second one would be taken for the next request's."""
    async with serving(tmp_path, config(max_body_bytes=2000)) as served:
        reader, writer = await served.connect()
        writer.write(HEAD + b"transfer-encoding: chunked\r\n\r\nfff\r\n" + b"x" * 0xFFF + b"\r\n")
        head = await reader.readuntil(b"\r\n\r\n")
        writer.write(b"zz\r\n" + NEXT)
        rest = await reader.read()
    assert head.startswith(b"HTTP/1.1 413 ") and b"HTTP/1.1" not in rest


async def test_answers_say_nothing_of_the_inside(tmp_path: Path) -> None:
    """No server software, no versions, no paths, no exceptions, whatever was asked."""
    async with serving(tmp_path) as served:

        async def broken(*_: object) -> None:
            raise RuntimeError(f"secret inside of {tmp_path}")

        good = await served.chat()
        bad = [await served.client.get(path) for path in ("/nothing", "/v1/models/nothing", "/..%2f..%2fetc/passwd")]
        served.deps.gateway.admit = broken  # type: ignore[assignment]
        failed = await served.chat()
    assert (good.status_code, failed.status_code) == (200, 500)
    for answer in [good, failed, *bad]:
        whole = (str(answer.headers) + answer.text).lower()
        for word in ("uvicorn", "starlette", "python", "traceback", "runtimeerror", "secret", str(tmp_path).lower()):
            assert word not in whole, (word, whole)
        assert "server" not in answer.headers and "x-powered-by" not in answer.headers
