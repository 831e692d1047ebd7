"""Step times by their texts."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.errors import ConfigError, HeadraceError
from headrace.simulate.hardware.open_times import open_times
from headrace.simulate.hardware.roofline import Roofline
from headrace.simulate.hardware.work import Work
from tests.simulate.hardware.test_tables import write_batch_table, write_layer_profile, write_lines


def test_a_roofline_with_everything() -> None:
    times = open_times(
        "roofline(B200, deepseek-v4-pro, data=8, experts=whole, weights=fp8, expert_weights=fp4, kv=fp8, index=fp4)"
    )
    assert isinstance(times, Roofline)
    assert times.parallel.ranks == 8 and times.parallel.expert
    assert times.precision.expert_weights == "fp4"
    assert times.kv_bytes_per_token() == pytest.approx(5_031, abs=1)


def test_a_calibration_is_named() -> None:
    """The ring of 2023 makes tokens slower."""
    plain = open_times("roofline(a100, llama-2-70b, tensor=8)")
    old = open_times("roofline(a100, llama-2-70b, tensor=8, calibration=vllm-2023-a100)")
    assert old.call_s(1, 512) > 2 * plain.call_s(1, 512)


def test_tables_are_opened(tmp_path: Path) -> None:
    write_layer_profile(tmp_path)
    write_batch_table(tmp_path / "table.csv")
    write_lines(tmp_path / "lines.json")
    assert open_times(f"layers({tmp_path}, 2)").pass_s(Work(1, 10)) > 0
    assert open_times(f"layers({tmp_path}, 2, step_ms=500)").pass_s(Work(1, 10)) > 0.5
    assert open_times(f"batches({tmp_path / 'table.csv'}, big, fast, tensor=2)").call_s(2) == pytest.approx(0.022)
    assert open_times(f"lines({tmp_path / 'lines.json'}, small)").call_s(4, 300) == pytest.approx(0.025)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("flat(1)", "names no step times"),
        ("roofline(h100)", "takes 2 values"),
        ("roofline(h100, llama-3.1-8b, tensor=x)", "no whole number"),
        ("roofline(h100, llama-3.1-8b, colour=green)", "has no 'colour'"),
        ("roofline(h100, llama-3.1-8b, weights=q4)", "weights are"),
        ("roofline(h100, llama-3.1-8b, experts=some)", "'whole' or 'shared'"),
        ("roofline(h100, llama-3.1-8b, calibration=mine)", "no known calibration"),
        ("roofline(h100, llama-9)", "neither a file nor a known architecture"),
        ("roofline(h100, qwen3.5-27b)", "not known to headrace"),
        ("layers(none, 2, step_ms=-1)", "0 and more"),
        ("none.json", "cannot be read"),
        ("roofline(h100, llama-3.1-8b, kernels=/nowhere)", "holds no table"),
    ],
)
def test_what_is_wrong_is_said(text: str, said: str) -> None:
    with pytest.raises(HeadraceError, match=said):
        open_times(text)


def test_where_it_stands_is_said() -> None:
    with pytest.raises(ConfigError, match=r"groups\.a\.times"):
        open_times("flat(1)", where="groups.a.times")
