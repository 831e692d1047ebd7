"""What will be sent and when: the whole load of a run, computed before its first request."""

from __future__ import annotations

from typing import Final, Literal

from msgspec import Struct

MalformedKind = Literal[
    "broken_json", "wrong_type", "unknown_model", "empty_messages", "bad_range", "too_long", "huge_body", "no_body"
]
"""How an illegal request is illegal. ``too_long``: a prompt beyond any context."""


RIGHT_STATUSES: Final[dict[str, frozenset[int]]] = {
    "broken_json": frozenset({400, 422}),
    "wrong_type": frozenset({400, 422}),
    "unknown_model": frozenset({400, 404}),
    "empty_messages": frozenset({400, 422}),
    "bad_range": frozenset({400, 422}),
    "too_long": frozenset({400, 413, 422}),
    "huge_body": frozenset({400, 413}),
    "no_body": frozenset({400, 411, 415, 422}),
}
"""By kind, the statuses that refuse it rightly. An answer of another status, or none at all, is a wrong one."""


class SharedPrefix(Struct, frozen=True, omit_defaults=True):
    """The prompt begins with ``tokens`` tokens that every request with the same ``key`` begins with.

    ``hash_ids`` (traces) names the prefix block by block instead: requests share as many leading blocks of
    ``block_tokens`` as their lists share leading ids.
    """

    key: str = ""
    tokens: int = 0
    hash_ids: tuple[int, ...] = ()
    block_tokens: int = 512


class PlannedRequest(Struct, frozen=True, omit_defaults=True):
    """One request of the schedule.

    ``due_ns`` is nanoseconds after the run's start. In a closed loop it is None and ``user`` says whose turn it
    is: each user sends its requests in ``index`` order, the next ``think_ns`` after the last one ended.
    ``input_tokens`` is the whole prompt's length (shared prefix, history and question), ``output_tokens`` the
    length asked for (``max_tokens``; with ``ignore_eos`` where the server knows it). A request with ``after``
    set is a later turn of that request's conversation: it carries the history and is never sent before that
    one has ended, however late; its own ``due_ns`` stays what it was.
    """

    index: int
    class_name: str
    input_tokens: int
    output_tokens: int
    due_ns: int | None = None
    lane: str | None = None
    headers: dict[str, str] = {}
    body: dict[str, object] = {}
    """Fields added to the request's JSON, as the workload file says them (``temperature``, ``priority``...)."""
    priority: int | None = None
    prefix: SharedPrefix | None = None
    session: str | None = None
    turn: int = 0
    after: int | None = None
    user: int | None = None
    think_ns: int = 0
    malformed: MalformedKind | None = None
    text_seed: int = 0


class SloTarget(Struct, frozen=True, omit_defaults=True):
    """A class's SLO, seconds; None leaves a figure free. A request is good when it meets all that are set."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None


class Schedule(Struct, frozen=True):
    """A run's load. ``seed`` and ``source`` (the arguments or workload file, resolved) reproduce it."""

    requests: list[PlannedRequest]
    duration_s: float
    seed: int
    source: dict[str, object]
    slos: dict[str, SloTarget]
    """By class name."""
    concurrency: int | None = None
    """Users of a closed loop, or None for an open one."""
