"""The server that notes what it did, once a module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.bench.truth_server import TruthServer


@pytest.fixture(scope="module")
def server() -> Iterator[TruthServer]:
    one = TruthServer()
    yield one
    one.close()
