"""Accept, hold or shed: the pure decision.

"Waiting" means admitted but without a first token yet, whether the sequence is held at the door or already
in the engine; "running" means that it has produced one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

MIN_RETRY_AFTER_S = 1.0
MAX_RETRY_AFTER_S = 600.0


@dataclass(frozen=True, slots=True)
class LaneLoad:
    """Sequences of one lane: held at the door, waiting in the engine, running in it."""

    held: int = 0
    waiting: int = 0
    running: int = 0

    @property
    def in_engine(self) -> int:
        return self.waiting + self.running


@dataclass(frozen=True, slots=True)
class DrainRate:
    """How fast waiting work is started, measured while anything waited. None: not measured yet."""

    sequences_per_s: float | None = None
    prefill_tokens_per_s: float | None = None


@dataclass(frozen=True, slots=True)
class AdmissionState:
    """What the gateway counts: all lanes together and the request's own lane."""

    waiting: int
    waiting_prefill_tokens: int
    lane: LaneLoad
    drain: DrainRate


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """Caps from the configuration; None means no cap."""

    max_queue: int
    lane_max_queue: int | None
    lane_max_running: int | None


@dataclass(frozen=True, slots=True)
class AdmissionDecision:
    """``hold`` is an acceptance that has to wait at the door for a place of its lane. ``reason`` and
    ``retry_after_s`` are set when shed: a metric label, and the predicted time until there is room."""

    action: Literal["accept", "hold", "shed"]
    reason: str = ""
    retry_after_s: float = 0.0


def decide(state: AdmissionState, limits: AdmissionLimits, sequences: int) -> AdmissionDecision:
    """Whether a request of ``sequences`` sequences may come in now.

    A request for more sequences than a queue holds is accepted when that queue is empty, since otherwise it
    could never be.
    """
    excess = state.waiting + sequences - limits.max_queue
    if state.waiting > 0 and excess > 0:
        return AdmissionDecision("shed", "queue_full", predict_room_s(state, excess))
    lane_waiting = state.lane.held + state.lane.waiting
    if limits.lane_max_queue is not None and lane_waiting > 0:
        lane_excess = lane_waiting + sequences - limits.lane_max_queue
        if lane_excess > 0:
            return AdmissionDecision("shed", "lane_queue_full", predict_room_s(state, lane_excess))
    if state.lane.held > 0 or not fits_lane(state.lane, limits.lane_max_running, sequences):
        return AdmissionDecision("hold")
    return AdmissionDecision("accept")


def fits_lane(lane: LaneLoad, max_running: int | None, sequences: int) -> bool:
    """Whether the lane's cap leaves places for all of a request's sequences (an empty lane always does)."""
    return max_running is None or lane.in_engine == 0 or lane.in_engine + sequences <= max_running


def predict_room_s(state: AdmissionState, excess: int) -> float:
    """Predicted seconds until ``excess`` waiting sequences have started.

    The slower of two predictions counts: by sequences started per second, and by prompt tokens, since one
    long prompt can stand for many short ones.
    """
    predictions = [MIN_RETRY_AFTER_S]
    if state.drain.sequences_per_s:
        predictions.append(excess / state.drain.sequences_per_s)
    if state.drain.prefill_tokens_per_s and state.waiting:
        tokens = state.waiting_prefill_tokens * min(1.0, excess / state.waiting)
        predictions.append(tokens / state.drain.prefill_tokens_per_s)
    return min(max(predictions), MAX_RETRY_AFTER_S)
