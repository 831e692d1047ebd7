"""Step times from tables of measurements, in each of the formats that are read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import ConfigError
from headrace.simulate.hardware.batch_table import BatchTable
from headrace.simulate.hardware.coefficients import FittedLines
from headrace.simulate.hardware.interpolate import Curve, Surface
from headrace.simulate.hardware.layer_profile import LayerProfile
from headrace.simulate.hardware.work import Chunk, Work


def test_a_curve_meets_its_points_and_goes_on() -> None:
    """Lines between, the last direction beyond, never below 0; points of one place count by their mean."""
    curve = Curve([(1, 10.0), (3, 20.0), (3, 22.0), (5, 23.0)])
    assert [curve(place) for place in (1, 2, 3, 4, 7)] == pytest.approx([10.0, 15.5, 21.0, 22.0, 25.0])
    assert Curve([(10, 1.0), (20, 11.0)])(0) == 0.0
    assert Curve([(4, 2.5)])(99) == 2.5
    with pytest.raises(ValueError, match="a point"):
        Curve([])


@given(st.dictionaries(st.integers(0, 1000), st.floats(0, 1e6), min_size=2, max_size=20), st.floats(0, 1000))
def test_between_two_points_a_curve_is_between_their_values(points: dict[int, float], place: float) -> None:
    curve = Curve(list(points.items()))
    if min(points) <= place <= max(points):
        around = [max(p for p in points if p <= place), min(p for p in points if p >= place)]
        low, high = sorted(points[p] for p in around)
        assert low - 1e-6 <= curve(place) <= high + 1e-6


def test_a_surface_goes_between_curves_of_different_points() -> None:
    surface = Surface({0: Curve([(0, 0.0), (10, 10.0)]), 4: Curve([(0, 4.0), (5, 4.0)])})
    assert surface(0, 5) == 5.0
    assert surface(2, 5) == pytest.approx(4.5)
    assert surface(4, 9) == pytest.approx(4.0)


LAYERS = ("layernorm", "qkv_proj", "rotary_emb", "o_proj", "gate_up_proj", "act_fn", "down_proj")


def write_layer_profile(folder: Path) -> None:
    """Every matrix takes 1 us a token, everything once 2, the head 10 us a sequence; attention 1 us for 10 decode
    tokens of context, and a microsecond a prompt token."""
    lines = [f"{name},{tokens},{tokens}" for name in LAYERS for tokens in (1, 100)]
    lines += [f"{name},{tokens},2" for name in ("embedding", "final_layernorm") for tokens in (1, 100)]
    (folder / "dense.csv").write_text("\n".join(["layer,tokens,time_us", *lines]) + "\n")
    lines = [f"{name},{count},{10 * count}" for name in ("lm_head", "sampler") for count in (1, 8)]
    (folder / "per_sequence.csv").write_text("\n".join(["layer,sequences,time_us", *lines]) + "\n")
    lines = []
    for chunk in (0, 10, 20):
        for count in (0, 1, 4):
            for before in (0, 100) if chunk else (0,):
                for context in (10, 1000) if count else (0,):
                    if chunk or count:
                        lines.append(f"{chunk},{before},{count},{context},{chunk + before / 10 + count * context / 10}")
    (folder / "attention.csv").write_text(
        "\n".join(["prefill_chunk,kv_prefill,n_decode,kv_decode,time_us", *lines]) + "\n"
    )


def test_a_layer_profile_adds_up_its_kernels(tmp_path: Path) -> None:
    """Two layers: eight matrices' worth each (the norm twice), once the ends, and what attention takes in each."""
    write_layer_profile(tmp_path)
    times = LayerProfile(tmp_path, layers=2)
    decode_us = 2 * (8 * 3 + 3 * 40 / 10) + 2 * 2 + 2 * 30
    assert times.pass_s(Work(3, 120)) == pytest.approx(decode_us * 1e-6)
    assert times.call_s(3, 120) == pytest.approx(decode_us * 1e-6)
    prompt_us = 2 * (8 * 15 + 15 + 50 / 10) + 2 * 2 + 2 * 10
    assert times.pass_s(Work(chunks=(Chunk(50, 15),))) == pytest.approx(prompt_us * 1e-6)
    both_us = 2 * (8 * 17 + 15 + 50 / 10 + 2 * 20 / 10) + 2 * 2 + 2 * 30
    assert times.pass_s(Work(2, 40, (Chunk(50, 15),))) == pytest.approx(both_us * 1e-6)
    assert times.pass_s(Work()) == 0.0
    assert LayerProfile(tmp_path, layers=2, step_s=0.5).pass_s(Work(3, 120)) == pytest.approx(0.5 + decode_us * 1e-6)


def test_a_layer_profile_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"dense\.csv cannot be read"):
        LayerProfile(tmp_path, layers=2)
    write_layer_profile(tmp_path)
    with pytest.raises(ConfigError, match="at least one layer"):
        LayerProfile(tmp_path, layers=0)
    text = (tmp_path / "dense.csv").read_text()
    (tmp_path / "dense.csv").write_text(text.replace("o_proj", "other"))
    with pytest.raises(ConfigError, match="'o_proj' is missing"):
        LayerProfile(tmp_path, layers=2)
    (tmp_path / "dense.csv").write_text(text.replace("o_proj,1,1", "o_proj,1,quick"))
    with pytest.raises(ConfigError, match="line 8"):
        LayerProfile(tmp_path, layers=2)


def write_batch_table(path: Path) -> None:
    lines = ["model,hardware,tensor_parallel,prompt_size,batch_size,prompt_time,token_time"]
    lines += [f"big,fast,2,{prompt},{batch},{prompt * batch / 10},{20 + batch}"
              for prompt, batch in ((100, 1), (1000, 1), (100, 4))]  # fmt: skip
    path.write_text("\n".join(lines) + "\n")


def test_a_batch_table_knows_prompts_by_tokens_and_decodes_by_sequences(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    write_batch_table(path)
    times = BatchTable(path, model="big", hardware="fast", tensor=2)
    assert times.pass_s(Work(2, 500)) == pytest.approx(0.022)
    assert times.pass_s(Work(chunks=(Chunk(0, 700),))) == pytest.approx(0.07)
    assert times.pass_s(Work(4, 500, (Chunk(0, 696),))) == pytest.approx(0.07)
    assert times.pass_s(Work(4, 500, (Chunk(0, 1),))) == pytest.approx(0.024)
    with pytest.raises(ConfigError, match="it has big on fast with 2 ranks"):
        BatchTable(path, model="big", hardware="slow", tensor=2)


def write_lines(path: Path) -> None:
    lines = {
        "decoding_large_small_bs_threshold": 10,
        "prefill": [10.0, 0.1, 0.001],
        "decoding_smallbs": [20.0, 0.01, 0.5],
        "decoding_largebs": [5.0, 0.02, 2.0],
    }
    path.write_text(json.dumps({"small": {"1": lines}}))


def test_fitted_lines(tmp_path: Path) -> None:
    """Prompts by tokens and squares, decodes by context and number, of two lines by their number."""
    path = tmp_path / "lines.json"
    write_lines(path)
    times = FittedLines(path, model="small", tensor=1)
    assert times.pass_s(Work(4, 300)) == pytest.approx(0.025)
    assert times.pass_s(Work(10, 300)) == pytest.approx(0.031)
    assert times.pass_s(Work(chunks=(Chunk(0, 100), Chunk(0, 50)))) == pytest.approx(1e-3 * (10 + 15 + 12.5))
    late, whole = times.pass_s(Work(chunks=(Chunk(50, 50),))), times.pass_s(Work(chunks=(Chunk(0, 100),)))
    early = times.pass_s(Work(chunks=(Chunk(0, 50),)))
    assert late + early == pytest.approx(whole + 0.01)
    with pytest.raises(ConfigError, match="it has small"):
        FittedLines(path, model="large", tensor=1)
    with pytest.raises(ConfigError, match="with 1 ranks, not 2"):
        FittedLines(path, model="small", tensor=2)
    path.write_text('{"small": {"1": {"prefill": [1]}}}')
    with pytest.raises(ConfigError, match="no such profile"):
        FittedLines(path, model="small", tensor=1)
