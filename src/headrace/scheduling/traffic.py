"""What recent requests were like, so that ``auto`` can choose a strategy."""

from __future__ import annotations

import math
from collections import Counter, deque
from typing import NamedTuple

from msgspec import Struct


class Traffic(Struct, frozen=True):
    """The latest requests. ``requests`` counts them; ``with_targets`` is the share that have an SLO target,
    ``streaming`` the share whose client reads tokens as they come, ``length_spread`` the standard deviation of
    prompt plus expected output tokens divided by their mean, ``lanes`` how many lanes they came in."""

    requests: int = 0
    with_targets: float = 0.0
    streaming: float = 0.0
    length_spread: float = 0.0
    lanes: int = 0


class _Request(NamedTuple):
    total_tokens: int
    lane: str
    has_target: bool
    stream: bool


class TrafficWindow:
    """The latest ``size`` requests. Noting one and viewing all are both of constant cost: sums are kept, exactly,
    since they are integers."""

    def __init__(self, size: int = 256) -> None:
        if size < 1:
            raise ValueError(f"a window holds at least 1 request, not {size}")
        self._size = size
        self._latest: deque[_Request] = deque()
        self._lanes: Counter[str] = Counter()
        self._tokens = self._squares = self._with_targets = self._streaming = 0
        self._view: Traffic | None = Traffic()

    def note(self, total_tokens: int, lane: str, has_target: bool, stream: bool) -> None:
        """A request has come, of ``total_tokens`` prompt and expected output tokens; the oldest one may go."""
        request = _Request(total_tokens, lane, has_target, stream)
        self._latest.append(request)
        self._count(request, 1)
        if len(self._latest) > self._size:
            self._count(self._latest.popleft(), -1)
        self._view = None

    def _count(self, request: _Request, sign: int) -> None:
        self._tokens += sign * request.total_tokens
        self._squares += sign * request.total_tokens**2
        self._with_targets += sign * request.has_target
        self._streaming += sign * request.stream
        self._lanes[request.lane] += sign
        if not self._lanes[request.lane]:
            del self._lanes[request.lane]

    def view(self) -> Traffic:
        """What the window holds; the same object until another request is noted."""
        if self._view is None:
            count = len(self._latest)
            variance = (count * self._squares - self._tokens**2) / count**2
            self._view = Traffic(
                requests=count,
                with_targets=self._with_targets / count,
                streaming=self._streaming / count,
                length_spread=math.sqrt(variance) * count / self._tokens if self._tokens else 0.0,
                lanes=len(self._lanes),
            )
        return self._view
