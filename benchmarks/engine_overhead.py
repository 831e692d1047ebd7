"""What the whole path costs: HTTP, gateway, messages, scheduler, text, against a bare llama_decode loop.

Same model, threads, prompts, tokens; A and B take turns in every round, so a drifting machine hits both.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from benchmarks.bare_loop import prompt_text
from benchmarks.harness import BareProcess, Spread, headrace_server, report, served_tokens_per_s
from headrace.engines.llama.threads import usable_cores
from headrace.models.store import resolve

PAUSE_S = 0.3
"""Between two runs: the threads of the one that ended go on spinning for a while, and would take the next one's
cores. Without it the first token behind a bare run was measured at 90 ms instead of 50."""


def body(index: int, tokens: int, model: str) -> dict[str, Any]:
    """The request of stream ``index``: greedy, exactly ``tokens`` tokens."""
    return {
        "model": model,
        "messages": [{"role": "user", "content": prompt_text(index)}],
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--threads", type=int, default=usable_cores())
    options = parser.parse_args()
    model = resolve("smollm2")
    bare = BareProcess(model)
    rows, data = [], []
    try:
        with headrace_server() as served:
            for streams in options.streams:
                ours: list[float] = []
                theirs: list[float] = []
                bodies = [body(i, options.tokens, "smollm2") for i in range(streams)]
                for round_number in range(options.rounds + 1):
                    time.sleep(PAUSE_S)
                    bare_tokens_per_s = bare.tokens_per_s(streams, options.tokens, options.threads)
                    time.sleep(PAUSE_S)
                    our_tokens_per_s = served_tokens_per_s(served, bodies)
                    if round_number > 0:  # the first round warms both
                        theirs.append(bare_tokens_per_s)
                        ours.append(our_tokens_per_s)
                ratio = Spread.of([a / b for a, b in zip(ours, theirs, strict=True)])
                rows.append([str(streams), Spread.of(ours).text(), Spread.of(theirs).text(), ratio.text(3), ">= 0.95"])
                data.append(
                    {
                        "streams": streams,
                        "headrace_tokens_per_s": Spread.of(ours).plain(),
                        "bare_tokens_per_s": Spread.of(theirs).plain(),
                        "ratio": ratio.plain(),
                    }
                )
            ready_s = served.ready_s
    finally:
        bare.close()
    rows.append(["time to ready, s", f"{ready_s:.2f}", "", "", "< 5"])
    report(
        "engine_overhead",
        f"python -m benchmarks.engine_overhead --rounds {options.rounds} --tokens {options.tokens}",
        ["streams", "headrace tok/s", "bare llama_decode tok/s", "ratio", "target"],
        rows,
        {"streams": data, "ready_s": ready_s},
    )


if __name__ == "__main__":
    main()
