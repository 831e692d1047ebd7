"""Step times from fitted coefficients, in the form of DistServe's profiles.

For each model and tensor parallelism three numbers a line, milliseconds: a prefill pass takes ``a + b * tokens + c *
(sum of squared lengths)``, a decode pass ``a + b * context tokens + c * sequences``, with other numbers from
``decoding_large_small_bs_threshold`` sequences on.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
from msgspec import Struct

from headrace.errors import ConfigError
from headrace.simulate.hardware.work import Work

_MS = 1e-3
_Line = tuple[float, float, float]


class _Coefficients(Struct, frozen=True):
    decoding_large_small_bs_threshold: int
    prefill: _Line
    decoding_smallbs: _Line
    decoding_largebs: _Line


class FittedLines:
    """``StepTimes`` of one model on one machine. A pass with both kinds takes a prefill pass and what its decodes add
    to it: the lines hold no such passes. Raises ConfigError."""

    def __init__(self, path: Path, *, model: str, tensor: int, copy_s_per_token: float = 0.0) -> None:
        try:
            document = msgspec.json.decode(path.read_bytes(), type=dict[str, dict[str, _Coefficients]])
        except OSError as error:
            raise ConfigError(f"the profile {path} cannot be read: {error.strerror}") from error
        except (msgspec.MsgspecError, UnicodeError) as error:
            raise ConfigError(f"{path} is no such profile: {error}") from error
        by_ranks = document.get(model)
        if by_ranks is None:
            raise ConfigError(f"{path} has no {model}; it has {', '.join(document)}")
        found = by_ranks.get(str(tensor))
        if found is None:
            raise ConfigError(f"{path} has {model} with {', '.join(by_ranks)} ranks, not {tensor}")
        self.source = f"lines fitted to {model} on {tensor} ranks, {path.name}"
        self._lines = found
        self._copy_s_per_token = copy_s_per_token

    def call_s(self, rows: int, context_tokens: int = 0, pairs: int = 0) -> float:
        """One forward pass of which only the sums are known (``Work.of_call`` says what is assumed)."""
        return self.pass_s(Work.of_call(rows, context_tokens, pairs))

    def pass_s(self, work: Work) -> float:
        """One forward pass."""
        if not work.rows:
            return 0.0
        lines = self._lines
        few = work.decodes < lines.decoding_large_small_bs_threshold
        a, b, c = lines.decoding_smallbs if few else lines.decoding_largebs
        total_ms = b * work.context_tokens + c * work.decodes
        if not work.chunks:
            return _MS * (a + total_ms)
        a, b, c = lines.prefill
        squares = sum([(chunk.done + chunk.tokens) ** 2 - chunk.done**2 for chunk in work.chunks])
        return _MS * (total_ms + a + b * work.prompt_tokens + c * squares)

    def move_s(self, tokens: int, band: int) -> float:
        """Copying a sequence's KV, which the lines do not hold."""
        return self._copy_s_per_token * tokens
