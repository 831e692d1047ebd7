"""vLLM's waiting queue with a gate: during a step it offers only what the policy admits."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from headrace.vllm.shapes import Request, RequestQueue


class GatedQueue:
    """Keeps requests in vLLM's own queue ``stock``, and offers them in its order while the gate is open. While it is
    shut, ``peek_request``, ``pop_request`` and truth see only what was offered, in that order; length and iteration
    always see everything, for vLLM's counts and aborts.

    ``members`` holds everybody in the queue by id; ``touched`` collects who came or went since it was cleared.
    """

    def __init__(self, stock: RequestQueue) -> None:
        self.stock = stock
        self.members: dict[str, Request] = {}
        self.touched: dict[str, Request] = {}
        self._offered: deque[Request] | None = None
        for request in stock:
            self._came(request)

    @property
    def offered(self) -> tuple[Request, ...]:
        """What is still offered; empty while the gate is open."""
        return tuple(self._offered or ())

    def shut(self, offered: Iterable[Request]) -> None:
        """Offer only these members."""
        self._offered = deque(offered)

    def open(self) -> None:
        """Offer everybody in vLLM's order."""
        self._offered = None

    def _came(self, request: Request) -> None:
        self.members[request.request_id] = request
        self.touched[request.request_id] = request

    def _went(self, request: Request) -> None:
        self.members.pop(request.request_id, None)
        self.touched[request.request_id] = request

    def add_request(self, request: Request) -> None:
        self.stock.add_request(request)
        self._came(request)

    def prepend_request(self, request: Request) -> None:
        self.stock.prepend_request(request)
        self._came(request)

    def prepend_requests(self, requests: Iterable[Request]) -> None:
        coming = list(requests)
        self.stock.prepend_requests(coming)
        for request in coming:
            self._came(request)

    def peek_request(self) -> Request:
        if self._offered is None:
            return self.stock.peek_request()
        if not self._offered:
            raise IndexError("peek from a queue that offers nothing")
        return self._offered[0]

    def pop_request(self) -> Request:
        if self._offered is None:
            request = self.stock.pop_request()
        else:
            if not self._offered:
                raise IndexError("pop from a queue that offers nothing")
            request = self._offered.popleft()
            self.stock.remove_request(request)
        self._went(request)
        return request

    def remove_request(self, request: Request) -> None:
        self.stock.remove_request(request)
        self._leave_offer((request.request_id,))
        self._went(request)

    def remove_requests(self, requests: Iterable[Request]) -> None:
        going = list(requests)
        self.stock.remove_requests(going)
        going = [request for request in going if request.request_id in self.members]
        self._leave_offer([request.request_id for request in going])
        for request in going:
            self._went(request)

    def _leave_offer(self, request_ids: Iterable[str]) -> None:
        if self._offered:
            gone = set(request_ids)
            self._offered = deque(r for r in self._offered if r.request_id not in gone)

    def __bool__(self) -> bool:
        return bool(self.stock) if self._offered is None else bool(self._offered)

    def __len__(self) -> int:
        return len(self.stock)

    def __iter__(self) -> Iterator[Request]:
        return iter(self.stock)
