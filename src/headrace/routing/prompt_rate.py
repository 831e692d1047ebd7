"""How fast a replica computes prompts, learned from the first tokens that came back. Pure."""

from __future__ import annotations

from typing import Final

RATE_MEMORY: Final = 0.2
"""Weight of the latest prompt in the measured rate of prompts."""

MIN_RATE_TOKENS: Final = 64
"""Shorter prompts say more of the engine's fixed costs than of its rate."""


def learned_rate(before_tokens_per_s: float, computed_tokens: int, took_s: float) -> float:
    """The rate after ``computed_tokens`` of a prompt took ``took_s``; ``before_tokens_per_s`` is 0 before the first."""
    if computed_tokens < MIN_RATE_TOKENS or took_s <= 0:
        return before_tokens_per_s
    rate = computed_tokens / took_s
    return before_tokens_per_s + RATE_MEMORY * (rate - before_tokens_per_s) if before_tokens_per_s else rate
