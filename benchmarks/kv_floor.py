"""The least KV memory that holds nothing: what libllama allocates for a stream, and what a workload can use of it.

    python benchmarks/kv_floor.py --model smollm2 --workload mixed-enterprise

First the bands' contexts are made one after the other: libllama's own figure for each, and how much resident memory
grows. Then the workload's sequences are laid into streams on paper: each lives for as many steps as it writes tokens,
in the shortest stream that holds it, and cells above what it holds are empty. That is the floor of a layout: no
scheduling gets below it, and what a server measures lies above it (sequences begin in a band before it is known how
long they get). The last line is everything as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import msgspec

from headrace.bench.load.build_schedule import build_schedule
from headrace.bench.load.workload_file import load_workload
from headrace.config.schema import EngineConfig
from headrace.engines.llama import library as llama_library
from headrace.engines.llama.context import Context
from headrace.engines.llama.library import Library
from headrace.engines.llama.weights import Weights
from headrace.kv.libllama_memory import ALLOCATION_TOKENS, padded, stream_bytes
from headrace.models import store
from headrace.scheduling.bands import Band, band_for

_BUFFER: Final = re.compile(r"KV buffer size =\s*([\d.]+) MiB")
_MIB: Final = 1 << 20
MOST_STREAMS: Final = 4
"""Of a band, so that the measurement does not take gigabytes: a context takes as much for each."""
GAPS: Final = (ALLOCATION_TOKENS, 1024)
"""Distances between bands, besides the default ones: the finest that libllama can allocate, and a practical one."""


def resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / _MIB


def default_bands(context_tokens: int) -> list[Band]:
    """The bands that serve has without a configuration, up to the model's context."""
    bands = [Band(band.max_context_tokens, band.max_sequences) for band in EngineConfig().bands]
    return [band for band in bands if band.max_context_tokens <= context_tokens]


def allocated(library: Library, weights: Weights, bands: Sequence[Band]) -> list[dict[str, Any]]:
    """What a context of each band takes before anything is in it, with ``MOST_STREAMS`` streams at most."""
    rows = []
    for wanted in bands:
        band = replace(wanted, max_sequences=min(wanted.max_sequences, MOST_STREAMS))
        pieces: list[str] = []
        before = resident_mib()
        with library.listening(pieces.append):
            context = Context(library, weights, band, step_tokens=512, threads=1)
        grown = resident_mib() - before
        context.close()
        logged = sum([float(size) for size in _BUFFER.findall("".join(pieces))])
        rows.append(
            {
                "band": band.max_context_tokens,
                "streams": band.max_sequences,
                "planned_mib_per_stream": round(stream_bytes(weights.kv_layout(), band.max_context_tokens) / _MIB, 2),
                "libllama_mib": round(logged, 2),
                "resident_mib": round(grown, 1),
            }
        )
    return rows


def floors(lengths: Sequence[tuple[int, int]], bands: Sequence[Band]) -> list[dict[str, Any]]:
    """For each layout: the share of cells of streams in use that hold nothing, on average over time."""
    longest = bands[-1].max_context_tokens
    stairs = {f"bands every {gap}": [Band(end, 1) for end in range(gap, padded(longest) + 1, gap)] for gap in GAPS}
    rows = []
    for name, these in {"default bands": list(bands), **stairs}.items():
        cells = held = 0.0
        for prompt, output in lengths:
            band = band_for(min(prompt + output, longest), these)
            assert band is not None
            cells += output * padded(these[band].max_context_tokens)
            held += output * (prompt + (output - 1) / 2)
        rows.append({"layout": name, "empty_share_of_used_streams": round(1 - held / cells, 3)})
    rows.append({"layout": "paged (cells taken one by one)", "empty_share_of_used_streams": 0.0})
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    lines = [list(rows[0]), *[[str(value) for value in row.values()] for row in rows]]
    widths = [max([len(line[column]) for line in lines]) for column in range(len(lines[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="smollm2", help="a catalog name or a GGUF")
    parser.add_argument("--workload", default="mixed-enterprise", help="a shipped workload's name or a file")
    parser.add_argument("--arrivals", default="poisson(0.5)", help="how requests come; only their number matters")
    parser.add_argument("--seconds", type=float, default=600.0, help="of the workload")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    weights = Weights(llama_library.load(), store.resolve(options.model))
    context_tokens = int(weights.library.api.llama_model_n_ctx_train(weights.handle))
    bands = default_bands(context_tokens)
    loaded = load_workload(options.workload)
    workload = msgspec.structs.replace(
        loaded.workload,
        arrivals=options.arrivals,
        duration_s=options.seconds,
        scale_to_context_tokens=bands[-1].max_context_tokens,
    )
    schedule = build_schedule(type(loaded)(workload, loaded.name, loaded.folder), seed=options.seed)
    lengths = [
        (request.input_tokens, request.output_tokens)
        for request in schedule.requests
        if request.malformed is None and request.output_tokens
    ]
    parts = {"allocated": allocated(weights.library, weights, bands), "floors": floors(lengths, bands)}
    for name, rows in parts.items():
        print(f"{name}\n{table(rows)}\n")
    weights.close()
    print(json.dumps({"model": options.model, "workload": options.workload, "requests": len(lengths), **parts}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
