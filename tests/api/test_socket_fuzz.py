"""Bytes of every kind against a server process: no 5xx for what a client did, no crash, nothing left behind."""

from __future__ import annotations

import contextlib
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

import psutil
import pytest

from tests.api.harness import chat_body, post
from tests.api.test_server import process

STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) ")
FRAGMENTS = [
    b"\r\n",
    b"\n",
    b"\r",
    b"\x00",
    b" ",
    b"\t",
    b":",
    b"0\r\n\r\n",
    b"ffffffffffffffff\r\n",
    b"-1\r\n",
    b"GET / HTTP/1.1\r\n",
    b"HTTP/1.1 200 OK\r\n\r\n",
    b"Host: x\r\n",
    b"Content-Length: 5\r\n",
    b"Content-Length: 0\r\n",
    b"Transfer-Encoding: chunked\r\n",
    b"Transfer-Encoding: gzip\r\n",
    b"Connection: close\r\n",
    b"Expect: 100-continue\r\n",
    b"Upgrade: websocket\r\nConnection: upgrade\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00",
    b"%00",
    b"%ff%fe",
    b"../../",
    b"{",
    b"}",
    b"[",
    b'"',
    b"\\ud800",
    b"\xff\xfe\xfd",
    b"\xf0\x9f\x98\x80",
    b"NaN",
    b"1e999",
    b"Authorization: Bearer \xff\r\n",
    b"X-Request-Id: a\r b\r\n",
    b"X-Headrace-Lane: \xe9\r\n",
    b"X-Slo-Ttft-Ms: -1\r\n",
]
TARGETS = [
    b"/v1/chat/completions",
    b"/v1/completions",
    b"/v1/models/%00",
    b"/tokenize",
    b"/admin/knobs",
    b"/batch/v1/models",
    b"/health",
    b"*",
    b"http://x/v1/models",
    b"//",
    b"/%zz",
    b"/" + b"a" * 5000,
    b"?",
    b"x:443",
    b"",
]
METHODS = [
    b"GET",
    b"POST",
    b"PUT",
    b"DELETE",
    b"HEAD",
    b"OPTIONS",
    b"TRACE",
    b"CONNECT",
    b"PATCH",
    b"get",
    b"G\x00T",
    b"",
]


def some_request(random: Random) -> bytes:
    """A request that is nearly right, or not at all."""
    kind = random.randrange(6)
    if kind == 0:
        return random.randbytes(random.randrange(1, 400))
    if kind == 1:
        return b"".join(random.choices(FRAGMENTS, k=random.randrange(1, 30)))
    if kind == 2:
        headers = b"".join(random.choices([part for part in FRAGMENTS if b": " in part], k=random.randrange(4)))
        line = random.choice(METHODS) + b" " + random.choice(TARGETS) + b" HTTP/1." + random.choice([b"1", b"0", b"9"])
        return line + b"\r\nhost: x\r\n" + headers + b"\r\n" + random.choice(FRAGMENTS)
    body = chat_body(max_tokens=1, stream=random.random() < 0.5)
    good = bytearray(post("/v1/chat/completions", body))
    if kind == 3:
        for _ in range(random.randrange(1, 6)):
            good[random.randrange(len(good))] = random.randrange(256)
    elif kind == 4:
        for _ in range(random.randrange(1, 4)):
            at = random.randrange(len(good))
            good[at:at] = random.choice(FRAGMENTS)
    else:
        del good[random.randrange(len(good)) :]
    return bytes(good) * random.choice([1, 1, 1, 3])


@contextlib.contextmanager
def closed_is_fine() -> Iterator[None]:
    """The server may close or reset whenever it likes; only silence is a fault."""
    try:
        yield
    except TimeoutError:
        raise
    except OSError:
        pass


def talk(port: int, random: Random) -> bytes:
    """One connection: some requests, in pieces, read or not read, ended in one of several ways."""
    received = b""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as client, closed_is_fine():
        for _ in range(random.randrange(1, 3)):
            data = some_request(random)
            while data:
                size = random.choice([1, 7, 100, len(data)])
                client.sendall(data[:size])
                data = data[size:]
        how = random.randrange(4)
        if how == 0:
            return received  # leaves
        if how == 1:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
            return received  # resets
        client.shutdown(socket.SHUT_WR)
        while piece := client.recv(65536):
            received += piece
    return received


def fuzz(folder: Path, connections: int, seed: int, threads: int = 4) -> None:
    # Short times: a connection that waits for more is closed, and the fuzzer goes on.
    with process(folder, body_timeout_s=1.0, write_timeout_s=1.0) as (server, port, _):
        complaints: list[str] = []
        log: list[str] = []
        assert server.stderr is not None
        lines = server.stderr
        reader = threading.Thread(target=lambda: log.extend(lines), daemon=True)
        reader.start()
        watched = psutil.Process(server.pid)

        def work(number: int) -> None:
            for index in range(number, connections, threads):
                answer = talk(port, Random(seed * 1_000_003 + index))
                found = [int(status) for status in STATUS.findall(answer)]
                if any(status >= 500 for status in found):
                    complaints.append(f"seed {seed} connection {index}: {answer[:500]!r}")

        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(post("/v1/chat/completions", chat_body(), "connection: close"))
            while client.recv(65536):
                pass
        files, memory = watched.num_fds(), watched.memory_info().rss
        workers = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        assert not complaints, complaints[:3]
        assert server.poll() is None
        deadline_s = time.monotonic() + 20
        while watched.num_fds() > files and time.monotonic() < deadline_s:
            time.sleep(0.05)
        assert watched.num_fds() <= files, watched.net_connections()
        # An open connection takes more than 10 KiB: were they kept, 20,000 would take 200 MiB. Caches and what
        # the allocator does not give back fit into the bound.
        assert watched.memory_info().rss - memory < 40 * 1024 * 1024
        with socket.create_connection(("127.0.0.1", port), timeout=20) as client:
            client.sendall(post("/v1/chat/completions", chat_body(), "connection: close"))
            answer = b""
            while piece := client.recv(65536):
                answer += piece
        assert answer.startswith(b"HTTP/1.1 200 ")
        server.send_signal(signal.SIGTERM)
        assert server.wait(timeout=20) == 0
        reader.join()
    text = "".join(log)
    assert "Traceback" not in text and "ERROR" not in text, text[:3000]


def test_hundreds_of_strange_connections(tmp_path: Path) -> None:
    """The quick part: the same four hundred each time."""
    fuzz(tmp_path, 400, seed=1)


@pytest.mark.slow
def test_many_thousands_of_strange_connections(tmp_path: Path) -> None:
    """Another seed each run, which a failure names."""
    fuzz(tmp_path, 20_000, seed=int(time.time()))


def test_slow_clients_do_not_stop_others(tmp_path: Path) -> None:
    """Three hundred connections that trickle heads and bodies: others are answered at once, and all of them end."""
    with process(tmp_path, body_timeout_s=2.0) as (_, port, _), contextlib.ExitStack() as open_ones:
        slow = [open_ones.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(300)]
        for index, client in enumerate(slow):
            head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n"
            client.sendall([b"", head, head + b"content-length: 50\r\n\r\n{"][index % 3])
        started_s = time.monotonic()
        for _ in range(20):
            for client in slow:
                with contextlib.suppress(ConnectionError):
                    client.send(b"x")
            with socket.create_connection(("127.0.0.1", port), timeout=20) as quick:
                quick.sendall(post("/v1/chat/completions", chat_body(), "connection: close"))
                assert quick.recv(12) == b"HTTP/1.1 200"
        # Twenty answers: none waited for a slow client's two seconds.
        assert time.monotonic() - started_s < 20
        for client in slow:
            client.settimeout(20)
            with contextlib.suppress(ConnectionError):
                while client.recv(65536):
                    pass
