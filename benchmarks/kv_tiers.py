"""The second turn of a long conversation, with its beginning from a live stream, from RAM and from disk.

Every round has a conversation of its own: a first turn, then a second one that begins with all of the first (prompt and
answer) and a question. It is asked three times, in an order that changes by round, each time with its beginning
somewhere else: in the stream that ran the first turn, in RAM (the stream has been used by another since), and on disk
(the engine has been started again over the same folder). Right after each, an engine without a prefix cache is asked
the same. TTFT is from the request to the first token, in the engine.

Texts are compared, too. KV from a store is, bit for bit, the KV that was stored; but what is computed after it is
computed in chunks that begin elsewhere, which rounds differently, so that a text may turn at a near tie: where one
does, the table says how far apart the two likeliest tokens were (nats).

With ``--exact`` everything is computed token by token, in every engine, so that calls have the same shapes: then the
texts must be the same, and the benchmark fails where one is not. Times say little there.

With ``--steps``, instead: how long the steps of a decoding sequence take while another one's blocks are packed and
written, beside those while nothing is stored, and the step before which they were copied out.
"""

from __future__ import annotations

import argparse
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness import Spread, report
from headrace.engines.llama import library
from headrace.engines.llama.build import build
from headrace.engines.llama.core import EngineCore
from headrace.engines.llama.threads import usable_cores
from headrace.engines.llama.vocabulary import Vocabulary
from headrace.engines.llama.weights import Weights
from headrace.kv.sources import SourceKind
from headrace.kv.token_blocks import packed
from headrace.messages.engine import SamplingParams, Start, Submit, TierPlan
from headrace.models.store import resolve
from headrace.scheduling.knobs import SchedulingKnobs

STREAMS = 1
DOCS = Path(__file__).resolve().parents[1] / "docs"
"""Conversations are about these pages, each round about another part of them."""
WAYS = ("live", "ram", "disk")
SOURCES: dict[str, SourceKind] = {"live": "take_over", "ram": "ram", "disk": "disk"}
TARGETS = {"live": 0.1, "ram": 0.15, "disk": 0.3}
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True, logprobs=2)


@dataclass(frozen=True, slots=True)
class Answer:
    """What one turn came to. ``gaps``: how far apart, in nats, the two likeliest tokens were at each place."""

    ttft_s: float
    cached_tokens: int
    tokens: tuple[int, ...]
    gaps: tuple[float, ...]


def ask(core: EngineCore, name: str, prompt: Sequence[int], answer_tokens: int) -> Answer:
    """One turn, alone. Raises RuntimeError when it fails."""
    sent_s = time.monotonic()
    core.submit(Submit(name, list(prompt), GREEDY, "chat", 0, max_tokens=answer_tokens, arrived_s=sent_s))
    ttft_s, cached = 0.0, 0
    tokens: list[int] = []
    gaps: list[float] = []
    while core.has_work:
        step = core.step()
        for output in step.outputs:
            if output.error is not None:
                raise RuntimeError(f"{name}: {output.error}")
            if not tokens:
                ttft_s, cached = step.ended_s - sent_s, output.cached_tokens
            tokens += output.token_ids
            gaps += [one.top[0][2] - one.top[1][2] for one in output.logprobs or []]
    return Answer(ttft_s, cached, tuple(tokens), tuple(gaps))


def settle(core: EngineCore) -> None:
    """Wait until all is stored, as between two turns. Raises RuntimeError when the accounts do not agree."""
    while core.chores is not None:
        core.do_chores()
        time.sleep(0.002)
    problem = core.check_integrity()
    if problem is not None:
        raise RuntimeError(problem)


@dataclass(frozen=True, slots=True)
class Setting:
    """How engines are made, and how long turns are, tokens."""

    model: str
    threads: int
    prompt_tokens: int
    question_tokens: int
    answer_tokens: int
    exact: bool = False

    def core(self, folder: Path | None) -> EngineCore:
        """An engine with stores, or, without a ``folder``, without anything to reuse."""
        plan = None if folder is None else TierPlan(1 << 30, str(folder), 4 << 30)
        knobs = SchedulingKnobs(step_tokens=1, max_prefill_tokens=1) if self.exact else SchedulingKnobs()
        context = self.prompt_tokens + self.question_tokens + 2 * self.answer_tokens + 64
        return build(
            Start(
                self.model,
                "smollm2",
                [(context, STREAMS)],
                threads=self.threads,
                prefix_cache=plan is not None,
                kv_tiers=plan,
                scheduling=knobs,
                self_measure=False,
            )
        ).core


def read_pages(setting: Setting) -> list[int]:
    """The documentation as tokens."""
    vocabulary = Vocabulary(Weights(library.load(), Path(setting.model), vocab_only=True))
    text = "\n".join([page.read_text(encoding="utf-8") for page in sorted(DOCS.glob("*.md"))])
    return vocabulary.encode(text, add_special=False, parse_special=False)


def second_turns(
    setting: Setting, plain: EngineCore, folder: Path, pages: Sequence[int], seed: int
) -> tuple[dict[str, Answer], dict[str, Answer]]:
    """One round: the second turn in every way, and each computed."""
    randomness = random.Random(seed)

    def words(count: int) -> list[int]:
        start = randomness.randrange(len(pages) - count)
        return list(pages[start : start + count])

    prompt, question = words(setting.prompt_tokens), words(setting.question_tokens)
    others = [words(setting.prompt_tokens // 2)]
    order = [*WAYS[seed % len(WAYS) :], *WAYS[: seed % len(WAYS)]]
    found: dict[str, Answer] = {}
    computed: dict[str, Answer] = {}
    for way in order:
        shutil.rmtree(folder, ignore_errors=True)
        core = setting.core(folder)
        settle(core)
        first = ask(core, f"{seed}.first", prompt, setting.answer_tokens)
        second = [*prompt, *first.tokens, *question]
        settle(core)
        if way != "live":
            for number, other in enumerate(others):  # they take the stream
                ask(core, f"{seed}.other{number}", other, 1)
                settle(core)
        if way == "disk":
            # Somebody else's second use of the first turn brings it to disk; then the engine starts again.
            ask(core, f"{seed}.use", [*prompt, *first.tokens, 5], 1)
            settle(core)
            core.close()
            core = setting.core(folder)
            settle(core)
        found[way] = ask(core, f"{seed}.second", second, setting.answer_tokens)
        begun = core.residents.reuse.totals.begun
        wanted: SourceKind = SOURCES[way]
        if not begun.get(wanted):
            raise RuntimeError(f"the second turn was to come from {way}: {begun}")
        settle(core)
        core.close()
        computed[way] = ask(plain, f"{seed}.{way}", second, setting.answer_tokens)
    return found, computed


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kv_tiers", description=__doc__)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--prompt-tokens", type=int, default=2000)
    parser.add_argument("--question-tokens", type=int, default=20)
    parser.add_argument("--answer-tokens", type=int, default=24)
    parser.add_argument("--exact", action="store_true", help="token by token: texts must be the same")
    parser.add_argument("--steps", action="store_true", help="measure steps beside packing and writing instead")
    parser.add_argument("--threads", type=int, default=usable_cores())
    options = parser.parse_args()
    setting = Setting(
        str(resolve("smollm2")),
        options.threads,
        options.prompt_tokens,
        options.question_tokens,
        options.answer_tokens,
        options.exact,
    )
    if options.steps:
        measure_steps(setting, options.rounds)
        return
    pages = read_pages(setting)
    plain = setting.core(None)
    folder = Path(tempfile.mkdtemp(prefix="kv-tiers-"))
    try:
        rounds = [second_turns(setting, plain, folder / "blocks", pages, seed) for seed in range(options.rounds)]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    plain.close()
    rows, data = [], {}
    for way in WAYS:
        pairs = [(found[way], computed[way]) for found, computed in rounds]
        ttft = Spread.of([1e3 * answer.ttft_s for answer, _ in pairs])
        all_computed = Spread.of([1e3 * computed.ttft_s for _, computed in pairs])
        ratio = Spread.of([answer.ttft_s / computed.ttft_s for answer, computed in pairs])
        same = sum([answer.tokens == computed.tokens for answer, computed in pairs])
        cached = statistics.median([answer.cached_tokens for answer, _ in pairs])
        gaps = [gap for answer, computed in pairs if (gap := _gap_at_difference(answer, computed)) is not None]
        if options.exact and same < len(rounds):
            raise SystemExit(f"{way}: {len(rounds) - same} texts differ from computing all")
        rows.append(
            [
                way,
                ttft.text(0),
                all_computed.text(0),
                ratio.text(3),
                f"{TARGETS[way]:g}",
                f"{cached:g}",
                f"{same}/{len(rounds)}",
                ", ".join([f"{gap:.3f}" for gap in gaps]) or "-",
            ]
        )
        data[way] = {
            "ttft_ms": ttft.plain(),
            "computed_ttft_ms": all_computed.plain(),
            "of_computed": ratio.plain(),
            "target": TARGETS[way],
            "cached_tokens": cached,
            "same_text": same,
            "gap_at_difference": gaps,
        }
    report(
        "kv_tiers",
        f"python -m benchmarks.kv_tiers --rounds {options.rounds} --prompt-tokens {options.prompt_tokens} "
        f"--question-tokens {options.question_tokens} --answer-tokens {options.answer_tokens} "
        f"--threads {options.threads}{' --exact' if options.exact else ''}",
        [
            "beginning",
            "TTFT ms, second turn",
            "all computed",
            "ratio",
            "at most",
            "cached tokens",
            "same text",
            "gap where not",
        ],
        rows,
        {"ways": data},
    )


def _gap_at_difference(one: Answer, computed: Answer) -> float | None:
    """How far apart the two likeliest tokens were where two answers part; None when they do not."""
    for index, (first, second) in enumerate(zip(one.tokens, computed.tokens, strict=True)):
        if first != second:
            return computed.gaps[index]
    return None


def measure_steps(setting: Setting, rounds: int) -> None:
    """Steps of one decoding sequence, with and without work beside them. Raises RuntimeError when there was none."""
    folder = Path(tempfile.mkdtemp(prefix="kv-tiers-"))
    quiet: list[float] = []
    busy: list[float] = []
    copying: list[float] = []
    beside_s: list[float] = []
    try:
        for number in range(rounds):
            shutil.rmtree(folder, ignore_errors=True)
            _steps_of_one_round(setting, folder, number, quiet, busy, copying, beside_s)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    rows, data = [], {}
    for name, steps in (("nothing stored", quiet), ("packing and writing", busy), ("copied before it", copying)):
        ordered = sorted(steps)
        median, late = statistics.median(ordered), ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
        rows.append([name, str(len(ordered)), f"{1e3 * median:.1f}", f"{1e3 * late:.1f}", f"{1e3 * ordered[-1]:.1f}"])
        data[name] = {"steps": len(ordered), "median_s": median, "p99_s": late, "most_s": ordered[-1]}
    report(
        "kv_tiers_steps",
        f"python -m benchmarks.kv_tiers --steps --rounds {rounds} --prompt-tokens {setting.prompt_tokens} "
        f"--threads {setting.threads}",
        ["steps while", "steps", "median ms", "p99 ms", "most ms"],
        rows,
        {"steps": data, "beside_s": beside_s},
    )


def _steps_of_one_round(
    setting: Setting,
    folder: Path,
    seed: int,
    quiet: list[float],
    busy: list[float],
    copying: list[float],
    beside_s: list[float],
) -> None:
    randomness = random.Random(seed)
    plan = TierPlan(1 << 30, str(folder), 4 << 30, compress_threshold=0, codec="zstd")
    bands = [(setting.prompt_tokens + 1024, 2)]
    core = build(
        Start(setting.model, "smollm2", bands, threads=setting.threads, kv_tiers=plan, self_measure=False)
    ).core
    tiering = core.residents.tiering
    assert tiering is not None
    prompt = [randomness.randrange(300, 40_000) for _ in range(setting.prompt_tokens)]
    ask(core, "stored", prompt, 1)  # its stream is not saved yet
    core.submit(Submit("decoding", prompt[:8], GREEDY, "chat", 0, max_tokens=800))
    written, begun_s = False, 0.0
    while core.has_work:
        working, copied_s = tiering.tiers.working, tiering.copy_s
        started_s = time.monotonic()
        core.step()
        took_s = time.monotonic() - started_s
        if tiering.copy_s > copied_s:
            copying.append(took_s)
            begun_s = time.monotonic()
        elif working:
            busy.append(took_s)
        elif core.residents.running and begun_s:
            quiet.append(took_s)
            if not written:  # all is packed: its second use sends it to disk
                written = True
                tiering.began(0, ("", "tenant", None), packed(prompt))
                begun_s, packed_s = time.monotonic(), time.monotonic() - begun_s
                beside_s.append(packed_s)
    if not written or not tiering.tiers.store.totals.written:
        raise RuntimeError("nothing was written while the sequence decoded")
    core.close()


if __name__ == "__main__":
    main()
