"""The file of a calibration, and the times that it gives."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from headrace.errors import ConfigError
from headrace.simulate.calibrated import CalibratedTimes, Calibration, read_calibration, write_calibration
from headrace.simulate.hardware.work import Chunk, Work

MADE = Calibration(
    format="headrace-step-times-1",
    source="a test",
    date="2026-12-01",
    model="m",
    machine="here",
    decode_ms=[(1, 5.0), (4, 8.0)],
    prompt_ms=[(16, 20.0), (64, 68.0)],
    context_s=1e-6,
    pair_s=1e-7,
    copy_s_per_token=1e-5,
)


def test_decodes_and_prompts_have_curves_of_their_own(tmp_path: Path) -> None:
    """Lines between the points and beyond them; context and pairs on top; what was written is read back."""
    path = tmp_path / "calibration.json"
    write_calibration(path, MADE)
    assert read_calibration(path) == MADE
    times = CalibratedTimes(MADE)
    assert times.call_s(2, 100) == pytest.approx(0.006 + 1e-4)
    assert times.call_s(32, 0, 500) == pytest.approx(0.036 + 5e-5)
    assert times.call_s(4096, 0, 1) == pytest.approx(4.1, rel=1e-6)
    assert times.pass_s(Work(1, 100, (Chunk(0, 31),))) == pytest.approx(times.call_s(32, 100, 496))
    assert times.move_s(100, 0) == pytest.approx(1e-3)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"decode_ms": []}, "has no points"),
        ({"decode_ms": [(4, 1.0), (2, 1.0)]}, "do not rise"),
        ({"prompt_ms": [(1, -1.0)]}, "0 and more"),
        ({"context_s": -1.0}, "0 or more"),
        ({"format": "other"}, "no file of headrace calibrate"),
        ({"colour": "green"}, "colour"),
    ],
)
def test_what_no_measurement_gives_is_refused(tmp_path: Path, change: dict[str, object], said: str) -> None:
    path = tmp_path / "calibration.json"
    path.write_text(json.dumps({**msgspec.to_builtins(MADE), **change}))
    with pytest.raises(ConfigError, match=said):
        read_calibration(path)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_calibration(tmp_path / "none.json")
    with pytest.raises(ConfigError, match="cannot be written"):
        write_calibration(tmp_path / "none" / "file.json", MADE)
