"""The gate offers what it is told to, in that order, and vLLM's counts and aborts see everybody all the same."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.vllm.gate import GatedQueue


class Stock(deque[Any]):
    """vLLM's first-come-first-served queue, in short."""

    add_request = deque.append
    pop_request = deque.popleft
    prepend_request = deque.appendleft
    prepend_requests = deque.extendleft
    remove_request = deque.remove

    def peek_request(self) -> Any:
        return self[0]

    def __bool__(self) -> bool:
        return len(self) > 0

    def remove_requests(self, requests: Iterable[Any]) -> None:
        kept = [r for r in self if r not in list(requests)]
        self.clear()
        self.extend(kept)


def request(name: str) -> Any:
    return SimpleNamespace(request_id=name)


@pytest.fixture(name="waiting")
def three_waiting() -> tuple[GatedQueue, list[Any]]:
    requests = [request(name) for name in "abc"]
    gate = GatedQueue(Stock())
    for one in requests:
        gate.add_request(one)
    return gate, requests


def test_open_it_is_vllms_queue(waiting: tuple[GatedQueue, list[Any]]) -> None:
    """Order, truth and length are the stock queue's."""
    gate, (a, b, c) = waiting
    assert gate.pop_request() is a
    gate.prepend_request(a)
    assert [*gate] == [a, b, c]
    assert bool(gate) and len(gate) == 3
    assert gate.peek_request() is a


def test_shut_it_offers_only_what_was_admitted(waiting: tuple[GatedQueue, list[Any]]) -> None:
    """In the policy's order; then it is empty for vLLM's loop, but not for its counts."""
    gate, (a, b, c) = waiting
    gate.shut([c, a])
    assert gate.peek_request() is c
    assert [gate.pop_request(), gate.pop_request()] == [c, a]
    assert not gate
    assert len(gate) == 1
    with pytest.raises(IndexError):
        gate.pop_request()
    gate.open()
    assert gate and gate.peek_request() is b


def test_an_abort_takes_it_out_of_the_offer(waiting: tuple[GatedQueue, list[Any]]) -> None:
    """Also one that is no member is taken without complaint, as vLLM does."""
    gate, (a, b, c) = waiting
    gate.shut([b, c])
    gate.remove_requests([b, request("nobody")])
    assert gate.pop_request() is c
    assert [*gate] == [a]


def test_it_tells_who_came_and_went(waiting: tuple[GatedQueue, list[Any]]) -> None:
    """``touched`` names everybody whose place changed, ``members`` who is in."""
    gate, (a, b, _) = waiting
    gate.touched.clear()
    gate.pop_request()
    gate.remove_request(b)
    gate.prepend_requests([request("d")])
    assert set(gate.touched) == {"a", "b", "d"}
    assert set(gate.members) == {"c", "d"}
    assert a.request_id == "a"
