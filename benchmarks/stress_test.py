"""The mix of the workload ``mixed-enterprise`` driven by Locust, for those whose tools and dashboards are Locust's:

    locust -f stress_test.py --users 100 --spawn-rate 10 --host http://127.0.0.1:8000 --csv=report -t 1h

Works as typed: it begins at once, prints its statistics as it goes, and ends when the time is over. Needs
``pip install 'headrace[bench,locust]'``.

Each user has a row of requests that ``headrace.bench`` draws for it alone (classes, lanes, headers, lengths,
conversations with their history, illegal requests on top) and sends them one at a time: the next one when the one
before has ended and the think time has passed. So this is a closed loop, and **a closed loop does not measure
latency under a given rate**: while a server is slow its users wait and send less, and its worst moments are asked
about the least (coordinated omission). For that use ``headrace bench run --workload mixed-enterprise``, whose
schedule does not depend on the server. A Retry-After is not waited for: a shed is a failure and the user goes on
with its row. Only a server that takes no connection is left alone for a second.

The rows of the statistics, in milliseconds:

- type E2E, a row per class: from sending to the last token; the response length is output tokens. Failures (sheds,
  errors, cut streams, empty answers, timeouts) have no time: a quick refusal must not improve a percentile.
- type E2E, ``malformed``: the illegal requests; a success is one that was refused with a right status.
- type TTFT, ``TTFT <class>``: from sending to the first token, of the answers that were whole. "Aggregated" is
  without these rows, so it counts every request once. Listeners of Locust's ``request`` event find the TTFT in its
  ``context``.

What is under way when the time is over may end within ``--stop-timeout`` (60 s unless given). What has not ended
then is a failure if it has broken a bound of its class's SLO already, else it is not counted, as in ``headrace
bench run``. Locust's exit status is 1 when there was any failure (``--exit-code-on-error`` changes that).

Locust's web page is off, as with ``--headless`` (which may be given too): it would listen on every interface of
this machine, wait for a click to begin, and stay when the time is over. ``--headful`` shows it.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import os
import re
import secrets
import sys
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import gevent
import msgspec
from locust import User, events, task
from locust.env import Environment
from locust.exception import CatchResponseError, StopTest
from locust.runners import MasterRunner
from locust.stats import CSV_STATS_INTERVAL_SEC
from numpy.random import SeedSequence

from headrace.bench.drive.gevent_client import Connection, Server
from headrace.bench.drive.reply import Reply
from headrace.bench.drive.served_model import served_model
from headrace.bench.load.arrivals import ClosedLoop, parse_arrivals
from headrace.bench.load.build_schedule import build_schedule
from headrace.bench.load.closed_plan import LEAST_ROUND_S
from headrace.bench.load.workload_file import LoadedWorkload, load_workload, with_values
from headrace.bench.planned import PlannedRequest, SloTarget
from headrace.bench.records import RequestRecord, new_record
from headrace.bench.requests.bodies import RequestBodies, Turn, Wire
from headrace.bench.requests.texts import PromptTexts
from headrace.bench.requests.token_scale import TokenScale, measure_token_scale
from headrace.bench.results.judge import judge
from headrace.bench.results.latencies import latencies
from headrace.errors import ConfigError

DRAIN = "60"
"""The default of ``--stop-timeout``."""
UNKNOWN_CONTEXT_TOKENS = 8192
"""What lengths are made to fit when neither the operator nor the server says what the context is."""

_ROW_REQUESTS = 500  # of one user, drawn together: 2 ms, 150 kB
_NOBODY_THERE_S = 1.0
_MAX_FAILURE_CHARS = 160
_VARYING = re.compile(r"[0-9A-Fa-f]*\d[0-9A-Fa-f]*")

logger = logging.getLogger("stress_test")


def add_options(parser: argparse.ArgumentParser, **_: Any) -> None:
    """Adds to Locust's command line what this file needs, and makes its defaults those of a run that ends."""
    parser.set_defaults(headless=True, stop_timeout=DRAIN)
    group = parser.add_argument_group("headrace options")
    group.add_argument(
        "--workload", default="mixed-enterprise", help="Workload file, or the name of one that comes with headrace."
    )
    group.add_argument(
        "--max-context",
        type=int,
        metavar="TOKENS",
        help="The model's context: long lengths are scaled to it [what the server says].",
    )
    group.add_argument("--model", metavar="NAME", help="Model name that requests carry [the server's first].")
    group.add_argument("--seed", type=natural, default=0, help="Of the whole load [0].")
    group.add_argument(
        "--salt",
        type=natural,
        default=secrets.randbits(31),
        help="Of the prompts' texts [random, so that no cache of an earlier run answers].",
    )
    group.add_argument(
        "--stop-at-eos", action="store_true", help="Let the model end its answers, instead of the drawn length."
    )


def natural(text: str) -> int:
    """A whole number from 0 on. Raises ArgumentTypeError."""
    if not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 on")
    return int(text)


def measured_scale(server: Server, model: str) -> TokenScale:
    """How many of the server's tokens a word is. Raises ConfigError when there is no answer."""

    async def post(path: str, fields: dict[str, object]) -> tuple[int, object]:
        status, body = server.ask("POST", path, fields)
        try:
            return status, msgspec.json.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return status, None

    try:
        # ``post`` never waits for an event loop (gevent switches below it), so one step is all of it.
        measure_token_scale(post, model=model).send(None)
    except StopIteration as end:
        scale: TokenScale = end.value
        return scale
    raise AssertionError("measuring waited for something else than post")


@dataclass(frozen=True)
class Load:
    """What all users of this process share. ``worker``: the number of this process in a distributed run."""

    server: Server
    workload: LoadedWorkload
    bodies: RequestBodies
    seed: int
    worker: int
    user_numbers: Iterator[int]

    def row(self, user: int, part: int) -> list[PlannedRequest]:
        """The ``part``-th row of requests of a user."""
        seed = int(SeedSequence((self.seed, self.worker, user, part)).generate_state(1, "uint64")[0])
        schedule = build_schedule(self.workload, seed=seed)
        self.bodies.prepare(schedule)
        # Every schedule counts its conversations from one; on the server they are different ones.
        whose = f"{self.worker}-{user}-{part}"
        return [
            msgspec.structs.replace(request, session=request.session and f"{whose}-{request.session}")
            for request in schedule.requests
        ]

    def slo(self, class_name: str) -> SloTarget | None:
        traffic = self.workload.workload.classes.get(class_name)
        return None if traffic is None else traffic.slo


def prepare(environment: Environment) -> Load:
    """Read the workload, ask the server what it is. Raises ConfigError."""
    options = environment.parsed_options
    assert options is not None, "Locust's command line makes them"
    if not environment.host:
        raise ConfigError("say which server to load, e.g. http://127.0.0.1:8000", where="--host")
    loaded = load_workload(options.workload)
    server = Server.at(environment.host, os.environ)
    model, served_tokens = served_model(lambda path: server.ask("GET", path), options.model)
    context_tokens = options.max_context or loaded.workload.scale_to_context_tokens or served_tokens
    if context_tokens is None:
        context_tokens = UNKNOWN_CONTEXT_TOKENS
        logger.warning(f"the server does not say its context: taken to be {context_tokens} tokens (--max-context)")
    scale = measured_scale(server, model)
    logger.info(f"workload {loaded.name}, model {model}, context {context_tokens} tokens, salt {options.salt}")
    logger.info(f"a word is {scale.tokens_per_word:.3g} tokens ({scale.source})")
    texts = PromptTexts(salt=options.salt)
    return Load(
        server=server,
        workload=_for_one_user(loaded, context_tokens),
        bodies=RequestBodies(model=model, texts=texts, scale=scale, ignore_eos=not options.stop_at_eos),
        seed=options.seed,
        worker=getattr(environment.runner, "worker_index", 0),
        user_numbers=itertools.count(),
    )


def _for_one_user(loaded: LoadedWorkload, context_tokens: int) -> LoadedWorkload:
    arrivals = parse_arrivals(loaded.workload.arrivals, folder=loaded.folder)
    think_s = arrivals.think_s if isinstance(arrivals, ClosedLoop) else 0.0
    return with_values(
        loaded,
        arrivals=f"closed(1, think={think_s:g})",
        duration_s=_ROW_REQUESTS * (think_s + LEAST_ROUND_S),
        scale_to_context_tokens=context_tokens,
    )


def failure(record: RequestRecord, wire: Wire) -> str | None:
    """What an ended request is reported as a failure for; None: it is none. Equal failures have equal texts: numbers
    and identifiers in the server's words become ``#``."""
    if record.malformed is not None:
        if record.status in wire.right_statuses:
            return None
        came = record.outcome if record.status is None else f"HTTP status {record.status}"
        return f"an illegal request ({record.malformed}) was not refused as it should be: {came}"
    if record.outcome == "ok":
        return None if record.chunk_ns else "empty: an answer without content"
    status = "" if record.status is None or record.status == 200 else f" (HTTP status {record.status})"
    return f"{record.outcome}{status}: {_VARYING.sub('#', record.error or '')}"[:_MAX_FAILURE_CHARS]


class MixedUser(User):
    """One person or program of the workload."""

    load: ClassVar[Load | None] = None
    """Set when the test starts: Locust makes users itself and gives them the environment alone."""

    def on_start(self) -> None:
        assert self.load is not None, "set before Locust makes users"
        self._load = self.load
        self._number = next(self._load.user_numbers)
        self._connection = Connection(self._load.server)
        self._row: deque[PlannedRequest] = deque()
        self._rows = 0
        self._past: dict[str, tuple[Turn, ...]] = {}  # by class: a user has one conversation of each open
        self._pause_s = 0.0
        self._draw()

    def on_stop(self) -> None:
        self._connection.close()

    @task
    def send_next(self) -> None:
        """One request, from its body to the statistics."""
        request = self._row.popleft()
        if not self._row:
            self._draw()
        past = () if request.after is None else self._past[request.class_name]
        wire = self._load.bodies.build(request, past)
        reply = Reply(keep_text=request.session is not None)
        now_ns = time.monotonic_ns()
        record = new_record(request, now_ns, now_ns)
        try:
            self._connection.send(record, wire, reply)
        finally:
            self._report(record, wire)
        self._pause_s = _NOBODY_THERE_S if record.outcome == "refused" else 0.0
        if request.session is not None:
            text = reply.text if record.outcome == "ok" else ""
            self._past[request.class_name] = (*past, Turn(request, wire.question, text))

    def wait_time(self) -> float:
        """Seconds until the next request."""
        return max(self._row[0].think_ns / 1e9, self._pause_s)

    def _draw(self) -> None:
        self._row.extend(self._load.row(self._number, self._rows))
        self._rows += 1

    def _report(self, record: RequestRecord, wire: Wire) -> None:
        name, times = record.class_name, latencies(record)
        if record.outcome == "cancelled" and not self._overdue(record):
            return
        failed = failure(record, wire)
        self.environment.events.request.fire(
            request_type="E2E",
            name=name,
            response_time=None if failed or times.e2e_s is None else times.e2e_s * 1e3,
            response_length=record.output_tokens,
            exception=None if failed is None else CatchResponseError(failed),
            context={
                "outcome": record.outcome,
                "lane": record.lane,
                "ttft_ms": None if times.ttft_s is None else times.ttft_s * 1e3,
                "malformed": record.malformed,
            },
            response=None,
            start_time=time.time() - (time.monotonic_ns() - record.ready_ns) / 1e9,
            url=wire.path,
        )
        if failed is None and times.ttft_s is not None and record.malformed is None:
            # Not as a second event of the request: Locust would count it in "Aggregated", where it would double the
            # rate, halve the share of failures and mix first tokens with last ones.
            self.environment.stats.get(f"TTFT {name}", "TTFT").log(times.ttft_s * 1e3, 0)

    def _overdue(self, record: RequestRecord) -> bool:
        """Of a request that the run's end cut off: whether it had broken its SLO by then."""
        if record.malformed is not None:
            return False
        return judge(record, self._load.slo(record.class_name)).verdict == "miss"


def begin(environment: Environment, **_: Any) -> None:
    """Before the first user; on a master, whose workers have the users, nothing. Ends Locust with status 1 when there
    is nothing to load; with its web page, where another server can be named, it ends only the test."""
    if isinstance(environment.runner, MasterRunner):
        return
    try:
        MixedUser.load = prepare(environment)
    except ConfigError as error:
        if environment.parsed_options is not None and environment.parsed_options.headless:
            sys.exit(f"error: {error}")
        raise StopTest(str(error)) from None


def let_files_be_written(environment: Environment, **_: Any) -> None:
    """Locust writes its CSV files every second, and not once more at the end: the last answers would be missing."""
    options = environment.parsed_options
    if options is not None and options.csv_prefix:
        gevent.sleep(1.2 * CSV_STATS_INTERVAL_SEC)


events.init_command_line_parser.add_listener(add_options)  # type: ignore[no-untyped-call]
events.test_start.add_listener(begin)  # type: ignore[no-untyped-call]
events.test_stop.add_listener(let_files_be_written)  # type: ignore[no-untyped-call]
