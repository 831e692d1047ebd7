"""Rehearsing degraded mode: a lane's engines seem to get slow, and everything that follows is real.

The drill sends small requests of its own on the lane and adds to the measured times of the lane's group until its
breakers open by their own rule. Then the addition ends, and what is measured is how long it takes until they are
closed again, with nobody's help. Clients' requests of the lane are served by the fallback meanwhile, as they would be.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from typing import Any, Final, Literal

from headrace.config.schema import Config
from headrace.engines.fleet.fleet import Fleet
from headrace.errors import EngineError
from headrace.messages.engine import SamplingParams, Submit, WireRequest

Stage = Literal["slow", "open", "recovering", "recovered", "failed"]

REQUESTS_PER_S: Final = 10.0
HOLD_S: Final = 3.0
"""How long the engines seem slow after the breakers have opened."""

RECOVERY_LIMIT_S: Final = 30.0
_PROMPT: Final = b'[{"role":"user","content":"drill"}]'
_OPEN_LIMIT_WINDOWS: Final = 4


class Drill:
    """One rehearsal of one lane."""

    def __init__(self, fleet: Fleet, config: Config, lane: str, *, clock: Callable[[], float]) -> None:
        self._fleet = fleet
        self._config = config
        self._lane_name = lane
        self._lane = config.lanes[lane]
        self._clock = clock
        self._stage: Stage = "slow"
        self._began_s = clock()
        self._opened_s: float | None = None
        self._ended_slow_s: float | None = None
        self._closed_s: float | None = None
        self._sent = self._served = self._degraded = 0
        self._task: asyncio.Task[None] | None = None
        self._requests: set[asyncio.Task[None]] = set()

    @property
    def over(self) -> bool:
        return self._stage in ("recovered", "failed")

    def begin(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run(), name="headrace-drill")

    def report(self) -> dict[str, Any]:
        """How far it is; times in seconds since the step before."""
        opened, slow, closed = self._opened_s, self._ended_slow_s, self._closed_s
        return {
            "lane": self._lane_name,
            "group": self._config.group_of(self._lane),
            "fallback": self._lane.fallback.group,
            "stage": self._stage,
            "opened_after_s": None if opened is None else opened - self._began_s,
            "recovered_after_s": None if closed is None or slow is None else closed - slow,
            "limit_s": RECOVERY_LIMIT_S,
            "requests": self._sent,
            "served": self._served,
            "served_degraded": self._degraded,
        }

    async def _run(self) -> None:
        breaker, fleet = self._lane.breaker, self._fleet
        fleet.slow_by[self._lane_name] = 10 * breaker.p99_ttft_s
        sending = asyncio.create_task(self._send_for_ever())
        try:
            limit_s = _OPEN_LIMIT_WINDOWS * breaker.windows * breaker.window_s
            if not await self._until(lambda: "open" in self._states(), limit_s):
                self._stage = "failed"
                return
            self._opened_s = self._clock()
            self._stage = "open"
            await asyncio.sleep(HOLD_S)
            fleet.slow_by.pop(self._lane_name, None)
            self._ended_slow_s = self._clock()
            self._stage = "recovering"
            well = await self._until(lambda: set(self._states()) <= {"closed"}, RECOVERY_LIMIT_S)
            self._closed_s = self._clock() if well else None
            self._stage = "recovered" if well else "failed"
        finally:
            fleet.slow_by.pop(self._lane_name, None)
            sending.cancel()
            await asyncio.gather(sending, *self._requests, return_exceptions=True)

    def _states(self) -> list[str]:
        group = self._fleet.groups.get(self._config.group_of(self._lane))
        replicas = [] if group is None else list(group.replicas.values())
        return [r.breakers[self._lane_name].state for r in replicas if self._lane_name in r.breakers]

    async def _until(self, condition: Callable[[], bool], limit_s: float) -> bool:
        ends_s = self._clock() + limit_s
        while not condition():
            if self._clock() >= ends_s:
                return False
            await asyncio.sleep(0.05)
        return True

    async def _send_for_ever(self) -> None:
        while True:
            task = asyncio.create_task(self._send(self._sent))
            self._sent += 1
            self._requests.add(task)
            task.add_done_callback(self._requests.discard)
            await asyncio.sleep(1 / REQUESTS_PER_S)

    async def _send(self, number: int) -> None:
        submit = Submit(
            request_id=f"drill-{self._lane_name}-{self._began_s:.3f}-{number}",
            prompt_tokens=[1],
            sampling=SamplingParams(),
            lane=self._lane_name,
            priority=self._lane.priority,
            max_tokens=1,
            arrived_s=self._clock(),
            wire=WireRequest("chat", _PROMPT),
        )
        try:
            async with aclosing(self._fleet.submit(submit)) as outputs:
                async for output in outputs:
                    if output.finish in ("stop", "length"):
                        self._served += 1
        except EngineError:
            return
        finally:
            self._degraded += self._fleet.degradation(submit.request_id) is not None
