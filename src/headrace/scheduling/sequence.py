"""A sequence as the scheduler sees it: token counts, urgency, and where its KV lives."""

from __future__ import annotations

from dataclasses import dataclass


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

    def __post_init__(self) -> None:
        if not self.known_tokens:
            self.known_tokens = self.prompt_tokens

    @property
    def pending_tokens(self) -> int:
        """Tokens that still have to be computed before the next one can be sampled."""
        return self.known_tokens - self.computed_tokens

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
