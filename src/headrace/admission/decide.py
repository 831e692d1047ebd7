"""Accept, hold, degrade or shed: the pure decision.

"Waiting" means admitted but without a first token yet, whether the sequence is held at the door or already
in the engine; "running" means that it has produced one.

Caps on queues come first. Then the prediction: an answer is no use any more when it comes later than ``patience``
times its target. A target that the same request could not meet even on an idle engine sheds nothing by itself; only
waiting does, for longer than ``UNREACHABLE_PATIENCE`` times what it would take there. An engine with nothing to do
takes everything. Nobody is shed for being late by less: the engine puts late requests behind those that can still be
in time.

Last come the parts of the engine that lanes and tenants have (``parts``): what is asked for beyond one's part while
others ask for theirs is shed, unless its lane queues whatever comes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from headrace.admission.predict import Prediction
from headrace.lanes.lane import Overload

MIN_RETRY_AFTER_S = 1.0
MAX_RETRY_AFTER_S = 600.0
UNREACHABLE_PATIENCE = 10.0
"""Patience where the target is out of reach whatever is shed: nothing is gained by shedding soon."""


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
    running: int
    waiting_prefill_tokens: int
    lane: LaneLoad
    drain: DrainRate

    @property
    def idle(self) -> bool:
        """Nothing was admitted that has not ended."""
        return self.waiting == 0 and self.running == 0


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """Caps from the configuration; None means no cap."""

    max_queue: int
    lane_max_queue: int | None
    lane_max_running: int | None


@dataclass(frozen=True, slots=True)
class Forecast:
    """One way of answering: what the model predicts, the same corrected by what usually happens (``now``), and what
    would be on an idle engine, corrected as well."""

    raw: Prediction
    now: Prediction
    idle: Prediction


@dataclass(frozen=True, slots=True)
class Outlook:
    """A request's targets (seconds from its arrival, ``spent_s`` of which are over), what its lane does when they
    cannot be met, and the forecasts for the full answer and, where there is one, for the degraded one. ``excess_s``: it
    is beyond its lane's or tenant's part, which will have room for it in so many seconds."""

    ttft_target_s: float | None
    e2e_target_s: float | None
    spent_s: float
    patience: float
    overload: Overload
    full: Forecast
    degraded: Forecast | None = None
    excess_s: float | None = None

    def too_late(self, forecast: Forecast) -> bool:
        """Whether the first or the last token would come when it is no use any more."""
        return any(
            [
                self.spent_s + now_s > _useful_s(target_s, idle_s, self.patience)
                for target_s, now_s, idle_s in self._pairs(forecast)
            ]
        )

    def late_s(self, forecast: Forecast) -> float:
        """By how much the worse of the two is later than its target, or than on an idle engine if that is later."""
        return max(
            [now_s - max(target_s, idle_s) for target_s, now_s, idle_s in self._pairs(forecast)],
            default=0.0,
        )

    def _pairs(self, forecast: Forecast) -> list[tuple[float, float, float]]:
        """Target, prediction, and prediction for an idle engine, of each target that there is."""
        # Between first and last token the engine paces a sequence with an E2E target: prompts of others get only what
        # it can spare. It is too late when the decode steps alone take too long, not when others could be in between.
        finish_s = forecast.now.ttft_s + min(forecast.now.decode_s, forecast.raw.decode_only_s or math.inf)
        pairs = (
            (self.ttft_target_s, forecast.now.ttft_s, forecast.idle.ttft_s),
            (self.e2e_target_s, finish_s, forecast.idle.finish_s),
        )
        return [(target_s, now_s, idle_s) for target_s, now_s, idle_s in pairs if target_s is not None]


@dataclass(frozen=True, slots=True)
class AdmissionDecision:
    """``hold`` is an acceptance that has to wait at the door for a place of its lane; ``degraded`` one of the cheaper
    answer. ``reason`` and ``retry_after_s`` are set when shed: a metric label, and the predicted time until there is
    room, or until the request would be in time."""

    action: Literal["accept", "hold", "shed"]
    reason: str = ""
    retry_after_s: float = 0.0
    degraded: bool = False


def decide(
    state: AdmissionState, limits: AdmissionLimits, sequences: int, outlook: Outlook | None = None
) -> AdmissionDecision:
    """Whether a request of ``sequences`` sequences may come in now; without an ``outlook`` by the caps alone.

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
    degraded = False
    if outlook is not None and not state.idle and outlook.overload != "queue" and _too_late(outlook, outlook.full):
        degraded = outlook.overload == "degrade" and not _too_late(outlook, outlook.degraded)
        if not degraded:
            return AdmissionDecision("shed", "predicted_late", predict_in_time_s(outlook))
    if outlook is not None and not state.idle and outlook.overload != "queue" and outlook.excess_s is not None:
        return AdmissionDecision("shed", "over_share", _retry_after_s(outlook.excess_s))
    held = state.lane.held > 0 or not fits_lane(state.lane, limits.lane_max_running, sequences)
    return AdmissionDecision("hold" if held else "accept", degraded=degraded)


def fits_lane(lane: LaneLoad, max_running: int | None, sequences: int) -> bool:
    """Whether the lane's cap leaves places for all of a request's sequences (an empty lane always does)."""
    return max_running is None or lane.in_engine == 0 or lane.in_engine + sequences <= max_running


def predict_room_s(state: AdmissionState, excess: int) -> float:
    """Predicted seconds until ``excess`` waiting sequences have started.

    The slower of two predictions counts: by sequences started per second, and by prompt tokens, since one
    long prompt can stand for many short ones.
    """
    predictions = [0.0]
    if state.drain.sequences_per_s:
        predictions.append(excess / state.drain.sequences_per_s)
    if state.drain.prefill_tokens_per_s and state.waiting:
        tokens = state.waiting_prefill_tokens * min(1.0, excess / state.waiting)
        predictions.append(tokens / state.drain.prefill_tokens_per_s)
    return _retry_after_s(max(predictions))


def predict_in_time_s(outlook: Outlook) -> float:
    """Predicted seconds until the same request, sent anew, would be within its target: the work ahead of it drains
    by a second per second, and the prediction falls with it."""
    return _retry_after_s(outlook.late_s(outlook.full))


def _too_late(outlook: Outlook, forecast: Forecast | None) -> bool:
    return forecast is None or outlook.too_late(forecast)


def _useful_s(target_s: float, idle_s: float, patience: float) -> float:
    """The time after arrival from which on an answer is no use."""
    return patience * target_s if idle_s <= target_s else max(patience, UNREACHABLE_PATIENCE) * idle_s


def _retry_after_s(predicted_s: float) -> float:
    return min(max(predicted_s, MIN_RETRY_AFTER_S), MAX_RETRY_AFTER_S)
