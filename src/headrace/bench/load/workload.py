"""A workload: which classes of requests come, how often, how long, in which lanes.

``Workload`` is the file's shape, ``workloads/mixed-enterprise.yaml`` shows it filled in, ``workload_file`` reads it.

Lengths are texts as ``lengths.LENGTH_FORMS`` lists them, arrivals as ``arrivals.ARRIVAL_FORMS`` does.
"""

from __future__ import annotations

from msgspec import Struct

from headrace.bench.planned import SloTarget


class PrefixPool(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Prompts of the class begin with one of ``count`` shared texts of ``tokens`` tokens, each as likely as the
    others: for example 10 system prompts of 800 tokens. A conversation keeps the one it began with."""

    tokens: int
    count: int = 1


class Session(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The class's requests are turns of conversations (sessions).

    ``turns`` is the length distribution of a conversation in turns. ``think_ms`` is the one of the time between
    two turns, milliseconds: from due to due in an open loop (so that the load does not depend on the server), from
    the answer's end to the next question in a closed one. With ``history`` a turn's prompt holds all turns before
    it; a conversation then ends early when its next turn would not fit the context.
    """

    turns: str
    think_ms: str
    history: bool = True


class TrafficClass(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One kind of request.

    ``weight`` is its share of all legal requests, relative to the other classes' weights; each turn of a
    conversation counts as one request. ``input_length`` is what a request (or a turn) adds of its own, in tokens;
    a shared prefix and a history come on top. ``output_length`` is the length asked for. A trace may give both.

    ``written_for_context_tokens``: the lengths of this class's prompts are meant for a context of this many tokens
    and shrink in proportion for a smaller one (see ``context_fit``).
    """

    description: str = ""
    weight: float = 1.0
    lane: str | None = None
    input_length: str | None = None
    output_length: str | None = None
    written_for_context_tokens: int | None = None
    headers: dict[str, str] = {}
    body: dict[str, object] = {}
    priority: int | None = None
    shared_prefix: PrefixPool | None = None
    session: Session | None = None
    slo: SloTarget = SloTarget()


class IllegalTraffic(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Illegal requests on top of the legal ones: 0.05 adds five to a hundred, and takes none away.

    ``kinds`` weighs the kinds against each other; empty: all alike.
    """

    share: float
    kinds: dict[str, float] = {}


class Workload(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A whole workload.

    ``duration_s`` may be left out when a trace says how long it is. With ``arrivals: trace(...)`` either no class
    gives lengths (they, the conversations and the shared prefixes are the trace's) or every class does (then only
    the times are). In the first case ``trace_classes`` maps the trace's class names to the workload's classes,
    ``"*"`` taking all that it does not name; a row of neither keeps its own class's name.
    ``scale_to_context_tokens``: the context of the target's model; no prompt with its output exceeds it.
    """

    arrivals: str
    classes: dict[str, TrafficClass] = {}
    description: str = ""
    duration_s: float | None = None
    malformed: IllegalTraffic | None = None
    scale_to_context_tokens: int | None = None
    trace_classes: dict[str, str] = {}
