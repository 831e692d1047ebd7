"""What ``headrace plan kv`` and ``headrace plan models`` print."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from rich.console import Console
from rich.text import Text

from headrace.bench.report.grid import Grid, print_grid
from headrace.bench.report.units import NOTHING
from headrace.bench.report.visible import visible
from headrace.cli.plan_bytes import show_bytes, show_exact
from headrace.plan.architectures import Architecture
from headrace.plan.kv_plan import KvPlan


def print_kv(plan: KvPlan, console: Console) -> None:
    """The model, its parts, the totals, libllama's allocation."""
    _say(console, f"{plan.model}: {plan.architecture}, {plan.layers} layers; from {plan.source}", "bold")
    index = f", indexer keys {plan.index_dtype}" if plan.index_dtype else ""
    _say(console, f"keys and values {plan.dtype}{index}; a sequence of {plan.context_tokens:,} tokens")
    console.print()
    print_grid(_parts(plan), console)
    console.print()
    beyond = f" (beyond {plan.window_tokens:,} tokens)" if plan.window_tokens else ""
    _say(console, f"per token{beyond}: {show_exact(plan.bytes_per_token)} B")
    _say(console, f"per sequence: {plan.sequence_bytes:,} B = {show_bytes(plan.sequence_bytes)}")
    if plan.state_bytes:
        _say(console, f"  of it whatever its length: {plan.state_bytes:,} B = {show_bytes(plan.state_bytes)}")
    if plan.sequences > 1:
        _say(console, f"{plan.sequences:,} sequences: {plan.total_bytes:,} B = {show_bytes(plan.total_bytes)}")
    _say(console, _formula(plan))
    if plan.libllama is not None:
        console.print()
        streams = (
            f"{plan.sequences} stream{'s' if plan.sequences > 1 else ''} of {plan.libllama_context_tokens:,} cells"
        )
        _say(console, f"libllama allocates for {streams}: {plan.libllama_bytes:,} B", "bold")
        print_grid(_libllama(plan), console)
    for note in plan.notes:
        _say(console, f"note: {note}", "yellow")


def write_kv_json(plan: KvPlan) -> str:
    """All figures."""
    return msgspec.json.format(msgspec.json.encode(plan)).decode()


def print_models(known: Sequence[Architecture], console: Console) -> None:
    """A line each."""
    rows = [[item.name, ", ".join(item.aliases) or NOTHING, item.date, item.source] for item in known]
    print_grid(Grid(("name", "also", "date", "source"), rows), console)


def write_models_json(known: Sequence[Architecture]) -> str:
    """With every fact."""
    return msgspec.json.format(msgspec.json.encode(list(known))).decode()


def _parts(plan: KvPlan) -> Grid:
    rows = [
        [
            part.name,
            str(part.layers),
            NOTHING if part.row_bytes is None else f"{part.row_bytes:,}",
            show_exact(part.bytes_per_token) if part.bytes_per_token else NOTHING,
            show_bytes(part.sequence_bytes),
        ]
        for part in plan.parts
    ]
    labels = ("kept", "layers", "row bytes", "bytes/token", "per sequence")
    return Grid(labels, rows)


def _libllama(plan: KvPlan) -> Grid:
    assert plan.libllama is not None and plan.libllama_bytes is not None
    rows = [
        [part.name, str(part.layers), f"{part.cells:,}" if part.cells else NOTHING, show_bytes(part.bytes)]
        for part in plan.libllama
    ]
    rows.append(["in all", "", "", show_bytes(plan.libllama_bytes)])
    return Grid(("allocated", "layers", "cells", "bytes"), rows)


def _formula(plan: KvPlan) -> str:
    said = plan.multi_head_bytes_per_token
    if not plan.bytes_per_token:
        return f"2*n_layers*d_model*dtype says {show_exact(said)} B per token; the model keeps nothing per token"
    times = said / plan.bytes_per_token
    return f"2*n_layers*d_model*dtype says {show_exact(said)} B per token: {times:,.3g} times as much"


def _say(console: Console, line: str, style: str = "") -> None:
    console.print(Text(visible(line), style=style))
