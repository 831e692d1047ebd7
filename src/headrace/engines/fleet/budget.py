"""How many further tries there may be: a share of the requests that come, and what was saved up. Pure."""

from __future__ import annotations


class RetryBudget:
    """Each request adds ``share`` of a try, up to ``reserve`` saved; it begins full."""

    __slots__ = ("_reserve", "_saved", "_share")

    def __init__(self, share: float, reserve: int) -> None:
        self._share = share
        self._reserve = float(reserve)
        self._saved = self._reserve

    @property
    def left(self) -> float:
        return self._saved

    def request_came(self) -> None:
        self._saved = min(max(1.0, self._reserve), self._saved + self._share)

    def take(self) -> bool:
        """Whether there may be one more try; it is counted."""
        if self._saved < 1.0:
            return False
        self._saved -= 1.0
        return True
