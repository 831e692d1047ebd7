"""How step times are written as a text, for the command line, files and the reference; ``open_times`` reads them."""

from __future__ import annotations

from typing import Final

from msgspec import Struct


class TimesForm(Struct, frozen=True):
    """One form: its signature, what it is, and an example."""

    signature: str
    meaning: str
    example: str


TIMES_FORMS: Final = (
    TimesForm("FILE.json", "what headrace calibrate wrote", "calibration.json"),
    TimesForm(
        "roofline(HARDWARE, MODEL, tensor=1, data=1, experts=whole|shared, weights=f16, expert_weights=, kv=bf16, "
        "index=, calibration=default, kernels=FOLDER)",
        "from data sheets; kernels: Parquet tables of measured ones",
        "roofline(h100, llama-3.1-70b, tensor=4, weights=fp8)",
    ),
    TimesForm(
        "layers(FOLDER, count, step_ms=0)",
        "kernels of each layer, as LLMServingSim profiles them, for so many layers",
        "layers(profiles/tp1, 32)",
    ),
    TimesForm(
        "batches(FILE, MODEL, HARDWARE, tensor=1)",
        "prompts and tokens by batch, as in splitwise-sim's perf_model.csv",
        "batches(perf_model.csv, llama2-70b, a100-80gb, tensor=8)",
    ),
    TimesForm(
        "lines(FILE, MODEL, tensor=1)",
        "fitted coefficients, as in DistServe's profiles",
        "lines(profiler-a100-80g.json, facebook/opt-13b, tensor=2)",
    ),
)
