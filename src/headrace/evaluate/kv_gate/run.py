"""The whole gate: load a model, measure precisions, write the result beside it."""

from __future__ import annotations

import datetime
import time
from collections.abc import Sequence
from pathlib import Path

from headrace.engines.llama import library as llama_library
from headrace.engines.llama.threads import check_threads
from headrace.engines.llama.vocabulary import Vocabulary
from headrace.engines.llama.weights import Weights
from headrace.evaluate.kv_gate.admit import gate_key, gated
from headrace.evaluate.kv_gate.measure import OnPrompt, measure
from headrace.evaluate.kv_gate.prompts import PromptSet, shipped_prompts
from headrace.evaluate.kv_gate.results import GateResult, result_path, write_results
from headrace.kv.precision import KvDtype


def run_gate(
    model: Path,
    dtypes: Sequence[KvDtype],
    *,
    threads: int | None = None,
    gpu_layers: int = 0,
    on_prompt: OnPrompt = lambda progress: None,
    prompts: PromptSet | None = None,
) -> tuple[GateResult, ...]:
    """Measure ``dtypes`` (F16 among them is left out) and keep the results. ``prompts`` None: the shipped set; with
    another one nothing is written, since no result of it counts. Raises GateError, ModelError, ConfigError."""
    key = gate_key(model)
    wanted = gated(dtypes)
    started_s = time.monotonic()
    weights = Weights(llama_library.load(), model, gpu_layers=gpu_layers)
    try:
        scores = measure(
            weights.library,
            weights,
            Vocabulary(weights),
            prompts or shipped_prompts(),
            wanted,
            threads=check_threads(threads),
            on_prompt=on_prompt,
        )
    finally:
        weights.close()
    at = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    took_s = round(time.monotonic() - started_s, 1)
    results = tuple(GateResult(key, dtype, found, at, took_s) for dtype, found in scores.items())
    if results and prompts is None:
        write_results(result_path(model), results)
    return results
