"""Writes docs/reference from the code: configuration keys, command line, metrics, headers.

``python scripts/make_reference.py`` writes; with ``--check`` it writes nothing and exits 1, naming the files,
when what is there is not what would be written.
"""

from __future__ import annotations

import ast
import inspect
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any, Final

import click
import msgspec

from headrace.admission.decide import AdmissionDecision, LaneLoad
from headrace.admission.front import Verdict
from headrace.admission.lengths import OutputLength
from headrace.admission.predict import Prediction
from headrace.bench.load.arrivals import ARRIVAL_FORMS
from headrace.bench.load.lengths import LENGTH_FORMS
from headrace.bench.load.workload import IllegalTraffic, PrefixPool, Session, TrafficClass, Workload
from headrace.bench.planned import SloTarget
from headrace.bench.records import RequestRecord
from headrace.cli.main import main as command_line
from headrace.config.environment import variables
from headrace.config.fields import notes
from headrace.config.groups import (
    DnsConfig,
    FleetConfig,
    GroupConfig,
    ProbeConfig,
    ReplicaConfig,
    RetryConfig,
    TimeoutConfig,
)
from headrace.config.problems import dotted
from headrace.config.schema import (
    BandConfig,
    Config,
    ControlConfig,
    EngineConfig,
    KvMemoryConfig,
    ModelConfig,
    SchedulingConfig,
    ServerConfig,
    Tenant,
    TlsConfig,
    TunerConfig,
)
from headrace.control.breaker import BreakerConfig
from headrace.control.concurrency import LimitBounds
from headrace.engines.fleet.fleet import Fleet
from headrace.engines.fleet.group import Group
from headrace.engines.fleet.replica import Replica, ReplicaSpec
from headrace.engines.remote.connection import Address
from headrace.engines.remote.engine import RemoteEngine, RemoteSettings
from headrace.engines.remote.exposition import EngineFigures
from headrace.lanes.lane import SLO, Fallback, Lane, LaneMatch
from headrace.messages.engine import EngineLoad
from headrace.routing.decide import RouteSettings
from headrace.routing.health import Health, HealthSettings
from headrace.routing.prefix_index import PrefixIndex
from headrace.telemetry.fleet_metrics import FleetCollector
from headrace.telemetry.metrics import Metrics
from headrace.telemetry.moment import Sources
from headrace.telemetry.timing import RequestTiming

ROOT: Final = Path(__file__).resolve().parent.parent
FOLDER: Final = ROOT / "docs" / "reference"
_MADE: Final = "<!-- Made by scripts/make_reference.py from the code; edit that, not this. -->\n"

_SECTIONS: Final[tuple[tuple[str, type[msgspec.Struct]], ...]] = (
    ("", Config),
    ("model", ModelConfig),
    ("server", ServerConfig),
    ("server.tls", TlsConfig),
    ("engine", EngineConfig),
    ("engine.bands[]", BandConfig),
    ("engine.kv_memory", KvMemoryConfig),
    ("engine.scheduling", SchedulingConfig),
    ("control", ControlConfig),
    ("control.tuner", TunerConfig),
    ("fleet", FleetConfig),
    ("groups.NAME", GroupConfig),
    ("groups.NAME.replicas[]", ReplicaConfig),
    ("groups.NAME.dns[]", DnsConfig),
    ("groups.NAME.timeouts", TimeoutConfig),
    ("groups.NAME.health", ProbeConfig),
    ("groups.NAME.retry", RetryConfig),
    ("lanes.NAME", Lane),
    ("lanes.NAME.slo", SLO),
    ("lanes.NAME.fallback", Fallback),
    ("lanes.NAME.breaker", BreakerConfig),
    ("lanes.NAME.match", LaneMatch),
    ("tenants.NAME", Tenant),
)

_REQUEST_HEADERS: Final = {
    "authorization": "`Bearer KEY`; needed once any tenant has an API key, and below /admin once there are admin keys.",
    "x-api-key": "On `/v1/messages`: the key, where `authorization` is absent.",
    "x-forwarded-for": "Says that a proxy sent it on: /admin without admin keys refuses it.",
    "x-forwarded-host": "As x-forwarded-for.",
    "x-forwarded-proto": "As x-forwarded-for.",
    "x-headrace-lane": "The lane. Wins over every other rule; an unknown name is 400, one not allowed 403.",
    "x-real-ip": "As x-forwarded-for.",
    "x-request-id": "Comes back on the response and stands in the log; made up when absent.",
    "x-session-id": "The conversation that a request belongs to; it stays on one replica while that is cheaper.",
    "x-slo-tpot-ms": "This request's own TPOT target in milliseconds; tightens the lane's, never loosens it.",
    "x-slo-ttft-ms": "This request's own TTFT target in milliseconds; tightens the lane's, never loosens it.",
    "x-tenant-id": "The tenant, while no tenant has keys and `server.trust_tenant_header` is on.",
}
_RESPONSE_HEADERS: Final = {
    "request-id": "On `/v1/messages`: the same as `x-request-id`, where clients of that API look for it.",
    "retry-after": "With 429 and 503: seconds until it is worth trying again; for 429 the predicted time.",
    "www-authenticate": "With 401: `Bearer`.",
    "x-accel-buffering": "`no` on streams: asks proxies not to hold them back.",
    "x-headrace-degraded": "What the answer was limited to because the full one would have come too late, or who gave"
    " it in degraded mode: `group=NAME` (the fallback) or `slow`.",
    "x-headrace-estimated": "On `/v1/messages/count_tokens`: `input_tokens` where the count is estimated.",
    "x-headrace-ignored": "Request fields that were ignored (`server.unsupported_params: ignore`).",
    "x-headrace-lane": "The lane that the request ran in.",
    "x-headrace-lane-rule": "The rule that chose the lane.",
    "x-headrace-predicted-ttft-ms": "The time to the first token as predicted at admission, in milliseconds.",
    "x-headrace-shed-reason": "With 429: `queue_full`, `lane_queue_full`, `predicted_late`, `over_share`, `kv_memory`;"
    " over a tenant's own limit `tenant_requests`, `tenant_tokens`, `tenant_concurrency`.",
    "x-ratelimit-limit-requests": "The tenant's requests per minute, where it has such a limit.",
    "x-ratelimit-limit-tokens": "The tenant's tokens per minute, where it has such a limit.",
    "x-ratelimit-remaining-requests": "Requests that the tenant could send at once now.",
    "x-ratelimit-remaining-tokens": "Tokens that the tenant could use at once now.",
    "x-headrace-kv-level": "With 429 for want of KV memory: its level, `refuse` or `move`.",
    "x-request-id": "The request's id, on every response.",
}
_HEADER: Final = re.compile(r"x-[a-z-]+|authorization|request-id|retry-after|www-authenticate")


def pages() -> dict[str, str]:
    """File name -> content of every page."""
    makers: dict[str, Callable[[], str]] = {
        "configuration.md": configuration,
        "cli.md": cli,
        "metrics.md": metrics,
        "headers.md": headers,
        "bench.md": bench,
    }
    return {name: make() for name, make in makers.items()}


def configuration() -> str:
    """Every key: meaning, default, range, environment variable."""
    env_names = {dotted(path): name for name, path in variables().items()}
    lines = [
        _MADE,
        "# Configuration keys\n",
        "Order: command line over environment over file over defaults. An unknown key is an error.",
        "[Lanes](../lanes.md) and [operating](../operate.md) say how to use them; `headrace init` writes a",
        "file with all of them.\n",
    ]
    for section, struct in _SECTIONS:
        lines += [f"## {f'`{section}`' if section else 'Top level'}\n", _docstring(struct), ""]
        lines += ["| key | default | range | environment | meaning |", "|---|---|---|---|---|"]
        for field in msgspec.structs.fields(struct):
            note = notes()[struct][field.name]
            key = f"{section}.{field.name}" if section else field.name
            cells = [
                f"`{field.name}`",
                _default(field),
                note.range_text,
                f"`{env_names[key]}`" if key in env_names else "",
                note.text,
            ]
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        lines.append("")
    lines += [
        "## Default lanes\n",
        "| lane | priority | targets (s) | recognised by | for |",
        "|---|---|---|---|---|",
    ]
    for name, lane in Config().lanes.items():
        targets = _pairs(msgspec.to_builtins(lane.slo))
        matched = _pairs(msgspec.to_builtins(lane.match))
        lines.append(f"| `{name}` | {lane.priority} | {targets} | {matched} | {lane.description} |")
    return "\n".join(lines) + "\n"


def cli() -> str:
    """The help of every command."""
    lines = [_MADE, "# Command line\n"]
    for path, command in _commands("headrace", command_line):
        lines += [f"## {path}\n", "```text", command, "```\n"]
    return "\n".join(lines)


def metrics() -> str:
    """Every metric that /metrics exposes."""
    lines = [
        _MADE,
        "# Metrics\n",
        "`GET /metrics`, Prometheus text format, base units. Besides these there are the usual `process_*`",
        "figures of the gateway on Linux. `lane` is a configured lane, or `none` for a request that ended",
        "before it had one; `outcome` is `ok`, or how the request failed.\n",
        "| metric | type | labels | meaning |",
        "|---|---|---|---|",
    ]
    for family in sorted(_observed().collect(), key=lambda family: family.name):
        if family.name.startswith("process_"):
            continue
        labels = sorted({label for sample in family.samples for label in sample.labels} - {"le"})
        name = family.name + {"counter": "_total", "info": "_info"}.get(family.type, "")
        shown = ", ".join(f"`{label}`" for label in labels)
        lines.append(f"| `{name}` | {family.type} | {shown} | {family.documentation} |")
    return "\n".join(lines) + "\n"


def bench() -> str:
    """The forms of arrivals and lengths, the workload file, the records."""
    lines = [_MADE, "# Arrivals, lengths, workloads, records\n"]
    lines += ["Numbers may end in `k` (1,000) or `ki` (1,024), durations in `ms`, `s`, `m` or `h`.\n"]
    for title, forms in (("Arrivals", ARRIVAL_FORMS), ("Lengths", LENGTH_FORMS)):
        lines += [f"## {title}\n", "| form | meaning | example |", "|---|---|---|"]
        lines += [f"| `{form.signature}` | {form.summary} | `{form.example}` |" for form in forms]
        lines.append("")
    lines.append("## A workload file\n")
    for struct in (Workload, TrafficClass, PrefixPool, Session, IllegalTraffic, SloTarget):
        lines += [f"### {struct.__name__}\n", f"{_docstring(struct)}\n", "| key | default |", "|---|---|"]
        lines += [f"| `{field.name}` | {_default(field)} |" for field in msgspec.structs.fields(struct)]
        lines.append("")
    lines += ["## Records\n", f"{_docstring(RequestRecord)}\n"]
    names = ", ".join(f"`{field.name}`" for field in msgspec.structs.fields(RequestRecord))
    lines += [f"Fields: {names}.\n"]
    return "\n".join(lines)


def headers() -> str:
    """Every header that headrace reads or sends besides plain HTTP's. Raises ValueError when the code names
    one that has no description here, or the other way round."""
    described = set(_REQUEST_HEADERS) | set(_RESPONSE_HEADERS)
    named = set(_named_headers())
    if described != named:
        raise ValueError(f"describe in scripts/make_reference.py, or remove there: {sorted(described ^ named)}")
    lines = [_MADE, "# Headers\n"]
    for title, table in (("Requests", _REQUEST_HEADERS), ("Responses", _RESPONSE_HEADERS)):
        lines += [f"## {title}\n", "| header | meaning |", "|---|---|"]
        lines += [f"| `{name}` | {text} |" for name, text in table.items()]
        lines.append("")
    return "\n".join(lines)


def _docstring(struct: type[msgspec.Struct]) -> str:
    return inspect.cleandoc(struct.__doc__ or "").replace("``", "`").replace("None", "null")


def _default(field: msgspec.structs.FieldInfo) -> str:
    if field.default is not msgspec.NODEFAULT:
        value = field.default
    elif field.default_factory is not msgspec.NODEFAULT:
        value = field.default_factory()
    else:
        return "(needed)"
    plain = msgspec.to_builtins(value)
    if isinstance(value, msgspec.Struct) or (isinstance(plain, dict) and plain):
        return "see below"
    if isinstance(plain, list | tuple) and plain:
        return f"{len(plain)} bands: " + "; ".join(_pairs(item) for item in plain)
    return f"`{json.dumps(plain)}`"


def _pairs(values: dict[str, Any]) -> str:
    return ", ".join(f"{key} {json.dumps(value)}" for key, value in values.items())


def _commands(path: str, command: click.Command) -> Iterator[tuple[str, str]]:
    yield path, _help(path)
    if isinstance(command, click.Group):
        context = click.Context(command, info_name=path.split()[-1])
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            assert inner is not None
            yield from _commands(f"{path} {name}", inner)


def _help(path: str) -> str:
    """What ``--help`` prints. In a process of its own: click keeps parts of a command's help from whoever asked
    first, so within this one the text would depend on what ran before."""
    program, *words = path.split()
    code = f"import sys; sys.argv[0] = {program!r}; from headrace.cli.main import main; main()"
    made = subprocess.run(
        [sys.executable, "-c", code, *words, "--help"],
        capture_output=True,
        text=True,
        check=True,
        # A fixed width: the text must not depend on the terminal it is made in.
        env={**os.environ, "COLUMNS": "90"},
    )
    return "\n".join(line.rstrip() for line in made.stdout.splitlines())


def _observed() -> Any:
    """A registry in which everything was observed once, so that every label shows."""
    found = Metrics("VERSION")
    load = EngineLoad(1, 1, 1, 2, 1, 2, 1, 0.1, 1, 1, 1, strategy="hybrid")
    found.watch(
        Sources(
            lanes=lambda: {"LANE": LaneLoad()},
            load=lambda: load,
            ready=lambda: None,
            lengths=lambda: {"LANE": OutputLength(1, 1)},
            ttft_errors=lambda: {"LANE": 0.0},
        )
    )
    found.admission_decided(
        "LANE", Verdict(AdmissionDecision("shed", "queue_full", 1.0), [], 0.0, Prediction(1.0, 1.0))
    )
    timing = RequestTiming(arrived_s=0.0, queue_wait_s=0.1)
    timing.output(0, 1, 1.0)
    timing.output(0, 1, 2.0)
    found.request_ended("LANE", "ok", prompt_tokens=1, timing=timing, ended_s=2.0, slo=SLO())
    found.request_ended("LANE", "shed", prompt_tokens=1, timing=None, ended_s=2.0, slo=SLO())
    found.tenants.entered("TENANT")
    found.tenants.refused("TENANT", "LIMIT")
    found.tenants.ended("TENANT", "ok", prompt_tokens=1, output_tokens=1)
    found.tuner_moved("KNOB", "OUTCOME")
    found.tuner_earned(1.0)
    found.step_ended(load)
    found.knobs_changed(["KNOB"])
    found.watch_fleet(_observed_fleet())
    return found.registry


def _observed_fleet() -> FleetCollector:
    """A fleet's metrics with one replica, of which everything is known."""
    fleet = Fleet(Config())
    group = Group(
        "GROUP",
        GroupConfig(),
        clock=lambda: 0.0,
        randomness=Random(0),
        settings=RouteSettings(),
        index=PrefixIndex(),
        session_memory_s=0.0,
    )
    engine = RemoteEngine(RemoteSettings(Address("HOST", 1)))
    health, bounds = Health(HealthSettings()), LimitBounds(1, 1)
    replica = Replica(ReplicaSpec("REPLICA"), engine, health, bounds, clock=lambda: 0.0, stale_s=1.0)
    replica.scraped(EngineFigures(0, 0, 0.0))
    replica.breaker("LANE", BreakerConfig())
    group.replicas["REPLICA"] = replica
    fleet.groups["GROUP"] = group
    fleet.counts.attempts["GROUP", "OUTCOME"] = fleet.counts.again["GROUP", "HOW"] = 1
    fleet.counts.routes["GROUP", "REASON"] = fleet.counts.degraded["LANE"] = 1
    fleet.counts.transitions["GROUP", "LANE", "STATE"] = 1
    return FleetCollector(fleet, lambda: iter(()), lambda: 0.0)


def _named_headers() -> Iterator[str]:
    """Header names that stand as whole texts in the HTTP edge's code."""
    for file in sorted((ROOT / "src" / "headrace" / "api").glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str | bytes):
                text = node.value.decode("latin-1") if isinstance(node.value, bytes) else node.value
                if _HEADER.fullmatch(text):
                    yield text


def main(arguments: list[str]) -> int:
    """Write the pages, or check them; the exit code."""
    stale = []
    for name, text in pages().items():
        file = FOLDER / name
        if file.is_file() and file.read_text(encoding="utf-8") == text:
            continue
        stale.append(name)
        if "--check" not in arguments:
            FOLDER.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
    verb = "stale" if "--check" in arguments else "wrote"
    for name in stale:
        print(f"{verb}: docs/reference/{name}")
    return 1 if stale and "--check" in arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
