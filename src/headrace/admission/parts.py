"""Who may come in while more is asked for than the engine can serve: everybody's part, at the door. Pure.

A prediction sheds whoever would be late, and under a flood that is everybody: the flood fills the engine, and those who
never asked for more than usual are late behind it. So each lane has a *part* of the engine, and what it asks for beyond
that is shed before the others feel it. Work is counted in seconds of engine time at the best rates (large chunks, full
batches); what a lane asks for is work per second, shed work included.

**Claim.** What a lane asked for in the last minutes, on average, is its *usual*. Chance moves the latest average by a
standard deviation of ``sqrt(usual * size / (2 * ASKED_MEMORY_S))``, ``size`` being the work of a request (shot noise
through an exponential average). A lane may claim its usual and ``CHANCE`` of these, and never less than
``LEAST_CLAIM`` of what its weight gives it. One that is over its part already claims its usual alone.

**Part.** The engine's time goes to claims first, max-min fair by weight, up to ``FULL``: all that it can do. What then
is left of ``SERVABLE``, which is what it does while it meets targets, goes to what is asked for beyond claims, by
weight again. In the short run, whoever asks for what it usually asks for comes first; since a lane's usual follows what
it asks for, by at most ``MOST_GROWTH`` in ``USUAL_MEMORY_S``, shares of lasting contention are those of the weights.

**Over its part** is a lane that asks for more than that, both in the latest seconds and over the last ten. It gets
what its usual is, and a queue of what that serves in a few seconds (``allowed_s``, times its patience; ``RECOVERING``
of it once something was shed, so that the backlog of a burst is gone soon after it). Of its tenants those are shed that
ask for more than an even division of the lane's part leaves them. Whoever is alone is never over its part: nobody else
feels it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from headrace.scheduling.debts import Owner, water_level

FULL: Final = 1.0
SERVABLE: Final = 0.68
"""Virtual clock, the mix of ``benchmarks.bursts``: ``continuous`` does 0.87 under a backlog, and beyond 0.7 targets are
missed."""
ASKED_MEMORY_S: Final = 10.0
RECENT_MEMORY_S: Final = 3.0
"""A lane is over its part only while this shorter average is too: a burst that has ended is not held against it."""
USUAL_MEMORY_S: Final = 180.0
YOUNG_S: Final = 30.0
"""A lane that was first seen so lately has no usual that could limit its growth."""
MOST_GROWTH: Final = 1.5
CHANCE: Final = 3.5
LEAST_CLAIM: Final = 0.25
LEAST_ALLOWED_S: Final = 3.0
MOST_ALLOWED_S: Final = 5.0
ALLOWED_SHARE: Final = 0.7
"""Of a lane's sooner target, what its queue at its part may take."""
RECOVERING: Final = 0.1
_PRESENT: Final = 0.01
_SIZE_MEMORY: Final = 0.05
_TICK_S: Final = 0.1
_NOTHING: Final = 1e-9


@dataclass(slots=True)
class _Tenant:
    """``left_s`` is the work let in that its part would not have served yet."""

    asked: float = 0.0
    left_s: float = 0.0
    over: bool = False


@dataclass(slots=True)
class _Lane:
    weight: float = 1.0
    asked: float = 0.0
    recent: float = 0.0
    usual: float = 0.0
    size_s: float = 0.0
    age_s: float = 0.0
    over: bool = False
    part: float = 0.0
    tenants: dict[str | None, _Tenant] = field(default_factory=dict)

    @property
    def left_s(self) -> float:
        return sum([tenant.left_s for tenant in self.tenants.values()])

    @property
    def claim(self) -> float:
        return self.usual + CHANCE * math.sqrt(self.usual * self.size_s / (2 * ASKED_MEMORY_S))

    def note(self, tenant: _Tenant, work_s: float) -> None:
        """A request of so much work asks to come in. Its size is the mean of squares over the mean: long ones move
        the average most."""
        self.asked += work_s / ASKED_MEMORY_S
        self.recent += work_s / RECENT_MEMORY_S
        tenant.asked += work_s / ASKED_MEMORY_S
        self.size_s += _SIZE_MEMORY * (work_s**2 / self.size_s - self.size_s) if self.size_s else work_s

    def pass_time(self, passed_s: float) -> None:
        """The usual follows what is asked for; what was asked for counts less and less."""
        rate = self.asked
        if self.age_s > YOUNG_S:
            rate = min(rate, MOST_GROWTH * max(self.usual, _PRESENT / 2))
        self.age_s += passed_s
        self.usual += (rate - self.usual) * -math.expm1(-passed_s / min(USUAL_MEMORY_S, self.age_s))
        decay = math.exp(-passed_s / ASKED_MEMORY_S)
        self.asked *= decay
        self.recent *= math.exp(-passed_s / RECENT_MEMORY_S)
        for tenant in self.tenants.values():
            tenant.asked *= decay

    def serve(self, served_s: float) -> None:
        """So much of what is left is served, evenly among tenants."""
        level = water_level([(tenant.left_s, 1.0) for tenant in self.tenants.values()], served_s)
        for tenant in self.tenants.values():
            tenant.left_s = max(0.0, tenant.left_s - level)


def allowed_s(to_deadline_s: float | None, patience: float) -> float:
    """How long a lane over its part may have work wait, at its part: by the sooner of its targets, None without."""
    if to_deadline_s is None:
        return patience * MOST_ALLOWED_S
    return patience * min(MOST_ALLOWED_S, max(LEAST_ALLOWED_S, ALLOWED_SHARE * to_deadline_s))


@dataclass(slots=True)
class Parts:
    """What every lane and tenant has been asking for. ``refresh`` before ``excess_s``. Times are handed in, in
    seconds."""

    _lanes: dict[str, _Lane] = field(default_factory=dict)
    _now_s: float = -math.inf

    def due(self, now_s: float) -> bool:
        """Whether it is time to ``refresh``."""
        return now_s >= self._now_s + _TICK_S

    def refresh(self, now_s: float, waiting: Mapping[str, frozenset[str | None]]) -> None:
        """It is ``now_s``, and these tenants of lanes have sequences that wait: let time pass. Who has nothing waiting
        has been served, but of a lane over its part what its part serves."""
        passed_s, self._now_s = now_s - self._now_s, now_s
        if not self._lanes or not 0 < passed_s < math.inf:
            return
        for name, lane in self._lanes.items():
            lane.pass_time(passed_s)
            waits = waiting.get(name, frozenset())
            for key, tenant in list(lane.tenants.items()):
                if key not in waits and not lane.over:
                    tenant.left_s = 0.0
                if tenant.asked < _PRESENT / 100 and tenant.left_s < _NOTHING:
                    del lane.tenants[key]
            if lane.over:
                lane.serve(lane.part * passed_s)
        left = {name: lane.left_s for name, lane in self._lanes.items() if not lane.over}
        claims = {name: min(work_s, self._lanes[name].claim * passed_s) for name, work_s in left.items()}
        over = sum([lane.part for lane in self._lanes.values() if lane.over]) * passed_s
        servable_s = max(0.0, SERVABLE * passed_s - over)
        for name, served_s in self._shared(left, claims, servable_s, servable_s).items():
            self._lanes[name].serve(served_s + _NOTHING)

    def excess_s(
        self, owner: Owner, weight: float, work_s: float, queue_s: float, *, idle: bool = False
    ) -> float | None:
        """A request of ``work_s`` asks to come in: None when it may, else in how many seconds its part will have room
        for it. ``queue_s`` is what its lane is allowed (``allowed_s``). ``idle``: the engine has nothing to do, so that
        nobody else can feel it."""
        lane = self._lanes.setdefault(owner[0], _Lane())
        tenant = lane.tenants.setdefault(owner[1], _Tenant())
        lane.weight = weight
        lane.note(tenant, work_s)
        lone = not any([one.asked > _PRESENT for one in self._lanes.values() if one is not lane])
        if lone and not any([one.asked > _PRESENT for one in lane.tenants.values() if one is not tenant]):
            lane.over = tenant.over = False
            return None
        entitled = self._part(lane, owner[0], least=False)
        if min(lane.asked, lane.recent) <= entitled:
            lane.over = False
            return None
        part = SERVABLE if lone else self._part(lane, owner[0], least=True)
        lane.part = part
        if lane.left_s / part <= queue_s * (RECOVERING if lane.over else 1.0):
            return None
        lane.over = True
        tenants_part = max(part, min(entitled, lane.claim))
        others = [(other.asked, 1.0) for other in lane.tenants.values() if other is not tenant]
        late_s = tenant.left_s / _rest(others, tenants_part) - queue_s * (RECOVERING if tenant.over else 1.0)
        tenant.over = late_s > 0 and tenant.asked > _rest(others, entitled)
        return lane.left_s / part - RECOVERING * queue_s if tenant.over and not idle else None

    def let_in(self, owner: Owner, work_s: float) -> None:
        """The request that ``excess_s`` was asked about came in."""
        self._lanes[owner[0]].tenants[owner[1]].left_s += work_s

    def _part(self, lane: _Lane, name: str, *, least: bool) -> float:
        """The lane's part, of whatever it may ask for; ``least``: no more than its usual."""
        present = sum([one.weight for one in self._lanes.values() if one.asked > _PRESENT or one is lane])
        asked: dict[str, float] = {}
        claims: dict[str, float] = {}
        for other, one in self._lanes.items():
            claim = one.usual if (least if one is lane else one.over) else one.claim
            claim = max(claim, LEAST_CLAIM * SERVABLE * one.weight / present)
            asked[other] = one.asked
            claims[other] = min(one.asked, claim)
            if one is lane:
                asked[other] = claim if least else max(claim, FULL)
                claims[other] = claim
        return max(1e-3, self._shared(asked, claims, FULL, SERVABLE)[name])

    def _shared(
        self, asked: Mapping[str, float], claims: Mapping[str, float], full: float, servable: float
    ) -> dict[str, float]:
        """Claims first, of ``full``; then what else is asked for, of what they leave of ``servable``."""
        first = self._by_weight(claims, full)
        rest = self._by_weight(
            {name: asked[name] - first[name] for name in asked}, max(0.0, servable - sum(first.values()))
        )
        return {name: first[name] + rest[name] for name in asked}

    def _by_weight(self, asked: Mapping[str, float], capacity: float) -> dict[str, float]:
        if capacity <= 0:
            return dict.fromkeys(asked, 0.0)
        level = water_level([(work, self._lanes[name].weight) for name, work in asked.items()], capacity)
        return {name: min(work, level * self._lanes[name].weight) for name, work in asked.items()}


def _rest(others: list[tuple[float, float]], part: float) -> float:
    """What one more tenant may ask for of a lane's part, beside these."""
    return water_level([*others, (math.inf, 1.0)], part)
