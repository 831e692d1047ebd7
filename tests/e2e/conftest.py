"""Running servers for end-to-end tests: real processes, the real model, real sockets."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.harness import Served, headrace_server


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[Served]:
    """A server of the test's own, to be killed or drained."""
    with headrace_server(environment={"XDG_STATE_HOME": str(tmp_path)}) as served:
        yield served
