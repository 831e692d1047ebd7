"""One request of a trace, whatever file format it came from, and what of a trace is replayed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from msgspec import Struct

from headrace.errors import ConfigError

TraceFormat = Literal["azure", "mooncake", "burstgpt", "bailian", "headrace"]
MIN_SPEED, MAX_SPEED = 0.001, 1e6
MAX_TRACE_S = 1e9
"""No trace is longer (31 years): so every time fits in 64 bits of nanoseconds."""

TRACE_FORMATS: tuple[TraceFormat, ...] = get_args(TraceFormat)


class TraceRow(Struct, frozen=True):
    """A request to replay.

    ``at_ns``: nanoseconds after the start of the replayed window, time scaling applied; rows come in this order.
    ``hash_ids`` name the prompt's leading blocks of ``block_tokens`` tokens each: requests whose lists begin alike
    have prompts that begin alike. Empty where the trace has none.
    ``session`` names the conversation, ``turn`` (from 0) this request's place in it, as far as the trace tells.
    ``parent`` is the position, among the rows read (from 0), of the turn before this one; None at the
    conversation's beginning and when that turn was not replayed.
    """

    at_ns: int
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] = ()
    block_tokens: int = 0
    session: str | None = None
    turn: int = 0
    parent: int | None = None
    lane: str | None = None
    class_name: str | None = None
    """BurstGPT's log type, Bailian's request type, our own ``class``."""
    headers: dict[str, str] = {}


@dataclass(frozen=True, slots=True)
class TraceOptions:
    """What is replayed of a trace, and how.

    ``start_s`` and ``duration_s`` cut a window out of the trace, in the trace's own seconds: from its time 0 (its
    first row, where it has only dates), before scaling. ``speed`` 2.0 halves the gaps. ``limit``: at most so many
    rows. Longer inputs and outputs than ``max_input_tokens`` and ``max_output_tokens`` are cut to these.
    ``keep_empty``: a row without input or output tokens (BurstGPT writes a failed request so) is replayed with 1
    token instead; otherwise it is passed over and counted.
    """

    format: TraceFormat | None = None
    """None: recognised by the first line."""
    speed: float = 1.0
    start_s: float = 0.0
    duration_s: float | None = None
    limit: int | None = None
    max_input_tokens: int | None = None
    max_output_tokens: int | None = None
    keep_empty: bool = False

    def __post_init__(self) -> None:
        """Raises ConfigError for a value that makes no sense."""
        if not MIN_SPEED <= self.speed <= MAX_SPEED:
            raise ConfigError(f"a trace's speed must be from {MIN_SPEED:g} to {MAX_SPEED:g}, and is {self.speed:g}")
        if not 0 <= self.start_s <= MAX_TRACE_S or not (self.duration_s is None or 0 < self.duration_s <= MAX_TRACE_S):
            raise ConfigError(f"a trace's start must be from 0 and its duration above 0, up to {MAX_TRACE_S:g} s")
        limits = (self.limit, self.max_input_tokens, self.max_output_tokens)
        if any(limit is not None and limit < 1 for limit in limits):
            raise ConfigError("a trace's limit and its largest input and output must be at least 1")


DEFAULT_OPTIONS = TraceOptions()
"""The whole trace, as it is."""
