"""How long every strategy takes to decide a step, as sequences grow in number.

A decision is what an engine does before its forward passes: bring the waiting queue up to now, describe the state, ask
the policy. Running sequences are spread over four bands, nine of ten decoding; waiting ones over six lanes and twenty
tenants, half of them with deadlines. Two cases: no stream is free, as under load that queues; and a tenth of the
streams is free, so that every decision also admits. Yardstick: at most 200 us at 100 running and 1,000 waiting, at most
1 ms at 1,000 and 10,000, growth no faster than n log n. ``arrive`` is what taking in one more waiting sequence costs.
"""

from __future__ import annotations

import argparse
import gc
import math
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import msgspec

from benchmarks.harness import report
from headrace.scheduling.bands import Band
from headrace.scheduling.knobs import SchedulingKnobs, Strategy
from headrace.scheduling.order import ServiceRates, WaitingQueue
from headrace.scheduling.sequence import SequenceState, Slot
from headrace.scheduling.step import SchedulerState
from headrace.scheduling.strategies import policy_for
from headrace.scheduling.traffic import Traffic
from headrace.simulate.step_times import SMOLLM2_2_THREADS

SIZES: Final = ((10, 100), (100, 1000), (300, 3000), (1000, 10000))
STRATEGIES: Final[tuple[Strategy, ...]] = ("static", "dynamic", "continuous", "hybrid", "auto")
TARGETS_US: Final = {(100, 1000): 200.0, (1000, 10000): 1000.0}
CONTEXTS: Final = (2048, 8192, 16384, 131072)
BAND_SHARES: Final = (0.6, 0.25, 0.1, 0.05)
LANES: Final = tuple([f"lane{number}" for number in range(6)])
NOW_S: Final = 1000.0
RATES: Final = ServiceRates(8.4e-4, 1.7e-3, 5.7e-3)


@dataclass(frozen=True)
class Measured:
    """Seconds of each decision, and of each arrival."""

    decisions: list[float]
    arrivals: list[float]


class Scene:
    """An engine's sequences, and the description that a policy gets of them."""

    def __init__(self, running: int, waiting: int, *, free: bool, strategy: Strategy, seed: int) -> None:
        self._draw = random.Random(f"{seed}/{running}/{waiting}")
        streams = math.ceil(running / 0.9) if free else running
        counts = [max(1, round(streams * share)) for share in BAND_SHARES]
        self._bands = tuple([Band(context, count) for context, count in zip(CONTEXTS, counts, strict=True)])
        # Room for every decode and a chunk, as whoever runs a thousand sequences sets it: the same work at every size.
        tokens = running + SchedulingKnobs().max_prefill_tokens
        self._knobs = SchedulingKnobs(step_tokens=tokens, strategy=strategy, lane_weights={"lane0": 4.0})
        slots = [Slot(band, stream) for band, count in enumerate(counts) for stream in range(count)]
        self._draw.shuffle(slots)
        self._running = [self._runs(number, slot) for number, slot in enumerate(slots[:running])]
        self._queue = WaitingQueue(self._bands, self._knobs)
        self._free = tuple(
            [
                count - sum(s.slot is not None and s.slot.band == band for s in self._running)
                for band, count in enumerate(counts)
            ]
        )
        self._numbers = 0
        for _ in range(waiting):
            self.arrive()
        self._policy = policy_for(strategy)
        self._now_s = NOW_S

    def _new(self, name: str, prompt: int, arrived_s: float) -> SequenceState:
        draw, lane = self._draw, self._draw.randrange(len(LANES))
        targets = lane < len(LANES) // 2
        return SequenceState(
            name,
            prompt,
            prompt + 400,
            10 * lane,
            arrived_s,
            arrived_s + draw.uniform(20, 60) if targets else None,
            lane=LANES[lane],
            tenant=f"tenant{draw.randrange(20)}",
            tpot_s=0.3 if targets else None,
            expected_tokens=100,
        )

    def _runs(self, number: int, slot: Slot) -> SequenceState:
        sequence = self._new(f"r{number}", CONTEXTS[slot.band] // 2, NOW_S - self._draw.uniform(1, 20))
        sequence.slot, sequence.rank_s = slot, sequence.arrived_s
        sequence.computed_tokens = sequence.prompt_tokens
        if self._draw.random() < 0.9:
            sequence.known_tokens += 1
            sequence.note_token(NOW_S - self._draw.uniform(0.0, 0.2))
        else:
            sequence.computed_tokens -= 200
        return sequence

    def arrive(self) -> SequenceState:
        """One more waits, with a prompt of 20 to 20,000 tokens."""
        self._numbers += 1
        prompt = int(20 * 1000 ** self._draw.random())
        sequence = self._new(f"w{self._numbers}", prompt, NOW_S - self._draw.uniform(0, 20))
        self._queue.add(sequence, RATES)
        return sequence

    def decide(self) -> None:
        """What happens before a step."""
        self._now_s += 1e-3
        self._queue.refresh(self._now_s)
        state = SchedulerState(
            now_s=self._now_s,
            bands=self._bands,
            free_streams=self._free,
            waiting=self._queue,
            running=list(self._running),
            knobs=self._knobs,
            times=SMOLLM2_2_THREADS,
            fused=False,
            urgent_seen_s=self._now_s,
            traffic=Traffic(256, 0.5, 1.0, 1.5, 6),
            batch_cap=max(band.max_sequences for band in self._bands),
        )
        self._policy.plan(state)

    def leave(self, sequence: SequenceState) -> None:
        """One that waited gives up."""
        self._queue.discard(sequence)


def measured(scene: Scene, seconds: float) -> Measured:
    """Decisions for so long, with an arrival and a departure between any two."""
    decisions: list[float] = []
    arrivals: list[float] = []
    gc.collect()
    gc.freeze()
    until_s = time.perf_counter() + seconds
    while time.perf_counter() < until_s or len(decisions) < 20:
        decisions.append(_took(scene.decide))
        started_s = time.perf_counter()
        sequence = scene.arrive()
        arrivals.append(time.perf_counter() - started_s)
        scene.leave(sequence)
    gc.unfreeze()
    return Measured(decisions, arrivals)


def _took(action: Callable[[], None]) -> float:
    started_s = time.perf_counter()
    action()
    return time.perf_counter() - started_s


def _growth(sizes: list[int], times: list[float]) -> tuple[float, float]:
    """The exponent of growth over the last two sizes, and the one that n log n has there."""
    (first, last), (before, after) = sizes[-2:], times[-2:]
    span = math.log(last / first)
    return math.log(after / before) / span, math.log(last * math.log(last) / (first * math.log(first))) / span


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.decision_time", description=__doc__)
    parser.add_argument("--seconds", type=float, default=1.0, help="of measuring for each cell")
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=list(STRATEGIES))
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    rows: list[list[str]] = []
    data: list[dict[str, object]] = []
    for strategy in options.strategies:
        for free in (False, True):
            medians: list[float] = []
            for running, waiting in SIZES:
                scene = Scene(
                    running, waiting, free=free, strategy=msgspec.convert(strategy, Strategy), seed=options.seed
                )
                found = measured(scene, options.seconds)
                ordered = sorted(found.decisions)
                median, p99 = statistics.median(ordered), ordered[int(0.99 * (len(ordered) - 1))]
                arrive = statistics.median(found.arrivals)
                medians.append(median)
                target = TARGETS_US.get((running, waiting))
                verdict = "" if target is None else f"<= {target:.0f}: {'yes' if median * 1e6 <= target else 'NO'}"
                case = "a tenth free" if free else "all taken"
                cells = [f"{value * 1e6:,.0f}" for value in (median, p99, arrive)]
                rows.append([strategy, case, f"{running:,} / {waiting:,}", *cells, verdict])
                data.append(
                    {
                        "strategy": strategy,
                        "streams": case,
                        "running": running,
                        "waiting": waiting,
                        "median_s": median,
                        "p99_s": p99,
                        "arrive_s": arrive,
                        "decisions": len(ordered),
                    }
                )
            exponent, allowed = _growth([sum(size) for size in SIZES], medians)
            verdict = "yes" if exponent <= allowed else "NO"
            rows.append(
                [strategy, "growth", f"n^{exponent:.2f}", "", "", "", f"<= n log n (n^{allowed:.2f}): {verdict}"]
            )
            data.append({"strategy": strategy, "growth": exponent, "n_log_n": allowed})
    report(
        "decision_time",
        f"python -m benchmarks.decision_time --seconds {options.seconds:g} --seed {options.seed}",
        ["strategy", "streams", "running / waiting", "median, us", "p99, us", "arrive, us", "target (median)"],
        rows,
        data,
    )


if __name__ == "__main__":
    main()
