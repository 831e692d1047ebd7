"""How vLLM's objects are asked and told things, where versions may differ."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from headrace.vllm.contract import SOURCES, Contract
from headrace.vllm.shapes import Request, Scheduler

Readiness = Literal["ready", "failed", "not yet"]


@dataclass(frozen=True)
class Adapter:
    """The versions from ``since`` (major, minor) to the next adapter's, and their shape."""

    since: tuple[int, int]
    contract: Contract

    def readiness(self, request: Request) -> Readiness:
        """Whether a waiting request could run now. ``failed``: vLLM must look at it once more, to end it."""
        status = request.status.name
        if status in ("WAITING", "PREEMPTED"):
            draining = request.num_stale_output_tokens > 0 and not request.drop_stale_output
            return "not yet" if draining else "ready"
        if status == "WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR":
            wanted = request.structured_output_request
            grammar = None if wanted is None else wanted.grammar
            if grammar is None:
                return "not yet"
            return "failed" if isinstance(grammar, Exception) else "ready"
        return "not yet"

    def runs(self, request: Request) -> bool:
        """Whether a request is among the running ones."""
        return bool(request.status.name == "RUNNING")

    def lets_in(self, scheduler: Scheduler) -> bool:
        """Whether the scheduler takes waiting requests at all, or is paused."""
        return getattr(scheduler, "_pause_state", 0) == 0

    def cached_tokens(self, scheduler: Scheduler, request: Request) -> int:
        """How many of a waiting request's tokens vLLM's prefix cache holds now."""
        return int(scheduler.kv_cache_manager.get_computed_blocks(request)[1])

    def preempt(self, scheduler: Scheduler, request: Request, now_s: float) -> None:
        """Take a running request out, to wait again and be computed again. Never within vLLM's own step."""
        scheduler.running.remove(request)
        scheduler._preempt_request(request, now_s)


def read_sources(package: Path) -> Mapping[str, str]:
    """The files that ``contract`` looks at, of vLLM's package folder; what is not there is left out."""
    found = {name: package / name for name in SOURCES}
    return {name: path.read_text(encoding="utf-8") for name, path in found.items() if path.is_file()}
