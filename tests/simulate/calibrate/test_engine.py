"""The real engine is measured, on a tiny model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.models.tiny import make_tiny_gguf
from headrace.scheduling.bands import Band
from headrace.simulate.calibrate.engine import batch_sizes_for, chunk_sizes_for
from headrace.simulate.calibrated import read_calibration

CONFIG = """
model:
  source: {model}
engine:
  threads: 1
  bands:
    - {{max_context_tokens: 512, max_sequences: 3}}
"""


def test_every_batch_and_chunk_up_to_the_largest_is_measured() -> None:
    assert batch_sizes_for(Band(512, 3)) == [1, 2, 3]
    assert batch_sizes_for(Band(512, 12)) == [*range(1, 9), 10, 12]
    assert chunk_sizes_for(Band(512, 3), 512) == [16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 448]
    assert chunk_sizes_for(Band(4096, 3), 128)[-1] == 128


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What ``headrace calibrate engine`` writes of a tiny model."""
    folder = tmp_path_factory.mktemp("calibrated")
    model = make_tiny_gguf(folder / "tiny.gguf")
    (folder / "headrace.yaml").write_text(CONFIG.format(model=model))
    done = subprocess.run(
        [sys.executable, "-m", "headrace", "calibrate", "engine", "--repeats", "3", "--most-time", "20"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert "written: calibration.json" in done.stdout
    return folder / "calibration.json"


def test_the_profile_has_curves_over_all_sizes(calibrated: Path) -> None:
    """Decodes of 1 to 3 sequences, prompt chunks up to the longest, times that are possible, and where they are
    from."""
    found = read_calibration(calibrated)
    assert [rows for rows, _ in found.decode_ms] == [1, 2, 3]
    assert {16, 64, 256} <= {rows for rows, _ in found.prompt_ms}
    assert all(0 < taken < 10_000 for _, taken in (*found.decode_ms, *found.prompt_ms))
    assert found.bands == [(512, 3)] and found.passes > 50
    assert "1 thread" in found.source and found.layout == "libllama"


def test_the_profile_is_shown(calibrated: Path) -> None:
    """By the same command that shows rooflines; as JSON too."""
    shown = subprocess.run(
        [sys.executable, "-m", "headrace", "calibrate", "show", "--json", str(calibrated)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    document = json.loads(shown.stdout)
    assert document["source"].startswith("headrace calibrate engine")
    assert document["decode_s"][0][1] > 0
