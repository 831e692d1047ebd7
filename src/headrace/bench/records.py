"""What happened to each request: raw, one per line of a JSONL file, the source of every reported figure."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from headrace.bench.planned import PlannedRequest

Outcome = Literal["ok", "shed", "rejected", "http_error", "refused", "cut", "timeout", "error", "cancelled"]
"""``ok``: answered whole. ``shed``: 429, or 503 with Retry-After. ``rejected``: another 4xx. ``http_error``: 5xx
or another status. ``refused``: no connection. ``cut``: the stream ended early or broke. ``timeout``: the run's
request limit passed. ``error``: an error event, or an answer that is none. ``cancelled``: the run ended first."""


MOST_TOKENS = 10_000_000
"""The most tokens that a prompt or an answer is believed to have: several times the longest context in use."""

INTERRUPTED = "interrupted"
"""The error of a request that was ``cancelled`` because the operator ended the run at once (a second Ctrl-C): it
says nothing about the server."""

GENERATOR_FAULT = "generator: "
"""Begins the error of a request that failed because of this machine, not of the server (no file descriptor, no
port): a run with one is not valid."""


class RequestRecord(Struct, omit_defaults=True):
    """One request. Times are nanoseconds of the monotonic clock after the run's start; None: it never came.

    ``due_ns``: when the schedule wanted it sent (in a closed loop, when its user was free). ``ready_ns``: when it
    could be sent: ``due_ns``, or later when the turn before it had not ended; the send lag is
    ``sent_ns - ready_ns`` and is the generator's own fault. ``sent_ns``: just before the first byte was written,
    of the connection's handshake when the request opened a new one; then ``connected_ns`` is when that stood.
    ``headers_ns``: the status line was read. ``first_ns``: the first chunk with generated content. ``chunk_ns``:
    every chunk with content, ``chunk_tokens`` the tokens in it as far as the server says so per chunk (else
    empty). ``end_ns``: the last byte, or the failure.
    ``output_tokens``: from ``usage`` when it came (``usage_seen``), else the number of content chunks.
    """

    index: int
    class_name: str
    outcome: Outcome
    due_ns: int
    ready_ns: int
    sent_ns: int | None = None
    connected_ns: int | None = None
    headers_ns: int | None = None
    first_ns: int | None = None
    chunk_ns: list[int] = []
    chunk_tokens: list[int] = []
    end_ns: int | None = None
    lane: str | None = None
    served_lane: str | None = None
    """``x-headrace-lane`` of the answer, when it has one."""
    session: str | None = None
    turn: int = 0
    user: int | None = None
    malformed: str | None = None
    status: int | None = None
    error: str | None = None
    finish_reason: str | None = None
    request_id: str | None = None
    retry_after_s: float | None = None
    input_tokens: int = 0
    """As planned."""
    note: str | None = None
    """Why the server's usage was not believed: the record then has none."""
    prompt_tokens: int | None = None
    """As the server counted."""
    cached_tokens: int | None = None
    wanted_output_tokens: int = 0
    output_tokens: int = 0
    usage_seen: bool = False


class GeneratorHealth(Struct, frozen=True):
    """How the generator itself did. ``cpu_share``: its processor time per second of the run (1.0: a whole
    core). ``loop_lag_p99_s``: how late its event loop's own timer fired."""

    cpu_share: float
    loop_lag_p99_s: float
    peak_in_flight: int


class RunInfo(Struct, frozen=True, omit_defaults=True):
    """The first line of a records file: what was run, against what, where, when."""

    tool_version: str
    target: str
    model: str
    started_at: str
    """UTC, ISO 8601."""
    duration_s: float
    wall_s: float
    warmup_s: float
    seed: int
    source: dict[str, object]
    slos: dict[str, dict[str, float]]
    health: GeneratorHealth
    machine: dict[str, object] = {}
    simulated: bool = False
    interrupted: bool = False
    """Someone ended the run early: ``duration_s`` is how long requests were sent."""
    concurrency: int | None = None
    label: str = ""
    schedule_sha256: str = ""
    """Of the schedule's canonical JSON: two runs with the same one had the same load."""


def new_record(planned: PlannedRequest, due_ns: int, ready_ns: int, outcome: Outcome = "cancelled") -> RequestRecord:
    """The record of a request that nothing has happened to, but for its ``outcome``."""
    return RequestRecord(
        index=planned.index,
        class_name=planned.class_name,
        outcome=outcome,
        due_ns=due_ns,
        ready_ns=ready_ns,
        lane=planned.lane,
        session=planned.session,
        turn=planned.turn,
        user=planned.user,
        malformed=planned.malformed,
        input_tokens=planned.input_tokens,
        wanted_output_tokens=planned.output_tokens,
    )
