"""Live knobs: their names, what they take, and changes over a configuration."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.config.knobs import KnobValue, checked_changes, differences, knobs_of, with_changes
from headrace.config.load import build
from headrace.config.problems import ConfigProblems
from headrace.config.scheduling import scheduling_knobs
from headrace.config.schema import Config
from headrace.config.validate import validate
from headrace.lanes.defaults import default_lanes
from headrace.scheduling.knobs import SchedulingKnobs

CONFIG = Config()
KNOBS = knobs_of(CONFIG, step_tokens_limit=512)


def changed(**given: object) -> Config:
    return with_changes(CONFIG, checked(given), KNOBS)


def checked(given: Mapping[str, object]) -> dict[str, KnobValue]:
    return checked_changes(given, KNOBS)


def refusal(given: Mapping[str, object]) -> list[str]:
    with pytest.raises(ConfigProblems) as caught:
        with_changes(CONFIG, checked(given), KNOBS)
    return [str(problem) for problem in caught.value.problems]


def test_every_live_value_has_a_knob() -> None:
    """Nothing of ``SchedulingKnobs`` is out of reach, and every knob is a value of it."""
    live = {name.partition(".")[0] for name in KNOBS}
    assert live == set(SchedulingKnobs.__struct_fields__)
    assert {name.partition(".")[2] for name in KNOBS if name.startswith("lane_caps.")} == set(default_lanes())
    assert [name for name in KNOBS if name.startswith("band_caps.")] == [f"band_caps.{band}" for band in range(4)]


def test_every_knob_says_what_it_means_and_takes() -> None:
    for knob in KNOBS.values():
        assert knob.note.text and knob.range_text
        assert knob.of(CONFIG) == knob.default
    assert {name for name, knob in KNOBS.items() if not knob.unit} == {
        "strategy",
        "knee_gain",
        "kv_warn",
        "kv_refuse",
        "kv_move",
        "kv_gap",
        *(f"lane_weights.{lane}" for lane in CONFIG.lanes),
    }


def test_a_default_is_headraces_own_not_the_files() -> None:
    config, _ = build("lanes: {x: {weight: 3}, long: {max_running: 7}}", name="t", env={}, overrides={})
    knobs = knobs_of(config, step_tokens_limit=512)
    assert (knobs["lane_weights.x"].default, knobs["lane_weights.x"].of(config)) == (1.0, 3.0)
    assert (knobs["lane_caps.long"].default, knobs["lane_caps.long"].of(config)) == (None, 7)
    assert knobs["lane_weights.realtime"].default == default_lanes()["realtime"].weight


def test_a_change_reaches_the_live_set() -> None:
    config = changed(
        **{
            "strategy": "dynamic",
            "max_prefill_tokens": 256,
            "merge_window_s": 1,
            "band_caps.0": 16,
            "lane_caps.long": 2,
            "lane_weights.batch": 0.5,
        }
    )
    knobs = scheduling_knobs(config)
    assert (knobs.strategy, knobs.max_prefill_tokens, knobs.merge_window_s) == ("dynamic", 256, 1.0)
    assert (knobs.band_caps or ())[0] == 16
    assert (knobs.lane_caps, knobs.lane_weights["batch"]) == ({"long": 2}, 0.5)


def test_null_takes_a_cap_away() -> None:
    config = with_changes(changed(**{"lane_caps.long": 2, "band_caps.1": 3}), checked({"lane_caps.long": None}), KNOBS)
    assert scheduling_knobs(config).lane_caps == {}
    assert with_changes(config, checked({"band_caps.1": None}), KNOBS) == CONFIG


def test_the_rest_of_the_configuration_stays() -> None:
    config = changed(**{"lane_caps.long": 2})
    long = msgspec.structs.replace(CONFIG.lanes["long"], max_running=2)
    assert config == msgspec.structs.replace(CONFIG, lanes={**CONFIG.lanes, "long": long})
    assert list(config.lanes) == list(CONFIG.lanes)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"max_prefil_tokens": 5}, ["max_prefil_tokens: there is no such knob; did you mean max_prefill_tokens?"]),
        ({"lane_caps.lng": 5}, ["lane_caps.lng: there is no such knob; did you mean lane_caps.long?"]),
        ({"§§": 5}, ["§§: there is no such knob; `headrace knobs get` lists them"]),
        ({"band_caps.4": 5}, ["band_caps.4: there is no such knob; did you mean band_caps.3?"]),
        ({"max_prefill_tokens": 0}, ["max_prefill_tokens: 0 is out of range (1 to 65536)"]),
        ({"max_prefill_tokens": "many"}, ['max_prefill_tokens: expected a whole number, got "many"']),
        ({"max_prefill_tokens": None}, ["max_prefill_tokens: expected a whole number, got nothing"]),
        ({"max_prefill_tokens": 2.5}, ["max_prefill_tokens: expected a whole number, got 2.5"]),
        ({"max_prefill_tokens": True}, ["max_prefill_tokens: expected a whole number, got true"]),
        ({"linger_s": [1]}, ["linger_s: expected a number, got a list"]),
        ({"linger_s": float("nan")}, ["linger_s: nan is out of range (0 to 3600)"]),
        ({"step_tokens": 513}, ["step_tokens: 513 is out of range (1 to 512)"]),
        ({"band_caps.0": 33}, ["band_caps.0: 33 is out of range (1 to 32)"]),
        ({"lane_weights.batch": 0}, ["lane_weights.batch: 0 is out of range (0.01 to 1000)"]),
        ({"max_prefill_tokens": 32}, ["min_prefill_tokens: 64 is above max_prefill_tokens 32"]),
        ({"x": 1, "ageing_s": 0, "linger_s": 1}, ["x: there is no", "ageing_s: 0 is out of range (above 0"]),
    ],
)
def test_a_wrong_change_is_refused_whole_and_every_mistake_named(given: dict[str, object], said: list[str]) -> None:
    problems = refusal(given)
    assert len(problems) == len(said)
    for problem, beginning in zip(problems, said, strict=True):
        assert problem.startswith(beginning)


def test_a_wrong_strategy_is_told_the_right_ones() -> None:
    (said,) = refusal({"strategy": "hybrd"})
    assert said == (
        'strategy: expected one of auto, continuous, dynamic, hybrid, static, got "hybrd"; did you mean hybrid?'
    )


def test_differences_are_what_has_another_value() -> None:
    after = changed(**{"max_num_seqs": 3, "linger_s": CONFIG.engine.scheduling.linger_s})
    assert [(change.name, change.old, change.new) for change in differences(CONFIG, after, KNOBS)] == [
        ("max_num_seqs", None, 3)
    ]


def test_a_lane_that_comes_or_goes_is_no_difference() -> None:
    fewer = Config(lanes={name: lane for name, lane in CONFIG.lanes.items() if name != "long"})
    more = Config(lanes={**CONFIG.lanes, "x": CONFIG.lanes["long"]})
    assert differences(CONFIG, fewer, knobs_of(fewer, step_tokens_limit=512)) == ()
    assert differences(CONFIG, more, knobs_of(more, step_tokens_limit=512)) == ()


_VALUES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.lists(st.integers())


@given(st.dictionaries(st.sampled_from(sorted(KNOBS)) | st.text(max_size=12), _VALUES, max_size=5))
@settings(max_examples=300)
def test_any_change_is_a_right_configuration_or_refused_with_a_name(given: dict[str, object]) -> None:
    try:
        config = with_changes(CONFIG, checked(given), KNOBS)
    except ConfigProblems as error:
        assert error.problems and all(str(problem) for problem in error.problems)
        return
    assert validate(config, {}) == []
    scheduling_knobs(config)
