"""What ``serve`` says once the engine is ready: the model, the memory plan, the processor."""

from __future__ import annotations

from headrace.messages.engine import Ready

_MIB = 1024 * 1024
_NOTABLE_CORES = 0.3


def ready_lines(ready: Ready) -> list[str]:
    """Lines for the log, without the lane targets."""
    model = ready.model
    total_bytes = sum(band.kv_bytes for band in ready.bands)
    lines = [
        f"model {model.name}: {model.architecture}, {model.parameters / 1e6:.0f} M parameters, "
        f"{model.weight_bytes / _MIB:.0f} MiB of weights, context {model.max_context_tokens} of "
        f"{model.context_train_tokens} trained tokens",
        f"KV memory: {total_bytes / _MIB:.0f} MiB of a budget of {ready.memory_budget_bytes / _MIB:.0f} MiB, "
        f"{model.kv_bytes_per_token} bytes per token at f16",
    ]
    lines += [
        f"  band up to {band.max_context_tokens} tokens: {band.max_sequences} sequences at once, "
        f"{'' if band.kv_dtype == 'f16' else f'KV at {band.kv_dtype}, '}"
        f"{'' if band.layout == 'contiguous' else f'{band.layout}, '}"
        f"{band.kv_bytes / _MIB:.0f} MiB{'' if band.created else ' (allocated when first needed)'}"
        for band in ready.bands
    ]
    lines += [f"  to fit the budget: {reduction}" for reduction in ready.reductions]
    lines += [f"  {note}" for note in ready.memory_notes]
    if ready.measurement is not None:
        lines.append(
            f"measured on this machine, {ready.threads} threads: prefill "
            f"{ready.measurement.prefill_tokens_per_s:.0f} tokens/s, single-stream decode "
            f"{ready.measurement.decode_tokens_per_s:.0f} tokens/s"
        )
        if ready.other_cores > _NOTABLE_CORES:
            lines.append(
                f"  other processes used {ready.other_cores:.1f} cores meanwhile: these figures and the lane targets "
                "below are what they left"
            )
    if "SSE3 = 1" in ready.processor and "AVX2 = 1" not in ready.processor:
        lines.append("libllama was built without AVX2 and will be slow: run 'make clean setup'")
    return lines
