"""All groups as one engine: implements ``engines.protocol.Engine``."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any, Final

import msgspec

from headrace.config.groups import GroupConfig, ReplicaConfig
from headrace.config.schema import Config
from headrace.control.breaker import Breaker, Transition
from headrace.control.concurrency import LimitBounds
from headrace.engines.fleet.alerts import Alert, Alerts, Post
from headrace.engines.fleet.budget import RetryBudget
from headrace.engines.fleet.counts import FleetCounts
from headrace.engines.fleet.discovery import (
    FILE_POLL_S,
    configured,
    file_mark,
    merged,
    read_replica_file,
    resolve,
    spec_of,
)
from headrace.engines.fleet.document import ask_group
from headrace.engines.fleet.group import Asked, Group, Place
from headrace.engines.fleet.replica import Replica, ReplicaSpec
from headrace.engines.fleet.run import Run
from headrace.engines.output_stream import OutputStream
from headrace.engines.protocol import Engine
from headrace.engines.remote.call import CallTimeouts
from headrace.engines.remote.connection import Address
from headrace.engines.remote.engine import RemoteEngine, RemoteSettings
from headrace.engines.remote.request_body import Dialect
from headrace.errors import ConfigError, EngineError, EngineNotReady, NotFound, RemoteFailure, RequestError
from headrace.messages.engine import (
    BandPlan,
    EngineLoad,
    EngineSnapshot,
    Knobs,
    ModelInfo,
    Ready,
    SequenceOutput,
    Submit,
)
from headrace.routing.decide import RouteSettings
from headrace.routing.health import Health, HealthSettings
from headrace.routing.prefix_index import BLOCK_BYTES, PrefixIndex, block_keys

_logger = logging.getLogger(__name__)

TICK_S: Final = 1.0
"""The control loop's window: limits, breakers, progress."""

_MOST_NOTES: Final = 10_000
_START_WAIT_S: Final = 5.0

NewEngine = Callable[[GroupConfig, ReplicaSpec], Engine]


class _Watched:
    """A replica and the task that looks after it."""

    def __init__(self, replica: Replica, task: asyncio.Task[None]) -> None:
        self.replica = replica
        self.task = task


class Fleet:
    """Groups of engines behind the one seam for engines.

    ``embedded`` is the engine of the group of that kind; the fleet does not start or close it. ``clock`` is monotonic,
    ``wall_clock`` seconds since the epoch, for alerts.
    """

    def __init__(
        self,
        config: Config,
        *,
        embedded: Engine | None = None,
        version: str = "",
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        randomness: Random | None = None,
        post_alerts: Post | None = None,
        new_engine: NewEngine | None = None,
    ) -> None:
        self._config = config
        self._embedded = embedded
        self._clock = clock
        self._wall_clock = wall_clock
        self._randomness = randomness or Random()
        self._new_engine = new_engine or self._remote_engine
        self._index = PrefixIndex(config.fleet.prefix_blocks)
        self._groups: dict[str, Group] = {}
        self._budgets: dict[str, RetryBudget] = {}
        self._found: dict[str, dict[str, list[ReplicaSpec]]] = {}
        self._watched: dict[tuple[str, str], _Watched] = {}
        self._leaving: set[asyncio.Task[None]] = set()
        self._sources: dict[str, list[asyncio.Task[None]]] = {}
        self._runs: dict[str, tuple[OutputStream, asyncio.Task[None]]] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._notes: OrderedDict[str, str] = OrderedDict()
        self._load: EngineLoad | None = None
        self._ready: Ready | None = None
        self._started = False
        self._someone_ready = asyncio.Event()
        self.counts = FleetCounts()
        self.transitions: deque[tuple[str, str, str, Transition]] = deque(maxlen=256)
        """The latest changes of breakers: group, replica, lane, what."""
        self.slow_by: dict[str, float] = {}
        """Seconds that a drill adds to a lane's measured times."""
        self.alerts = Alerts(post_alerts, version=version, sleep=asyncio.sleep)

    # What it is, as an engine:

    @property
    def ready(self) -> Ready | None:
        return self._ready

    @property
    def load(self) -> EngineLoad | None:
        if self._ready is None:
            return None
        if self._load is None:
            self._load = self._measure()
        return self._load

    @property
    def groups(self) -> dict[str, Group]:
        return self._groups

    @property
    def live(self) -> int:
        """Requests that have not ended."""
        return len(self._runs)

    async def start(self) -> Ready:
        """Begin to look after replicas; waits a few seconds for the first to be ready. Raises EngineNotReady when none
        is by then: the fleet goes on trying."""
        if not self._started:
            self._started = True
            self._apply(self._config)
            self._tasks = [
                asyncio.create_task(self._tick_for_ever(), name="headrace-fleet-loop"),
                asyncio.create_task(self.alerts.run(), name="headrace-alerts"),
            ]
        try:
            async with asyncio.timeout(_START_WAIT_S):
                await self._someone_ready.wait()
        except TimeoutError as error:
            raise EngineNotReady("no engine of any group is ready yet") from error
        self._see_ready()
        if self._ready is None:
            raise EngineNotReady("no engine of any group is ready yet")
        return self._ready

    def submit(self, request: Submit) -> OutputStream:
        def begin(outer: OutputStream) -> None:
            if self._ready is None:
                raise EngineNotReady("no engine is ready")
            if request.request_id in self._runs:
                raise EngineError(f"request id {request.request_id} is already live")
            if request.max_tokens == 0 and request.wire is None and not request.prompt_tokens:
                raise EngineError("there is nothing to generate")
            run = self._run(request, outer)
            task = asyncio.get_running_loop().create_task(run.run())
            self._runs[request.request_id] = outer, task
            self._load = None
            task.add_done_callback(lambda task: self._ended(request.request_id, outer, task))

        def abort(outer: OutputStream) -> None:
            live = self._runs.get(request.request_id)
            if live is not None and live[0] is outer:
                live[1].cancel()

        return OutputStream(begin, abort)

    def abort(self, request_id: str) -> None:
        live = self._runs.get(request_id)
        if live is not None:
            live[1].cancel()

    async def snapshot(self) -> EngineSnapshot:
        ready = self._ready
        if ready is None:
            raise EngineNotReady("no engine is ready")
        load = self.load
        assert load is not None
        return EngineSnapshot(0, load, ready.bands, list(self._runs), self.integrity())

    def set_knobs(self, knobs: Knobs) -> None:
        if self._embedded is not None:
            self._embedded.set_knobs(knobs)

    async def close(self) -> None:
        self._ready = None
        self._started = False
        for request_id in list(self._runs):
            self.abort(request_id)
        running = [task for _, task in self._runs.values()]
        watching = [watched.task for watched in self._watched.values()]
        sources = [task for tasks in self._sources.values() for task in tasks]
        helpers = [*watching, *sources, *self._tasks, *self._leaving]
        for task in helpers:
            task.cancel()
        await asyncio.gather(*running, *helpers, return_exceptions=True)
        for watched in self._watched.values():
            if watched.replica.engine is not self._embedded:
                await watched.replica.engine.close()
        self._watched.clear()
        self._sources.clear()
        self._groups.clear()
        self._tasks = []
        self._someone_ready.clear()

    # What it is besides:

    def degradation(self, request_id: str) -> str | None:
        """How the request is served in degraded mode, for its response; None when it is not."""
        return self._notes.get(request_id)

    async def ask(self, lane: str, asked: Asked, path: str, body: bytes) -> tuple[int, bytes] | None:
        """A document of the lane's group (``fleet.document``); None: its engine is the embedded one, which has none.
        Raises RemoteFailure."""
        group = self._groups[self._config.group_of(self._config.lanes[lane])]
        return None if group.config.kind == "embedded" else await ask_group(group, asked, path, body)

    def not_served(self, lane: str) -> str | None:
        """Why a lane is in degraded mode now; None when it is not."""
        group = self._groups.get(self._config.group_of(self._config.lanes[lane]))
        if group is None or not group.replicas:
            return "no_replicas"
        now_s, states = self._clock(), []
        for replica in group.replicas.values():
            breaker = replica.breakers.get(lane)
            well = replica.engine.ready is not None and replica.health.healthy(now_s)
            states.append("unhealthy" if not well else "closed" if breaker is None else breaker.state)
        if all(state == "unhealthy" for state in states):
            return "unhealthy"
        return "breaker" if not any(state == "closed" for state in states) else None

    def reconfigure(self, config: Config) -> None:
        """Put another configuration in force. Replicas that it keeps keep their streams, health and limits."""
        self._config = config
        if self._started:
            self._apply(config)

    def add_replica(self, group: str, replica: ReplicaConfig) -> ReplicaSpec:
        """Add or change a replica by hand; it lasts until it is removed or the process ends. Raises NotFound, and
        RequestError for a group that takes none."""
        if group not in self._groups:
            raise NotFound(f"there is no group {group[:64]!r}")
        if self._groups[group].config.kind == "embedded":
            raise RequestError("the embedded engine is its group's only replica")
        spec = spec_of(replica, "admin")
        found = self._found[group]
        found["admin"] = [spec, *(old for old in found.get("admin", []) if old.name != spec.name)]
        found["removed"] = [old for old in found.get("removed", []) if old.name != spec.name]
        self._sync(group)
        return spec

    def remove_replica(self, group: str, name: str) -> None:
        """Take a replica out: it gets no new requests, its streams may finish. Raises NotFound."""
        if group not in self._groups or name not in self._groups[group].replicas:
            raise NotFound(f"there is no replica {name[:64]!r} in group {group[:64]!r}")
        found = self._found[group]
        found["admin"] = [spec for spec in found.get("admin", []) if spec.name != name]
        found.setdefault("removed", []).append(self._groups[group].replicas[name].spec)
        self._sync(group)

    def change_replica(self, group: str, name: str, *, draining: bool | None, weight: float | None) -> ReplicaSpec:
        """Change what is said of a replica by hand. Raises NotFound."""
        if group not in self._groups or name not in self._groups[group].replicas:
            raise NotFound(f"there is no replica {name[:64]!r} in group {group[:64]!r}")
        old = self._groups[group].replicas[name].spec
        changes: dict[str, Any] = {"source": "admin"}
        if draining is not None:
            changes["draining"] = draining
        if weight is not None:
            changes["weight"] = weight
        spec = ReplicaSpec(**{**{key: getattr(old, key) for key in old.__slots__}, **changes})
        found = self._found[group]
        found["admin"] = [spec, *(kept for kept in found.get("admin", []) if kept.name != name)]
        self._sync(group)
        return spec

    def force_open(self, group: str, lane: str, reason: str) -> int:
        """Open a lane's breakers in a group by hand; how many were opened."""
        opened = 0
        for replica in self._groups[group].replicas.values():
            breaker = replica.breaker(lane, self._config.lanes[lane].breaker)
            opened += breaker.force_open(self._clock(), reason) is not None
            self._hear(group, replica, lane, breaker)
        return opened

    def integrity(self) -> str | None:
        """What does not agree, or None."""
        try:
            for group in self._groups.values():
                group.check_integrity()
        except AssertionError as error:
            return str(error)
        return None

    # What its requests tell (``run.Watcher``):

    def attempt_ended(self, group: str, replica: str, outcome: str) -> None:
        self.counts.attempts[group, outcome] += 1

    def tried_again(self, group: str, how: str) -> None:
        self.counts.again[group, how] += 1

    def routed(self, group: str, reason: str) -> None:
        self.counts.routes[group, reason] += 1

    def degraded(self, submit: Submit, how: str) -> None:
        self.counts.degraded[submit.lane] += 1
        self._notes[submit.request_id] = how
        while len(self._notes) > _MOST_NOTES:
            self._notes.popitem(last=False)

    def first_token(self, place: Place, lane: str, ttft_s: float | None) -> None:
        self._load = None
        breaker = place.replica.breakers[lane]
        if ttft_s is not None:
            ttft_s += self.slow_by.get(lane, 0.0)
        breaker.record(ttft_s, self._clock(), probe=place.probe)
        if breaker.news:
            self._hear(self._group_name(place.replica), place.replica, lane, breaker)

    # Inside:

    def _run(self, request: Submit, outer: OutputStream) -> Run:
        wire = request.wire
        prompt = b"" if wire is None else wire.prompt
        keys = block_keys(prompt)
        lane = self._config.lanes.get(request.lane)
        name = self._config.group_of(lane) if lane is not None else next(iter(self._groups))
        budget = self._budgets[name]
        budget.request_came()
        return Run(
            request,
            outer,
            self._config,
            self._groups,
            config_now=lambda: self._config,
            keys=keys,
            block_tokens=request.prompt_count * BLOCK_BYTES / len(prompt) if prompt else 0.0,
            session=request.session,
            budget=budget,
            watcher=self,
            clock=self._clock,
            randomness=self._randomness,
            on_end=lambda: self._forget(request.request_id, outer),
        )

    def _ended(self, request_id: str, outer: OutputStream, task: asyncio.Task[None]) -> None:
        """A request's task is over: one that did not say so itself was cancelled, or met a fault of ours."""
        self._forget(request_id, outer)
        if task.cancelled():
            outer.push(SequenceOutput(request_id, finish="abort"))
        elif task.exception() is not None:
            _logger.error("request %s failed", request_id, exc_info=task.exception())
            outer.push(EngineError("headrace failed on this request"))

    def _forget(self, request_id: str, outer: OutputStream) -> None:
        live = self._runs.get(request_id)
        if live is not None and live[0] is outer:
            del self._runs[request_id]
            self._load = None

    def _apply(self, config: Config) -> None:
        """Groups, sources and replicas as configured."""
        removed: list[Group] = []
        for name in [name for name in self._groups if name not in config.groups]:
            self._found[name] = {}
            self._sync(name)
            self._stop_sources(name)
            removed.append(self._groups.pop(name))
            del self._found[name]
        settings = RouteSettings(config.fleet.zone, config.fleet.zone_cost_s)
        for name, group_config in config.groups.items():
            group = self._groups.get(name)
            if group is None:
                group = self._groups[name] = Group(
                    name,
                    group_config,
                    clock=self._clock,
                    randomness=self._randomness,
                    settings=settings,
                    index=self._index,
                    session_memory_s=config.fleet.session_memory_s,
                )
                self._found[name] = {}
            changed = group.config != group_config or name not in self._sources
            anew = _without_places(group.config) != _without_places(group_config)
            group.config, group.settings = group_config, settings
            self._budgets.setdefault(name, RetryBudget(group_config.retry.budget, group_config.retry.reserve))
            found = self._found[name]
            # The admin API's word goes first, then the configuration, the file, DNS.
            self._found[name] = {
                "admin": found.get("admin", []),
                "config": configured(group_config),
                "file": found.get("file", []),
                "dns": found.get("dns", []),
                "removed": found.get("removed", []),
            }
            if changed:
                self._stop_sources(name)
                self._start_sources(name, group_config)
            self._sync(name, anew=anew)
        for group in removed:  # by now there is where to go
            group.disband()

    def _stop_sources(self, name: str) -> None:
        for task in self._sources.pop(name, []):
            task.cancel()

    def _start_sources(self, name: str, config: GroupConfig) -> None:
        self._sources[name] = []
        if config.file is not None:
            path = Path(config.file)
            self._sources[name].append(asyncio.create_task(self._watch_file(name, path)))
        else:
            self._found[name]["file"] = []
        if config.dns:
            self._sources[name].append(asyncio.create_task(self._watch_dns(name, config)))
        else:
            self._found[name]["dns"] = []

    async def _watch_file(self, name: str, path: Path) -> None:
        seen: object = ()
        while True:
            mark = await asyncio.to_thread(file_mark, path)
            if mark != seen:
                seen = mark
                try:
                    self._found[name]["file"] = await asyncio.to_thread(read_replica_file, path)
                    self._sync(name)
                except ConfigError as error:
                    _logger.error("group %s: its replica file is not used, the old list stays: %s", name, error)
            await asyncio.sleep(FILE_POLL_S)

    async def _watch_dns(self, name: str, config: GroupConfig) -> None:
        answers: dict[str, list[ReplicaSpec]] = {}
        while True:
            for named in config.dns:
                try:
                    answers[named.url] = await resolve(named)
                except OSError as error:
                    _logger.warning("group %s: %s does not resolve: %s", name, named.url, error)
            self._found[name]["dns"] = [spec for specs in answers.values() for spec in specs]
            self._sync(name)
            await asyncio.sleep(min(named.refresh_s for named in config.dns))

    def _sync(self, name: str, *, anew: bool = False) -> None:
        """Make the group's replicas those that were found."""
        group, found = self._groups[name], dict(self._found[name])
        removed = {spec.name for spec in found.pop("removed", [])}
        wanted = {key: spec for key, spec in merged(found).items() if key not in removed}
        for key in [key for key in group.replicas if key not in wanted or anew]:
            self._let_go(name, group.replicas.pop(key))
        for key, spec in wanted.items():
            if key in group.replicas:
                group.replicas[key].spec = spec
            else:
                group.replicas[key] = self._take_on(name, group.config, spec)
        group.dispatch()

    def _take_on(self, name: str, config: GroupConfig, spec: ReplicaSpec) -> Replica:
        health = config.health
        settings = HealthSettings(
            health.unhealthy_after,
            health.healthy_after,
            health.failures,
            health.rest_s,
            health.max_rest_s,
            health.progress_s,
        )
        if spec.url:
            engine = self._new_engine(config, spec)
        else:
            if self._embedded is None:
                raise ConfigError("there is no embedded engine", where=f"groups.{name}")
            engine = self._embedded
        bounds = LimitBounds(config.min_in_flight, config.max_in_flight)
        replica = Replica(spec, engine, Health(settings), bounds, clock=self._clock, stale_s=health.metrics_stale_s)
        task = asyncio.create_task(self._look_after(name, replica, config), name=f"headrace-replica-{name}-{spec.name}")
        self._watched[name, spec.name] = _Watched(replica, task)
        _logger.info("group %s: replica %s (%s)", name, spec.name, spec.source)
        return replica

    def _let_go(self, name: str, replica: Replica) -> None:
        """No new requests; what runs may finish."""
        replica.removed = True
        watched = self._watched.pop((name, replica.name))
        self._index.forget_replica(replica.name)
        _logger.info("group %s: replica %s is taken out", name, replica.name)

        async def leave() -> None:
            try:
                await replica.empty()
            finally:
                watched.task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await watched.task
                if replica.engine is not self._embedded:
                    await replica.engine.close()

        task = asyncio.create_task(leave())
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)

    async def _look_after(self, name: str, replica: Replica, config: GroupConfig) -> None:
        """Active probes of one replica, and its metrics, for ever."""
        engine, health = replica.engine, config.health
        while True:
            before = replica.health.cause(self._clock())
            try:
                if engine is self._embedded:
                    if engine.ready is None:
                        raise EngineNotReady("the engine is not ready")
                elif engine.ready is None:
                    await engine.start()
                elif isinstance(engine, RemoteEngine):
                    await engine.probe()
                replica.health.probed(well=True)
            except EngineError as error:
                replica.health.probed(well=False)
                after = replica.health.cause(self._clock())
                if after == "probe" and before != after:
                    _logger.warning("group %s: replica %s is not well: %s", name, replica.name, error)
                    replica.break_off(RemoteFailure("the engine went away", kind="cut"), streaming=False)
            else:
                self._seen_ready(name, replica, before is not None)
            if isinstance(engine, RemoteEngine) and engine.ready is not None and health.metrics:
                with contextlib.suppress(RemoteFailure):
                    replica.scraped(await engine.scrape())
            self._see_ready()
            await asyncio.sleep(health.interval_s * (0.9 + 0.2 * self._randomness.random()))

    def _seen_ready(self, name: str, replica: Replica, was_sick: bool) -> None:
        ready = replica.engine.ready
        if ready is not None:
            group = self._groups.get(name)
            limit = None if group is None else group.config.max_context_tokens
            replica.max_context_tokens = limit or ready.model.max_context_tokens
        if was_sick and replica.health.healthy(self._clock()):
            _logger.info("group %s: replica %s is well", name, replica.name)
            if name in self._groups:
                self._groups[name].dispatch()

    def _see_ready(self) -> None:
        """The fleet is ready while any replica is. What it says of itself changes only with what it is."""
        replicas = [replica for group in self._groups.values() for replica in group.replicas.values()]
        ready = [replica for replica in replicas if replica.engine.ready is not None]
        if not ready or not self._started:
            self._ready = None
            return
        context = max(replica.max_context_tokens for replica in ready)
        places = sum(replica.bounds.most for replica in ready)
        if self._ready is None or self._ready.bands[0] != BandPlan(context, places, 0, created=True):
            model = ModelInfo("fleet", "", "fleet", 0, 0, context, context, 0, 0)
            self._ready = Ready(model, [BandPlan(context, places, 0, created=True)], 0, 1, None)
        self._someone_ready.set()

    async def _tick_for_ever(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            try:
                self.tick()
            except Exception:
                _logger.exception("the fleet's loop failed once")

    def tick(self) -> None:
        """One window of the control loop has passed."""
        now_s = self._clock()
        self._load = None
        for name, group in self._groups.items():
            for replica in group.replicas.values():
                streaming = sum(attempt.streaming for attempt in replica.attempts)
                if replica.health.watch(now_s, streaming):
                    _logger.warning("group %s: replica %s makes no progress", name, replica.name)
                    replica.break_off(RemoteFailure("the engine stopped producing tokens", kind="timeout"))
                replica.next_window()
                for lane, breaker in replica.breakers.items():
                    breaker.tick(now_s)
                    self._hear(name, replica, lane, breaker)
            group.dispatch(everyone=True)

    def _hear(self, group: str, replica: Replica, lane: str, breaker: Breaker) -> None:
        """Take note of what a breaker did."""
        while breaker.news:
            self._changed(group, replica, lane, breaker.news.popleft())

    def _changed(self, group: str, replica: Replica, lane: str, transition: Transition) -> None:
        """A breaker changed its state."""
        self.transitions.append((group, replica.name, lane, transition))
        self.counts.transitions[group, lane, transition.after] += 1
        key = (group, replica.name, lane)
        if transition.after == "open" and transition.before == "closed":
            self.alerts.fire(Alert(*key, transition.reason, self._wall_clock()))
        elif transition.after == "closed":
            self.alerts.resolve(key, self._wall_clock())
        _logger.info(
            "lane %s on %s/%s: breaker %s -> %s: %s",
            lane, group, replica.name, transition.before, transition.after, transition.reason,
        )  # fmt: skip

    def _group_name(self, replica: Replica) -> str:
        for name, group in self._groups.items():
            if group.replicas.get(replica.name) is replica:
                return name
        return "gone"

    def _remote_engine(self, config: GroupConfig, spec: ReplicaSpec) -> Engine:
        assert config.kind != "embedded"
        key = None if config.api_key is None else os.environ.get(config.api_key.removeprefix("env:"))
        limits, health = config.timeouts, config.health
        return RemoteEngine(
            RemoteSettings(
                Address.of(spec.url),
                Dialect(config.kind, config.model, config.priority_order),
                CallTimeouts(limits.connect_s, limits.first_token_s, limits.between_tokens_s, limits.total_s),
                api_key=key,
                max_sequences=config.max_in_flight,
                max_context_tokens=config.max_context_tokens,
                probe_path=health.path,
                probe_timeout_s=health.timeout_s,
            ),
            clock=self._clock,
        )

    def _measure(self) -> EngineLoad:
        """What runs now. Asked for with every token, so it is made anew only when a request begins, gets its first
        token or ends, and with every tick."""
        used = total = running = 0
        for group in self._groups.values():
            for replica in group.replicas.values():
                running += sum(attempt.streaming for attempt in replica.attempts)
                load = replica.engine.load
                if load is not None:
                    used, total = used + load.kv_used_tokens, total + load.kv_total_tokens
        waiting = len(self._runs) - running
        return EngineLoad(running, waiting, used, total, 0, 0, 0, 0.0, running, 0, 1)


def _without_places(config: GroupConfig) -> GroupConfig:
    """What of a group its replicas' engines are made with."""
    return msgspec.structs.replace(
        config, replicas=(), dns=(), file=None, description="", queue_wait_s=1.0, unavailable_wait_s=1.0
    )
