"""One group: its replicas, and the line of requests that wait for a place in it.

The line is here and not in the engines, so that the most urgent goes first at the moment when a place is free.
"""

from __future__ import annotations

import asyncio
import itertools
from bisect import insort
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Final

from headrace.config.groups import GroupConfig
from headrace.control.breaker import BreakerConfig
from headrace.engines.fleet.replica import Replica
from headrace.errors import RemoteFailure
from headrace.routing.decide import RouteDecision, RouteRequest, RouteSettings, route
from headrace.routing.order import rank
from headrace.routing.prefix_index import PrefixIndex

MOST_SESSIONS: Final = 50_000
MOST_LOOKED_AT: Final = 64
"""Waiting requests that are looked at for one that fits, when the first one does not."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What a request wants of a group. ``keys`` are its prompt's blocks, of ``block_tokens`` tokens each;
    ``last_resort``: replicas whose breaker is open for the lane do as well."""

    lane: str
    breaker: BreakerConfig
    priority: int
    arrived_s: float
    deadline_s: float | None
    prompt_tokens: int
    output_tokens: int
    keys: tuple[int, ...] = ()
    block_tokens: float = 0.0
    session: str | None = None
    avoid: frozenset[str] = frozenset()
    last_resort: bool = False
    continuing: bool = False


@dataclass(frozen=True, slots=True)
class Place:
    """Where a request goes, and whether it is a probe of the lane's breaker there."""

    replica: Replica
    probe: bool
    decision: RouteDecision
    lane: str

    def take(self) -> None:
        """Count it, until the request itself is counted (``began``)."""
        self.replica.reserved += 1
        if self.probe:
            self.replica.breakers[self.lane].probing()

    def began(self) -> None:
        """The request is counted from here on."""
        self.replica.reserved -= 1

    def give_back(self) -> None:
        """The request does not come."""
        self.replica.reserved -= 1
        self.replica.breakers[self.lane].gave_up(probe=self.probe)


@dataclass(order=True, slots=True)
class _Waiting:
    rank: float
    number: int
    asked: Asked = field(compare=False)
    place: asyncio.Future[Place] = field(compare=False)
    since_s: float = field(compare=False, default=0.0)
    hopeless_since_s: float | None = field(compare=False, default=None)


@dataclass(frozen=True, slots=True)
class _Session:
    replica: str
    tokens: int
    at_s: float


class NoPlace(RemoteFailure):
    """No replica of the group can take the request. ``breaker``: because the lane's breakers are open; ``too_long``:
    because none takes a context of its length; ``gone``: because the configuration has the group no more."""

    def __init__(self, message: str, *, breaker: bool = False, too_long: bool = False, gone: bool = False) -> None:
        super().__init__(message, kind="busy", retry_after_s=1.0)
        self.gone = gone
        self.breaker = breaker
        self.too_long = too_long


class Group:
    """``clock`` is monotonic seconds; ``randomness`` decides ties."""

    def __init__(
        self,
        name: str,
        config: GroupConfig,
        *,
        clock: Callable[[], float],
        randomness: Random,
        settings: RouteSettings,
        index: PrefixIndex,
        session_memory_s: float,
    ) -> None:
        self.name = name
        self.config = config
        self.settings = settings
        self.replicas: dict[str, Replica] = {}
        self._clock = clock
        self._randomness = randomness
        self._index = index
        self._session_memory_s = session_memory_s
        self._sessions: OrderedDict[str, _Session] = OrderedDict()
        self._line: list[_Waiting] = []
        self._numbers = itertools.count()
        self._gone = False

    @property
    def waiting(self) -> int:
        """Requests in line."""
        return len(self._line)

    def try_place(self, asked: Asked) -> Place | RouteDecision:
        """A place now, taken; or why there is none."""
        now_s = self._clock()
        probes: set[str] = set()
        views = []
        for replica in self.replicas.values():
            permit = replica.breaker(asked.lane, asked.breaker).permit(now_s)
            if permit == "probe":
                probes.add(replica.name)
            views.append(replica.view(admits=permit != "no", last_resort=asked.last_resort))
        matched = {
            replica: round(blocks * asked.block_tokens) for replica, blocks in self._index.matches(asked.keys).items()
        }
        session = self._session(asked.session, now_s)
        request = RouteRequest(
            prompt_tokens=asked.prompt_tokens,
            output_tokens=asked.output_tokens,
            matched_tokens=matched,
            session=None if session is None else session.replica,
            session_tokens=0 if session is None else session.tokens,
            avoid=asked.avoid,
        )
        decision = route(request, views, self.settings, self._randomness)
        if decision.replica is None:
            return decision
        replica = self.replicas[decision.replica]
        place = Place(replica, decision.replica in probes, decision, asked.lane)
        place.take()
        return place

    async def place(self, asked: Asked) -> Place:
        """A place, waiting in line for it. Raises NoPlace: at once when the prompt fits nowhere or the lane's breakers
        are open or the group is gone, later when no replica gets well or none gets room."""
        if self._gone:
            raise NoPlace("the group of engines is gone", gone=True)
        if not self._line:
            found = self.try_place(asked)
            if isinstance(found, Place):
                return found
            self._raise_if_hopeless(found)
        now_s = self._clock()
        waiting = _Waiting(
            rank(asked.priority, asked.arrived_s, asked.deadline_s),
            next(self._numbers),
            asked,
            asyncio.get_running_loop().create_future(),
            now_s,
        )
        insort(self._line, waiting)
        self.dispatch()
        try:
            return await waiting.place
        except asyncio.CancelledError:
            place = waiting.place
            if place.done() and not place.cancelled() and place.exception() is None:
                place.result().give_back()
                self.dispatch()
            raise
        finally:
            if waiting in self._line:
                self._line.remove(waiting)

    def dispatch(self, *, everyone: bool = False) -> None:
        """Give free places to who waits, the most urgent first. ``everyone``: look at all who wait even when no place
        is free, and tell those for whom there is no hope."""
        now_s, looked_at = self._clock(), 0
        for waiting in list(self._line):
            if waiting.place.done():
                continue
            if not everyone and not self._has_room():
                return
            if looked_at >= MOST_LOOKED_AT and now_s - waiting.since_s < self.config.queue_wait_s:
                continue
            looked_at += 1
            found = self.try_place(waiting.asked)
            if isinstance(found, Place):
                self._line.remove(waiting)
                waiting.place.set_result(found)
                continue
            try:
                self._raise_if_hopeless(found, waiting, now_s)
            except NoPlace as error:
                self._line.remove(waiting)
                waiting.place.set_exception(error)

    def disband(self) -> None:
        """The configuration has this group no more: whoever waits in its line must look elsewhere."""
        self._gone = True
        line, self._line = self._line, []
        for waiting in line:
            if not waiting.place.done():
                waiting.place.set_exception(NoPlace("the group of engines is gone", gone=True))

    def _has_room(self) -> bool:
        return any(replica.in_flight < replica.places() for replica in self.replicas.values())

    def remember(self, session: str | None, replica: str, tokens: int) -> None:
        """A session's conversation is at ``replica`` now, ``tokens`` long."""
        if session is None:
            return
        self._sessions[session] = _Session(replica, tokens, self._clock())
        self._sessions.move_to_end(session)
        while len(self._sessions) > MOST_SESSIONS:
            self._sessions.popitem(last=False)

    def sent(self, replica: str, keys: tuple[int, ...]) -> None:
        """A replica got a prompt of these blocks."""
        if keys:
            self._index.sent(replica, keys)

    def check_integrity(self) -> None:
        """Raise AssertionError unless replicas, line and index are in order."""
        for replica in self.replicas.values():
            replica.check_integrity()
        assert self._line == sorted(self._line), "the line is out of order"
        assert all(not waiting.place.done() for waiting in self._line), "somebody in line has been served"
        self._index.check_integrity()

    def _session(self, name: str | None, now_s: float) -> _Session | None:
        found = None if name is None else self._sessions.get(name)
        if found is None or now_s - found.at_s > self._session_memory_s:
            return None
        return found

    def _raise_if_hopeless(self, decision: RouteDecision, waiting: _Waiting | None = None, now_s: float = 0.0) -> None:
        """Raise NoPlace when waiting (longer) is of no use."""
        waited_s = 0.0 if waiting is None else now_s - waiting.since_s
        match decision.reason:
            case "breaker":
                raise NoPlace("every engine for this lane is too slow at the moment", breaker=True)
            case "too_long":
                raise NoPlace("no engine takes a context of this length", too_long=True)
            case "unhealthy" | "no_replicas":
                if waiting is None:
                    if self.config.unavailable_wait_s == 0:
                        raise NoPlace("no engine is available")
                    return
                if waiting.hopeless_since_s is None:
                    waiting.hopeless_since_s = now_s
                if now_s - waiting.hopeless_since_s >= self.config.unavailable_wait_s:
                    raise NoPlace("no engine is available")
            case _:
                if waiting is not None:
                    waiting.hopeless_since_s = None
                if waited_s >= self.config.queue_wait_s:
                    raise NoPlace(f"no engine had room within {self.config.queue_wait_s:g} s")
