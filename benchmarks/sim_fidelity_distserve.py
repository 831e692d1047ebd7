"""The placement that DistServe publishes, found again: prompts and answers of OPT-13B on separate A100s.

Published (github.com/LLMServe/DistServe, simdistserve/README.md): ShareGPT, 300 requests, TTFT within 200 ms and TPOT
within 100 ms for 90 % each, up to 4 accelerators: 1.56 requests/s per accelerator, with tensor parallelism 2 for
prompts and 1 for answers. Step times are DistServe's fitted lines; lengths are those of another extract of ShareGPT,
cut at OPT's context of 2,048 tokens as DistServe does it. The rate is searched in halves between 0 and 5 down to 0.25,
as published, and to 0.01 as well. Every figure is over ``--seeds`` drawings of requests and arrivals.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.disaggregated import Served, Side, serve
from benchmarks.harness import report
from headrace.simulate.hardware.coefficients import FittedLines

MODEL = "facebook/opt-13b"
PUBLISHED_RATE, PUBLISHED_PLACEMENT = 1.56, (2, 1, 1, 1)
TTFT_S, TPOT_S, ATTAINMENT, REQUESTS, ACCELERATORS = 0.2, 0.1, 0.9, 300, 4
CONTEXT_TOKENS = 2048
Lengths = Sequence[tuple[int, int]]
Placement = tuple[int, int, int, int]
"""Tensor parallelism and stages of prompts, then of answers."""


@dataclass(frozen=True)
class Placed:
    """One placement, and its best rates per accelerator: at the published steps, and finely."""

    placement: Placement
    accelerators: int
    coarse: list[float]
    fine: list[float]


def read_lengths(data: Path) -> list[tuple[int, int]]:
    """Prompts and answers that fit OPT's context."""
    with (data / "sharegpt-8k-lengths/sharegpt_8k_filtered_stats_llama2_tokenizer.csv").open(newline="") as file:
        pairs = [(int(row["num_prefill_tokens"]), int(row["num_decode_tokens"])) for row in csv.DictReader(file)]
    return [pair for pair in pairs if sum(pair) < CONTEXT_TOKENS and pair[1] > 1]


def scaled(lengths: Lengths, prompt_mean: float, output_mean: float) -> list[tuple[int, int]]:
    """The same shapes with other means, as far as OPT's context goes: a factor for prompts and one for answers, found
    by repetition because the context cuts some off."""
    prompts, outputs = 1.0, 1.0
    found: list[tuple[int, int]] = []
    for _ in range(40):
        made = [(max(4, round(prompts * prompt)), max(2, round(outputs * output))) for prompt, output in lengths]
        found = [pair for pair in made if sum(pair) < CONTEXT_TOKENS]
        prompts *= prompt_mean / statistics.mean([prompt for prompt, _ in found])
        outputs *= output_mean / statistics.mean([output for _, output in found])
    return found


def tilted(lengths: Lengths, prompt_mean: float, output_mean: float) -> list[tuple[int, int]]:
    """As many requests drawn anew from the same ones, with weights exp(a * prompt + b * output): of all weightings
    with these means the one nearest to none (least relative entropy). Newton's method finds a and b."""
    pairs = np.array(lengths, np.float64)
    wanted, factors = np.array([prompt_mean, output_mean]), np.zeros(2)
    for _ in range(60):
        logs = pairs @ factors
        weights = np.exp(logs - logs.max())
        weights /= weights.sum()
        means = weights @ pairs
        spread = (pairs - means).T @ ((pairs - means) * weights[:, None])
        factors += np.linalg.solve(spread, wanted - means)
    chosen = np.random.default_rng(0).choice(len(lengths), size=len(lengths), p=weights)
    return [lengths[index] for index in chosen]


def meets(lengths: Lengths, prompts: Side, answers: Side, rate: float, seed: int) -> bool:
    """Whether both targets are met for enough of one drawing at ``rate`` requests/s in all."""
    draw = random.Random(seed)
    at_s, requests = 0.0, []
    for prompt_tokens, output_tokens in draw.sample(lengths, REQUESTS):
        requests.append(Served(at_s, prompt_tokens, output_tokens))
        at_s += draw.expovariate(rate)
    serve(requests, prompts, answers)
    return all(
        [
            sum([value <= target for value in values]) >= ATTAINMENT * REQUESTS
            for values, target in (
                ([request.ttft_s for request in requests], TTFT_S),
                ([request.tpot_s for request in requests], TPOT_S),
            )
        ]
    )


def best_rate(lengths: Lengths, prompts: Side, answers: Side, seed: int, within: float) -> float:
    """Requests/s per accelerator, by halving."""
    low, high = 0.0, 5.0
    accelerators = prompts.accelerators + answers.accelerators
    while high - low >= within:
        middle = (low + high) / 2
        if meets(lengths, prompts, answers, middle * accelerators, seed):
            low = middle
        else:
            high = middle
    return low


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder with distserve/ and sharegpt-8k-lengths/")
    parser.add_argument("--seeds", type=int, default=7)
    parser.add_argument(
        "--means", type=float, nargs=2, metavar=("PROMPT", "OUTPUT"), help="scale lengths to these means of tokens"
    )
    parser.add_argument("--match", choices=["tilt", "scale"], default="tilt", help="how lengths come to these means")
    options = parser.parse_args()
    profile = options.data / "distserve/profiler-a100-80g.distserve.json"
    times = {tensor: FittedLines(profile, model=MODEL, tensor=tensor) for tensor in (1, 2, 4)}
    lengths = read_lengths(options.data)
    if options.means:
        lengths = (tilted if options.match == "tilt" else scaled)(lengths, *options.means)
    found = []
    for placement in itertools.product((1, 2, 4), (1, 2), (1, 2, 4), (1, 2)):
        prompt_ranks, prompt_stages, answer_ranks, answer_stages = placement
        if prompt_ranks * prompt_stages + answer_ranks * answer_stages > ACCELERATORS:
            continue
        prompts = Side(times[prompt_ranks], prompt_ranks, prompt_stages)
        answers = Side(times[answer_ranks], answer_ranks, answer_stages)
        coarse, fine = (
            [best_rate(lengths, prompts, answers, seed, within) for seed in range(options.seeds)]
            for within in (0.25, 0.01)
        )
        found.append(Placed(placement, prompts.accelerators + answers.accelerators, coarse, fine))
    found.sort(key=lambda one: -statistics.mean(one.fine))
    best = found[0]
    coarse_rate, rate = statistics.median(best.coarse), statistics.mean(best.fine)
    means = "" if options.means is None else f" --means {options.means[0]} {options.means[1]} --match {options.match}"
    report(
        "sim_fidelity_distserve",
        f"python -m benchmarks.sim_fidelity_distserve --data {options.data} --seeds {options.seeds}{means}",
        ["prompts, answers", "accelerators", "req/s each, steps of 0.25", "mean req/s each, to 0.01 (range)", ""],
        [
            [
                "TP{} x {}, TP{} x {}".format(*one.placement),
                str(one.accelerators),
                f"{statistics.median(one.coarse):.2f}",
                f"{statistics.mean(one.fine):.2f} ({min(one.fine):.2f} to {max(one.fine):.2f})",
                "published: 1.56" if one.placement == PUBLISHED_PLACEMENT else "",
            ]
            for one in found
        ],
        {
            "best_placement": best.placement,
            "same_placement": best.placement == PUBLISHED_PLACEMENT,
            "rate_at_published_steps": coarse_rate,
            "error_at_published_steps": coarse_rate / PUBLISHED_RATE - 1,
            "rate": rate,
            "error": rate / PUBLISHED_RATE - 1,
            "mean_prompt_tokens": statistics.mean([prompt for prompt, _ in lengths]),
            "mean_output_tokens": statistics.mean([output for _, output in lengths]),
            "placements": [{"placement": one.placement, "coarse": one.coarse, "fine": one.fine} for one in found],
        },
    )


if __name__ == "__main__":
    main()
