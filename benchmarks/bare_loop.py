"""The yardstick: a bare llama_decode loop with nothing around it.

Run as a child process by the benchmarks. Reads one JSON command a line (``{"streams": 8, "tokens": 64,
"threads": 2}``), runs it, answers one JSON line. Same context shape, same batch order, greedy argmax; no
server, no scheduler, no text.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from headrace.engines.llama import library as llama_library
from headrace.engines.llama.context import Context
from headrace.engines.llama.vocabulary import Vocabulary
from headrace.engines.llama.weights import Weights
from headrace.scheduling.bands import Band

STEP_TOKENS = 512


def prompt_text(index: int) -> str:
    """The user message of stream ``index``; the served side sends the same."""
    return f"Tell me a long story about the number {index}."


class BareLoop:
    """A context of 32 streams of 2,048 tokens and a loop over it."""

    def __init__(self, model: Path) -> None:
        library = llama_library.load()
        self._api: Any = library.api
        weights = Weights(library, model)
        self._vocabulary = Vocabulary(weights)
        self._context = Context(library, weights, Band(2048, 32), step_tokens=STEP_TOKENS, threads=1)

    def run(self, streams: int, tokens: int, threads: int) -> dict[str, float]:
        """Prefill ``streams`` prompts and decode ``tokens`` tokens of each. Returns seconds and tokens."""
        context, batch = self._context, self._context.batch
        context.set_threads(threads)
        prompts = [self._prompt(index) for index in range(streams)]
        for stream in range(streams):
            context.clear_stream(stream)
        started_s = time.perf_counter()
        current = [0] * streams
        positions = [len(prompt) for prompt in prompts]
        pending = list(range(streams))
        while pending:
            batch.clear()
            ends: list[tuple[int, int]] = []
            while pending and batch.size + len(prompts[pending[0]]) <= STEP_TOKENS:
                stream = pending.pop(0)
                ends.append((stream, batch.add_chunk(prompts[stream], 0, stream, last_output=True, all_outputs=False)))
            context.decode()
            for stream, index in ends:
                current[stream] = int(context.logits(index).argmax())
        for _ in range(tokens - 1):
            batch.clear()
            for stream in range(streams):
                batch.add_one(current[stream], positions[stream], stream)
                positions[stream] += 1
            context.decode()
            for stream in range(streams):
                current[stream] = int(context.logits(stream).argmax())
        return {"seconds": time.perf_counter() - started_s, "tokens": float(streams * tokens)}

    def _prompt(self, index: int) -> list[int]:
        text = self._vocabulary.render_chat([{"role": "user", "content": prompt_text(index)}])
        return self._vocabulary.encode(text, add_special=False, parse_special=True)


def main() -> None:
    """Serve commands from standard input until it ends."""
    loop = BareLoop(Path(sys.argv[1]))
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        print(json.dumps(loop.run(command["streams"], command["tokens"], command["threads"])), flush=True)


if __name__ == "__main__":
    main()
