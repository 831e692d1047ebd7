"""What ``headrace plan seqs`` prints: the arithmetic, then every answer with its probability of overflow."""

from __future__ import annotations

import msgspec
from rich.console import Console
from rich.text import Text

from headrace.bench.report.grid import Grid, print_grid
from headrace.bench.report.units import NOTHING
from headrace.bench.report.visible import visible
from headrace.cli.plan_bytes import show_bytes, show_exact
from headrace.plan.seqs_plan import Answer, SeqsPlan


def print_seqs(plan: SeqsPlan, console: Console) -> None:
    """The steps from lengths to a number of sequences."""
    _say(console, f"{plan.model}: {plan.architecture}; from {plan.source}", "bold")
    for line in _steps(plan):
        _say(console, line)
    console.print()
    print_grid(_answers(plan), console)
    _say(console, _wrong(plan))


def write_seqs_json(plan: SeqsPlan) -> str:
    """All figures."""
    return msgspec.json.format(msgspec.json.encode(plan)).decode()


def _steps(plan: SeqsPlan) -> list[str]:
    reserve = f" - {show_bytes(plan.reserve_bytes)} reserved" if plan.reserve_bytes else ""
    rounding = ", sizes rounded up to it" if plan.rounded_up else ""
    return [
        f"lengths: {plan.lengths}, cut to {plan.context_tokens:,} tokens",
        f"tokens: mean {plan.mean_tokens:,.1f}, standard deviation {plan.std_tokens:,.1f}, "
        f"p50 {plan.p50_tokens:,}, p99 {plan.p99_tokens:,}",
        f"bytes per sequence, in blocks of {plan.block_tokens} tokens, {plan.dtype}: "
        f"mean {show_bytes(plan.mean_bytes)}, "
        f"standard deviation {show_bytes(plan.std_bytes)}, "
        f"smallest {show_bytes(plan.smallest_bytes)}, largest {show_bytes(plan.largest_bytes)}",
        f"KV memory: {show_bytes(plan.memory_bytes)}{reserve} = {show_bytes(plan.kv_bytes)}",
        f"sum of n sizes: exact convolution in units of {plan.unit_bytes:,} B{rounding}",
        f"P(sum of {plan.sequences:,} > memory) = {_chance(plan.sequences_overflow)}, "
        f"of {plan.sequences + 1:,}: {_chance(plan.one_more_overflow)}; "
        f"accepted: {_chance(plan.accepted_overflow)}",
        f"=> {plan.sequences:,} sequences",
    ]


def _answers(plan: SeqsPlan) -> Grid:
    rows = [_row(answer) for answer in plan.answers]
    return Grid(("how many by", "sequences", "to exact", "P(overflow)"), rows, styles={0: "bold"})


def _row(answer: Answer) -> list[str]:
    return [
        answer.name,
        NOTHING if answer.count is None else f"{answer.count:,}",
        NOTHING if answer.ratio is None else f"x {answer.ratio:.3g}",
        NOTHING if answer.overflow is None else _chance(answer.overflow),
    ]


def _wrong(plan: SeqsPlan) -> str:
    said, real = plan.multi_head_bytes_per_token, plan.bytes_per_token
    times = f", {said / real:,.3g} times the {show_exact(real)} B that it keeps" if real else ""
    return (
        f"The multi-head formula counts {show_exact(said)} B per token of this model{times}; "
        "int(gpu_mem*0.8/...) knows no length: it says the same for prompts of 100 tokens and of 100,000."
    )


def _chance(chance: float) -> str:
    return "0" if chance == 0 else f"{chance:.4g}"


def _say(console: Console, line: str, style: str = "") -> None:
    console.print(Text(visible(line), style=style))
