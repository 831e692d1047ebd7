"""The values that the tuner may use."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.config.knobs import knobs_of, with_changes
from headrace.config.schema import BandConfig, Config, SchedulingConfig
from headrace.control.grid import TUNED, fits, grids_of, home_of, values_of


def configured(**values: object) -> Config:
    config = Config()
    scheduling = msgspec.structs.replace(SchedulingConfig(), **values)
    engine = msgspec.structs.replace(config.engine, scheduling=scheduling, bands=(BandConfig(2048, 32),))
    return msgspec.structs.replace(config, engine=engine)


def test_values_lie_around_the_configured_one() -> None:
    grids = grids_of(configured(), steps=2)
    assert set(grids) == set(TUNED)
    assert grids["min_prefill_tokens"].values == (16, 32, 64, 128, 256)
    assert grids["urgent_step_s"].values == pytest.approx((0.1276, 0.1786, 0.25, 0.35, 0.49))
    assert grids["max_prefill_tokens"].values == (261, 366, 512)  # step_tokens is 512
    assert grids["max_num_seqs"].values == (16, 23, None)  # the streams are 32
    assert values_of(grids, home_of(grids)) == {name: getattr(configured().engine.scheduling, name) for name in TUNED}


def test_what_a_strategy_does_not_read_is_not_tuned() -> None:
    assert set(grids_of(configured(strategy="static"), steps=2)) == {"max_prefill_tokens", "max_num_seqs"}
    assert set(grids_of(configured(), steps=2, hands_off=frozenset({"knee_gain"}))) == set(TUNED) - {"knee_gain"}


@given(
    st.builds(
        configured,
        urgent_step_s=st.floats(1e-4, 3600),
        idle_step_s=st.floats(1e-4, 3600),
        min_prefill_tokens=st.integers(1, 512),
        max_prefill_tokens=st.integers(512, 65536),
        knee_gain=st.floats(0, 1),
        max_num_seqs=st.none() | st.integers(1, 1_000_000),
    ),
    st.integers(1, 4),
)
def test_whatever_is_configured_every_value_is_in_range_and_home_is_the_configured_one(
    config: Config, steps: int
) -> None:
    """The ranges are those of ``config.fields``; ascending values mean that a step has a direction."""
    grids, knobs = grids_of(config, steps=steps), knobs_of(config, step_tokens_limit=512)
    for name, grid in grids.items():
        assert grid.values[grid.home] == knobs[name].of(config)
        assert len(grid.values) <= 2 * steps + 1
        for value in grid.values:
            assert knobs[name].checked(value)[1] == []
            if fits(values_of(grids, {**home_of(grids), name: grid.values.index(value)}), {}):
                with_changes(config, {name: value}, knobs)  # raises when it does not go with the others
        numbers = [value for value in grid.values if isinstance(value, int | float)]
        assert numbers == sorted(set(numbers))
