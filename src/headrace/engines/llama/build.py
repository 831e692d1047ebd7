"""From a ``Start`` message to an engine that can serve: model, memory plan, contexts, measurement."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil

from headrace.engines.llama import library as llama_library
from headrace.engines.llama.core import EngineCore
from headrace.engines.llama.library import Library
from headrace.engines.llama.measure import measure, one_by_one_limit
from headrace.engines.llama.memory_formats import check_usable
from headrace.engines.llama.parking import Parking
from headrace.engines.llama.prefix import PrefixRules
from headrace.engines.llama.spill import SpillStore
from headrace.engines.llama.threads import CpuReader, check_threads
from headrace.engines.llama.tiering import Tiering
from headrace.engines.llama.vocabulary import Vocabulary
from headrace.engines.llama.weights import Weights
from headrace.errors import ConfigError, ModelError
from headrace.kv.band_layout import BandLayout, layout_problem
from headrace.kv.budget import MIN_CONTEXT_TOKENS, default_store_bytes, fit_bands
from headrace.kv.layout import CacheType, KvLayout
from headrace.kv.libllama_memory import ContextShape, stream_bytes
from headrace.kv.precision import KvDtype
from headrace.kv.tiers.address import weights_identity
from headrace.kv.tiers.disk import BlockFolder
from headrace.kv.tiers.kv_tiers import KvTiers, TierSettings
from headrace.kv.tiers.worker import READING_NICENESS, ThreadWorker
from headrace.kv.token_blocks import KV_BLOCK_TOKENS
from headrace.messages.engine import Ready, Start
from headrace.scheduling.bands import Band
from headrace.scheduling.cost import CostModel, CostPrior
from headrace.scheduling.strategies import policy_for

MOST_QUEUED_BYTES = 256 * 2**20
"""What may wait in memory to be stored, besides one state of any size, or an eighth of what the RAM store holds; and
what may be read from disk for sequences that wait."""


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
    layout = weights.kv_layout()
    free_bytes = psutil.virtual_memory().available
    budget_bytes = start.memory_budget_bytes or free_bytes // 2
    trained_tokens = library.api.llama_model_n_ctx_train(weights.handle)
    rest: list[KvDtype] = ["f16"] * len(start.bands)
    dtypes = [*start.kv_dtypes, *rest]
    plain: list[BandLayout] = ["contiguous"] * len(start.bands)
    layouts = [*start.layouts, *plain]
    wanted = [
        Band(tokens, many, dtype, how) for (tokens, many), dtype, how in zip(start.bands, dtypes, layouts, strict=False)
    ]
    _check_layouts(wanted, layout)
    budget = fit_bands(
        wanted,
        weights.kv_bytes_per_token(),
        budget_bytes,
        trained_tokens,
        stream_bytes=partial(_stream_bytes, layout),
    )

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
        kv_budget_tokens=_kv_budget_tokens(start.kv_budget_bytes, budget.most_token_bytes),
        parking=_parking(start),
        tiering=_tiering(start, library, free_bytes, budget.total_bytes),
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
        memory_notes=_doubts(weights),
    )
    return Engine(core, max_threads, ready)


def _stream_bytes(layout: KvLayout, tokens: int, dtype: KvDtype) -> int:
    """Bytes of one stream at a precision. Raises ConfigError where the model's heads are no whole blocks."""
    try:
        return stream_bytes(layout, tokens, ContextShape(CacheType.named(dtype)))
    except ConfigError as error:
        raise ConfigError(f"this model's KV cannot be kept at {dtype}: {error}", where="engine.bands") from error


def _check_layouts(bands: Sequence[Band], model: KvLayout) -> None:
    """Raises ConfigError when this model's memory cannot be laid out as a band wants it."""
    for index, band in enumerate(bands):
        problem = layout_problem(band.layout, model)
        if problem is not None:
            raise ConfigError(
                f"this model's KV cannot be {band.layout}: {problem}", where=f"engine.bands[{index}].layout"
            )


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


def _doubts(weights: Weights) -> list[str]:
    """What about the memory plan is not exact."""
    if not weights.layout_doubt:
        return []
    return [f"KV memory is planned as if every layer kept every token: {weights.layout_doubt}"]


def _kv_budget_tokens(budget_bytes: int | None, bytes_per_token: int) -> int | None:
    """The budget in whole blocks. Raises ConfigError when it holds none."""
    if budget_bytes is None:
        return None
    tokens = budget_bytes // bytes_per_token // KV_BLOCK_TOKENS * KV_BLOCK_TOKENS
    if tokens < MIN_CONTEXT_TOKENS:
        raise ConfigError(
            f"{budget_bytes} bytes hold {tokens} tokens of KV ({bytes_per_token} bytes each); at least "
            f"{MIN_CONTEXT_TOKENS} are needed",
            where="engine.kv_memory.budget_bytes",
        )
    return tokens


def _tiering(start: Start, library: Library, free_bytes: int, bands_bytes: int) -> Tiering | None:
    """The stores of KV blocks, on a machine with ``free_bytes`` of memory, of which bands may take ``bands_bytes``.
    Raises ConfigError when their folder cannot be used, ModelError when the model file cannot be read."""
    plan = start.kv_tiers
    if plan is None or not start.prefix_cache or plan.ram_bytes == 0:
        return None
    ram_bytes = plan.ram_bytes
    if ram_bytes is None:
        ram_bytes = default_store_bytes(free_bytes, bands_bytes)
    if not ram_bytes:
        return None
    path = Path(start.model_path)
    try:
        weights = weights_identity(path)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    folder = None if plan.disk_path is None else BlockFolder(Path(plan.disk_path).expanduser())
    most_bytes = max(MOST_QUEUED_BYTES, ram_bytes // 8)
    settings = TierSettings(ram_bytes, plan.disk_bytes, plan.compress_threshold, plan.codec, fetched_bytes=most_bytes)
    worker = ThreadWorker(most_bytes)
    reader = None if folder is None else ThreadWorker(most_bytes, READING_NICENESS)
    return Tiering(KvTiers(settings, worker, folder, reader=reader), weights, library.state_build())


def _parking(start: Start) -> Parking:
    """Where KV without a stream goes. Raises ConfigError when the folder for its files cannot be written."""
    limit_bytes = start.parked_bytes
    if limit_bytes is None:
        limit_bytes = psutil.virtual_memory().available // 4
    spill = None if start.spill_dir is None else SpillStore(Path(start.spill_dir).expanduser(), start.spill_bytes)
    return Parking(limit_bytes, spill)
