"""A tuner beside a virtual engine: it counts what ends, window by window, and turns the engine's knobs."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import Final

import msgspec

from headrace.control.reward import LaneCounts, Window
from headrace.control.tuner import Decision, Tuner
from headrace.simulate.requests import RequestRecord, VirtualRequest
from headrace.simulate.simulation import Event
from headrace.simulate.virtual_engine import VirtualEngine
from headrace.telemetry.goodput import LONG_PROMPT_TOKENS

_SAMPLES: Final = 6


class TunedEngine:
    """Submit to it as to the engine, and add ``begin``'s events once. ``batch_cap`` is what load is measured by;
    ``watch`` is told every decision."""

    def __init__(
        self,
        engine: VirtualEngine,
        tuner: Tuner,
        randomness: random.Random,
        *,
        window_s: float,
        settle_s: float,
        batch_cap: int,
        watch: Callable[[float, Decision], None] | None = None,
    ) -> None:
        self._engine = engine
        self._tuner = tuner
        self._random = randomness
        self._window_s = window_s
        self._settle_s = settle_s
        self._batch_cap = batch_cap
        self._watch = watch
        self._open: list[RequestRecord] = []
        self._arrived = 0
        self._loads: list[float] = []
        self.state = tuner.start()
        self.outcomes: Counter[str] = Counter()

    def submit(self, request: VirtualRequest, now_s: float) -> Iterable[Event]:
        """Pass a request on to the engine."""
        events = self._engine.submit(request, now_s)
        self._open.append(self._engine.records[request.request_id])
        self._arrived += 1
        return events

    def begin(self, now_s: float) -> Iterable[Event]:
        """The next window begins."""
        self._ended()
        self._arrived, self._loads = 0, []
        step_s = self._window_s / _SAMPLES
        samples = [Event(now_s + step_s * number, self._sample) for number in range(1, _SAMPLES)]
        return (*samples, Event(now_s + self._window_s, partial(self._end, now_s)))

    def _sample(self, _: float) -> Iterable[Event]:
        self._loads.append((len(self._engine.running) + len(self._engine.waiting)) / self._batch_cap)
        return ()

    def _end(self, began_s: float, now_s: float) -> Iterable[Event]:
        """A window is over: ask, turn, go on."""
        self._sample(now_s)
        ended = self._ended()
        lanes: dict[str, LaneCounts] = {}
        for record in ended:
            one = LaneCounts(int(record.good), int(not record.good))
            lanes[record.request.lane] = lanes.get(record.request.lane, LaneCounts()).plus(one)
        long_prompts = sum(record.request.prompt_tokens >= LONG_PROMPT_TOKENS for record in ended)
        window = Window(
            now_s - began_s,
            dict(sorted(lanes.items())),
            self._arrived,
            sum(self._loads) / len(self._loads),
            long_prompts / len(ended) if ended else 0.0,
        )
        self.state, decision = self._tuner.step(self.state, window, self._random)
        self.outcomes[decision.outcome] += 1
        if self._watch is not None:
            self._watch(now_s, decision)
        if not decision.changes:
            return self.begin(now_s)
        knobs = msgspec.structs.replace(self._engine.knobs, **decision.changes)
        return (*self._engine.set_knobs(knobs, now_s), Event(now_s + self._settle_s, self.begin))

    def _ended(self) -> list[RequestRecord]:
        """Requests that ended since this was asked last."""
        ended = [record for record in self._open if record.ended_s is not None]
        self._open = [record for record in self._open if record.ended_s is None]
        return ended
