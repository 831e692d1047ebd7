"""HTTPS: certificates, the oldest version spoken, renewal without a restart."""

from __future__ import annotations

import asyncio
import shutil
import ssl
import subprocess
from pathlib import Path

import pytest

from headrace.api.server import http_server
from headrace.api.tls import tls_context
from headrace.config.load import build
from headrace.config.problems import ConfigProblems
from headrace.config.schema import ServerConfig, TlsConfig
from headrace.errors import ConfigError
from tests.api.harness import Served, chat_body, config, post, serving

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="the openssl command makes the certificates")


def certificate(folder: Path, name: str) -> TlsConfig:
    """A new self-signed certificate for 127.0.0.1."""
    tls = TlsConfig(str(folder / f"{name}.pem"), str(folder / f"{name}.key"))
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
        "-days",
        "2",
    ]
    command += ["-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1", "-out", str(tls.certificate)]
    subprocess.run([*command, "-keyout", str(tls.key)], check=True, capture_output=True)
    return tls


async def ask(served: Served, tls: TlsConfig, version: ssl.TLSVersion | None = None) -> bytes:
    """One chat over TLS, trusting exactly this certificate."""
    context = ssl.create_default_context(cafile=tls.certificate)
    if version is not None:
        context.maximum_version = version
    reader, writer = await asyncio.open_connection("127.0.0.1", served.port, ssl=context)
    try:
        writer.write(post("/v1/chat/completions", chat_body(stream=True), "connection: close"))
        return await reader.read()
    finally:
        writer.close()


async def test_streams_over_https_and_a_renewed_certificate_without_a_restart(tmp_path: Path) -> None:
    """A stream is whole; after a renewal new connections see the new certificate, and an open one stays."""
    old, new = certificate(tmp_path, "old"), certificate(tmp_path, "new")
    settings = config(tls=old)
    async with serving(tmp_path, settings) as served:
        answer = await ask(served, old)
        assert answer.startswith(b"HTTP/1.1 200 ") and answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        context = ssl.create_default_context(cafile=old.certificate)
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port, ssl=context)
        served.server.reconfigure(ServerConfig(tls=new))
        assert (await ask(served, new)).startswith(b"HTTP/1.1 200 ")
        with pytest.raises(ssl.SSLCertVerificationError):
            await ask(served, old)
        writer.write(post("/v1/chat/completions", chat_body(), "connection: close"))
        assert (await reader.read()).startswith(b"HTTP/1.1 200 ")
        writer.close()


async def test_a_wrong_renewal_changes_nothing(tmp_path: Path) -> None:
    """A key of another certificate, or no file at all: the old pair stays in use."""
    good, other = certificate(tmp_path, "good"), certificate(tmp_path, "other")
    async with serving(tmp_path, config(tls=good)) as served:
        for wrong in (
            TlsConfig(good.certificate, other.key),
            TlsConfig(other.certificate, good.key),
            TlsConfig(str(tmp_path / "nothing"), good.key),
            TlsConfig(),
        ):
            with pytest.raises(ConfigError, match=r"server\.tls"):
                served.server.reconfigure(ServerConfig(tls=wrong))
            assert (await ask(served, good)).startswith(b"HTTP/1.1 200 ")


async def test_older_versions_than_configured_are_not_spoken(tmp_path: Path) -> None:
    pair = certificate(tmp_path, "pair")
    strict = TlsConfig(pair.certificate, pair.key, "1.3")
    async with serving(tmp_path, config(tls=strict)) as served:
        assert (await ask(served, pair)).startswith(b"HTTP/1.1 200 ")
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await ask(served, pair, ssl.TLSVersion.TLSv1_2)


async def test_plain_http_on_the_tls_port_is_closed_and_others_go_on(tmp_path: Path) -> None:
    pair = certificate(tmp_path, "pair")
    async with serving(tmp_path, config(tls=pair)) as served:
        reader, writer = await served.connect()
        writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert b"HTTP/1.1 200" not in await reader.read()
        assert (await ask(served, pair)).startswith(b"HTTP/1.1 200 ")


def test_files_that_cannot_be_used_are_named_and_their_content_is_not(tmp_path: Path) -> None:
    pair = certificate(tmp_path, "pair")
    text = tmp_path / "text"
    text.write_text("-----BEGIN secret words-----", encoding="utf-8")
    locked = tmp_path / "locked"
    subprocess.run(
        ["openssl", "pkcs8", "-topk8", "-in", str(pair.key), "-out", str(locked), "-passout", "pass:secret"],
        check=True,
        capture_output=True,
    )
    for wrong in (TlsConfig(str(text), pair.key), TlsConfig(pair.certificate, str(text))):
        with pytest.raises(ConfigError, match="cannot be used") as caught:
            tls_context(wrong)
        assert "secret words" not in str(caught.value)
    with pytest.raises(ConfigError, match=r"server\.tls\.key: .*without a password"):
        http_server(lambda *_: None, ServerConfig(tls=TlsConfig(pair.certificate, str(locked))))  # type: ignore[arg-type]


@pytest.mark.parametrize("half", ["certificate", "key"])
def test_half_a_pair_is_refused(half: str) -> None:
    with pytest.raises(ConfigProblems, match="needed together"):
        build(f"server: {{tls: {{{half}: x.pem}}}}", name="headrace.yaml", env={}, overrides={})
