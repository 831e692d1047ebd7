"""Whether an arrival is worth cutting a forward pass short."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.scheduling.cost import prefill_pairs
from headrace.scheduling.step import StepTimes


@dataclass(frozen=True, slots=True)
class ArrivalFacts:
    """What counts of a request that arrived during a pass: when its first token is due (None: no target), its
    priority (lower is more urgent), and whether a stream is or can be made free for it."""

    deadline_s: float | None
    priority: int
    has_room: bool = True


@dataclass(frozen=True, slots=True)
class RunningPass:
    """A prefill pass: when it is predicted to end, the most urgent priority in it, and when the earliest first token
    of its sequences is due (None: none has a target)."""

    ends_s: float
    priority: int
    deadline_s: float | None = None


def saves_deadline(arrival: ArrivalFacts, now_s: float, running: RunningPass, own_s: float) -> bool:
    """True when the arrival, which needs ``own_s`` to its first token once its turn comes, meets its deadline if the
    pass is cut now and misses it if the pass goes on to its end.

    Never for an arrival that has no deadline, no room, or misses it either way; never against a pass with something
    more urgent in it, or as urgent and due no later: that one would lose what the arrival wins.
    """
    if arrival.deadline_s is None or not arrival.has_room or arrival.priority > running.priority:
        return False
    if (
        arrival.priority == running.priority
        and running.deadline_s is not None
        and running.deadline_s <= arrival.deadline_s
    ):
        return False
    return now_s + own_s <= arrival.deadline_s < max(now_s, running.ends_s) + own_s


def first_token_s(
    prompt_tokens: int, cached_tokens: int, times: StepTimes, *, chunk_tokens: int, decode_s: float
) -> float:
    """Predicted time to a prompt's first token when its chunks of up to ``chunk_tokens`` come next, with a decode step
    of ``decode_s`` before each. The first ``cached_tokens``, fewer than the prompt has, are there already; bringing
    them to its stream is not counted (``kv.sources`` does it only where it takes a fraction of computing them)."""
    total_s = 0.0
    for start in range(cached_tokens, prompt_tokens, chunk_tokens):
        tokens = min(chunk_tokens, prompt_tokens - start)
        total_s += decode_s + times.call_s(tokens, 0, prefill_pairs(start, tokens))
    return total_s
