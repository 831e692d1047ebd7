"""A real server is measured from outside."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from benchmarks.harness import headrace_server
from headrace.errors import ConfigError
from headrace.models.tiny import make_tiny_gguf
from headrace.simulate.calibrate.server import plan_for
from headrace.simulate.calibrated import read_calibration


def test_a_plan_stays_within_context_and_number() -> None:
    plan = plan_for(1024, 6, 1.0)
    assert plan.prompt_tokens == [16, 32, 64, 128, 256, 512]
    assert plan.together == [1, 2, 4, 6] and plan.contexts == [16, 512]
    with pytest.raises(ConfigError, match="too short"):
        plan_for(100, 1, 1.0)


@pytest.mark.slow
def test_curves_come_out_of_a_server(tmp_path: Path) -> None:
    """From outside: a curve over batches and one over prompts that rises. From a profile of its engine: what serving
    adds."""
    model = make_tiny_gguf(tmp_path / "tiny.gguf", layers=6, embedding=256, heads=8, kv_heads=4, feed_forward=768)
    config = tmp_path / "headrace.yaml"
    config.write_text(
        f"model: {{source: {model}}}\n"
        "engine: {threads: 1, prefix_cache: false, bands: [{max_context_tokens: 1024, max_sequences: 4}]}\n"
    )
    command = [sys.executable, "-m", "headrace", "calibrate"]
    outside, alone, service = (tmp_path / f"{name}.json" for name in ("outside", "alone", "service"))
    subprocess.run(
        [*command, "engine", "--config", config, "--output", alone, "--repeats", "3"], check=True, timeout=100
    )
    with headrace_server(["--config", str(config)]) as served:
        with urllib.request.urlopen(f"{served.base_url}/v1/models", timeout=10) as answer:
            name = json.load(answer)["data"][0]["id"]
        target = ["--target", served.base_url, "--model", name, "--point-time", "1"]
        subprocess.run(
            [*command, "server", *target, "--context", "1024", "--together", "4", "--output", outside],
            check=True,
            timeout=100,
        )
        subprocess.run([*command, "service", alone, *target, "--output", service], check=True, timeout=100)
    found = read_calibration(outside)
    assert [rows for rows, _ in found.decode_ms] == [1, 2, 4]
    prompts = [taken for _, taken in found.prompt_ms]
    assert prompts == sorted(prompts) and len(prompts) >= 5
    assert "in service" in read_calibration(service).source
