"""Whether configured precisions have passed the gate for this model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from headrace.errors import GateError
from headrace.evaluate.kv_gate.prompts import shipped_prompts
from headrace.evaluate.kv_gate.results import (
    GateKey,
    GateResult,
    libllama_build,
    model_fingerprint,
    read_results,
    result_path,
)
from headrace.evaluate.kv_gate.scores import DEFAULT_LIMITS, GateLimits
from headrace.kv.precision import KV_DTYPES, KvDtype


def gate_key(model: Path) -> GateKey:
    """What a result must be of to count here and now. Raises GateError."""
    prompts = shipped_prompts()
    return GateKey(model_fingerprint(model), libllama_build(), f"{prompts.version}+{prompts.digest}")


def gated(dtypes: Iterable[KvDtype]) -> list[KvDtype]:
    """Those of ``dtypes`` that need the gate, each once. F16 is what others are measured by, and always passes."""
    wanted = set(dtypes)
    return [dtype for dtype in KV_DTYPES if dtype in wanted and dtype != "f16"]


def missing(dtypes: Iterable[KvDtype], results: Sequence[GateResult], key: GateKey) -> list[KvDtype]:
    """Precisions without a result that counts."""
    there = {result.dtype for result in results if result.key == key}
    return [dtype for dtype in gated(dtypes) if dtype not in there]


def refusal(
    dtypes: Iterable[KvDtype],
    results: Sequence[GateResult],
    key: GateKey,
    command: str,
    limits: GateLimits = DEFAULT_LIMITS,
) -> str | None:
    """Why one of ``dtypes`` must not be used; None when all may. ``command`` makes the results that are missing."""
    by_dtype = {result.dtype: result for result in results if result.key == key}
    for dtype in gated(dtypes):
        result = by_dtype.get(dtype)
        if result is None:
            stale = any(old.dtype == dtype for old in results)
            why = "only a result for another model file, libllama or prompt set" if stale else "no result"
            return f"KV at {dtype} needs to pass the gate for this model, and there is {why}; run: {command}"
        problems = result.scores.shortcomings(limits)
        if problems:
            return (
                f"KV at {dtype} failed the gate for this model ({'; '.join(problems)}); use a finer kv_dtype."
                f" Measured {result.measured_at} by: {command}"
            )
    return None


def check(model: Path, dtypes: Sequence[KvDtype], command: str) -> None:
    """Raises GateError unless every one of ``dtypes`` has passed the gate for the model file ``model``."""
    if not gated(dtypes):
        return
    problem = refusal(dtypes, read_results(result_path(model)), gate_key(model), command)
    if problem is not None:
        raise GateError(problem)
