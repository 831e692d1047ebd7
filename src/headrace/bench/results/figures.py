"""What a summary holds. Times are seconds, rates are per second of the measured window; the unit is in the name.

A figure is None (null in JSON) when there is nothing to make it of, and a percentile also when the sample
cannot support it (``quantiles`` has the rule).
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from headrace.bench.records import RunInfo
from headrace.bench.results.validity import CPU_SHARE_LIMIT, SEND_LAG_LIMIT_S

FORMAT = "headrace-bench-summary"
VERSION = 1

METRICS = (
    "ttft_s",
    "ttft_from_due_s",
    "tpot_s",
    "itl_s",
    "ntpot_s",
    "e2e_s",
    "e2e_from_due_s",
    "send_lag_s",
)
"""The latencies of a group, in the order in which they are shown."""

METRIC_NAMES: dict[str, str] = {
    "ttft_s": "TTFT",
    "ttft_from_due_s": "TTFT from due",
    "tpot_s": "TPOT",
    "itl_s": "ITL",
    "ntpot_s": "NTPOT",
    "e2e_s": "E2E",
    "e2e_from_due_s": "E2E from due",
    "send_lag_s": "send lag",
}


class PercentileFigure(Struct, frozen=True):
    """A percentile and its 95 % interval, in the metric's unit."""

    value: float
    low: float
    high: float


class Distribution(Struct, frozen=True):
    """How one metric is spread, in the metric's unit. ``std`` is that of the sample (n - 1).

    ``independent``: how many independent values the intervals count with; below ``count`` for pooled gaps.
    """

    count: int
    independent: int
    mean: float | None
    std: float | None
    min: float | None
    max: float | None
    percentiles: dict[str, PercentileFigure | None]


class ShareFigure(Struct, frozen=True):
    """A share and its 95 % Wilson interval."""

    value: float
    low: float
    high: float
    hits: int
    count: int


class Group(Struct, frozen=True):
    """The legal requests of the whole run, of one lane or of one class that were due in the measured window.

    ``offered`` = ``good`` + misses; ``outcomes`` counts the offered ones, and adds up to ``offered``.
    ``not_offered``: cut off by the end of a closed loop, in no figure. ``missed_by`` counts reasons, and a
    request may have several. Latencies are those of requests that were answered whole (outcome ok, and content);
    the send lag is that of every request that was sent.

    Rates: ``offered_rps`` due, ``sent_rps`` sent, ``completed_rps`` answered whole with content inside the window,
    whenever they were due; ``goodput_rps`` those of them that are good, so never more. (Attainment counts good
    answers that come after the window too: it is not goodput / offered rate where the server was behind.)
    Tokens are counted when they arrive inside the window and belong to an answer that ended whole, sooner or
    later; a prompt's tokens arrive with its first token. ``wasted_tokens_per_s``: output tokens that arrived
    inside the window of answers that failed; they are in no other rate.
    """

    kind: Literal["whole", "lane", "class"]
    name: str
    slo: dict[str, float] | None
    """The SLO, when every class in the group has the same one."""
    offered: int
    good: int
    good_from_due: int
    not_offered: int
    outcomes: dict[str, int]
    missed_by: dict[str, int]
    attainment: ShareFigure | None
    attainment_from_due: ShareFigure | None
    offered_rps: float
    sent_rps: float
    completed_rps: float
    goodput_rps: float
    input_tokens_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    without_usage: int
    """Requests answered whole whose output tokens are the count of their chunks: the server sent no usage."""
    served_elsewhere: int
    """Requests that asked for a lane and were served in another one."""
    latencies: dict[str, Distribution]
    wasted_tokens_per_s: float = 0.0
    empty: int = 0
    """Offered requests that were answered ("ok") without any content."""
    ended_after: int = 0
    """Offered requests that ended after the window, or never."""


class Refusals(Struct, frozen=True):
    """Illegal requests of one kind, over the whole run. ``unjudged``: shed for load, or cut off by the end."""

    kind: str
    count: int
    right: int
    wrong: int
    unjudged: int
    statuses: dict[str, int]
    """By HTTP status; "none" where no status came."""


class Failure(Struct, frozen=True):
    """How often legal requests failed in one way, over the whole run; ``error`` is the beginning of the text."""

    outcome: str
    status: int | None
    error: str
    count: int


class Window(Struct, frozen=True):
    """The measured window, seconds after the run's start. What was due in it is measured."""

    start_s: float
    end_s: float

    @property
    def length_s(self) -> float:
        return self.end_s - self.start_s


class Limits(Struct, frozen=True):
    """Beyond these the generator, not the server, made the figures: the run is invalid. The event loop's lag is held
    against the send lag's limit."""

    send_lag_p99_s: float = SEND_LAG_LIMIT_S
    cpu_share: float = CPU_SHARE_LIMIT


class Summary(Struct, frozen=True, tag_field="format", tag=FORMAT):
    """What a run's records say. ``invalid`` and ``warnings`` are sentences; a run is valid when ``invalid`` is
    empty."""

    version: int
    run: RunInfo
    window: Window
    limits: Limits
    confidence: float
    send_lag_p99_s: float | None
    """The p99 that the limit is held against: that of the sample itself, whether it supports one or not."""
    invalid: list[str]
    warnings: list[str]
    records: int
    legal_in_window: int
    legal_before_window: int
    """Warm-up."""
    legal_after_window: int
    whole: Group
    lanes: list[Group]
    classes: list[Group]
    classes_are_lanes: bool
    """Every lane holds exactly one class and every class lies in one lane: the two lists say the same."""
    refusals: list[Refusals]
    failures: list[Failure]
    """The most frequent ones."""

    @property
    def groups(self) -> list[Group]:
        """The whole, the lanes, and the classes where these are not the lanes under other names. A lane that is alone
        is the whole under its name: it stands for both."""
        whole = [] if len(self.lanes) == 1 else [self.whole]
        return [*whole, *self.lanes, *([] if self.classes_are_lanes else self.classes)]

    @property
    def nothing_answered(self) -> bool:
        """Requests were offered and not one was answered with content."""
        return self.whole.offered > 0 and self.whole.outcomes.get("ok", 0) == self.whole.empty
