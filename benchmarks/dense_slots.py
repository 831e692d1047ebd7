"""What holes between streams cost, and what filling or closing them costs, on the real model.

Sixteen sequences decode in a band of 32 streams: in the first sixteen; in every second one, a pass for each; in every
second one with padding rows between them, over empty streams and over resting sequences; as the engine itself chooses
by its cost model; and after compaction, when copies have made them dense again. The engine's own core runs the steps;
the ways take turns within each round, so a drifting machine hits all.

Then, for sequences of 500, 1,000 and 2,000 tokens: moving one to another stream (save and load, as the engine does,
and libllama's own copy of whole streams), and parking and resuming it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from benchmarks.harness import Spread, report
from headrace.engines.llama import library as llama_library
from headrace.engines.llama.build import build
from headrace.engines.llama.context import Context
from headrace.engines.llama.core import EngineCore
from headrace.engines.llama.library import Library
from headrace.engines.llama.threads import usable_cores
from headrace.engines.llama.weights import Weights
from headrace.messages.engine import SamplingParams, Start, Submit
from headrace.models.store import resolve
from headrace.scheduling.bands import Band
from headrace.scheduling.continuous import DecodeFirst
from headrace.scheduling.cost import Call, CostModel
from headrace.scheduling.knobs import SchedulingKnobs
from headrace.scheduling.step import Move, SchedulerState, StepPlan

STREAMS = 32
ACTIVE = 16
CONTEXT_TOKENS = 2048
PROMPT_TOKENS = 150
LENGTHS = (500, 1000, 2000)
WAYS = (
    "dense",
    "holes, split",
    "holes, padded",
    "holes of resting sequences, padded",
    "holes, as the engine chooses",
    "after compaction",
)


@dataclass
class Driven:
    """``DecodeFirst``, except that ``resting`` compute nothing, ``victims`` are parked and stay so, and ``moves`` are
    made."""

    resting: set[str] = field(default_factory=set)
    victims: tuple[str, ...] = ()
    moves: tuple[Move, ...] = ()
    parked: bool = False

    def plan(self, state: SchedulerState) -> StepPlan:
        plan = DecodeFirst().plan(state)
        victims, self.victims = self.victims, ()
        moves, self.moves = self.moves, ()
        self.parked = self.parked or bool(victims)
        absent = self.resting | set(victims)
        return StepPlan(
            victims=victims,
            moves=moves,
            admissions=() if self.parked else plan.admissions,
            decode=tuple([name for name in plan.decode if name not in absent]),
            prefill=() if self.parked else plan.prefill,
        )


class OnlyRowsCost(CostModel):
    """Predicts that no hole is worth filling. Learns nothing."""

    def call_s(self, rows: int, context_tokens: int = 0, pairs: int = 0) -> float:
        return float(rows)

    def learn(self, calls: Sequence[Call], took_s: float) -> None:
        pass


class OnlyPassesCost(OnlyRowsCost):
    """Predicts that every hole is worth filling."""

    def call_s(self, rows: int, context_tokens: int = 0, pairs: int = 0) -> float:
        return 1.0


class Bench:
    """A core with 32 decoding sequences of about the same length."""

    def __init__(self, threads: int, steps: int) -> None:
        knobs = SchedulingKnobs(step_tokens=512, max_prefill_tokens=256, strategy="continuous")
        start = Start(
            str(resolve("smollm2")), "smollm2", [(CONTEXT_TOKENS, STREAMS)], knobs, threads=threads, prefix_cache=False
        )
        self.core: EngineCore = build(start).core
        self.policy = Driven()
        self.core.set_policy(self.policy)
        self.learned = self.core.costs.model
        self.steps = steps
        self.samples: dict[str, list[float]] = {way: [] for way in WAYS}
        sampling = SamplingParams(temperature=0.0, ignore_eos=True)
        for number in range(STREAMS):
            prompt = [300 + (7 * index + 31 * number) % 3000 for index in range(PROMPT_TOKENS)]
            self.core.submit(Submit(f"s{number}", prompt, sampling, "any", 0, arrived_s=time.monotonic()))
        self.settle()

    def settle(self) -> None:
        """Until all sequences decode."""
        core = self.core
        while core.residents.waiting or not all(s.state.decoding for s in core.residents.running.values()):
            core.step()

    def streams(self) -> dict[int, str]:
        """Who runs in which stream."""
        return {slot.stream: name for slot, name in self.core.residents.slots.owners().items()}

    def measure(self, way: str, model: CostModel) -> None:
        """The median step of a few."""
        self.core.costs.model = model
        self.core.forward.forget_runs()
        self.core.step()
        times: list[float] = []
        for _ in range(self.steps):
            started_s = time.perf_counter()
            self.core.step()
            times.append(time.perf_counter() - started_s)
            assert self.core.forward.decode_tokens == ACTIVE
        self.samples[way].append(sorted(times)[len(times) // 2])
        self.core.costs.model = self.learned

    def park(self, streams: Iterable[int]) -> None:
        """Empty these streams."""
        names = self.streams()
        self.policy.victims = tuple([names[stream] for stream in streams])

    def resume(self) -> None:
        """Everybody back."""
        self.policy.parked = False
        self.settle()

    def round(self) -> None:
        """Each way once."""
        names = self.streams()
        self.park(range(ACTIVE, STREAMS))
        self.measure("dense", self.learned)
        self.resume()
        self.policy.resting = {self.streams()[stream] for stream in range(1, STREAMS, 2)}
        self.measure("holes of resting sequences, padded", OnlyPassesCost())
        self.policy.resting = set()
        self.park(range(1, STREAMS, 2))
        self.measure("holes, split", OnlyRowsCost())
        self.measure("holes, padded", OnlyPassesCost())
        self.measure("holes, as the engine chooses", self.learned)
        names = self.streams()
        pairs = zip(range(STREAMS - 2, ACTIVE - 1, -2), range(1, ACTIVE, 2), strict=True)
        self.policy.moves = tuple([Move(names[source], hole) for source, hole in pairs])
        self.measure("after compaction", self.learned)
        assert sorted(self.streams()) == list(range(ACTIVE))
        self.resume()


def fill(context: Context, stream: int, tokens: int) -> None:
    """Compute ``tokens`` tokens into an empty stream."""
    for position in range(0, tokens, 512):
        chunk = [300 + (7 * index) % 3000 for index in range(position, min(position + 512, tokens))]
        context.batch.clear()
        context.batch.add_chunk(chunk, position, stream, last_output=False, all_outputs=False)
        context.decode()


def decode_s(context: Context, stream: int, position: int) -> float:
    """One token on top, taken back afterwards."""
    context.batch.clear()
    context.batch.add_one(300, position, stream)
    started_s = time.perf_counter()
    context.decode()
    elapsed_s = time.perf_counter() - started_s
    context.take_back(stream, position)
    return elapsed_s


def copies(library: Library, context: Context, tokens: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of each way to bring one sequence elsewhere. libllama copies whole streams at the beginning of the next
    call, so its time is what that call takes longer."""
    fill(context, 10, tokens - 1)
    here, there = 10, 3
    times: dict[str, list[float]] = {"save and load": [], "libllama's copy": [], "park": [], "resume": []}
    memory = library.api.llama_get_memory(context.handle)
    for _ in range(rounds + 1):
        started_s = time.perf_counter()
        data = context.save_stream(here, reuse=True)
        context.clear_stream(here)
        assert context.load_stream(there, data)
        times["save and load"].append(time.perf_counter() - started_s)
        here, there = there, here

        plain_s = decode_s(context, here, tokens - 1)
        started_s = time.perf_counter()
        library.api.llama_memory_seq_cp(memory, here, there, -1, -1)
        context.clear_stream(here)
        asked_s = time.perf_counter() - started_s
        times["libllama's copy"].append(asked_s + decode_s(context, there, tokens - 1) - plain_s)
        here, there = there, here

        started_s = time.perf_counter()
        parked = context.save_stream(here)
        context.clear_stream(here)
        saved_s = time.perf_counter()
        assert context.load_stream(there, parked)
        times["park"].append(saved_s - started_s)
        times["resume"].append(time.perf_counter() - saved_s)
        here, there = there, here
    context.clear_stream(here)
    return {name: values[1:] for name, values in times.items()}  # the first round warms


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--threads", type=int, default=usable_cores())
    options = parser.parse_args()

    bench = Bench(options.threads, options.steps)
    for _ in range(options.rounds + 1):
        bench.round()
    samples = {way: values[1:] for way, values in bench.samples.items()}  # the first round warms, and teaches
    bench.core.close()
    rows, steps = [], {}
    for way in WAYS:
        step_ms = Spread.of([1e3 * value for value in samples[way]])
        ratio = Spread.of([value / dense for value, dense in zip(samples[way], samples["dense"], strict=True)])
        rows.append([f"step, {way}", step_ms.text(), ratio.text(2)])
        steps[way] = {"step_ms": step_ms.plain(), "ratio_to_dense": ratio.plain()}

    library = llama_library.load()
    weights = Weights(library, resolve("smollm2"))
    context = Context(library, weights, Band(CONTEXT_TOKENS, STREAMS), step_tokens=512, threads=options.threads)
    copied: dict[str, dict[str, dict[str, float]]] = {}
    for tokens in LENGTHS:
        for name, values in copies(library, context, tokens, options.rounds).items():
            took_ms = Spread.of([1e3 * value for value in values])
            rows.append([f"{name}, {tokens} tokens", took_ms.text(), ""])
            copied.setdefault(name, {})[str(tokens)] = took_ms.plain()
    context.close()
    report(
        "dense_slots",
        f"python -m benchmarks.dense_slots --rounds {options.rounds} --steps {options.steps} "
        f"--threads {options.threads}",
        ["what", "ms", "to dense"],
        rows,
        {"steps": steps, "copies_ms": copied},
    )


if __name__ == "__main__":
    main()
