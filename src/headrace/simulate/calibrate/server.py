"""Calibrating an OpenAI-compatible server from outside: prompts of growing length one at a time, then answers at a
growing number of requests at once.

What is seen is a client's: times to the first token and between tokens. Prompts give a line and a square (attention
pairs); what they share, beyond a decode pass, is the way from the client to the engine and back (``edge_s``). How the
server divides its steps is not visible; it is taken as one pass for prompts and decodes together.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from headrace.bench.drive.runner import RunSettings
from headrace.bench.load.workload import TrafficClass, Workload
from headrace.bench.load.workload_file import LoadedWorkload
from headrace.bench.records import RequestRecord
from headrace.bench.session import RequestOptions, ask_scale, prepare, run_load
from headrace.errors import ConfigError
from headrace.scheduling.cost import prefill_pairs
from headrace.scheduling.step import StepTimes
from headrace.simulate.calibrate.fit import Fitted, MeasuredPass, fit

_ANSWER_TOKENS = 48
_NS = 1e-9


@dataclass(frozen=True, slots=True)
class ServerMeasured:
    """``decodes`` as fitted; ``prompt_ms`` and ``pair_s`` of prompts; ``edge_s`` as the module says; ``errors`` of
    single prompts; ``requests`` answered."""

    decodes: Fitted
    prompt_ms: list[tuple[int, float]]
    pair_s: float
    edge_s: float
    errors: list[float]
    requests: int


@dataclass(frozen=True, slots=True)
class ServerPlan:
    """What to send. ``point_s``: how long each combination is measured."""

    prompt_tokens: Sequence[int]
    together: Sequence[int]
    contexts: Sequence[int]
    point_s: float = 3.0


def plan_for(context_tokens: int, most_together: int, point_s: float) -> ServerPlan:
    """Prompts from 16 tokens to half the context, 1, 2, 4... requests at once, over a short and a longer context.
    Raises ConfigError for a context that leaves no room."""
    if context_tokens < 4 * _ANSWER_TOKENS:
        raise ConfigError(f"a context of {context_tokens} tokens is too short to measure in")
    prompts = [size for size in (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192) if size <= context_tokens // 2]
    together = sorted({*[1 << power for power in range(10) if 1 << power < most_together], most_together})
    contexts = sorted({16, min(1024, context_tokens // 2)})
    return ServerPlan(prompts, together, contexts, point_s)


def measure_server(
    settings: RunSettings,
    plan: ServerPlan,
    environment: Mapping[str, str],
    *,
    seed: int,
    progress: Callable[[str], None] = lambda text: None,
) -> ServerMeasured:
    """Send the plan's requests. Raises ConfigError when the server does not answer, or too few requests well."""
    options = RequestOptions(ignore_eos=True, salt=seed)
    scale = ask_scale(settings, options.endpoint, environment)
    answered = 0

    def send(together: int, prompt_tokens: int, output_tokens: int) -> list[RequestRecord]:
        nonlocal answered
        progress(f"{together} at once, prompts of {prompt_tokens} tokens, answers of {output_tokens}")
        every = TrafficClass(input_length=str(prompt_tokens), output_length=str(output_tokens))
        workload = Workload(arrivals=f"closed({together})", classes={"all": every}, duration_s=plan.point_s)
        salted = RequestOptions(ignore_eos=True, salt=seed + answered + 1)  # no prefix cache answers
        load = prepare(LoadedWorkload(workload, "calibration", Path()), salted, scale, model=settings.model, seed=seed)
        sent = run_load(load, settings, environment).records
        records = [record for record in sent if record.outcome == "ok"]
        if not records:
            why = f": {sent[0].outcome}, {sent[0].error or sent[0].status}" if sent else ""
            raise ConfigError(
                f"the server answered none of the requests with prompts of {prompt_tokens} tokens, {together} at "
                f"once{why}"
            )
        answered += len(records)
        return records

    prompts = [one for tokens in plan.prompt_tokens for one in _prompts(send(1, tokens, 2))]
    decodes = [
        one
        for tokens in plan.contexts
        for together in plan.together
        for one in _decodes(send(together, tokens, _ANSWER_TOKENS), together)
    ]
    if len({one.rows for one in prompts}) < 3 or not decodes:
        raise ConfigError("the server streamed too little to measure it; does it stream token by token?")
    fitted = fit(decodes)
    return _with_prompts(fitted, prompts, answered)


def _prompts(records: Sequence[RequestRecord]) -> list[MeasuredPass]:
    found = []
    for record in records:
        if record.sent_ns is None or record.first_ns is None:
            continue
        tokens = (record.prompt_tokens or record.input_tokens) - (record.cached_tokens or 0)
        if tokens > 0:
            took_s = (record.first_ns - record.sent_ns) * _NS
            found.append(MeasuredPass(tokens, prefill_pairs(record.cached_tokens or 0, tokens), took_s))
    return found


def _decodes(records: Sequence[RequestRecord], together: int) -> list[MeasuredPass]:
    """The median gap between tokens, of a request in the middle of its answer."""
    found = []
    for record in records:
        gaps = [later - earlier for earlier, later in zip(record.chunk_ns, record.chunk_ns[1:], strict=False)]
        if len(gaps) >= 4 and record.output_tokens >= len(gaps):
            context = (record.prompt_tokens or record.input_tokens) + record.output_tokens // 2
            found.append(MeasuredPass(together, together * context, statistics.median(gaps) * _NS))
    return found


def _with_prompts(decodes: Fitted, prompts: Sequence[MeasuredPass], answered: int) -> ServerMeasured:
    """The three parts of a time to first token: what all have, what grows with tokens, what grows with pairs."""
    features = np.array([[1 / one.took_s, one.rows / one.took_s, one.reach / one.took_s] for one in prompts])
    kept = [0, 1, 2]
    while True:
        values = np.zeros(3)
        values[kept] = np.linalg.lstsq(features[:, kept], np.ones(len(prompts)), rcond=None)[0]
        below = [place for place in kept if values[place] < 0]
        if not below:
            break
        kept = [place for place in kept if place not in below]
    fixed_s, row_s, pair_s = (float(value) for value in values)
    single_s = min(fixed_s, decodes.of(decodes.curve[0][0], 0))
    sizes = sorted({one.rows for one in prompts})
    errors = [one.took_s / max(1e-9, fixed_s + row_s * one.rows + pair_s * one.reach) - 1 for one in prompts]
    return ServerMeasured(
        decodes,
        [(tokens, 1e3 * (single_s + row_s * tokens)) for tokens in sizes],
        pair_s,
        fixed_s - single_s,
        errors,
        answered,
    )


@dataclass(frozen=True, slots=True)
class InService:
    """What serving adds to an engine that was measured alone: ``pace`` times longer steps (its neighbours take
    processor, cache and memory bandwidth), ``edge_s`` beside every request."""

    pace: float
    edge_s: float


def measure_in_service(
    settings: RunSettings,
    environment: Mapping[str, str],
    times: StepTimes,
    overhead_s: float,
    *,
    seed: int,
    prompt_tokens: int = 64,
    point_s: float = 5.0,
) -> InService:
    """Single requests to an idle server whose engine is known: time between tokens over what its steps take alone,
    and what is left of the time to the first token. Raises ConfigError."""
    options = RequestOptions(ignore_eos=True, salt=seed)
    scale = ask_scale(settings, options.endpoint, environment)
    every = TrafficClass(input_length=str(prompt_tokens), output_length=str(_ANSWER_TOKENS))
    workload = Workload(arrivals="closed(1)", classes={"all": every}, duration_s=point_s)
    load = prepare(LoadedWorkload(workload, "in service", Path()), options, scale, model=settings.model, seed=seed)
    records = [record for record in run_load(load, settings, environment).records if record.outcome == "ok"]
    prompts, decodes = _prompts(records), _decodes(records, 1)
    if not prompts or not decodes:
        raise ConfigError("the server answered none of the requests that measure the way to it")
    pace = statistics.median([one.took_s / (times.call_s(1, one.reach) + overhead_s) for one in decodes])
    edge_s = statistics.median(
        [one.took_s - pace * (times.call_s(one.rows, 0, one.reach) + overhead_s) for one in prompts]
    )
    return InService(pace, max(0.0, edge_s))
