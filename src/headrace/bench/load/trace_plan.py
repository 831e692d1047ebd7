"""A trace replayed with its own lengths, shared prefixes and conversations.

Where the trace has hash ids, they say what a prompt shares with earlier ones, its history included, and the prompt's
text is made from them; the replies that the history would hold are not the target's own. Where it has none, a later
turn carries the real history, if its recorded prompt is long enough to have held it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import tee

from headrace.bench.load.class_plan import IllegalPlan
from headrace.bench.load.context_fit import ContextFit
from headrace.bench.load.open_plan import Timeline, add_illegal, with_next
from headrace.bench.load.streams import text_seeds
from headrace.bench.load.traces import TraceRow
from headrace.bench.load.workload import TrafficClass, Workload
from headrace.bench.planned import PlannedRequest, SharedPrefix

EVERY_OTHER = "*"
"""In ``trace_classes``: all classes of the trace that it does not name."""

_UNNAMED = "trace"
"""The class of a row without one that nothing maps."""


@dataclass(frozen=True)
class _Replay:
    workload: Workload
    fit: ContextFit
    seed: int

    def class_of(self, row: TraceRow) -> str:
        mapped = self.workload.trace_classes
        own = row.class_name or _UNNAMED
        return mapped.get(own) or mapped.get(EVERY_OTHER) or own


def plan_trace(
    rows: Iterable[TraceRow],
    workload: Workload,
    illegal: IllegalPlan,
    *,
    seed: int,
    fit: ContextFit,
    duration_ns: int,
) -> list[PlannedRequest]:
    """All requests in order of time: the rows before ``duration_ns``, and the illegal ones between them."""
    replay = _Replay(workload, fit, seed)
    timeline = Timeline(duration_ns)
    seeds: dict[str, Iterator[int]] = {}
    places: list[int] = []
    listed, timed = tee(rows)
    for row, (time_ns, next_ns) in zip(listed, with_next((row.at_ns for row in timed), duration_ns), strict=True):
        if time_ns >= duration_ns:
            break
        timeline.advance(time_ns)
        name = replay.class_of(row)
        if name not in seeds:
            seeds[name] = text_seeds(seed, name)
        before = None if row.parent is None else timeline.requests[places[row.parent]]
        places.append(timeline.next_index)
        timeline.requests.append(_planned(row, name, replay, timeline.next_index, before, next(seeds[name])))
        add_illegal(timeline, illegal, time_ns, min(next_ns, duration_ns))
    return timeline.finish()


def _planned(
    row: TraceRow, name: str, replay: _Replay, index: int, before: PlannedRequest | None, text_seed: int
) -> PlannedRequest:
    traffic = replay.workload.classes.get(name) or TrafficClass()
    factor = replay.fit.factor(traffic)
    input_tokens, output_tokens = replay.fit.cut(max(1, round(row.input_tokens * factor)), row.output_tokens)
    prefix: SharedPrefix | None = None
    if row.hash_ids:
        prefix = SharedPrefix(hash_ids=row.hash_ids, block_tokens=max(1, round(row.block_tokens * factor)))
    carries_history = (
        prefix is None and before is not None and input_tokens > before.input_tokens + before.output_tokens
    )
    return PlannedRequest(
        index=index,
        class_name=name,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        due_ns=row.at_ns,
        lane=row.lane or traffic.lane,
        headers=traffic.headers | row.headers if row.headers else traffic.headers,
        body=traffic.body,
        priority=traffic.priority,
        prefix=prefix,
        session=row.session,
        turn=row.turn,
        after=before.index if carries_history and before is not None else None,
        text_seed=text_seed,
    )
