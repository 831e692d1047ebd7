"""Dialogues with a long system prompt, with the prefix cache on and off, on the real model.

Some people talk at once, each turn right after the answer to the one before; all share a system prompt. Every round has
a system prompt and questions of its own, so that nothing is left of the round before; on and off take turns, so that a
drifting machine hits both. The engine's own core runs the steps, with the default strategy.

With ``--stores`` the prefix cache is on in both, and the store in RAM on in one: with more people than streams, what
one of them left in a stream is gone when the next turn comes.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness import Spread, report
from headrace.engines.llama.build import build
from headrace.engines.llama.core import EngineCore
from headrace.engines.llama.threads import usable_cores
from headrace.messages.engine import SamplingParams, Start, Submit, TierPlan
from headrace.models.store import resolve
from headrace.models.tiny import make_tiny_gguf

CONTEXT_TOKENS = 2048
STREAMS = 16
FIRST_TOKEN, TOKENS = 300, {"smollm2": 40_000, "tiny": 500}
"""Prompts are of random tokens: the KV does not care what they say, and nothing repeats by chance."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of one round, tokens."""

    people: int
    turns: int
    system_tokens: int
    question_tokens: int
    answer_tokens: int
    tokens: int
    """Prompts are of tokens from ``FIRST_TOKEN`` to this one."""


@dataclass(slots=True)
class Person:
    """One dialogue: all that was said, and when the turn under way was sent."""

    name: str
    history: list[int]
    turn: int = 0
    sent_s: float = 0.0
    answered: bool = False


@dataclass(slots=True)
class Round:
    """What one round of one setting came to. ``ttft_s`` by turn, of all people."""

    ttft_s: list[list[float]]
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    took_s: float = 0.0


def talk(core: EngineCore, shape: Shape, seed: int) -> Round:
    """Run all dialogues to their end."""
    randomness = random.Random(seed)
    found = Round([[] for _ in range(shape.turns)])

    def words(count: int) -> list[int]:
        return [randomness.randrange(FIRST_TOKEN, shape.tokens) for _ in range(count)]

    system = words(shape.system_tokens)
    questions = [[words(shape.question_tokens) for _ in range(shape.turns)] for _ in range(shape.people)]
    people = {f"{seed}.{number}": Person(f"{seed}.{number}", list(system)) for number in range(shape.people)}
    sampling = SamplingParams(temperature=0.0, ignore_eos=True)

    def send(person: Person) -> None:
        person.history += questions[int(person.name.split(".")[1])][person.turn]
        person.sent_s, person.answered = time.monotonic(), False
        found.prompt_tokens += len(person.history)
        core.submit(
            Submit(
                person.name,
                list(person.history),
                sampling,
                "interactive",
                0,
                max_tokens=shape.answer_tokens,
                arrived_s=person.sent_s,
            )
        )

    started_s = time.monotonic()
    for person in people.values():
        send(person)
    while core.has_work:
        step = core.step()
        for output in step.outputs:
            person = people[output.request_id]
            found.cached_tokens += output.cached_tokens
            found.output_tokens += len(output.token_ids)
            if not person.answered:
                person.answered = True
                found.ttft_s[person.turn].append(step.ended_s - person.sent_s)
            person.history += output.token_ids
            if output.finish is not None:
                if output.finish != "length":
                    raise RuntimeError(f"{output.request_id} ended with {output.finish}: {output.error}")
                person.turn += 1
                if person.turn < shape.turns:
                    send(person)
    found.took_s = time.monotonic() - started_s
    return found


def row(setting: str, rounds: Sequence[Round]) -> tuple[list[str], dict[str, object]]:
    """A table row and its data."""
    first = Spread.of([1e3 * statistics.median(one.ttft_s[0]) for one in rounds])
    later = Spread.of([1e3 * statistics.median([ttft for turn in one.ttft_s[1:] for ttft in turn]) for one in rounds])
    prompt_rate = Spread.of([one.prompt_tokens / one.took_s for one in rounds])
    output_rate = Spread.of([one.output_tokens / one.took_s for one in rounds])
    cached = Spread.of([one.cached_tokens / one.prompt_tokens for one in rounds])
    cells = [setting, first.text(0), later.text(0), prompt_rate.text(0), output_rate.text(0), cached.text(3)]
    data: dict[str, object] = {
        "ttft_first_turn_ms": first.plain(),
        "ttft_later_turns_ms": later.plain(),
        "prompt_tokens_per_s": prompt_rate.plain(),
        "output_tokens_per_s": output_rate.plain(),
        "cached_share": cached.plain(),
    }
    return cells, data


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.prefix_reuse", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--people", type=int, default=4)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--question-tokens", type=int, default=40)
    parser.add_argument("--answer-tokens", type=int, default=40)
    parser.add_argument("--model", choices=["smollm2", "tiny"], default="smollm2")
    parser.add_argument("--stores", action="store_true", help="compare the store in RAM, not the prefix cache")
    parser.add_argument("--system-tokens", type=int, default=800)
    parser.add_argument("--threads", type=int, default=usable_cores())
    options = parser.parse_args()
    if options.turns < 2:
        parser.error("--turns must be at least 2: what follows the first turn is compared")

    shape = Shape(
        options.people,
        options.turns,
        options.system_tokens,
        options.question_tokens,
        options.answer_tokens,
        TOKENS[options.model],
    )
    with tempfile.TemporaryDirectory(prefix="prefix-reuse-") as folder:
        model = str(make_tiny_gguf(Path(folder) / "tiny.gguf") if options.model == "tiny" else resolve("smollm2"))
        compare(model, shape, options)


def compare(model: str, shape: Shape, options: argparse.Namespace) -> None:
    """Rounds with both settings in turns, and the report."""
    cores = {
        setting: build(
            Start(
                model,
                options.model,
                [(CONTEXT_TOKENS, STREAMS)],
                threads=options.threads,
                prefix_cache=options.stores or setting == "on",
                kv_tiers=TierPlan(None) if options.stores and setting == "on" else None,
            )
        ).core
        for setting in ("off", "on")
    }
    rounds: dict[str, list[Round]] = {setting: [] for setting in cores}
    for number in range(options.rounds + 1):
        for setting in list(cores) if number % 2 else list(reversed(cores)):
            rounds[setting].append(talk(cores[setting], shape, number))
    for core in cores.values():
        problem = core.check_integrity()
        if problem is not None:
            raise RuntimeError(problem)
        core.close()
    measured = {setting: found[1:] for setting, found in rounds.items()}  # the first round warms, and teaches
    rows, data = [], {}
    for setting, found in measured.items():
        cells, data[setting] = row(setting, found)
        rows.append(cells)
    pairs = list(zip(measured["off"], measured["on"], strict=True))
    faster = Spread.of([off.took_s / on.took_s for off, on in pairs])
    report(
        "prefix_reuse",
        f"python -m benchmarks.prefix_reuse --rounds {options.rounds} --people {options.people} "
        f"--turns {options.turns} --system-tokens {options.system_tokens} "
        f"--question-tokens {options.question_tokens} --answer-tokens {options.answer_tokens} "
        f"--model {options.model} --threads {options.threads}{' --stores' if options.stores else ''}",
        [
            "stores" if options.stores else "cache",
            "TTFT ms, first turn",
            "TTFT ms, later turns",
            "prompt tokens/s",
            "output tokens/s",
            "cached share",
        ],
        rows,
        {"settings": data, "whole_round_off_to_on": faster.plain()},
    )


if __name__ == "__main__":
    main()
