"""From the configuration to the live values of scheduling, and what of it needs a restart."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.config.fields import notes
from headrace.config.load import build
from headrace.config.problems import ConfigProblems
from headrace.config.scheduling import needs_restart, scheduling_knobs
from headrace.config.schema import BandConfig, Config, EngineConfig, ModelConfig, SchedulingConfig
from headrace.config.validate import validate
from headrace.scheduling.knobs import SchedulingKnobs


def read(text: str) -> Config:
    return build(text, name="t", env={}, overrides={})[0]


def test_the_section_has_every_value_of_the_live_set_at_the_same_default() -> None:
    by_band_and_lane = {"band_caps", "lane_caps", "lane_weights"}
    live = {name: getattr(SchedulingKnobs(), name) for name in SchedulingKnobs.__struct_fields__}
    assert msgspec.structs.asdict(SchedulingConfig()) == {n: v for n, v in live.items() if n not in by_band_and_lane}


def test_bands_and_lanes_give_caps_and_weights() -> None:
    knobs = scheduling_knobs(
        read(
            "engine:\n  bands: [{max_context_tokens: 512, max_sequences: 8}, "
            "{max_context_tokens: 4096, max_sequences: 4, max_running: 2}]\n"
            "lanes: {long: {max_running: 1}, batch: {weight: 0.5}, captions: null}\n"
        )
    )
    assert knobs.band_caps == (8, 2)
    assert knobs.lane_caps == {"long": 1}
    assert knobs.lane_weights["batch"] == 0.5
    assert set(knobs.lane_weights) == {"realtime", "interactive", "retrieval", "long", "batch"}


def test_the_section_is_what_the_engine_gets() -> None:
    knobs = scheduling_knobs(read("engine: {scheduling: {strategy: auto, merge_window_s: 0.00005, max_num_seqs: 12}}"))
    assert (knobs.strategy, knobs.merge_window_s, knobs.max_num_seqs) == ("auto", 0.00005, 12)


def _values(key: str) -> st.SearchStrategy[object]:
    note, default = notes()[SchedulingConfig][key], getattr(SchedulingConfig(), key)
    if isinstance(default, str):
        return st.sampled_from(["static", "dynamic", "continuous", "hybrid", "auto"])
    assert note.minimum is not None and note.maximum is not None
    if isinstance(default, float):
        return st.floats(note.minimum, note.maximum, exclude_min=note.above_minimum)
    return st.integers(int(note.minimum), int(note.maximum))


@given(st.fixed_dictionaries({key: _values(key) for key in SchedulingConfig.__struct_fields__}))
@settings(max_examples=200)
def test_whatever_passes_the_checks_makes_a_live_set(section: dict[str, object]) -> None:
    """The ranges leave nothing through that ``SchedulingKnobs`` refuses."""
    config = Config(engine=EngineConfig(scheduling=msgspec.convert(section, SchedulingConfig)))
    if not validate(config, {}):
        scheduling_knobs(config)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "engine: {scheduling: {min_prefill_tokens: 65, max_prefill_tokens: 64}}",
            "engine.scheduling.min_prefill_tokens: 65 is above max_prefill_tokens 64",
        ),
        (
            "engine: {bands: [{max_context_tokens: 512, max_sequences: 2, max_running: 3}]}",
            "max_running: 3 is above max_sequences 2",
        ),
        ("engine: {scheduling: {strategy: hybrd}}", "did you mean hybrid?"),
        ("engine: {max_prefill_tokens: 64}", "engine.max_prefill_tokens: unknown key"),
        ("engine: {step_tokens: 64}", "engine.step_tokens: unknown key"),
        ("engine: {scheduling: {max_prefil_tokens: 64}}", "unknown key; did you mean max_prefill_tokens?"),
        ("engine: {scheduling: {ageing_s: 0}}", "engine.scheduling.ageing_s: 0 is out of range (above 0"),
    ],
)
def test_a_mistake_in_it_is_named(text: str, message: str) -> None:
    with pytest.raises(ConfigProblems) as caught:
        read(text)
    assert message in str(caught.value)


def _with(**engine: object) -> Config:
    return Config(engine=msgspec.structs.replace(EngineConfig(), **engine))


def test_scheduling_caps_and_weights_need_no_restart() -> None:
    started = Config()
    bands = tuple(msgspec.structs.replace(band, max_running=1) for band in started.engine.bands)
    fresh = _with(bands=bands, scheduling=SchedulingConfig(strategy="static", max_num_seqs=1, step_tokens=64))
    assert needs_restart(started, fresh) == []
    assert needs_restart(started, read("lanes: {batch: {weight: 0.5, max_running: 1}, captions: null}")) == []


@pytest.mark.parametrize(
    ("fresh", "said"),
    [
        (_with(threads=1), "engine.threads"),
        (_with(bands=(BandConfig(max_context_tokens=64, max_sequences=1),)), "engine.bands"),
        (Config(model=ModelConfig(source="other")), "model.source"),
        (
            _with(scheduling=SchedulingConfig(step_tokens=513)),
            "engine.scheduling.step_tokens (raised above its value at start, 512)",
        ),
    ],
)
def test_what_the_process_is_built_on_needs_one(fresh: Config, said: str) -> None:
    assert needs_restart(Config(), fresh) == [said]


def test_a_model_name_or_a_queue_needs_none() -> None:
    assert needs_restart(Config(), read("model: {name: x}\nserver: {max_queue: 5}\n")) == []
