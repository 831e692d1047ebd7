"""Stock vLLM, vLLM with its own best flags, and vLLM with headrace's policies, in turns under the same load.

Three workloads: a burst of short requests among long prompts, steady light load of shorts alone, and chats that share
the beginnings of their prompts. Every round has its own seed, so that no round finds the last one's prefixes cached;
within a round all three get the same requests. One server runs at a time, with both cores to itself.

A run may be cut into pieces (``--only``, ``--rounds``, ``--first-round``) that write into one folder; ``--report``
alone makes the table of what is there.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, get_args

from benchmarks.vllm_model import checkpoint
from benchmarks.vllm_server import Kind, VllmServer, lane_body, vllm_server

LANES: Final[Mapping[str, dict[str, Any]]] = {
    "short": {"lane": "chat", "priority": 0, "first_token_in_s": 2.0, "tpot_s": 0.25},
    "long": {"lane": "documents", "priority": 90},
}
PRIORITY: Final = {"short": 0, "long": 90}
KNOBS: Final = {"urgent_step_s": 0.4, "idle_step_s": 1.0}


@dataclass(frozen=True)
class Planned:
    """One request: when it is sent, its class, prompt and output length."""

    at_s: float
    kind: str
    prompt: tuple[int, ...]
    tokens: int


@dataclass(frozen=True)
class Happened:
    """What a client saw. Times from when the request was due to be sent."""

    kind: str
    ttft_s: float
    e2e_s: float
    tokens: int


def burst(draw: random.Random) -> list[Planned]:
    """Three prompts of 3,000 tokens, and twelve short ones in the seconds after."""
    longs = [Planned(0.05 * n, "long", _prompt(draw, 3000), 32) for n in range(3)]
    return longs + [Planned(0.5 + 0.25 * n, "short", _prompt(draw, 60), 24) for n in range(12)]


def steady(draw: random.Random) -> list[Planned]:
    """A short request every 0.8 s."""
    return [Planned(0.8 * n, "short", _prompt(draw, 60), 24) for n in range(20)]


def chats(draw: random.Random) -> list[Planned]:
    """Sixteen chats behind one system prompt of 600 tokens, two long documents among them."""
    system = _prompt(draw, 600)
    found = [Planned(0.4 * n, "short", system + _prompt(draw, 40), 24) for n in range(16)]
    return found + [Planned(1.0 + 2.0 * n, "long", _prompt(draw, 2000), 32) for n in range(2)]


WORKLOADS: Final = {"burst": burst, "steady": steady, "chats": chats}


def _prompt(draw: random.Random, tokens: int) -> tuple[int, ...]:
    return tuple([draw.randrange(1000, 40000) for _ in range(tokens)])


async def drive(server: VllmServer, kind: Kind, plan: Sequence[Planned]) -> tuple[list[Happened], float]:
    """Send a plan; what happened, and how long all of it took."""
    import aiohttp

    began_s = time.perf_counter()
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as session:

        async def one(planned: Planned) -> Happened:
            due_s = began_s + planned.at_s
            await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
            body = lane_body(planned.prompt, planned.tokens, kind, LANES[planned.kind], priority=PRIORITY[planned.kind])
            first_s, tokens = 0.0, 0
            async with session.post(f"{server.base}/v1/completions", json={**body, "stream": True}) as answer:
                answer.raise_for_status()
                async for line in answer.content:
                    if not line.startswith(b"data: {"):
                        continue
                    choices = json.loads(line[6:])["choices"]
                    if choices and choices[0].get("token_ids"):
                        first_s = first_s or time.perf_counter()
                        tokens += len(choices[0]["token_ids"])
            assert tokens == planned.tokens, f"{tokens} tokens of {planned.tokens}"
            return Happened(planned.kind, first_s - due_s, time.perf_counter() - due_s, tokens)

        happened = await asyncio.gather(*[one(planned) for planned in plan])
    return list(happened), time.perf_counter() - began_s


def measure(
    kind: Kind, model: Path, rounds: Sequence[int], names: Sequence[str], folder: Path, settings: Mapping[str, Any]
) -> None:
    """Start the server, drive every workload of every round, and write what happened."""
    with vllm_server(kind, model, settings) as server:
        warm = random.Random(f"warm {kind} {rounds}")
        asyncio.run(drive(server, kind, [Planned(0.0, "short", _prompt(warm, 300), 8) for _ in range(3)]))
        for number in rounds:
            for name in names:
                plan = WORKLOADS[name](random.Random(f"{name} {number}"))
                happened, took_s = asyncio.run(drive(server, kind, plan))
                record = {"took_s": took_s, "requests": [asdict(one) for one in happened]}
                (folder / f"{name}-{number}-{kind}.json").write_text(json.dumps(record), encoding="utf-8")
                print(f"{kind} round {number} {name}: {took_s:.1f} s", flush=True)


def report(folder: Path) -> None:
    """A table of all rounds that are there, and the ratios."""
    for name in WORKLOADS:
        rows: dict[str, dict[str, float]] = {}
        for kind in get_args(Kind):
            found = [json.loads(file.read_text()) for file in sorted(folder.glob(f"{name}-*-{kind}.json"))]
            if found:
                rows[kind] = _figures(found)
        if not rows:
            continue
        counts = ", ".join([f"{kind}: {row['rounds']:.0f} rounds" for kind, row in rows.items()])
        print(f"\n{name} ({counts})")
        for key in next(iter(rows.values())):
            if key == "rounds":
                continue
            values = "  ".join(f"{kind} {row[key]:8.3f}" for kind, row in rows.items())
            ours = rows.get("headrace")
            ratios = (
                ""
                if ours is None
                else "  ".join(
                    f"headrace/{kind} {ours[key] / row[key]:.3f}"
                    for kind, row in rows.items()
                    if kind != "headrace" and row[key]
                )
            )
            print(f"  {key:18s} {values}   {ratios}")


def _figures(found: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    shorts = [r for record in found for r in record["requests"] if r["kind"] == "short"]
    longs = [r for record in found for r in record["requests"] if r["kind"] == "long"]
    tokens = sum(r["tokens"] for record in found for r in record["requests"])
    figures = {
        "short p99 TTFT s": _p99([r["ttft_s"] for r in shorts]),
        "short p50 TTFT s": statistics.median([r["ttft_s"] for r in shorts]),
        "short p99 E2E s": _p99([r["e2e_s"] for r in shorts]),
        "output tokens/s": tokens / sum(record["took_s"] for record in found),
    }
    if longs:
        figures["long mean TTFT s"] = statistics.mean([r["ttft_s"] for r in longs])
        figures["long mean E2E s"] = statistics.mean([r["e2e_s"] for r in longs])
    return {**figures, "rounds": float(len(found))}


def _p99(values: Sequence[float]) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]


def main() -> None:
    """Measure, report, or both."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--out", type=Path, required=True, help="folder for records")
    options.add_argument("--model", type=Path, required=True, help="folder for the checkpoint, made if it is not there")
    options.add_argument("--only", nargs="*", choices=get_args(Kind), default=list(get_args(Kind)))
    options.add_argument("--workloads", nargs="*", choices=list(WORKLOADS), default=list(WORKLOADS))
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--first-round", type=int, default=0)
    options.add_argument("--knobs", type=json.loads, default=KNOBS, help="headrace's knobs at start, JSON")
    options.add_argument("--report", action="store_true", help="only the table")
    given = options.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    if not given.report:
        model = checkpoint(given.model)
        for number in range(given.first_round, given.first_round + given.rounds):
            for kind in given.only:
                measure(kind, model, [number], given.workloads, given.out, {"knobs": given.knobs})
    report(given.out)


if __name__ == "__main__":
    main()
