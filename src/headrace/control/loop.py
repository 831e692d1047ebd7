"""The tuner at work: waits, counts, asks ``tuner`` what to do, and sets knobs."""

from __future__ import annotations

import logging
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final

from headrace.api.live import BY_TUNER, LiveConfig
from headrace.config.knobs import KnobChange
from headrace.config.problems import ConfigProblems
from headrace.config.schema import Config, TunerConfig
from headrace.control.grid import TUNED, grids_of
from headrace.control.reward import LaneCounts, Window
from headrace.control.tuner import Decision, Tuner, TunerState
from headrace.messages.engine import EngineLoad
from headrace.scheduling.knobs import SchedulingKnobs
from headrace.telemetry.goodput import Goodput
from headrace.telemetry.metrics import Metrics

_logger = logging.getLogger(__name__)

_SAMPLES: Final = 6
"""Looks at the engine's load in one window."""
_QUIET: Final = ("hold", "alternated")

Sleep = Callable[[float], Awaitable[None]]


@dataclass(slots=True)
class _Counts:
    """Goodput's counts at a moment."""

    arrived: int
    long_prompts: int
    good: dict[str, int]
    violated: dict[str, int]

    @classmethod
    def of(cls, goodput: Goodput) -> _Counts:
        return cls(goodput.arrived, goodput.long_prompts, dict(goodput.good), dict(goodput.violated))


@dataclass(slots=True)
class _Tuning:
    """The tuner for one configuration and one set of knobs that are its own."""

    loaded: Config
    hands_off: frozenset[str]
    tuner: Tuner
    state: TunerState
    settled: bool = False


class TunerLoop:
    """Runs as long as the server. While ``control.tuner.enabled`` is off it does nothing but look, once per window,
    whether it was switched on.

    Knobs that a person has set or reset through the admin API are not touched any more, until a reload
    puts the configuration back. ``clock`` and ``sleep`` are in seconds; ``load`` is the engine's latest report.
    """

    def __init__(
        self,
        live: LiveConfig,
        metrics: Metrics,
        load: Callable[[], EngineLoad | None],
        *,
        clock: Callable[[], float],
        sleep: Sleep,
        randomness: random.Random,
    ) -> None:
        self._live = live
        self._metrics = metrics
        self._load = load
        self._clock = clock
        self._sleep = sleep
        self._random = randomness
        self._tuning: _Tuning | None = None
        self._setting = False
        self._disturbed = False
        live.watch(self._changed)

    async def run(self) -> None:
        """Until cancelled. Whatever goes wrong in it is logged, its knobs go back, and serving goes on."""
        try:
            while True:
                await self.tick()
        except Exception:
            _logger.exception("the tuner failed and stops; its knobs go back to the configuration")
            self._put_back()

    async def tick(self) -> None:
        """One window: wait for it, and do what follows from it."""
        settings = self._live.config.control.tuner
        if not settings.enabled:
            if self._tuning is not None:
                self._put_back()
                _logger.info("tuner: switched off")
            await self._sleep(settings.window_s)
            return
        tuning = self._current(settings)
        if not tuning.settled:
            await self._sleep(settings.settle_s)
        window = await self._measured(settings)
        if self._disturbed or self._hands_off() != tuning.hands_off:
            self._disturbed = False
            self._give_up(tuning)
            return
        before = tuning.state
        tuning.state, decision = tuning.tuner.step(before, window, self._random)
        tuning.settled = not decision.changes
        self._do(tuning, decision)

    def _changed(self, _: SchedulingKnobs, changes: Sequence[KnobChange]) -> None:
        """Scheduling was changed: if not by the tuner, windows before it and after it cannot be compared."""
        self._disturbed = self._disturbed or not self._setting

    def _hands_off(self) -> frozenset[str]:
        """Knobs that it could move and that are somebody else's."""
        touched_by = self._live.touched_by
        return frozenset(name for name in TUNED if touched_by.get(name, BY_TUNER) != BY_TUNER)

    def _current(self, settings: TunerConfig) -> _Tuning:
        """The tuner for what is configured now; a new one when the configuration was read again, and one with fewer
        knobs, at the configured values, when somebody took some."""
        live, tuning = self._live, self._tuning
        hands_off = self._hands_off()
        if tuning is None or tuning.loaded is not live.loaded or tuning.hands_off != hands_off:
            self._put_back()
            self._disturbed = False
            grids = grids_of(live.loaded, steps=settings.max_steps, hands_off=hands_off)
            fixed = {name: live.knobs[name].of(live.config) for name in TUNED if name not in grids}
            tuner = Tuner(grids, settings.violation_penalty, settings.min_requests, fixed)
            tuning = self._tuning = _Tuning(live.loaded, hands_off, tuner, tuner.start())
            _logger.info("tuner: may move %s", ", ".join(grids) or "nothing")
        return tuning

    async def _measured(self, settings: TunerConfig) -> Window:
        """Wait for a window and say what was counted in it."""
        began_s, before = self._clock(), _Counts.of(self._metrics.goodput)
        loads: list[float] = []
        errors: list[float] = []
        for _ in range(_SAMPLES):
            await self._sleep(settings.window_s / _SAMPLES)
            report = self._load()
            if report is not None and report.batch_cap:
                loads.append((report.running + report.waiting) / report.batch_cap)
                errors.append(report.step_error)
        return window_between(
            before,
            _Counts.of(self._metrics.goodput),
            duration_s=self._clock() - began_s,
            load=sum(loads) / len(loads) if loads else 0.0,
            prediction_error=sum(errors) / len(errors) if errors else 0.0,
        )

    def _do(self, tuning: _Tuning, decision: Decision) -> None:
        """Carry a decision out, and say so."""
        if decision.reward is not None:
            self._metrics.tuner_earned(decision.reward)
        if decision.changes and not self._set(decision):
            self._put_back()
            return
        if decision.outcome not in _QUIET:
            self._metrics.tuner_moved(decision.knob, decision.outcome)
            values = ", ".join(f"{name}={value}" for name, value in decision.changes.items())
            _logger.info("tuner: %s %s %s: %s", decision.outcome, decision.knob, values, decision.why)

    def _set(self, decision: Decision) -> bool:
        """Set knobs; those at their configured values are not kept as set. False when that was refused."""
        configured = {name: self._live.knobs[name].of(self._live.loaded) for name in decision.changes}
        moved = {name: value for name, value in decision.changes.items() if value != configured[name]}
        back = [name for name in decision.changes if name not in moved]
        self._setting = True
        try:
            if moved:
                self._live.set_knobs(moved, by=BY_TUNER)
            if back:
                self._live.reset_knobs(back, by=BY_TUNER)
        except ConfigProblems as error:
            _logger.warning("tuner: %s was refused, it begins anew: %s", decision.knob, error)
            return False
        finally:
            self._setting = False
        return True

    def _give_up(self, tuning: _Tuning) -> None:
        """Somebody else changed something while it measured: undo a trial under way."""
        if tuning.loaded is not self._live.loaded or self._hands_off() != tuning.hands_off:
            return  # the next tick begins anew
        tuning.state, decision = tuning.tuner.abandoned(tuning.state)
        tuning.settled = False
        self._do(tuning, decision)

    def _put_back(self) -> None:
        """Every knob that the tuner set has its configured value again."""
        self._tuning = None
        own = [name for name, who in self._live.touched_by.items() if who == BY_TUNER and name in self._live.changes]
        if own:
            self._setting = True
            try:
                self._live.reset_knobs(own, by=BY_TUNER)
            finally:
                self._setting = False


def window_between(
    before: _Counts, after: _Counts, *, duration_s: float, load: float, prediction_error: float
) -> Window:
    """What was counted from one moment to another."""
    lanes = {
        name: LaneCounts(
            after.good.get(name, 0) - before.good.get(name, 0),
            after.violated.get(name, 0) - before.violated.get(name, 0),
        )
        for name in sorted({*after.good, *after.violated})
    }
    ended = sum(lane.ended for lane in lanes.values())
    return Window(
        duration_s,
        lanes,
        after.arrived - before.arrived,
        load,
        (after.long_prompts - before.long_prompts) / ended if ended else 0.0,
        prediction_error,
    )
