"""Everything between an operator's options and a finished run: what to send, how long its words are for this
target, the run itself.

A run is prepared once (``prepare``: the schedule is built, the target is asked how many of its tokens a word is) and
then run. A sweep prepares the scale once and a schedule for each rate.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from headrace.bench.drive.live import Progress
from headrace.bench.drive.runner import RunSettings, client_for, run
from headrace.bench.load.build_schedule import build_schedule
from headrace.bench.load.workload_file import LoadedWorkload, with_values
from headrace.bench.planned import Schedule
from headrace.bench.record_file import RecordsNotWritten, RunResult
from headrace.bench.requests.bodies import RequestBodies
from headrace.bench.requests.texts import PromptTexts
from headrace.bench.requests.token_scale import Endpoint, TokenScale, measure_token_scale
from headrace.errors import ConfigError


@dataclass(frozen=True)
class RequestOptions:
    """How requests are written. ``salt`` makes the texts of one run differ from those of any other, so that a
    target cannot answer from a prefix cache that an earlier run filled; the same salt sends the same texts."""

    endpoint: Endpoint = "chat"
    stream: bool = True
    ignore_eos: bool = False
    max_tokens_field: str = "max_tokens"
    headers: Mapping[str, str] | None = None
    body: Mapping[str, object] | None = None
    salt: int = 0


@dataclass(frozen=True)
class Load:
    """A schedule and what writes its requests."""

    schedule: Schedule
    bodies: RequestBodies
    scale: TokenScale

    @property
    def warnings(self) -> list[str]:
        """What should be said of the load itself (sentences)."""
        source = self.schedule.source
        found = []
        if left_out := source.get("trace_rows_left_out"):
            found.append(f"{left_out} rows of the trace have no input or no output tokens and were left out")
        if filled := source.get("trace_rows_filled"):
            found.append(f"{filled} rows of the trace have no input or no output tokens and count as 1 token")
        return found


def ask_scale(settings: RunSettings, endpoint: Endpoint, environment: Mapping[str, str]) -> TokenScale:
    """How many of the target's tokens a word is. Raises ConfigError when the target does not answer."""

    async def ask() -> TokenScale:
        async with client_for(settings, environment) as client:
            return await measure_token_scale(client.post_json, model=settings.model, endpoint=endpoint)

    return asyncio.run(ask())


def check_warmup(warmup_s: float, duration_s: float) -> None:
    """Raises ConfigError when the warm-up leaves nothing of a run to measure."""
    if warmup_s >= duration_s:
        raise ConfigError(
            f"a warm-up of {warmup_s:g} s leaves nothing of a run of {duration_s:g} s to measure; "
            "make the run longer or the warm-up shorter",
            where="--warmup",
        )


def prepare(
    workload: LoadedWorkload,
    options: RequestOptions,
    scale: TokenScale,
    *,
    model: str,
    seed: int,
    warmup_s: float = 0.0,
) -> Load:
    """The load of one run. Raises ConfigError for a workload that is not right, or is over before the warm-up is."""
    schedule = build_schedule(workload, seed=seed)
    check_warmup(warmup_s, schedule.duration_s)
    facts = {
        "endpoint": options.endpoint,
        "stream": options.stream,
        "ignore_eos": options.ignore_eos,
        "max_tokens_field": options.max_tokens_field,
        "header_names": sorted(options.headers or {}),  # not their values, which may be secrets
        "body": dict(options.body or {}),
        "salt": options.salt,
        "token_scale": msgspec.to_builtins(scale),
    }
    schedule = msgspec.structs.replace(schedule, source={**schedule.source, "requests": facts})
    bodies = RequestBodies(
        model=model,
        texts=PromptTexts(salt=options.salt),
        scale=scale,
        endpoint=options.endpoint,
        stream=options.stream,
        ignore_eos=options.ignore_eos,
        max_tokens_field=options.max_tokens_field,
        headers=options.headers,
        body=options.body,
    )
    bodies.prepare(schedule)
    return Load(schedule, bodies, scale)


def run_load(
    load: Load,
    settings: RunSettings,
    environment: Mapping[str, str],
    *,
    records_path: Path | None = None,
    progress: Progress | None = None,
) -> RunResult:
    """Run a prepared load; the result's warnings begin with the load's. Raises ConfigError.

    RecordsNotWritten, when the run is over but its file is not whole, has the result.
    """
    try:
        result = run(
            load.schedule, load.bodies, settings, environment=environment, records_path=records_path, progress=progress
        )
    except RecordsNotWritten as error:
        raise RecordsNotWritten(error, _with_warnings(load, error.result)) from error
    return _with_warnings(load, result)


def _with_warnings(load: Load, result: RunResult) -> RunResult:
    return replace(result, warnings=[*load.warnings, *result.warnings])


def at_rate(workload: LoadedWorkload, arrivals: str, rate_rps: float, duration_s: float) -> LoadedWorkload:
    """The workload with its arrivals at ``rate_rps``: ``arrivals`` is a form with the word RATE in it, such as
    ``poisson(RATE)``. Raises ConfigError."""
    return with_values(workload, arrivals=arrivals.replace("RATE", f"{rate_rps:.6g}"), duration_s=duration_s)
