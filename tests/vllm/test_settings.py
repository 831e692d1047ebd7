"""Settings and live knobs are checked before anything changes, and fields of requests never fail a request."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import ConfigError
from headrace.scheduling.bands import Band
from headrace.vllm.settings import EngineShape, Settings, bands_of, changed, first_knobs, settings_of
from headrace.vllm.xargs import LaneFields, from_xargs, to_xargs

SHAPE = EngineShape(max_num_seqs=64, max_num_batched_tokens=2048, max_model_len=32768, kv_tokens=100_000)


def test_without_settings_a_step_may_hold_what_vllm_allows() -> None:
    """The caps are vLLM's own."""
    knobs = first_knobs(settings_of({}), SHAPE)
    assert (knobs.step_tokens, knobs.max_prefill_tokens, knobs.max_num_seqs) == (2048, 2048, 64)
    assert bands_of(Settings(), SHAPE) == (Band(32768, 64),)


def test_settings_come_from_vllms_additional_config() -> None:
    """Under the key ``headrace``; other keys are other people's."""
    settings = settings_of(
        {"headrace": {"knobs": {"lane_caps": {"docs": 4}}, "bands": [[4096, 64], [32768, 8]]}, "other": 1}
    )
    assert first_knobs(settings, SHAPE).lane_caps == {"docs": 4}
    assert bands_of(settings, SHAPE) == (Band(4096, 64), Band(32768, 8))


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"nonsense": 1}, "nonsense"),
        ({"enabled": "yes"}, "bool"),
        ({"knobs": {"nonsense": 1}}, "nonsense"),
        ({"knobs": {"max_num_seqs": 65}}, "at most 64"),
        ({"knobs": {"step_tokens": 4096}}, "at most 2048"),
        ({"knobs": {"lane_caps": {"docs": 0}}}, "at least 1"),
        ({"knobs": {"strategy": "best"}}, "best"),
        ({"bands": [[4096, 64]]}, "32768"),
        ({"bands": [[32768, 8], [4096, 64]]}, "rising"),
        ({"bands": [[4096, 0], [32768, 8]]}, "one sequence"),
    ],
)
def test_wrong_settings_are_refused_by_name(config: dict[str, Any], said: str) -> None:
    """At start, with what is wrong."""
    with pytest.raises(ConfigError, match=said):
        settings = settings_of({"headrace": config})
        first_knobs(settings, SHAPE)
        bands_of(settings, SHAPE)


def test_a_change_is_whole_or_not_at_all() -> None:
    """Two good values and a wrong one change nothing; None for ``max_num_seqs`` is vLLM's own cap."""
    knobs = first_knobs(Settings(), SHAPE)
    with pytest.raises(ConfigError):
        changed(knobs, {"linger_s": 1.0, "urgent_step_s": 0.1, "ageing_s": -1}, SHAPE)
    after = changed(knobs, {"linger_s": 1.0, "max_num_seqs": None}, SHAPE)
    assert (after.linger_s, after.max_num_seqs, knobs.linger_s) == (1.0, 64, 2.0)


@given(
    st.builds(
        LaneFields,
        lane=st.text(min_size=1, max_size=20),
        tenant=st.none() | st.text(min_size=1, max_size=20),
        priority=st.none() | st.integers(-100, 100),
        first_token_in_s=st.none() | st.floats(-5, 100),
        finish_in_s=st.none() | st.floats(-5, 100),
        tpot_s=st.none() | st.floats(0.001, 1),
        expected_tokens=st.none() | st.integers(1, 10_000),
        stream=st.booleans(),
    )
)
def test_fields_arrive_as_they_were_sent(fields: LaneFields) -> None:
    """What the gateway writes is what the scheduler reads."""
    assert from_xargs(to_xargs(fields)) == (fields, ())


def test_values_that_make_no_sense_are_left_out_and_named() -> None:
    """The request is served without them; keys of others are not looked at."""
    fields, wrong = from_xargs(
        {
            "headrace_lane": "chat",
            "headrace_tpot_s": "fast",
            "headrace_priority": 1.5,
            "headrace_first_token_in_s": float("nan"),
            "headrace_colour": "blue",
            "kv_transfer_params": {},
        }
    )
    assert fields == LaneFields(lane="chat")
    assert set(wrong) == {
        "headrace_tpot_s", "headrace_priority", "headrace_first_token_in_s", "headrace_colour"
    }  # fmt: skip
    assert from_xargs(None) == (LaneFields(), ())
