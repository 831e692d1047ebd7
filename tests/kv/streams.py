"""Streams that hold tokens, and a machine with simple times."""

from __future__ import annotations

from headrace.scheduling.bands import Band

BANDS = (Band(1024, 4), Band(4096, 2))


class Machine:
    """Predicted times of a slow processor: 2 ms a prefill token, 35 ms a copy."""

    def call_s(self, rows: int, context_tokens: int = 0, pairs: int = 0) -> float:
        return 0.005 + rows * 2e-3 + pairs * 1e-7

    def move_s(self, tokens: int, band: int) -> float:
        return 0.035


TIMES = Machine()
