"""One round: the same load by headrace, then by GuideLLM, each against a server that was just started.

    python -m benchmarks.agreement truth --round 1 --guidellm GUIDELLM --tokenizer FOLDER --output FOLDER

``truth`` is the tests' server, which notes what it did; ``smollm2`` is ``headrace serve``. What the server itself
says of a tool's run is saved beside the tool's result and is the judge between them. ``python -m
benchmarks.agreement.table FOLDER`` prints the comparison.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from benchmarks.agreement.results import GUIDELLM_FILE, HEADRACE_FOLDER, SERVED_FILE, exposed_figures, told_figures
from benchmarks.harness import headrace_server
from tests.bench.truth_server import TruthServer

SERVER_CORE, CLIENT_CORE = 0, 1

FIRST_MS, GAP_MS = 50.0, 10.0
"""The truth server's pauses: before the first token, and before each further one."""


_STREAM_OPTIONS = '{"stream_options": {"include_usage": true, "continuous_usage_stats": true}}'
"""What GuideLLM asks for: usage in every chunk. headrace asks for the same here, so that both are the same load."""


class Load(NamedTuple):
    """``text_tokens``: a prompt's tokens without the chat template's, which is how GuideLLM counts."""

    model: str
    rate_rps: float
    duration_s: float
    prompt_tokens: int
    text_tokens: int
    output_tokens: int

    @property
    def requests(self) -> int:
        """How many come in ``duration_s``."""
        return round(self.rate_rps * self.duration_s)


LOADS = {
    "truth": Load("truth", rate_rps=30, duration_s=20, prompt_tokens=128, text_tokens=128, output_tokens=32),
    # SmolLM2's template, with its default system message, takes 30 tokens.
    "smollm2": Load("smollm2", rate_rps=1, duration_s=40, prompt_tokens=128, text_tokens=98, output_tokens=32),
}


def headrace_command(load: Load, url: str, folder: Path, seed: int) -> list[str]:
    """``headrace bench run`` for the load."""
    return [
        *(sys.executable, "-m", "headrace", "bench", "run"),
        *("--target", url, "--model", load.model),
        *("--arrivals", f"constant({load.rate_rps:g})", "--duration", f"{load.duration_s:g}"),
        *("--input-length", str(load.prompt_tokens), "--output-length", str(load.output_tokens)),
        *("--body", _STREAM_OPTIONS),
        *("--seed", str(seed), "--output", str(folder / HEADRACE_FOLDER)),
    ]


def guidellm_command(load: Load, url: str, folder: Path, seed: int, program: Path, tokenizer: Path) -> list[str]:
    """``guidellm run`` for the load. It sends ``max_completion_tokens``; the truth server reads ``max_tokens``."""
    extras = msgspec.json.encode({"body": {"max_tokens": load.output_tokens}}).decode()
    return [
        *(str(program), "run", "--disable-console-interactive"),
        *("--backend", f"kind=openai_http,target={url},model={load.model},extras={extras}"),
        *("--profile", f"kind=constant,rate={load.rate_rps:g}"),
        *("--constraint", f"kind=max_requests,count={load.requests}"),
        *("--tokenizer", f"kind=huggingface_auto,model={tokenizer}"),
        *("--data", f"kind=synthetic_text,prompt_tokens={load.text_tokens},output_tokens={load.output_tokens}"),
        *("--seed", f"kind=static,value={seed}"),
        *("--output", f"kind=json,path={folder / GUIDELLM_FILE}"),
    ]


@contextlib.contextmanager
def on_core(core: int) -> Iterator[None]:
    """Processes that are started inside keep to one core, so that no tool slows the server that it measures."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextlib.contextmanager
def server(name: str, served: Path) -> Iterator[str]:
    """A fresh server's address. What it says of its requests is written to ``served`` at the end."""
    if name == "truth":
        with on_core(SERVER_CORE):
            truth = TruthServer(first_ms=FIRST_MS, gap_ms=GAP_MS)
        try:
            yield truth.url
            told = [truth.told(str(number)) for number in range(1, truth.counts()["requests"] + 1)]
        finally:
            truth.close()
        # The others measured the length of a word, before the run.
        figures = told_figures([one for one in told if one.tokens == LOADS[name].output_tokens])
    else:
        with contextlib.ExitStack() as stack:
            with on_core(SERVER_CORE):
                running = stack.enter_context(headrace_server())
            yield running.base_url
            with urllib.request.urlopen(f"{running.base_url}/metrics", timeout=10) as response:
                figures = exposed_figures(response.read().decode())
    served.write_bytes(msgspec.json.encode(figures))


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options, from the command line unless ``arguments`` are given."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.agreement")
    parser.add_argument("server", choices=sorted(LOADS))
    parser.add_argument("--round", type=int, required=True, help="number of the round; also the seed")
    parser.add_argument("--guidellm", type=Path, required=True, help="the program, in an environment of its own")
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder of benchmarks.agreement.tokenizer")
    parser.add_argument("--output", type=Path, required=True, help="folder for the results")
    return parser.parse_args(arguments)


def main() -> None:
    """Run the round."""
    options = parse()
    load, number = LOADS[options.server], options.round
    folder = (options.output / f"round-{number}").resolve()
    folder.mkdir(parents=True)
    with server(options.server, folder / SERVED_FILE.format(tool="headrace")) as url, on_core(CLIENT_CORE):
        subprocess.run(headrace_command(load, url, folder, number), check=True)
    with server(options.server, folder / SERVED_FILE.format(tool="guidellm")) as url, on_core(CLIENT_CORE):
        command = guidellm_command(load, url, folder, number, options.guidellm, options.tokenizer.resolve())
        # One sender process, as headrace has; the default is ten.
        alone = {"HF_HUB_OFFLINE": "1", "GUIDELLM__MAX_WORKER_PROCESSES": "1"}
        subprocess.run(command, check=True, cwd=folder, env={**alone, **os.environ})


if __name__ == "__main__":
    main()
