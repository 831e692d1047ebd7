"""From a ``Start`` message to an engine that can serve: model, memory plan, contexts, measurement."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from headrace.engines.llama import library as llama_library
from headrace.engines.llama.core import EngineCore
from headrace.engines.llama.measure import measure, one_by_one_limit
from headrace.engines.llama.threads import check_threads
from headrace.engines.llama.vocabulary import Vocabulary
from headrace.engines.llama.weights import Weights
from headrace.kv.budget import BandBudget, fit_bands
from headrace.messages.engine import Ready, Start
from headrace.scheduling.bands import Band
from headrace.scheduling.step import DecodeFirst, StepLimits


@dataclass(frozen=True, slots=True)
class Engine:
    """The core, what to tell the gateway, and how to make the relief core (None: memory does not allow it)."""

    core: EngineCore
    ready: Ready
    make_relief: Callable[[], EngineCore] | None


def build(start: Start) -> Engine:
    """Load the model, fit bands to memory, create the first context, measure. Raises HeadraceError."""
    library = llama_library.load()
    weights = Weights(library, Path(start.model_path), gpu_layers=start.gpu_layers)
    vocabulary = Vocabulary(weights)
    per_token = weights.kv_bytes_per_token()
    budget_bytes = start.memory_budget_bytes or psutil.virtual_memory().available // 2
    trained_tokens = library.api.llama_model_n_ctx_train(weights.handle)
    wanted = [Band(tokens, sequences) for tokens, sequences in start.bands]
    budget = fit_bands(wanted, per_token, budget_bytes, trained_tokens)

    def make_core(budget: BandBudget, threads: int) -> EngineCore:
        limits = StepLimits(start.step_tokens, start.prefill_chunk_tokens)
        return EngineCore(library, weights, vocabulary, budget, DecodeFirst(), limits=limits, threads=threads)

    core = make_core(budget, check_threads(start.threads))
    first = core.context(0)
    measurement = measure(first, weights.vocab_size) if start.self_measure else None
    if start.self_measure:
        core.one_by_one_limit = one_by_one_limit(first, weights.vocab_size)
    relief_budget = _relief_budget(budget, start, core.threads)

    def make_relief() -> EngineCore:
        assert relief_budget is not None
        relief = make_core(relief_budget, 1)
        relief.one_by_one_limit = core.one_by_one_limit
        relief.context(0)
        return relief

    ready = Ready(
        model=weights.info(start.model_name, budget.bands[-1].max_context_tokens),
        bands=core.band_plans(),
        memory_budget_bytes=budget_bytes,
        reductions=list(budget.reductions),
        threads=core.threads,
        measurement=measurement,
        processor=library.system_info(),
        relief_kv_bytes=relief_budget.total_bytes if relief_budget is not None else 0,
    )
    return Engine(core, ready, make_relief if relief_budget is not None else None)


def _relief_budget(budget: BandBudget, start: Start, threads: int) -> BandBudget | None:
    """Memory for the relief core: half the streams of the shortest band, where the budget has that left. None
    without it, with a single thread, or when the operator fixed the number of threads."""
    if start.threads is not None or threads < 2 or start.gpu_layers:
        return None
    first = budget.bands[0]
    band = Band(first.max_context_tokens, max(1, first.max_sequences // 2))
    relief = BandBudget((band,), budget.bytes_per_token, budget.budget_bytes - budget.total_bytes, ())
    return relief if relief.total_bytes <= relief.budget_bytes else None
