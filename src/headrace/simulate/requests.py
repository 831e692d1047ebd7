"""A request on the virtual clock, and what became of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from msgspec import Struct

from headrace.messages.engine import FinishReason

Outcome = Literal["unfinished"] | FinishReason


class Targets(Struct, frozen=True):
    """An SLO's targets for one request, seconds from its arrival (``tpot_s``: per token); None leaves one free."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None


class VirtualRequest(Struct, frozen=True):
    """What a client sends. It stops by itself after ``output_tokens``, which the engine does not know, or at
    ``max_tokens`` (0: only the prompt is computed). ``expected_tokens`` is what its lane's outputs usually are,
    ``cached_tokens`` how much of its prompt the engine holds from others and copies instead of computing it."""

    request_id: str
    arrived_s: float
    prompt_tokens: int
    output_tokens: int
    lane: str = ""
    tenant: str | None = None
    priority: int = 0
    targets: Targets = Targets()
    max_tokens: int | None = None
    expected_tokens: int | None = None
    chunk_limit_tokens: int | None = None
    stream: bool = True
    cached_tokens: int = 0

    @property
    def deadline_s(self) -> float | None:
        """When the first token is due, as ``lanes.deadline`` has it: the sooner of the TTFT and E2E targets."""
        due = [target for target in (self.targets.ttft_s, self.targets.e2e_s) if target is not None]
        return self.arrived_s + min(due) if due else None

    @property
    def finish_by_s(self) -> float | None:
        """When the last token is due."""
        return None if self.targets.e2e_s is None else self.arrived_s + self.targets.e2e_s


@dataclass(slots=True)
class RequestRecord:
    """The times of one request, seconds on the virtual clock; None for what has not happened. ``admitted_s`` and
    ``started_s`` are when it first got a stream and first was computed; ``longest_gap_s`` lies between two of its
    tokens; ``preempted`` counts how often it gave up its stream; ``token_s`` is every token's time, where an engine
    keeps them."""

    request: VirtualRequest
    admitted_s: float | None = None
    started_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    ended_s: float | None = None
    outcome: Outcome = "unfinished"
    output_tokens: int = 0
    longest_gap_s: float = 0.0
    preempted: int = 0
    token_s: list[float] | None = None

    @property
    def ttft_s(self) -> float | None:
        """Sent to first token."""
        return None if self.first_token_s is None else self.first_token_s - self.request.arrived_s

    @property
    def e2e_s(self) -> float | None:
        """Sent to last token; None unless it ended as it should."""
        if self.ended_s is None or self.outcome not in ("stop", "length"):
            return None
        return self.ended_s - self.request.arrived_s

    @property
    def tpot_s(self) -> float | None:
        """(E2E - TTFT) / (n - 1); None for fewer than two tokens."""
        if self.e2e_s is None or self.ttft_s is None or self.output_tokens < 2:
            return None
        return (self.e2e_s - self.ttft_s) / (self.output_tokens - 1)

    @property
    def good(self) -> bool:
        """True when it ended as it should and met every target that it had."""
        if self.e2e_s is None:
            return False
        targets = self.request.targets
        pairs = ((self.ttft_s, targets.ttft_s), (self.tpot_s, targets.tpot_s), (self.e2e_s, targets.e2e_s))
        return all(target is None or seen is None or seen <= target for seen, target in pairs)
