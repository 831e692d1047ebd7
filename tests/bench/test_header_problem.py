"""Headers that an operator may not add to requests."""

from __future__ import annotations

import pytest

from headrace.bench.load.request_fields import header_problem


@pytest.mark.parametrize("name", ["Host", "Content-Length", "transfer-encoding", "CONNECTION", "te", "trailer"])
def test_a_header_that_says_how_bytes_travel_is_refused(name: str) -> None:
    assert header_problem(name, "3") == f"the header {name} belongs to the HTTP client"


@pytest.mark.parametrize("value", ["a\r\nx: y", "a\nb", "a\0b", "a\x7fb", "ü"])
def test_a_value_that_is_more_than_a_value_is_refused(value: str) -> None:
    assert header_problem("x-tenant-id", value) is not None
    assert header_problem("x-tenant-id", "bank 7") is None
