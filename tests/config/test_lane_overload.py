"""The keys that say what a lane does under overload."""

from __future__ import annotations

import pytest

from headrace.config.load import build
from headrace.config.problems import ConfigProblems
from headrace.config.schema import Config
from headrace.config.validate import validate
from headrace.lanes.defaults import default_lanes
from headrace.lanes.lane import Fallback, Lane


def said(lane: Lane) -> list[str]:
    return [str(problem) for problem in validate(Config(lanes={**default_lanes(), "a": lane}), {})]


@pytest.mark.parametrize(
    ("lane", "message"),
    [
        (Lane(weight=0.0), "lanes.a.weight: 0 is out of range (0.01 to 1000)"),
        (Lane(patience=0.5), "lanes.a.patience: 0.5 is out of range (1 to 1000)"),
        (Lane(overload="degrade"), "lanes.a.fallback.max_tokens: overload: degrade needs it"),
        (
            Lane(overload="degrade", fallback=Fallback(model="smollm2")),
            "lanes.a.fallback.max_tokens: overload: degrade",
        ),
        (Lane(fallback=Fallback(max_tokens=0)), "lanes.a.fallback.max_tokens: 0 is out of range"),
        (
            Lane(max_tokens=10, fallback=Fallback(max_tokens=10)),
            "lanes.a.fallback.max_tokens: 10 is not below max_tokens",
        ),
        (
            Lane(fallback=Fallback(model="gpt-oss")),
            "lanes.a.fallback.model: there is no model 'gpt-oss' to fall back to: only the served model exists",
        ),
    ],
)
def test_what_cannot_work_is_named(lane: Lane, message: str) -> None:
    (problem,) = said(lane)
    assert message in problem


def test_the_served_models_names_are_accepted_as_fallback() -> None:
    name = Config().model.source
    assert said(Lane(overload="degrade", fallback=Fallback(max_tokens=64, model=name))) == []


def test_the_keys_are_read_from_a_file() -> None:
    text = "lanes: {chat: {overload: degrade, patience: 3, weight: 2, fallback: {max_tokens: 32}}}"
    lane = build(text, name="t", env={}, overrides={})[0].lanes["chat"]
    assert lane == Lane(overload="degrade", patience=3.0, weight=2.0, fallback=Fallback(max_tokens=32))
    with pytest.raises(ConfigProblems, match="did you mean degrade"):
        build("lanes: {chat: {overload: degraded}}", name="t", env={}, overrides={})


def test_more_urgent_default_lanes_weigh_more() -> None:
    lanes = sorted(default_lanes().values(), key=lambda lane: lane.priority)
    assert [lane.weight for lane in lanes] == [8, 8, 4, 4, 2, 1]
