"""What headrace adds to a step of vLLM's scheduler: time around ``schedule`` and ``update_from_output``.

vLLM's real scheduler with the counting model of the tests: so many requests run (decoding), so many wait in six lanes
for a place. Stock and steered steps take turns; the difference is the plug-in's. Needs vLLM (``make test-vllm`` makes
an environment with it). The yardstick is 100 us a step at 256 running and 1,000 waiting.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.vllm.harness import Engine, make_request, make_scheduler, prompt_of, vllm_config


def step_times_s(running: int, waiting: int, steps: int, *, headrace: bool, asynchronous: bool) -> list[float]:
    """Seconds of ``schedule`` plus ``update_from_output``, for every step."""
    with tempfile.TemporaryDirectory() as folder:
        config = vllm_config(
            Path(folder),
            asynchronous=asynchronous,
            max_num_seqs=running,
            max_num_batched_tokens=8192,
            blocks=40 * running + 1000,
        )
        scheduler = make_scheduler(config, headrace=headrace)
        engine = Engine(scheduler, depth=2 if asynchronous else 1)
        taken: list[float] = []
        spent = 0.0

        def timed(call: Any) -> Any:
            def wrapped(*args: Any, **kwargs: Any) -> Any:
                nonlocal spent
                began = time.perf_counter()
                try:
                    return call(*args, **kwargs)
                finally:
                    spent += time.perf_counter() - began

            return wrapped

        for index in range(running + waiting):
            lane = index % 6
            extra = {
                "headrace_lane": f"lane{lane}",
                "headrace_tenant": f"tenant{index % 20}",
                "headrace_priority": 10 * lane,
            }
            if lane < 3:
                extra |= {"headrace_first_token_in_s": 60.0, "headrace_tpot_s": 0.3}
            engine.add(make_request(f"r{index}", prompt_of(100, seed=index), 500, extra=extra))
        if headrace:
            # hybrid would hold some back while others decode: here all are to run.
            scheduler.headrace.change({"strategy": "continuous"})
        while len(scheduler.running) < running or any(not engine.outputs[r.request_id] for r in scheduler.running):
            engine.step()
        if headrace:
            scheduler.headrace.change({"strategy": "hybrid"})
        scheduler.schedule, scheduler.update_from_output = (
            timed(scheduler.schedule),
            timed(scheduler.update_from_output),
        )
        gc.disable()
        for _ in range(steps):
            spent = 0.0
            engine.step()
            taken.append(spent)
        gc.enable()
        if headrace:
            assert scheduler.headrace.active
            assert len(scheduler.running) == running
        return taken


def main() -> None:
    """Print a table."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--steps", type=int, default=300)
    options.add_argument("--rounds", type=int, default=3)
    given = options.parse_args()
    print("running waiting  mode   stock us  headrace us  added us (median of steps, median of rounds)")
    for running, waiting in ((16, 0), (64, 100), (256, 0), (256, 1000)):
        for asynchronous in (False, True):
            medians: dict[bool, list[float]] = {False: [], True: []}
            for _ in range(given.rounds):
                for headrace in (False, True):
                    times = step_times_s(running, waiting, given.steps, headrace=headrace, asynchronous=asynchronous)
                    medians[headrace].append(1e6 * statistics.median(times))
            stock, ours = statistics.median(medians[False]), statistics.median(medians[True])
            mode = "async" if asynchronous else "sync"
            print(f"{running:7d} {waiting:7d} {mode:>5s} {stock:10.0f} {ours:12.0f} {ours - stock:9.0f}", flush=True)


if __name__ == "__main__":
    main()
