"""``headrace plan`` as it is typed: figures, JSON, and one line with exit code 1 for what is wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from headrace.cli.main import main
from headrace.models.tiny_kinds import make_tiny_kind

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments: str) -> Result:
    return CliRunner(env={"COLUMNS": "100"}).invoke(main, ["plan", *arguments])


def answered(*arguments: str) -> Any:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_kv_by_name() -> None:
    """V4-Pro at 1M tokens in bf16, as published: the figures, the origin, and what the formula says."""
    plan = answered("kv", "--model", "deepseek-v4-pro", "--context", "1024ki", "--dtype", "bf16")
    assert plan["bytes_per_token"] == 9848 and plan["context_tokens"] == 1 << 20
    assert plan["multi_head_bytes_per_token"] == 1_748_992
    assert plan["sequence_bytes"] == sum(part["sequence_bytes"] for part in plan["parts"])
    assert "deepseek-ai/DeepSeek-V4-Pro" in plan["source"] and "2026-08-21" in plan["source"]
    table = run("kv", "--model", "DeepSeek-V4-Pro", "--dtype", "bf16").stdout
    for text in ("9,848 B", "1,748,992 B per token: 178 times as much", "16.67 MiB", "one of 128 tokens"):
        assert text in table


def test_fp8_is_no_type_of_libllama() -> None:
    plan = answered("kv", "--model", "deepseek-v3.2", "--dtype", "fp8")
    assert plan["bytes_per_token"] == 48_068 and plan["libllama"] is None
    assert any("libllama has no fp8" in note for note in plan["notes"])


def test_kv_of_a_gguf(tmp_path: Path) -> None:
    """A file, and the allocation for several streams."""
    path = make_tiny_kind("gqa", tmp_path / "tiny.gguf")
    plan = answered("kv", "--model", str(path), "--context", "1000", "--sequences", "3", "--dtype", "q8_0")
    assert plan["bytes_per_token"] == 2 * 2 * 68 and plan["sequence_bytes"] == 1000 * 272
    assert plan["libllama_context_tokens"] == 1024 and plan["libllama_bytes"] == 3 * 1024 * 272


def test_kv_of_a_folder_with_a_config(tmp_path: Path) -> None:
    fields = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert answered("kv", "--model", str(tmp_path), "--context", "10")["sequence_bytes"] == 10 * 2 * 2 * 64 * 2
    result = run("kv", "--model", str(tmp_path))
    assert result.exit_code == 1 and "--context: the model does not say how long its context is" in result.stderr


def test_models_are_listed() -> None:
    listed = answered("models")
    assert {"deepseek-v4-pro", "llama-3.1-8b", "smollm2-135m"} <= {item["name"] for item in listed}
    assert all(item["source"] and item["date"] for item in listed)
    assert "deepseek-v4-flash" in run("models").stdout


SEQS = ("seqs", "--model", "llama-3.1-8b", "--memory", "80GiB", "--reserve", "16GiB")
LENGTHS = ("--input-length", "uniform(100, 4000)", "--output-length", "200")


def test_seqs() -> None:
    """The arithmetic is in the answer, and the formulas beside it with their ratio and probability."""
    plan = answered(*SEQS, *LENGTHS, "--overflow", "0.01")
    assert plan["sequences_overflow"] <= 0.01 < plan["one_more_overflow"]
    assert plan["kv_bytes"] == 64 << 30 and plan["block_tokens"] == 128
    by_name = {answer["name"]: answer for answer in plan["answers"]}
    assert by_name["exact"]["count"] == plan["sequences"]
    formula = by_name["int(gpu_mem*0.8/(2*model_size*precision))"]
    assert formula["count"] == 2 and formula["overflow"] == 0
    assert by_name["memory / mean size"]["overflow"] > 0.3
    shown = run(*SEQS, *LENGTHS).stdout
    for text in ("mean 2,2", "standard deviation", "=> ", "sequences", "P(overflow)", "4 times the 131,072 B"):
        assert text in shown


def test_seqs_from_a_trace_while_running(tmp_path: Path) -> None:
    """At a random moment sequences are shorter than at their end: more fit."""
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(f'{{"at_s": {i}, "input_tokens": 10, "output_tokens": 3000}}\n' for i in range(3)))
    end = answered(*SEQS, "--trace", str(trace))
    running = answered(*SEQS, "--trace", str(trace), "--at", "running")
    assert running["sequences"] > 1.5 * end["sequences"]
    assert running["mean_tokens"] == pytest.approx(10 + 3001 / 2)


def test_weights_that_are_not_known_leave_the_second_formula_open() -> None:
    without = answered("seqs", "--model", "mixtral-8x7b", "--memory", "80GiB", *LENGTHS)
    assert without["answers"][6]["count"] is None
    given = answered("seqs", "--model", "mixtral-8x7b", "--memory", "80GB", *LENGTHS, "--parameters", "8000m")
    assert given["answers"][6]["count"] == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("kv", "--model", "lama-3.1-8b"), "neither a file nor a known architecture; did you mean llama-3.1-8b"),
        (("kv", "--model", "./nothing.gguf"), "there is no file ./nothing.gguf"),
        (("kv", "--model", "/dev/null"), "is no regular file"),
        (("kv", "--model", "a\0b"), "is no file name"),
        (("kv", "--model", "x" * 5000), "cannot be read: File name too long"),
        (("kv", "--model", "llama-3.1-8b", "--context", "0"), "--context: 0 is out of range"),
        (("kv", "--model", "llama-3.1-8b", "--context", "many"), "--context: 'many' is not a whole number"),
        (("kv", "--model", "llama-3.1-8b", "--context", "1.5"), "--context: '1.5' is not a whole number"),
        (("kv", "--model", "llama-3.1-8b", "--context", "9" * 400), "--context"),
        (
            ("kv", "--model", "smollm2-135m", "--dtype", "f16", "--index-dtype", "fp4", "--sequences", "0"),
            "--sequences",
        ),
        (("kv", "--model", "deepseek-v3.2", "--dtype", "q8_0", "--index-dtype", "fp4", "--context", "x"), "--context"),
        (("seqs", "--model", "llama-3.1-8b", "--memory", "80", *LENGTHS), "--memory: '80' is not a size"),
        (("seqs", "--model", "llama-3.1-8b", "--memory", "9" * 12 + "TiB", *LENGTHS), "more than 2^60 bytes"),
        ((*SEQS[:5], "--reserve", "81GiB", *LENGTHS), "leave nothing for KV memory"),
        ((*SEQS, *LENGTHS, "--overflow", "0"), "--overflow: 0 is out of range"),
        ((*SEQS, *LENGTHS, "--overflow", "nan"), "--overflow: nan is out of range"),
        ((*SEQS, "--input-length", "5"), "--output-length: is needed"),
        ((*SEQS, "--trace", "/nowhere.csv"), "/nowhere.csv: cannot be read"),
        ((*SEQS, *LENGTHS, "--context", "100m"), "--context: 100000000 tokens are too many to compute with"),
    ],
)
def test_what_is_wrong_is_one_line_and_exit_code_1(arguments: tuple[str, ...], message: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 1, result.output
    assert message in result.stderr
    assert result.stderr.count("\n") == 1 and result.stderr.startswith("error: ")


def test_a_wrong_choice_is_exit_code_2() -> None:
    result = run("kv", "--model", "llama-3.1-8b", "--dtype", "int3")
    assert result.exit_code == 2 and "'int3' is not one of 'f16'" in result.stderr


def test_the_script_writes_every_kind(tmp_path: Path) -> None:
    command = [sys.executable, "scripts/make_tiny_kinds.py", str(tmp_path / "kinds")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    made = sorted(path.name for path in (tmp_path / "kinds").iterdir())
    assert len(made) == 10 and "compressed.gguf" in made and "latent-indexed.gguf" in made
    assert done.stdout.count("\n") == 10
