"""All parts of a scenario together: groups of replicas, their gateway, what goes wrong, and how groups grow."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from msgspec import Struct

from headrace.admission.accuracy import Accuracy
from headrace.admission.lengths import OutputLengths
from headrace.config.schema import Config
from headrace.simulate.fleet.gateway import Ended, Gateway
from headrace.simulate.fleet.replica import Replica
from headrace.simulate.fleet.scaling import ScalingState, decide_scale
from headrace.simulate.fleet.scenario import Fault, Group, Scenario
from headrace.simulate.simulation import Event, Simulation

_AFTER_RANK = 2
"""Of looks at metrics: they see all that happened at their time."""


class ReplicaFacts(Struct, frozen=True):
    """What one replica did in a run. ``paid_s``: how long it was there; ``busy_s``: computing."""

    name: str
    paid_s: float
    busy_s: float
    steps: int
    routed: int
    shed: int
    lost: int
    preempted: int
    asked_tokens: int
    hit_tokens: int


class GroupFacts(Struct, frozen=True):
    """What a group was in a run. ``busy``: share of the paid time in which its replicas computed; ``cost`` in the
    currency of its price, None without one."""

    name: str
    replicas: list[ReplicaFacts]
    mean_replicas: float
    most_replicas: int
    busy: float
    cost: float | None


@dataclass(slots=True)
class _Scaled:
    """A group that follows its load."""

    name: str
    group: Group
    state: ScalingState
    coming: int = 0
    busy_s: float = 0.0


class Fleet:
    """``over`` says whether nothing more comes and all is answered: what recurs then ends."""

    def __init__(
        self, simulation: Simulation, scenario: Scenario, config: Config, ended: Ended, over: Callable[[], bool]
    ) -> None:
        self._simulation = simulation
        self._scenario = scenario
        self._lengths = OutputLengths()
        self._over = over
        self.gateway = Gateway(simulation, scenario.gateway, scenario.link, config, self._lengths, ended)
        self._learns = any(fault.kind == "slow" for fault in scenario.faults)
        self._groups: dict[str, list[Replica]] = {}
        self._most: dict[str, int] = {}
        for name, group in scenario.groups.items():
            accuracy = Accuracy()
            most = group.replicas if group.scaling is None else max(group.replicas, group.scaling.most)
            self._groups[name] = [
                Replica(
                    f"{name}/{number}",
                    group,
                    config,
                    self.gateway,
                    simulation.random(f"engine {name}/{number}"),
                    accuracy=accuracy,
                    lengths=self._lengths,
                    learns=self._learns or group.engine.noise > 0,
                )
                for number in range(most)
            ]
            self._most[name] = group.replicas
            self.gateway.replicas += self._groups[name]
        self._by_name = {replica.name: replica for replica in self.gateway.replicas}

    def begin(self) -> Iterable[Event]:
        """Replicas serve; the events of what recurs and of what goes wrong."""
        for name, group in self._scenario.groups.items():
            for replica in self._groups[name][: group.replicas]:
                replica.begin(0.0)
            if group.scaling is not None:
                scaled = _Scaled(name, group, ScalingState())
                yield Event(group.scaling.interval_s, partial(self._scale, scaled), _AFTER_RANK)
        interval_s = self._scenario.gateway.metrics_interval_s
        if interval_s:
            yield Event(0.0, partial(self._scrape, interval_s), -1)
        for fault in self._scenario.faults:
            yield Event(fault.at_s, partial(self._fault, fault))

    def facts(self, until_s: float) -> list[GroupFacts]:
        """What every group was and did until then."""
        return [self._group_facts(name, group, until_s) for name, group in self._scenario.groups.items()]

    def check_integrity(self) -> str | None:
        """None when all accounts agree; else what is wrong."""
        return self.gateway.check_integrity()

    # ----------------------------------------------------------------------------------------- what recurs

    def _scrape(self, interval_s: float, now_s: float) -> Iterable[Event]:
        self.gateway.scrape(now_s)
        return () if self._over() else (Event(now_s + interval_s, partial(self._scrape, interval_s), _AFTER_RANK),)

    def _scale(self, scaled: _Scaled, now_s: float) -> Iterable[Event]:
        """One look at a group's load."""
        scaling = scaled.group.scaling
        assert scaling is not None
        if self._over():
            return
        replicas = self._groups[scaled.name]
        busy_s = sum([replica.engine.busy_until(now_s) for replica in replicas])
        serving = [replica for replica in replicas if replica.serving]
        busy = (busy_s - scaled.busy_s) / (scaling.interval_s * max(1, len(serving)))
        scaled.busy_s = busy_s
        decision = decide_scale(
            scaling, scaled.state, serving=len(serving), coming=scaled.coming, busy=busy, now_s=now_s
        )
        scaled.state = decision.state
        have = len(serving) + scaled.coming
        if decision.replicas > have:
            idle = [one for one in replicas if not one.serving and one.up_since_s is None]
            for replica in idle[: decision.replicas - have]:
                replica.order(now_s)
                scaled.coming += 1
                yield Event(now_s + scaling.warmup_s, partial(self._warm, scaled, replica))
        elif decision.replicas < have and serving:
            leaving = min(reversed(serving), key=lambda one: len(one.flights))  # the newest of the emptiest
            leaving.serving, leaving.draining = False, True
        for replica in replicas:
            if replica.draining and not replica.flights:
                replica.retire(now_s)
        there = sum([one.up_since_s is not None for one in replicas])
        self._most[scaled.name] = max(self._most[scaled.name], there)
        yield Event(now_s + scaling.interval_s, partial(self._scale, scaled), _AFTER_RANK)

    def _warm(self, scaled: _Scaled, replica: Replica, now_s: float) -> Iterable[Event]:
        """A new replica serves, or will once it is up again."""
        scaled.coming -= 1
        replica.begin(now_s)
        return ()

    # ------------------------------------------------------------------------------------- what goes wrong

    def _fault(self, fault: Fault, now_s: float) -> Iterable[Event]:
        replica = self._by_name[fault.replica]
        if fault.kind == "slow":
            again = Event(now_s + fault.for_s, partial(self._as_fast_again, replica))
            return (*replica.engine.set_pace(fault.factor, now_s), again)
        if fault.kind == "stale":
            replica.seen = replica.look(now_s, with_wait=True)
            replica.frozen_until_s = now_s + fault.for_s
            return ()
        events: list[Event] = [*replica.die(now_s, fault.for_s)]
        events.append(Event(now_s + fault.noticed_s, partial(self._noticed, replica)))
        return events

    def _as_fast_again(self, replica: Replica, now_s: float) -> Iterable[Event]:
        return replica.engine.set_pace(1.0, now_s)

    def _noticed(self, replica: Replica, now_s: float) -> Iterable[Event]:
        """The gateway sees that a replica is down: it sends nothing there until it is up again."""
        served = replica.serving
        replica.serving = False
        events = [*self.gateway.lost(replica, now_s)]
        if served:
            events.append(Event(max(now_s, replica.down_until_s), partial(self._back, replica)))
        return events

    def _back(self, replica: Replica, now_s: float) -> Iterable[Event]:
        replica.begin(now_s)
        return ()

    # ----------------------------------------------------------------------------------------------- facts

    def _group_facts(self, name: str, group: Group, until_s: float) -> GroupFacts:
        replicas = [_facts_of(replica, until_s) for replica in self._groups[name]]
        replicas = [one for one in replicas if one.paid_s > 0]
        paid_s = math.fsum([one.paid_s for one in replicas])
        busy_s = math.fsum([one.busy_s for one in replicas])
        return GroupFacts(
            name=name,
            replicas=replicas,
            mean_replicas=paid_s / until_s if until_s > 0 else 0.0,
            most_replicas=self._most[name],
            busy=busy_s / paid_s if paid_s > 0 else 0.0,
            cost=None if group.price_per_hour is None else group.price_per_hour * paid_s / 3600,
        )


def _facts_of(replica: Replica, until_s: float) -> ReplicaFacts:
    engine = replica.engine
    return ReplicaFacts(
        name=replica.name,
        paid_s=replica.paid_s(until_s),
        busy_s=engine.busy_until(until_s),
        steps=engine.steps,
        routed=replica.routed,
        shed=replica.shed,
        lost=replica.lost,
        preempted=engine.victims,
        asked_tokens=replica.cache.asked_tokens,
        hit_tokens=replica.cache.hit_tokens,
    )
