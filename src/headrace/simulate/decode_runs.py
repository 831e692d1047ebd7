"""Decode steps in a row that no plan could change, computed as one.

While nothing waits and all that run decode, in one band with one pass for everything, every policy's plan is the same:
decode them all. So as long as nobody ends, nobody fills the band, memory is far from scarce and nothing comes from
outside, the ends of the next steps follow from the step times alone. They are computed together, and undone beyond the
step under way when something does come. Times and tokens are those of single steps, to the bit.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Final

from headrace.scheduling.knobs import SchedulingKnobs
from headrace.scheduling.memory import in_blocks
from headrace.scheduling.sequence import SequenceState

SHORTEST: Final = 2
LONGEST: Final = 256
_FULL_SHARE: Final = 0.6
"""Of the KV budget, below every watermark: up to here nobody is parked or preempted."""
_MARGIN_TOKENS: Final = 256
"""Blocks that are begun, and what projections are ahead of what is there."""


@dataclass(slots=True, eq=False)
class DecodeRun:
    """The steps under way end at ``ends_s``; ``done`` of them have been counted."""

    ends_s: list[float]
    done: int = 0

    def cut(self, now_s: float) -> float:
        """Nothing after the step that is under way at ``now_s``. Returns when that ends."""
        last = bisect_left(self.ends_s, now_s)
        del self.ends_s[last + 1 :]
        return self.ends_s[-1]

    def ended(self, now_s: float) -> list[float]:
        """The ends up to ``now_s`` that have not been counted; they are now."""
        upto = bisect_right(self.ends_s, now_s)
        ends_s = self.ends_s[self.done : upto]
        self.done = upto
        return ends_s


@dataclass(slots=True)
class RunLengths:
    """How many steps to look ahead: twice as many after each run that was not cut, few after one that was."""

    ahead: int = field(default=8)

    def whole(self) -> None:
        self.ahead = min(LONGEST, 2 * self.ahead)

    def cut(self, steps: int) -> None:
        self.ahead = max(SHORTEST, min(self.ahead, steps + 1))


def steps_alike(
    running: Collection[SequenceState],
    stops_at: dict[str, int],
    *,
    most: int,
    band_tokens: int,
    budget_tokens: int | None,
    knobs: SchedulingKnobs,
    batch_cap: int,
) -> int:
    """How many steps from now on decode all of ``running`` and nothing else; 0 where that is not sure, or only one."""
    count = len(running)
    if not count or count > knobs.step_tokens or (batch_cap and count > batch_cap):
        return 0
    steps, held = most, 0
    for sequence in running:
        known = sequence.known_tokens
        if known - sequence.computed_tokens != 1 or sequence.first_token_s is None:
            return 0
        left = min(stops_at[sequence.request_id], band_tokens) - known
        if left < steps:
            steps = left
        held += known
    if steps < SHORTEST:
        return 0
    if budget_tokens is not None:
        expected = sum([in_blocks(s.prompt_tokens + s.output_tokens_to_expect) for s in running])
        if max(expected, held) + count * (steps + _MARGIN_TOKENS) > _FULL_SHARE * budget_tokens:
            return 0
    return steps
