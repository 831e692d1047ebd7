"""A programmable server and an engine over it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from benchmarks.programmable_engine import EngineProcess, Program
from headrace.engines.remote.call import CallTimeouts
from headrace.engines.remote.connection import Address
from headrace.engines.remote.engine import RemoteEngine, RemoteSettings
from headrace.engines.remote.request_body import Dialect


@pytest.fixture(scope="module")
def server() -> Iterator[EngineProcess]:
    process = EngineProcess()
    yield process
    process.kill()


@pytest.fixture
async def engine(server: EngineProcess) -> AsyncIterator[RemoteEngine]:
    """A started engine with short limits; at the end nothing is left open."""
    defaults: dict[str, Any] = {field: getattr(Program(), field) for field in Program.__struct_fields__}
    server.control(**defaults)
    timeouts = CallTimeouts(connect_s=1.0, first_token_s=0.3, between_tokens_s=0.3, total_s=2.0)
    settings = RemoteSettings(Address.of(server.url), Dialect("vllm", "m"), timeouts, max_sequences=8)
    engine = RemoteEngine(settings)
    await engine.start()
    yield engine
    assert engine.in_flight == 0
    await engine.close()
    assert engine.connections == 0
