"""Levels of KV memory with hysteresis, and what to do at each. Pure.

| level | from | what happens |
|---|---|---|
| ``normal`` | | nothing |
| ``warn`` | 70 % | it is said (log, metric, /admin) |
| ``refuse`` | 85 % | new requests of long contexts are refused, with the time until there is room |
| ``move`` | 95 % | cold sequences are parked outside the streams until there is room again |

Two quantities are compared with the marks, both projected (``scheduling.memory``): what running sequences will hold,
and that plus what waits in the engine, which has been promised memory too. Promises warn and refuse; only what is held
moves anybody, since parking one makes no room for a promise that another one must make.

A level is left ``gap`` below the mark by which it was entered. A quantity that wiggles by less than ``gap`` therefore
changes the level at most once.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from headrace.scheduling.knobs import SchedulingKnobs, marks_problem
from headrace.scheduling.memory import projected_tokens
from headrace.scheduling.sequence import SequenceState

KvLevel = Literal["normal", "warn", "refuse", "move"]
LEVELS: Final[tuple[KvLevel, ...]] = ("normal", "warn", "refuse", "move")
NEARLY_DONE: Final = 0.2
"""A sequence with at most this share of its expected output to come is about to finish: it frees its memory sooner
than parking it and coming back would take."""


@dataclass(frozen=True, slots=True)
class Marks:
    """Shares of the budget. Raises ValueError for what cannot be watermarks (``scheduling.knobs.marks_problem``)."""

    warn: float = 0.70
    refuse: float = 0.85
    move: float = 0.95
    gap: float = 0.05

    def __post_init__(self) -> None:
        problem = marks_problem(self.warn, self.refuse, self.move, self.gap)
        if problem is not None:
            raise ValueError(problem)

    @classmethod
    def of_knobs(cls, knobs: SchedulingKnobs) -> Marks:
        """What the knobs say."""
        return cls(knobs.kv_warn, knobs.kv_refuse, knobs.kv_move, knobs.kv_gap)

    def of(self, level: KvLevel) -> float:
        """The share from which on a level holds; 0 for ``normal``."""
        return {"normal": 0.0, "warn": self.warn, "refuse": self.refuse, "move": self.move}[level]


def next_level(level: KvLevel, held: float, promised: float, marks: Marks) -> KvLevel:
    """The level after ``level`` when running sequences will hold the share ``held`` of the budget, and together with
    waiting ones ``promised`` (at least as much)."""
    for candidate in reversed(LEVELS[1:]):
        share = held if candidate == "move" else promised
        entered = LEVELS.index(level) >= LEVELS.index(candidate)
        if share >= marks.of(candidate) - (marks.gap if entered else 0.0):
            return candidate
    return "normal"


def nearly_done(sequence: SequenceState) -> bool:
    """Whether a sequence is about to finish: it decodes, and little of its expected output is to come."""
    if not sequence.decoding:
        return False
    expected = sequence.output_tokens_to_expect
    return expected - sequence.generated_tokens <= NEARLY_DONE * expected


def cold_sequences(
    running: Iterable[SequenceState], excess_tokens: int, *, long_tokens: int, most_tokens: int
) -> list[SequenceState]:
    """Who gives up its stream so that ``excess_tokens`` of projected KV are freed: the least urgent first, long ones
    before short ones of the same priority, the longer before the shorter. Nobody who is about to finish, nor the last
    one that runs, nor who needs more than ``most_tokens``, up to which parked sequences come back. Only long
    sequences, and short ones without a target, are ever taken: parking an urgent short one frees little and costs its
    SLO."""
    everybody = list(running)
    candidates = [
        s
        for s in everybody
        if not nearly_done(s)
        and projected_tokens(s) <= most_tokens
        and (not s.urgent or projected_tokens(s) >= long_tokens)
    ]
    candidates.sort(key=lambda s: (-s.priority, -projected_tokens(s), -s.arrived_s, s.request_id))
    chosen: list[SequenceState] = []
    for sequence in candidates:
        if excess_tokens <= 0 or len(chosen) + 1 >= len(everybody):
            break
        chosen.append(sequence)
        excess_tokens -= projected_tokens(sequence)
    return chosen


def drain_s(
    running: Sequence[SequenceState],
    waiting: Sequence[SequenceState],
    excess_tokens: int,
    *,
    prefill_s: Callable[[int, int], float],
    decode_step_s: float,
) -> float:
    """Predicted seconds until ``excess_tokens`` of projected KV are free again.

    Prompts are computed one after the other, running sequences' first, then waiting ones' in order; each sequence then
    takes a decode step for every token that is expected of it. Sequences free their memory in the order in which they
    end by that. ``prefill_s(a, b)`` is the time to compute the tokens from ``a`` to ``b``: the later ones of a long
    prompt take longer. 0 when nothing is in excess.
    """
    if excess_tokens <= 0:
        return 0.0
    ends: list[tuple[float, int]] = []
    computed_s = 0.0
    for sequence in (*sorted(running, key=lambda s: (s.priority, s.arrived_s)), *waiting):
        if not sequence.decoding:
            computed_s += prefill_s(sequence.known_tokens - sequence.uncached_tokens, sequence.known_tokens)
        to_come = max(1, sequence.output_tokens_to_expect - sequence.generated_tokens)
        ends.append((computed_s + to_come * decode_step_s, projected_tokens(sequence)))
    heapq.heapify(ends)
    end_s = 0.0
    while ends and excess_tokens > 0:
        end_s, tokens = heapq.heappop(ends)
        excess_tokens -= tokens
    return end_s
