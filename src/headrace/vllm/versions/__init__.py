"""One small module for each range of vLLM versions, and which of them fits."""

from __future__ import annotations

from typing import Final

from headrace.vllm.adapter import Adapter
from headrace.vllm.versions import v0_31, v0_32

ADAPTERS: Final[tuple[Adapter, ...]] = (v0_31.ADAPTER, v0_32.ADAPTER)
"""Oldest first."""


def adapter_for(version: tuple[int, int]) -> Adapter | None:
    """The adapter of a version; the newest one for later versions, whose shape ``contract`` then decides about; None
    for earlier ones."""
    fitting = [adapter for adapter in ADAPTERS if adapter.since <= version]
    return fitting[-1] if fitting else None
