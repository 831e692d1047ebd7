"""A sequence as the scheduler sees it: token counts, urgency, and where its KV lives."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from headrace.kv.precision import KvDtype

RELAXED_PACE_S: Final = 0.5
"""Time between tokens at which a sequence without targets begins to constrain others: two tokens a second still read
as alive."""
PACE_MARGIN: Final = 0.95
"""Of a target, what tokens are paced for: steps take longer than predicted half of the time. 0.9
made interactive traffic meet its targets more often at 70 % of capacity, but cost documents theirs under overload."""
UNKNOWN_OUTPUT_TOKENS: Final = 128
"""Output length to reckon with before a lane has shown its own."""


@dataclass(frozen=True, slots=True)
class Slot:
    """A stream of one band's context. ``band`` indexes the bands, shortest first; ``stream`` is dense from 0."""

    band: int
    stream: int


@dataclass(slots=True, eq=False)
class SequenceState:
    """Counts that decide when a sequence runs.

    ``known_tokens`` are prompt plus generated tokens, ``computed_tokens`` those whose KV is in the slot:
    the difference is what the next steps must compute (1 while decoding). ``limit_tokens`` is the length at
    which the sequence ends with ``length``. ``priority``: lower is more urgent. Times are monotonic seconds.

    ``deadline_s`` is when the first token is due, ``finish_by_s`` the last one, ``tpot_s`` the target for the time
    per token between them (None: no such target). ``expected_tokens`` is the output length that its lane's requests
    usually have (None: unknown). ``first_token_s`` and ``last_token_s`` are when it got its first and latest token.
    A sequence without a slot that has ``computed_tokens`` is parked: its KV is kept outside the streams.
    ``cached_tokens`` is how much of a waiting sequence's prompt need not be computed. ``min_kv_dtype``: only
    bands that keep KV at least this precisely will do (None: any). ``made_way`` is true from when it was taken out of
    its stream for want of memory, whether its KV could be kept or not.

    ``due_s`` is when the next token is due, ``pace_s`` the time between due tokens (``note_token``); ``rank_s`` and
    ``start_by_s`` are set when it begins to wait (``order``).
    """

    request_id: str
    prompt_tokens: int
    limit_tokens: int
    priority: int
    arrived_s: float
    deadline_s: float | None = None
    known_tokens: int = 0
    computed_tokens: int = 0
    chunk_limit_tokens: int | None = None
    slot: Slot | None = None
    lane: str = ""
    tenant: str | None = None
    tpot_s: float | None = None
    finish_by_s: float | None = None
    expected_tokens: int | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    due_s: float = math.inf
    pace_s: float = math.inf
    rank_s: float | None = None
    start_by_s: float = math.inf
    cached_tokens: int = 0
    min_kv_dtype: KvDtype | None = None
    made_way: bool = False

    def __post_init__(self) -> None:
        if not self.known_tokens:
            self.known_tokens = self.prompt_tokens

    @property
    def pending_tokens(self) -> int:
        """Tokens that still have to be computed before the next one can be sampled."""
        return self.known_tokens - self.computed_tokens

    def note_token(self, now_s: float) -> None:
        """A token was sampled at ``now_s``; the caller has counted it in ``known_tokens``.

        The k-th token after the first is due k paces after the first one, so that at every moment the time per token
        so far is within its target: who is ahead has slack that a prefill may use. The pace is the TPOT target, or
        what the E2E deadline leaves for the expected output, whichever is shorter; without either it is
        ``RELAXED_PACE_S`` after the last token.
        """
        self.last_token_s = now_s
        if self.first_token_s is None:
            self.first_token_s = now_s
            self.pace_s = math.inf if self.tpot_s is None else self.tpot_s
            if self.finish_by_s is not None:
                to_come = max(1, self.output_tokens_to_expect - 1)
                self.pace_s = min(self.pace_s, max(0.0, self.finish_by_s - now_s) / to_come)
            self.pace_s *= PACE_MARGIN
        if self.pace_s == math.inf:
            self.due_s = now_s + RELAXED_PACE_S
        else:
            self.due_s = self.first_token_s + self.pace_s * (self.known_tokens - self.prompt_tokens)

    @property
    def output_tokens_to_expect(self) -> int:
        """The output length to reckon with: what its lane usually has, never beyond its limit."""
        most = max(0, self.limit_tokens - self.prompt_tokens)
        return min(most, UNKNOWN_OUTPUT_TOKENS if self.expected_tokens is None else self.expected_tokens)

    @property
    def uncached_tokens(self) -> int:
        """Tokens to compute before the next one can be sampled, less what can be taken from a cache."""
        return max(1, self.known_tokens - max(self.computed_tokens, self.cached_tokens))

    @property
    def generated_tokens(self) -> int:
        """Output tokens so far."""
        return self.known_tokens - self.prompt_tokens

    @property
    def urgent(self) -> bool:
        """True when it has a target that a long step could make it miss."""
        return self.deadline_s is not None or self.tpot_s is not None or self.finish_by_s is not None

    @property
    def decoding(self) -> bool:
        """True when only the token sampled last is pending."""
        return self.known_tokens > self.prompt_tokens and self.known_tokens - self.computed_tokens == 1


def urgency(sequence: SequenceState) -> tuple[int, float, str]:
    """Sort key: priority, then arrival; the id makes the order total and reproducible."""
    return (sequence.priority, sequence.arrived_s, sequence.request_id)
