"""Searches the knobs by trials, one step of one knob at a time, and goes back when in doubt. Pure.

State and a window in, state and a decision out; randomness is handed in. Why it cannot run away:

- It has a finite set of settings: for each knob a few values around the configured one (``grid``), all in the ranges
  of ``config.fields``. No arithmetic on a running value ever makes a new one.
- Two settings in force after one another differ by one step of one knob, unless the later is the operator's.
- A move is kept only after paired windows with and without it (``trial``): better reward by a test, no lane with lower
  attainment. In every other case the last good setting comes back, in doubt too. That costs at most the windows of one
  trial, and only one in the worst case: a window with a move in which a lane's attainment or the reward falls by more
  than noise ends the trial at once (``alarm``).
- A kept move is on probation: when attainment or reward is then worse than in its trial, it is taken back.
- Away from the operator's setting, when a lane attains less than it did there for ``POOR_WINDOWS`` windows in a row,
  everything goes back to the operator's values at once, all that was learned is forgotten, and nothing is tried for
  ``REST_WINDOWS`` windows, twice as many each time that it happens again. Whatever the reason was: those values are
  what was asked for.
- Windows with too little traffic decide nothing, and a trial in which several come in a row is given up.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from headrace.config.knobs import KnobValue
from headrace.control.bandit import Arm, Beliefs, context_of
from headrace.control.grid import Grid, Setting, fits, home_of, values_of
from headrace.control.reward import Window, arrival_slope, fallen_lanes, reward
from headrace.control.trial import Trial, differences, effect, is_tried, verdict

Outcome = Literal["hold", "tried", "alternated", "kept", "returned", "alarm", "taken_back", "home"]
"""``hold``: nothing. ``tried``: a trial begins. ``alternated``: its next window. ``kept`` or ``returned``: it ended.
``alarm``: it was ended for harm. ``taken_back``: a kept move failed its probation. ``home``: the operator's values."""

ALL_KNOBS: Final = "all"
POOR_WINDOWS: Final = 3
REST_WINDOWS: Final = 20
PROBATION_WINDOWS: Final = 4
THIN_WINDOWS: Final = 3
_RECENT: Final = 12
_LEAST_FOR_NOISE: Final = 3
"""Windows: fewer do not show how much they differ."""
_MOST_DOUBLINGS: Final = 6
_HOME_WINDOWS: Final = 24
_ALARM: Final = {"least_fall": 0.02, "sigmas": 2.33}
_REWARD_SIGMAS: Final = 3.0
_POOR_FALL: Final = 0.05
_POOR_SIGMAS: Final = 1.64


@dataclass(frozen=True, slots=True)
class Probation:
    """A move that was kept: the setting ``before`` it, the windows of its trial with the move, and those since."""

    knob: str
    before: Setting
    trial: tuple[tuple[Window, float], ...]
    since: tuple[tuple[Window, float], ...] = ()


@dataclass(frozen=True, slots=True)
class TunerState:
    """``good`` is the last good setting; ``recent`` are the latest windows with it and their rewards, ``at_home``
    the latest with the operator's setting."""

    good: Setting
    trial: Trial | None = None
    probation: Probation | None = None
    beliefs: Beliefs = field(default_factory=Beliefs)
    recent: tuple[tuple[Window, float], ...] = ()
    at_home: tuple[Window, ...] = ()
    poor: int = 0
    rest: int = 0
    homes: int = 0
    thin: int = 0

    @property
    def trying(self) -> Arm | None:
        """The move that is in force now."""
        return self.trial.arm if self.trial is not None and self.trial.next_is_tried else None

    @property
    def in_force(self) -> dict[str, int]:
        """The setting that the next window is measured with."""
        return _moved(self.good, self.trying)


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do: knobs to set (none: leave all as they are), and why. ``knob`` is ``all`` for a return home.
    ``reward`` is the window's, None when it had too little traffic."""

    outcome: Outcome
    knob: str
    changes: Mapping[str, KnobValue]
    why: str
    reward: float | None


@dataclass(frozen=True, slots=True)
class Tuner:
    """The rules for one set of grids. ``penalty`` is what a violation takes from the reward, in good requests; windows
    with fewer than ``min_requests`` ended ones decide nothing. ``fixed`` are values of tuned knobs that are not the
    tuner's to change."""

    grids: Mapping[str, Grid]
    penalty: float = 1.0
    min_requests: int = 20
    fixed: Mapping[str, KnobValue] = field(default_factory=dict)

    def start(self) -> TunerState:
        """At the operator's setting, nothing learned."""
        return TunerState(home_of(self.grids))

    def step(self, state: TunerState, window: Window, randomness: random.Random) -> tuple[TunerState, Decision]:
        """A window with ``state.in_force`` is over: what now?"""
        earned = reward(window, self.penalty, self.min_requests)
        if earned is None:
            return self._thin(state)
        state = replace(state, thin=0)
        if state.trying is None:
            state = self._noted(state, window, earned)
            if state.poor >= POOR_WINDOWS:
                return self._go_home(state, earned)
        if state.trial is not None:
            return self._tried(state, state.trial.plus(window, earned), earned)
        if state.probation is not None:
            return self._on_probation(state, state.probation, window, earned)
        if state.rest:
            return self._decided(replace(state, rest=state.rest - 1), state, "hold", "", "rests", earned)
        return self._chosen(state, window, earned, randomness)

    def abandoned(self, state: TunerState) -> tuple[TunerState, Decision]:
        """Somebody else changed something: a trial under way says nothing any more."""
        after = replace(state, trial=None, probation=None, recent=(), poor=0)
        knob = "" if state.trial is None else state.trial.arm.knob
        return self._decided(after, state, "returned" if knob else "hold", knob, "something else was changed", None)

    def _thin(self, state: TunerState) -> tuple[TunerState, Decision]:
        after = replace(state, thin=state.thin + 1)
        if state.trial is None or after.thin < THIN_WINDOWS:
            return self._decided(after, state, "hold", "", "too little traffic to judge", None)
        after = replace(after, trial=None, thin=0)
        return self._decided(after, state, "returned", state.trial.arm.knob, "too little traffic to judge", None)

    def _noted(self, state: TunerState, window: Window, earned: float) -> TunerState:
        """Remember a window with the good setting; at home it is the measure for those away from it."""
        recent = (*state.recent, (window, earned))[-_RECENT:]
        if state.good == home_of(self.grids):
            at_home = (*state.at_home, window)[-_HOME_WINDOWS:]
            return replace(state, recent=recent, at_home=at_home, poor=0)
        worse = fallen_lanes(state.at_home, [window], least_fall=_POOR_FALL, sigmas=_POOR_SIGMAS)
        return replace(state, recent=recent, poor=state.poor + 1 if worse else 0)

    def _go_home(self, state: TunerState, earned: float) -> tuple[TunerState, Decision]:
        rest = REST_WINDOWS * 2 ** min(state.homes, _MOST_DOUBLINGS)
        after = TunerState(home_of(self.grids), at_home=state.at_home, rest=rest, homes=state.homes + 1)
        return self._decided(after, state, "home", ALL_KNOBS, "a lane attains less than with the configuration", earned)

    def _tried(self, state: TunerState, trial: Trial, earned: float) -> tuple[TunerState, Decision]:
        """A trial has one more window."""
        knob, slope = trial.arm.knob, _slope(state)
        harm = self._harm(state, trial, slope)
        judged = verdict(trial, slope)
        if harm is None and judged == "open":
            after = replace(state, trial=trial)
            return self._decided(after, state, "alternated", knob, "the trial goes on", earned)
        mean, error = effect(differences(trial, slope))
        after = replace(state, trial=None, beliefs=_learned(state, trial, mean, error, slope))
        shown = f"{mean:+.3f} good requests/s, give or take {error:.3f}"
        if harm is not None:
            return self._decided(after, state, "alarm", knob, harm, earned)
        if judged == "no better":
            return self._decided(after, state, "returned", knob, f"no better: {shown}", earned)
        tested = tuple(item for place, item in enumerate(trial.windows) if is_tried(place))
        kept = replace(
            after,
            good=_moved(state.good, trial.arm),
            beliefs=after.beliefs.without(knob),
            recent=(),
            poor=0,
            probation=Probation(knob, state.good, tested),
        )
        return self._decided(kept, state, "kept", knob, f"better: {shown}", earned)

    def _harm(self, state: TunerState, trial: Trial, slope: float) -> str | None:
        """Why the move must not stay a window longer, after a window with it; None when it may."""
        if state.trying is None:
            return None
        fallen = fallen_lanes([window for window, _ in state.recent], trial.with_move, **_ALARM)
        if fallen:
            return f"attainment of {fallen[0]} fell"
        window, earned = trial.windows[-1]
        return "the reward fell" if _fell(state.recent, ((window, earned),), slope) else None

    def _on_probation(
        self, state: TunerState, probation: Probation, window: Window, earned: float
    ) -> tuple[TunerState, Decision]:
        """One more window since a move was kept."""
        knob = probation.knob
        probation = replace(probation, since=(*probation.since, (window, earned)))
        worse = fallen_lanes([w for w, _ in probation.trial], [w for w, _ in probation.since], **_ALARM)
        if worse or _fell(probation.trial, probation.since, _slope(state)):
            why = f"attainment of {worse[0]} fell after it was kept" if worse else "the reward fell after it was kept"
            back = replace(state, good=probation.before, probation=None, recent=(), poor=0)
            return self._decided(back, state, "taken_back", knob, why, earned)
        done = len(probation.since) >= PROBATION_WINDOWS
        after_it = replace(state, probation=None if done else probation)
        return self._decided(after_it, state, "hold", "", "watches what was kept", earned)

    def _chosen(
        self, state: TunerState, window: Window, earned: float, randomness: random.Random
    ) -> tuple[TunerState, Decision]:
        """Begin a trial, or not."""
        context = context_of(window)
        arm = state.beliefs.choose(context, self._arms(state.good), randomness)
        if arm is None:
            return self._decided(state, state, "hold", "", "no move promises anything", earned)
        after = replace(state, trial=Trial(arm, context, ((window, earned),)))
        mean, deviation = state.beliefs.effect(context, arm)
        why = f"believed to bring {mean:+.3f} of each request, give or take {deviation:.3f}"
        return self._decided(after, state, "tried", arm.knob, why, earned)

    def _arms(self, good: Setting) -> list[Arm]:
        """Moves that there are from a setting."""
        arms = [Arm(name, direction) for name in self.grids for direction in _DIRECTIONS]
        return [
            arm
            for arm in arms
            if self.grids[arm.knob].holds(good[arm.knob] + arm.direction)
            and fits(values_of(self.grids, _moved(good, arm)), self.fixed)
        ]

    def _decided(
        self, after: TunerState, before: TunerState, outcome: Outcome, knob: str, why: str, earned: float | None
    ) -> tuple[TunerState, Decision]:
        """What has to be set to get from one state's setting to the other's."""
        was, wanted = values_of(self.grids, before.in_force), values_of(self.grids, after.in_force)
        changes = {name: value for name, value in wanted.items() if value != was[name]}
        return after, Decision(outcome, knob, changes, why, earned)


_DIRECTIONS: Final[tuple[Literal[-1, 1], ...]] = (-1, 1)


def _moved(setting: Setting, arm: Arm | None) -> dict[str, int]:
    return dict(setting) if arm is None else {**setting, arm.knob: setting[arm.knob] + arm.direction}


def _slope(state: TunerState) -> float:
    """How reward follows arrivals at the good setting."""
    return arrival_slope([(window.arrivals_per_s, earned) for window, earned in state.recent])


def _levels(windows: Sequence[tuple[Window, float]], slope: float) -> list[float]:
    """Rewards without what arrivals made of them."""
    return [earned - slope * window.arrivals_per_s for window, earned in windows]


def _fell(before: Sequence[tuple[Window, float]], after: Sequence[tuple[Window, float]], slope: float) -> bool:
    """Whether the reward is lower than before by more than noise."""
    if len(before) < _LEAST_FOR_NOISE or not after:
        return False
    levels, now = _levels(before, slope), _levels(after, slope)
    noise = statistics.stdev(levels) * math.sqrt(1 / len(now) + 1 / len(levels))
    return statistics.fmean(now) < statistics.fmean(levels) - _REWARD_SIGMAS * noise


def _learned(state: TunerState, trial: Trial, mean: float, error: float, slope: float) -> Beliefs:
    """Beliefs with a trial's result, per arriving request. Few pairs do not know their own error: it is at least what
    follows from how the latest windows with the good setting differ, and with nothing known, as large as the effect."""
    pairs = max(1, len(differences(trial, slope)))
    known = [] if math.isinf(error) else [error]
    if len(state.recent) >= _LEAST_FOR_NOISE:
        known.append(statistics.stdev(_levels(state.recent, slope)) * math.sqrt(2 / pairs))
    rate = max(statistics.fmean(window.arrivals_per_s for window, _ in trial.windows), 1e-9)
    return state.beliefs.learned(trial.context, trial.arm, mean / rate, max(known, default=abs(mean)) / rate)
