"""From a ``StepPlan`` to what vLLM's own ``schedule`` must be shown so that it does just that. Pure.

``schedule`` walks the running requests in the order of its list and gives each what it lacks, then takes waiting ones
from its queue, until a budget of tokens is used up; one threshold bounds what any request gets. So a plan becomes an
order of the list, who is left out of it for this step, which waiting requests the queue offers, the budget and the
threshold.

Every chunk comes out as planned when all but the last are whole, or cut to one same length. Else the ones that would
come out longer are left out: they are computed a step later.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from headrace.errors import EngineError
from headrace.scheduling.sequence import SequenceState
from headrace.scheduling.step import StepPlan


class PlanRefused(EngineError):
    """A plan names what is not there, or more than a step may hold: a policy and vLLM do not agree."""


@dataclass(frozen=True, slots=True)
class Shown:
    """What vLLM is shown for one step. ``order`` are the running requests in front, by id; None: as they are. With
    ``hide_rest`` the others are left out, else they follow, and the budget ends before them. ``offered`` are waiting
    requests. ``threshold`` 0 is none. ``decodes`` counts decoding sequences, ``rows`` all tokens."""

    order: tuple[str, ...] | None
    hide_rest: bool
    offered: tuple[str, ...]
    budget: int
    threshold: int
    decodes: int
    chunks: tuple[tuple[str, int], ...]

    @property
    def empty(self) -> bool:
        """Nothing would be computed."""
        return not self.decodes and not self.chunks


@dataclass(frozen=True, slots=True)
class _Chunk:
    request_id: str
    tokens: int
    pending: int
    waits: bool

    @property
    def partial(self) -> bool:
        return self.tokens < self.pending


def shown(
    plan: StepPlan,
    running: Sequence[SequenceState],
    waiting: Mapping[str, SequenceState],
    *,
    most_tokens: int,
    drafts: Mapping[str, int] = {},
    allowed: Collection[str] | None = None,
) -> Shown:
    """What to show for ``plan``. ``waiting`` holds at least those that it admits. ``drafts`` are the speculative
    tokens that a decode brings along. Of those that the plan admits only the ``allowed`` enter (None: all). Raises
    PlanRefused."""
    decode = set(plan.decode)
    if len(decode) != len(plan.decode):
        raise PlanRefused("a plan decodes a sequence twice")
    runs: Mapping[str, SequenceState] = {}
    if plan.prefill or plan.admissions or len(decode) != len(running):
        runs = {s.request_id: s for s in running}
        if not decode <= runs.keys():
            raise PlanRefused(f"a plan decodes what does not run: {sorted(decode - runs.keys())[:3]}")
    elif not decode.issuperset([s.request_id for s in running]):
        raise PlanRefused("a plan decodes what does not run")
    decoded_tokens = len(decode)
    if drafts:
        decoded_tokens += sum([drafts.get(request_id, 0) for request_id in decode])
    chunks = _chunks(plan, runs, waiting, decode, allowed, most_tokens - decoded_tokens)
    chunks = _exact(chunks)
    threshold = max((c.tokens for c in chunks[:-1] if c.partial), default=0)
    budget = decoded_tokens + sum([c.tokens for c in chunks])
    if budget > most_tokens:
        raise PlanRefused(f"a plan of {budget} tokens, of at most {most_tokens}")
    entering = tuple([c.request_id for c in chunks if c.waits])
    order: tuple[str, ...] | None = None
    going_on = [c.request_id for c in chunks if not c.waits]
    if going_on or len(decode) < len(running):
        order = (*[s.request_id for s in running if s.request_id in decode], *going_on)
    return Shown(
        order,
        hide_rest=bool(entering),
        offered=entering,
        budget=budget,
        threshold=threshold,
        decodes=len(decode),
        chunks=tuple([(c.request_id, c.tokens) for c in chunks]),
    )


def _chunks(
    plan: StepPlan,
    runs: Mapping[str, SequenceState],
    waiting: Mapping[str, SequenceState],
    decode: Collection[str],
    allowed: Collection[str] | None,
    most_tokens: int,
) -> list[_Chunk]:
    """In the order of the plan. vLLM lets nobody in without computing something of it: an admitted sequence without a
    chunk of its own gets what the step still holds, or enters another time."""
    entering = {a.request_id for a in plan.admissions}
    if not entering <= waiting.keys():
        raise PlanRefused(f"a plan admits who does not wait: {sorted(entering - waiting.keys())[:3]}")
    found: list[_Chunk] = []
    planned = {c.request_id: c.tokens for c in plan.prefill}
    if len(planned) < len(plan.prefill) or planned.keys() & decode:
        raise PlanRefused("a plan computes a sequence twice")
    for chunk in plan.prefill:
        if chunk.request_id in entering:
            sequence = waiting[chunk.request_id]
        elif chunk.request_id in runs:
            sequence = runs[chunk.request_id]
        else:
            raise PlanRefused(f"a plan prefills {chunk.request_id}, which neither runs nor enters")
        pending = sequence.uncached_tokens if chunk.request_id in entering else sequence.pending_tokens
        if not 1 <= chunk.tokens <= max(1, pending):
            raise PlanRefused(f"a plan computes {chunk.tokens} of {pending} tokens of {chunk.request_id}")
        found.append(_Chunk(chunk.request_id, chunk.tokens, pending, chunk.request_id in entering))
    left = most_tokens - sum([c.tokens for c in found])
    for admission in plan.admissions:
        if admission.request_id not in planned and left > 0:
            pending = waiting[admission.request_id].uncached_tokens
            found.append(_Chunk(admission.request_id, min(pending, left), pending, True))
            left -= min(pending, left)
    return found if allowed is None else [c for c in found if not c.waits or c.request_id in allowed]


def _exact(chunks: list[_Chunk]) -> list[_Chunk]:
    """The chunks that vLLM will give just so, in its order: of running requests, then of waiting ones."""
    kept = [c for c in chunks if not c.waits] + [c for c in chunks if c.waits]
    while True:
        cut = {c.tokens for c in kept[:-1] if c.partial}
        if not cut:
            return kept
        threshold = max(cut)
        if len(cut) == 1 and all(c.tokens <= threshold for c in kept):
            return kept
        # A running one can be left out and goes on in the next step; a waiting one takes those behind it along.
        going_on = next((c for c in kept[:-1] if c.partial and not c.waits), None)
        if going_on is not None:
            kept.remove(going_on)
        else:
            first = next(index for index, c in enumerate(kept) if c.partial)
            kept = kept[: first + 1]
