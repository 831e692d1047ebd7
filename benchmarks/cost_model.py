"""How well the engine predicts its next step, on the real model under mixed traffic.

The engine's core runs random traffic (prompts of 5 to 1,500 tokens, answers of 5 to 80) and its cost model predicts
every step before it is run. Yardstick: the median relative error after 100 steps, and the error of the trivial
prediction "as long as the step before".
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Sequence

from benchmarks.harness import report
from headrace.engines.llama.build import build
from headrace.engines.llama.core import EngineCore
from headrace.messages.engine import SamplingParams, Start, Submit
from headrace.models.store import resolve
from headrace.scheduling.cost import Call, CostModel
from headrace.scheduling.knobs import SchedulingKnobs


class Watched(CostModel):
    """Notes how wrong each prediction was, before learning from the step."""

    def __init__(self, model: CostModel) -> None:
        super().__init__(model.prior)
        self.errors: list[float] = []
        self.naive_errors: list[float] = []
        self.learn_s: list[float] = []
        self._before_s: float | None = None

    def learn(self, calls: Sequence[Call], took_s: float) -> None:
        self.errors.append(abs(self.predict(calls).seconds / took_s - 1))
        if self._before_s is not None:
            self.naive_errors.append(abs(self._before_s / took_s - 1))
        self._before_s = took_s
        started_s = time.perf_counter()
        super().learn(calls, took_s)
        self.learn_s.append(time.perf_counter() - started_s)


def arrive(core: EngineCore, draw: random.Random, number: int) -> None:
    """One more sequence."""
    length = min(1500, int(draw.lognormvariate(4.8, 1.0)) + 5)
    core.submit(
        Submit(
            request_id=str(number),
            prompt_tokens=[draw.randrange(300, 4000) for _ in range(length)],
            sampling=SamplingParams(temperature=0, ignore_eos=True),
            lane="any",
            priority=1,
            max_tokens=draw.randrange(5, 80),
            arrived_s=time.monotonic(),
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    engine = build(Start(str(resolve("smollm2")), "smollm2", [(2048, 32)], scheduling=SchedulingKnobs(512, 256)))
    core, draw = engine.core, random.Random(options.seed)
    watched = core.costs.model = Watched(core.costs.model)
    number = 0
    while len(watched.errors) < options.steps:
        if not core.has_work or draw.random() < 0.12:
            arrive(core, draw, number)
            number += 1
        core.step()
    spans = [(0, 50), (50, 100), (100, options.steps // 2), (options.steps // 2, options.steps)]
    rows, data = [], []
    for first, last in spans:
        part, naive = sorted(watched.errors[first:last]), watched.naive_errors[first:last]
        median, p90 = statistics.median(part), part[int(0.9 * (len(part) - 1))]
        bound = "< 0.10" if first >= 100 else ""
        rows.append([f"{first}-{last}", f"{median:.3f}", f"{p90:.3f}", f"{statistics.median(naive):.3f}", bound])
        data.append({"first": first, "last": last, "median": median, "p90": p90, "naive": statistics.median(naive)})
    rows.append(["learning, us", f"{statistics.median(watched.learn_s) * 1e6:.0f}", "", "", ""])
    report(
        "cost_model",
        f"python -m benchmarks.cost_model --steps {options.steps} --seed {options.seed}",
        ["steps", "median relative error", "p90", "median of 'as the last step'", "target"],
        rows,
        {"spans": data, "learn_s": statistics.median(watched.learn_s)},
    )


if __name__ == "__main__":
    main()
