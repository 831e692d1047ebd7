"""One run: a schedule sent to a target, and everything that happened as records.

``run`` owns the process for that time: its event loop (uvloop where it is installed), its Ctrl-C, its cycle
collector and its limit of open files. Ctrl-C once stops sending and lets what is in flight end within the drain
time; twice ends at once. Either way the records so far are the result.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import msgspec

import headrace
from headrace.bench.drive.body_window import BUDGET_BYTES, BodyMaker, BodyWindow
from headrace.bench.drive.client import Client, ClientSettings
from headrace.bench.drive.dispatch import Dispatcher
from headrace.bench.drive.health import Collector, HealthProbe, machine_facts, raise_file_limit
from headrace.bench.drive.live import LiveState, Progress
from headrace.bench.drive.target import API_KEY_ENV, api_key, parse_target
from headrace.bench.load.build_schedule import schedule_sha256
from headrace.bench.planned import Schedule
from headrace.bench.record_file import RecordsNotWritten, RecordWriter, RunResult
from headrace.bench.records import GeneratorHealth, RequestRecord, RunInfo
from headrace.errors import ConfigError

_LEAD_S = 0.1
"""Between the last preparation and the run's start, so that its first request is not late because of it."""

_SWITCH_INTERVAL_S = 0.0005
"""How long another thread of this process (which makes bodies, writes records) may hold the event loop up."""


@dataclass(frozen=True)
class RunSettings:
    """``target``: a base URL with or without ``/v1``. ``timeout_s`` bounds each request, ``connect_timeout_s`` its
    connection. ``drain_s``: how long requests may still run after the duration. ``warmup_s``: what the summary
    leaves out at the beginning. ``api_key_env``: the variable with the API key; None: OPENAI_API_KEY if it is set."""

    target: str
    model: str
    timeout_s: float = 600.0
    connect_timeout_s: float = 10.0
    drain_s: float = 30.0
    warmup_s: float = 0.0
    api_key_env: str | None = None
    label: str = ""
    body_budget_bytes: int = BUDGET_BYTES


def run(
    schedule: Schedule,
    maker: BodyMaker,
    settings: RunSettings,
    *,
    environment: Mapping[str, str] | None = None,
    records_path: Path | None = None,
    progress: Progress | None = None,
    clock: Callable[[], int] = time.monotonic_ns,
    wall_clock: Callable[[], float] = time.time,
) -> RunResult:
    """Run it and return what happened; with ``records_path`` the records are also written there as they come.

    ``environment`` is where the API key is looked up (default: the process's). ``clock`` gives the monotonic
    nanoseconds that records hold, ``wall_clock`` the seconds since the epoch of the run's start.

    Raises ConfigError for a target that is no URL or has no address, a missing API key, a records file that
    cannot be written (RecordsNotWritten, with the result, once the run is over), and what the body maker raises.
    A target that does not answer is no error: the records say so.
    """
    environment = os.environ if environment is None else environment
    one = _Run(schedule, maker, settings, environment, records_path, progress, clock, wall_clock)
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(one.run())


def client_for(
    settings: RunSettings,
    environment: Mapping[str, str],
    *,
    clock: Callable[[], int] = time.monotonic_ns,
    wall_clock: Callable[[], float] = time.time,
) -> Client:
    """A client for the settings' target, for what is to be asked before a run too. Raises ConfigError."""
    required = settings.api_key_env is not None
    return Client(
        parse_target(settings.target),
        ClientSettings(
            settings.timeout_s, settings.connect_timeout_s, user_agent=f"headrace-bench/{headrace.__version__}"
        ),
        api_key=api_key(environment, settings.api_key_env or API_KEY_ENV, required=required),
        clock=clock,
        wall_clock=wall_clock,
    )


class _Run:
    """The parts of one run and the order in which they begin and end."""

    def __init__(
        self,
        schedule: Schedule,
        maker: BodyMaker,
        settings: RunSettings,
        environment: Mapping[str, str],
        records_path: Path | None,
        progress: Progress | None,
        clock: Callable[[], int],
        wall_clock: Callable[[], float],
    ) -> None:
        self._schedule = schedule
        self._settings = settings
        self._records_path = records_path
        self._progress = progress
        self._clock = clock
        self._wall_clock = wall_clock
        self._client = client_for(settings, environment, clock=clock, wall_clock=wall_clock)
        order = sorted(schedule.requests, key=lambda request: (request.due_ns or 0, request.index))
        first_turns = [request for request in order if request.after is None]
        self._bodies = BodyWindow(maker, first_turns, budget_bytes=settings.body_budget_bytes)
        self._state = LiveState(
            duration_s=schedule.duration_s,
            warmup_s=settings.warmup_s,
            planned=len(order) if schedule.concurrency is None else None,
        )
        self._probe = HealthProbe(clock)
        self._collector = Collector(clock)
        self._writer: RecordWriter | None = None
        self._records: list[RequestRecord] = []

    async def run(self) -> RunResult:
        wanted = self._schedule.concurrency or len(self._schedule.requests)
        limit_warning = raise_file_limit(wanted)
        warnings = [] if limit_warning is None else [limit_warning]
        self._bodies.fill()
        info = self._facts()
        with contextlib.ExitStack() as stack:
            if self._records_path is not None:
                self._writer = stack.enter_context(RecordWriter(self._records_path, info))
            stack.enter_context(_switch_interval(_SWITCH_INTERVAL_S))
            self._bodies.start()
            stack.callback(self._bodies.close)
            async with self._client:
                info, more = await self._load(info, stack)
            result = RunResult(info, self._records, warnings + more)
            if self._writer is not None:
                try:
                    self._writer.finish(info)
                except ConfigError as error:
                    raise RecordsNotWritten(error, result) from error
        return result

    async def _load(self, info: RunInfo, stack: contextlib.ExitStack) -> tuple[RunInfo, list[str]]:
        """From the first request to the last end."""
        stack.enter_context(self._collector.quiet())
        started_at = datetime.fromtimestamp(self._wall_clock() + _LEAD_S, UTC)
        origin_ns = self._clock() + round(_LEAD_S * 1e9)
        self._client.origin_ns = origin_ns
        dispatcher = Dispatcher(
            self._schedule,
            self._bodies,
            self._client,
            drain_s=self._settings.drain_s,
            now_ns=lambda: self._clock() - origin_ns,
            on_record=self._take,
        )
        stack.enter_context(_interrupts(lambda: self._interrupt(dispatcher)))
        watch = asyncio.get_running_loop().create_task(self._watch(dispatcher, origin_ns))
        self._probe.start()
        try:
            await dispatcher.run()
        finally:
            wall_s = max(0, self._clock() - origin_ns) / 1e9  # below 0: ended before it began
            self._probe.stop()
            watch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watch
        warnings: list[str] = []
        if dispatcher.users_without_work:
            warnings.append(
                f"{dispatcher.users_without_work} users had sent all of their planned requests before the run's end"
            )
        noted = [record.note for record in self._records if record.note is not None]
        if noted:
            warnings.append(f"the usage of {len(noted)} answers is not believed and not used; the first: {noted[0]}")
        stopped_ns = dispatcher.interrupted_ns
        info = msgspec.structs.replace(
            info,
            started_at=started_at.isoformat(),
            wall_s=wall_s,
            health=self._probe.result(dispatcher.peak_in_flight),
            interrupted=stopped_ns is not None,
            duration_s=info.duration_s if stopped_ns is None else min(info.duration_s, max(0, stopped_ns) / 1e9),
        )
        return info, warnings

    def _interrupt(self, dispatcher: Dispatcher) -> None:
        again = dispatcher.interrupted_ns is not None
        dispatcher.interrupt()
        message = (
            "headrace: ends now; what is in flight is cut off"
            if again
            else f"headrace: sends nothing more and waits up to {self._settings.drain_s:g} s for "
            f"{dispatcher.in_flight} requests in flight; a second Ctrl-C ends it now"
        )
        with contextlib.suppress(OSError, ValueError):  # nobody looks any more
            print(message, file=sys.stderr, flush=True)

    async def _watch(self, dispatcher: Dispatcher, origin_ns: int) -> None:
        """Beside the load: the display, the collector, the end of the time in which the generator is measured."""
        progress = self._progress
        shown_s = 0.0
        try:
            while True:
                await asyncio.sleep(0.1)
                now_ns = self._clock() - origin_ns
                due_ns = dispatcher.next_due_ns()
                self._collector.tidy(None if due_ns is None else due_ns - now_ns)
                if now_ns >= self._schedule.duration_s * 1e9 or dispatcher.interrupted_ns is not None:
                    self._probe.stop()
                if progress is not None and now_ns / 1e9 - shown_s >= progress.interval_s:
                    shown_s = now_ns / 1e9
                    snapshot = self._state.snapshot(
                        shown_s,
                        sent=dispatcher.sent,
                        in_flight=dispatcher.in_flight,
                        chunks=self._client.chunks_seen,
                    )
                    try:
                        progress.show(snapshot)
                    except OSError:  # nobody looks any more; the run goes on
                        progress = None
        finally:
            if progress is not None:
                progress.close()

    def _take(self, record: RequestRecord) -> None:
        self._records.append(record)
        self._state.add(record)
        if self._writer is not None:
            self._writer.write(record)

    def _facts(self) -> RunInfo:
        """What is known before the run."""
        schedule, settings = self._schedule, self._settings
        return RunInfo(
            tool_version=headrace.__version__,
            target=parse_target(settings.target).base_url,
            model=settings.model,
            started_at=datetime.fromtimestamp(self._wall_clock(), UTC).isoformat(),
            duration_s=schedule.duration_s,
            wall_s=0.0,
            warmup_s=settings.warmup_s,
            seed=schedule.seed,
            source=schedule.source,
            slos={
                name: {key: value for key, value in msgspec.to_builtins(slo).items() if value is not None}
                for name, slo in schedule.slos.items()
            },
            health=GeneratorHealth(0.0, 0.0, 0),
            machine=machine_facts(type(asyncio.get_running_loop()).__module__.partition(".")[0]),
            concurrency=schedule.concurrency,
            label=settings.label,
            schedule_sha256=schedule_sha256(schedule),
        )


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    if sys.platform == "win32":
        return asyncio.new_event_loop
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop
    return uvloop.new_event_loop


@contextlib.contextmanager
def _interrupts(interrupt: Callable[[], None]) -> Iterator[None]:
    """SIGINT and SIGTERM call ``interrupt`` (signals reach only the main thread's event loop)."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    signals = (signal.SIGINT, signal.SIGTERM)
    before = [signal.getsignal(number) for number in signals]
    for number in signals:
        loop.add_signal_handler(number, interrupt)
    try:
        yield
    finally:
        for number, handler in zip(signals, before, strict=True):
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


@contextlib.contextmanager
def _switch_interval(seconds: float) -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(seconds)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
