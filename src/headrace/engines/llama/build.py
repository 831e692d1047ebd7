"""From a ``Start`` message to an engine that can serve: model, memory plan, contexts, measurement."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from headrace.engines.llama import library as llama_library
from headrace.engines.llama.core import EngineCore
from headrace.engines.llama.memory_formats import check_usable
from headrace.engines.llama.measure import measure, one_by_one_limit
from headrace.engines.llama.prefix import PrefixRules
from headrace.engines.llama.threads import CpuReader, check_threads
from headrace.engines.llama.vocabulary import Vocabulary
from headrace.engines.llama.weights import Weights
from headrace.errors import ConfigError
from headrace.kv.budget import fit_bands
from headrace.kv.precision import KvDtype
from headrace.messages.engine import Ready, Start
from headrace.scheduling.bands import Band
from headrace.scheduling.cost import CostModel, CostPrior
from headrace.scheduling.strategies import policy_for


@dataclass(frozen=True, slots=True)
class Engine:
    """The core, the most threads it may use, and what to tell the gateway."""

    core: EngineCore
    max_threads: int
    ready: Ready


def build(start: Start) -> Engine:
    """Load the model, fit bands to memory, create the first context, measure. Raises HeadraceError."""
    reader = CpuReader(os.getppid(), time.monotonic())
    library = llama_library.load()
    weights = Weights(library, Path(start.model_path), gpu_layers=start.gpu_layers)
    vocabulary = Vocabulary(weights)
    per_token = weights.kv_bytes_per_token()
    budget_bytes = start.memory_budget_bytes or psutil.virtual_memory().available // 2
    trained_tokens = library.api.llama_model_n_ctx_train(weights.handle)
    rest: list[KvDtype] = ["f16"] * len(start.bands)
    dtypes = [*start.kv_dtypes, *rest]
    wanted = [Band(tokens, many, dtype) for (tokens, many), dtype in zip(start.bands, dtypes, strict=False)]
    budget = fit_bands(wanted, per_token, budget_bytes, trained_tokens)

    max_threads = check_threads(start.threads)
    core = EngineCore(
        library,
        weights,
        vocabulary,
        budget,
        policy_for(start.scheduling.strategy),
        knobs=start.scheduling,
        threads=max_threads,
        prefix=PrefixRules(start.prefix_cache, start.prefix_sharing),
    )
    _check_precisions(core)
    first = core.context(0)
    reading = reader.read(time.monotonic())
    other_cores = reading.other_cores if reading is not None else 0.0
    if start.threads is None:
        # Spinning against a busy neighbour would make the start take many times as long.
        core.set_threads(max(1, max_threads - round(other_cores)))
        first.set_threads(core.threads)
    measurement = measure(first, weights.vocab_size) if start.self_measure else None
    if measurement is not None:
        core.costs.model = CostModel(
            CostPrior(
                single_decode_s=1 / measurement.decode_tokens_per_s,
                prefill_tokens_per_s=measurement.prefill_tokens_per_s,
                overhead_s=measurement.step_overhead_s,
            )
        )
    if start.self_measure:
        core.one_by_one_limit = one_by_one_limit(first, weights.vocab_size)
    ready = Ready(
        model=weights.info(start.model_name, core.max_context_tokens),
        bands=core.band_plans(),
        memory_budget_bytes=budget_bytes,
        reductions=list(budget.reductions),
        threads=max_threads,
        measurement=measurement,
        processor=library.system_info(),
        other_cores=other_cores,
    )
    return Engine(core, max_threads, ready)


def _check_precisions(core: EngineCore) -> None:
    """Raises ConfigError when libllama cannot keep this model's KV as a band wants it: at start, not at the first
    request that needs the band. Also finds out, before anybody waits, how KV converts between bands."""
    bands = core.residents.bands
    if {band.kv_dtype for band in bands} == {"f16"}:
        return
    for index, band in enumerate(bands):
        problem = check_usable(core.residents.formats, band.kv_dtype)
        if problem is not None:
            raise ConfigError(
                f"this model's KV cannot be kept at {band.kv_dtype}: {problem}", where=f"engine.bands[{index}].kv_dtype"
            )
