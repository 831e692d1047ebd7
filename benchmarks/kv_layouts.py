"""What each layout of KV memory that libllama offers costs: time, memory, and cells that hold nothing.

    python benchmarks/kv_layouts.py --model smollm2

Contexts of libllama alone, without headrace's engine. Layouts take turns in every round, so that a passing neighbour
meets all of them; times are the rounds' medians. The last line is everything as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from headrace.engines.llama import library as llama_library
from headrace.engines.llama.context import Context
from headrace.engines.llama.library import Library
from headrace.engines.llama.weights import Weights
from headrace.kv.precision import KV_DTYPES, KvDtype
from headrace.models import store
from headrace.scheduling.bands import Band

MIXES: dict[str, list[int]] = {
    "8 short": [64] * 8,
    "7 short, 1 long": [64] * 7 + [1400],
    "8 of 700": [700] * 8,
}
CONTEXT_TOKENS = 1536
DECODE_STEPS = 12
PREFILL_TOKENS = 512


@dataclass(frozen=True)
class Shape:
    """A context: contiguous streams or one shared pool, and its micro-batch."""

    unified: bool = False
    micro_batch: int = 512


class RawContext:
    """A libllama context with ``streams`` sequences, driven directly."""

    def __init__(self, library: Library, weights: Weights, streams: int, shape: Shape, threads: int) -> None:
        self.api = library.api
        params = self.api.llama_context_default_params()
        params.n_ctx, params.n_seq_max = CONTEXT_TOKENS * streams, streams
        params.n_batch, params.n_ubatch = 512, shape.micro_batch
        params.n_threads = params.n_threads_batch = threads
        params.kv_unified = shape.unified
        self.handle: Any = self.api.llama_init_from_model(weights.handle, params)
        if not self.handle:
            raise SystemExit(f"libllama cannot create the context: {library.recent_log()}")
        self.batch = self.api.llama_batch_init(512, 0, 1)
        self.positions = [0] * streams

    def decode(self, entries: Sequence[tuple[int, int]]) -> float:
        """One call with (token, stream) entries, logits of each stream's last; how long it took."""
        last = {stream: index for index, (_, stream) in enumerate(entries)}
        self.batch.n_tokens = len(entries)
        for index, (token, stream) in enumerate(entries):
            self.batch.token[index], self.batch.pos[index] = token, self.positions[stream]
            self.batch.n_seq_id[index], self.batch.seq_id[index][0] = 1, stream
            self.batch.logits[index] = int(last[stream] == index)
            self.positions[stream] += 1
        started_s = time.perf_counter()
        code = self.api.llama_decode(self.handle, self.batch)
        took_s = time.perf_counter() - started_s
        if code != 0:
            raise SystemExit(f"llama_decode returned {code}")
        return took_s

    def prefill(self, stream: int, tokens: int) -> float:
        """Fill a stream with ``tokens`` more tokens; how long it took."""
        took_s = 0.0
        for start in range(0, tokens, 512):
            took_s += self.decode([((7 * i + 11) % 256, stream) for i in range(start, min(tokens, start + 512))])
        return took_s

    def close(self) -> None:
        self.api.llama_batch_free(self.batch)
        self.api.llama_free(self.handle)


def rss_mib() -> float:
    """Memory that this process has now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def decode_times(library: Library, weights: Weights, rounds: int, threads: int) -> list[dict[str, Any]]:
    """Decode steps over mixes of lengths, with contiguous streams and with one pool; and the memory of both."""
    found: list[dict[str, Any]] = []
    for mix, lengths in MIXES.items():
        contexts: dict[str, RawContext] = {}
        memory: dict[str, float] = {}
        for name, unified in (("contiguous", False), ("paged", True)):
            before = rss_mib()
            contexts[name] = RawContext(library, weights, len(lengths), Shape(unified), threads)
            for stream, tokens in enumerate(lengths):
                contexts[name].prefill(stream, tokens)
            memory[name] = rss_mib() - before
        times: dict[str, list[float]] = {name: [] for name in contexts}
        for _ in range(rounds):
            for name, context in contexts.items():
                steps = [context.decode([(17, stream) for stream in range(len(lengths))]) for _ in range(DECODE_STEPS)]
                times[name].append(statistics.median(steps))
        used = sum(contexts["contiguous"].positions)
        for name, context in contexts.items():
            found.append(
                {
                    "mix": mix,
                    "layout": name,
                    "decode_ms": round(1000 * statistics.median(times[name]), 2),
                    "memory_mib": round(memory[name], 1),
                    "used_tokens": used,
                    "allocated_tokens": CONTEXT_TOKENS * len(lengths),
                    "empty_share": round(1 - used / (CONTEXT_TOKENS * len(lengths)), 3),
                }
            )
            context.close()
    return found


def chunk_times(library: Library, weights: Weights, rounds: int, threads: int) -> list[dict[str, Any]]:
    """Prefill with micro-batches of several sizes: speed, and memory of the intermediate results."""
    sizes = (64, 128, 256, 512)
    times: dict[int, list[float]] = {size: [] for size in sizes}
    memory: dict[int, float] = {}
    for _ in range(rounds):
        for size in sizes:
            before = rss_mib()
            context = RawContext(library, weights, 1, Shape(micro_batch=size), threads)
            times[size].append(context.prefill(0, PREFILL_TOKENS))
            memory.setdefault(size, rss_mib() - before)
            context.close()
    return [
        {
            "micro_batch": size,
            "prefill_tokens_per_s": round(PREFILL_TOKENS / statistics.median(times[size]), 1),
            "memory_mib": round(memory[size], 1),
        }
        for size in sizes
    ]


def precision_times(library: Library, weights: Weights, rounds: int, threads: int) -> list[dict[str, Any]]:
    """Prefill and decode at each precision of KV, and the bytes of a stream's state."""
    contexts: dict[KvDtype, Context] = {}
    for dtype in KV_DTYPES:
        contexts[dtype] = Context(library, weights, Band(CONTEXT_TOKENS, 1, dtype), step_tokens=512, threads=threads)
    prefill: dict[KvDtype, list[float]] = {dtype: [] for dtype in contexts}
    decode: dict[KvDtype, list[float]] = {dtype: [] for dtype in contexts}
    sizes: dict[KvDtype, int] = {}
    for _ in range(rounds):
        for dtype, context in contexts.items():
            context.clear_stream(0)
            prefill[dtype].append(_timed(partial(_fill, context, 1024)))
            sizes[dtype] = len(context.save_stream(0))
            steps = [_timed(partial(_one, context, 1024 + step)) for step in range(DECODE_STEPS)]
            decode[dtype].append(statistics.median(steps))
    for context in contexts.values():
        context.close()
    return [
        {
            "dtype": dtype,
            "prefill_tokens_per_s": round(1024 / statistics.median(prefill[dtype]), 1),
            "decode_ms_at_1024": round(1000 * statistics.median(decode[dtype]), 2),
            "state_mib_at_1024": round(sizes[dtype] / 2**20, 2),
        }
        for dtype in contexts
    ]


def disk_times(library: Library, weights: Weights, rounds: int, threads: int) -> list[dict[str, Any]]:
    """A stream's state to a file and back, beside computing it again."""
    context = Context(library, weights, Band(CONTEXT_TOKENS, 1), step_tokens=512, threads=threads)
    found: dict[str, list[float]] = {"compute": [], "save": [], "write": [], "read": [], "load": []}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "state"
        for _ in range(rounds):
            context.clear_stream(0)
            found["compute"].append(_timed(lambda: _fill(context, 1024)))
            started_s = time.perf_counter()
            state = context.save_stream(0)
            found["save"].append(time.perf_counter() - started_s)
            found["write"].append(_timed(partial(_write, path, state)))
            context.clear_stream(0)
            data = bytearray(len(state))
            found["read"].append(_timed(partial(_read, path, data)))
            found["load"].append(_timed(partial(context.load_stream, 0, data)))
    context.close()
    return [{"step": name, "ms_of_1024_tokens": round(1000 * statistics.median(of), 2)} for name, of in found.items()]


def _timed(call: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    call()
    return time.perf_counter() - started_s


def _fill(context: Context, tokens: int) -> None:
    for start in range(0, tokens, 512):
        context.batch.clear()
        chunk = [(7 * index + 11) % 256 for index in range(start, min(tokens, start + 512))]
        context.batch.add_chunk(chunk, start, 0, last_output=True, all_outputs=False)
        context.decode()


def _one(context: Context, position: int) -> None:
    context.batch.clear()
    context.batch.add_one(17, position, 0)
    context.decode()


def _write(path: Path, state: memoryview) -> None:
    with path.open("wb") as file:
        file.write(state)
        file.flush()
        os.fsync(file.fileno())


def _read(path: Path, data: bytearray) -> None:
    """From the page cache as a rule: what a disk adds depends on the disk."""
    with path.open("rb") as file:
        file.readinto(data)


def table(rows: list[dict[str, Any]]) -> str:
    """Rows as aligned text."""
    names = list(rows[0])
    cells = [names, *[[str(row[name]) for name in names] for row in rows]]
    widths = [max(len(line[column]) for line in cells) for column in range(len(names))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in cells)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="smollm2", help="a catalog name or a GGUF")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    if options.rounds < 1 or options.threads < 1:
        parser.error("--rounds and --threads must be at least 1")
    weights = Weights(llama_library.load(), store.resolve(options.model))
    parts = {
        "layouts": decode_times,
        "chunks": chunk_times,
        "precisions": precision_times,
        "disk": disk_times,
    }
    results: dict[str, Any] = {"model": options.model, "rounds": options.rounds, "threads": options.threads}
    for name, measure in parts.items():
        results[name] = measure(weights.library, weights, options.rounds, options.threads)
        print(f"{name}\n{table(results[name])}\n", flush=True)
    weights.close()
    print(json.dumps(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
