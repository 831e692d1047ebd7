"""Prompts on some accelerators, answers on others: a small event loop for the published result of DistServe.

Its rules are those of the simulator that the result comes from: all waiting prompts share a pass, first come first
served; all running answers share a step; a pipeline of n stages takes 1/n of a pass in each stage and ``STAGE_S`` x n
more in prompts' stages; 2 ms and 0.1 us per token of context (messages) pass in the first stage beside the pass.
Moving KV from one side to the other takes no time.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from headrace.simulate.hardware.coefficients import FittedLines
from headrace.simulate.hardware.work import Chunk, Work

STAGE_S = 0.001
MESSAGE_S = 0.002
MESSAGE_S_PER_TOKEN = 1e-7
MOST_CONTEXT_TOKENS = 50_000
"""Of one decode step."""


@dataclass(frozen=True)
class Side:
    """One kind of worker: its step times at its tensor parallelism, and stages."""

    times: FittedLines
    tensor: int
    stages: int = 1

    @property
    def accelerators(self) -> int:
        return self.tensor * self.stages


@dataclass
class Served:
    """A request: what it is, and when its first and last token came."""

    arrived_s: float
    prompt_tokens: int
    output_tokens: int
    first_token_s: float = 0.0
    last_token_s: float = 0.0

    @property
    def ttft_s(self) -> float:
        return self.first_token_s - self.arrived_s

    @property
    def tpot_s(self) -> float:
        """Per token of the whole answer, as the published simulator divides."""
        return (self.last_token_s - self.first_token_s) / self.output_tokens


def serve(requests: Sequence[Served], prompts: Side, answers: Side) -> None:
    """Serve all; their times are in them afterwards."""
    _prefill(sorted(requests, key=lambda request: request.arrived_s), prompts)
    _decode(sorted(requests, key=lambda request: request.first_token_s), answers)


def _prefill(requests: Sequence[Served], side: Side) -> None:
    waiting = deque(requests)
    free_s = [0.0] * side.stages
    while waiting:
        start_s = max(free_s[0], waiting[0].arrived_s)
        batch = []
        while waiting and waiting[0].arrived_s <= start_s:
            batch.append(waiting.popleft())
        tokens = sum([request.prompt_tokens for request in batch])
        chunks = tuple([Chunk(0, request.prompt_tokens) for request in batch])
        stage_s = side.times.pass_s(Work(chunks=chunks)) / side.stages + STAGE_S * side.stages
        at_s = start_s + MESSAGE_S + MESSAGE_S_PER_TOKEN * tokens
        for stage in range(side.stages):
            at_s = max(at_s, free_s[stage]) + stage_s
            free_s[stage] = at_s
        for request in batch:
            request.first_token_s = at_s


def _decode(requests: Sequence[Served], side: Side) -> None:
    """A batch goes round the stages; while one is in the second stage, another is in the first."""
    coming = deque(requests)
    ready: deque[tuple[Served, int]] = deque()  # with the tokens that each has
    free_s = [0.0] * side.stages
    under_way: list[tuple[float, int, list[tuple[Served, int]]]] = []
    number = 0
    while coming or ready or under_way:
        start_s = free_s[0]
        if not ready:
            start_s = max(
                start_s,
                min(
                    coming[0].first_token_s if coming else float("inf"), under_way[0][0] if under_way else float("inf")
                ),
            )
        while under_way and under_way[0][0] <= start_s:
            ready.extend(heapq.heappop(under_way)[2])
        while coming and coming[0].first_token_s <= start_s:
            ready.append((coming.popleft(), 1))
        if not ready:
            continue
        batch: list[tuple[Served, int]] = []
        context_tokens = 0
        while ready and context_tokens + ready[0][0].prompt_tokens + ready[0][1] + 1 <= MOST_CONTEXT_TOKENS:
            request, tokens = ready.popleft()
            context_tokens += request.prompt_tokens + tokens + 1
            batch.append((request, tokens))
        stage_s = side.times.pass_s(Work(len(batch), context_tokens)) / side.stages
        at_s = start_s + MESSAGE_S + MESSAGE_S_PER_TOKEN * context_tokens
        for stage in range(side.stages):
            at_s = max(at_s, free_s[stage]) + stage_s
            free_s[stage] = at_s
        going = []
        for request, tokens in batch:
            request.last_token_s = at_s
            if tokens + 1 < request.output_tokens:
                going.append((request, tokens + 1))
        if going:
            number += 1
            heapq.heappush(under_way, (at_s, number, going))
