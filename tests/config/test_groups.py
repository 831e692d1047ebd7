"""Groups in the configuration: what is refused, and what lanes say of them."""

from __future__ import annotations

import pytest

from headrace.config.load import build
from headrace.config.model_names import served_model_names
from headrace.config.problems import ConfigProblems
from headrace.config.scheduling import needs_restart
from headrace.config.schema import Config

ONE = "groups:\n  g: {kind: vllm, model: m, replicas: [{url: 'http://10.0.0.1:8000'}]}\n"
TWO = ONE + "  h: {kind: openai, model: n, replicas: [{url: 'https://h.example/v1', zone: b, weight: 2}]}\n"


def load(text: str, env: dict[str, str] | None = None) -> Config:
    return build(text, name="t", env=env or {}, overrides={})[0]


def problems(text: str) -> str:
    with pytest.raises(ConfigProblems) as caught:
        load(text)
    return str(caught.value)


def test_without_groups_nothing_changes() -> None:
    config = load("")
    assert config.embeds_engine and config.groups == {}
    assert served_model_names(config) == ("smollm2",)


def test_the_only_group_serves_lanes_that_name_none() -> None:
    config = load(ONE)
    assert {config.group_of(lane) for lane in config.lanes.values()} == {"g"}
    assert not config.embeds_engine and served_model_names(config) == ("m",)


def test_with_several_groups_each_lane_names_one_or_there_is_a_default() -> None:
    assert "lanes.realtime.group" in problems(TWO)
    config = load(TWO + "default_group: h\nlanes: {long: {group: g}}\n")
    assert config.group_of(config.lanes["long"]) == "g" and config.group_of(config.lanes["batch"]) == "h"
    assert served_model_names(config) == ("m", "n")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("groups: {g: {model: m, replicas: [{url: 'ftp://x'}]}}", "groups.g.replicas[0].url"),
        ("groups: {g: {model: m, replicas: [{url: 'http://a:1'}, {url: 'http://a:1'}]}}", "is there twice"),
        ("groups: {g: {replicas: [{url: 'http://a:1'}]}}", "groups.g.model"),
        ("groups: {G!: {model: m}}", "a group's name"),
        ("groups: {g: {kind: vlm, model: m}}", "did you mean vllm"),
        ("groups: {g: {kind: embedded, replicas: [{url: 'http://a:1'}]}}", "only replica"),
        ("groups: {g: {kind: embedded}, h: {kind: embedded}}\ndefault_group: g", "there is one embedded engine"),
        ("groups: {g: {model: m, api_key: secret}}", "env:NAME"),
        ("groups: {g: {model: m, api_key: 'env:NOT_THERE'}}", "NOT_THERE is not set"),
        ("groups: {g: {model: m, max_in_flight: 2, min_in_flight: 3}}", "above max_in_flight"),
        ("groups: {g: {model: m, replicas: [{url: 'http://a:1', weight: 0}]}}", "out of range"),
        (ONE + "default_group: x", "there is no group 'x'"),
        (ONE + "lanes: {long: {group: gg}}", "did you mean g?"),
        (ONE + "lanes: {long: {fallback: {group: g}}}", "the lane's own group"),
        (ONE + "lanes: {long: {breaker: {cool_down_s: 20}}}", "above max_cool_down_s"),
        (ONE + "fleet: {alert_webhook: 'x'}", "fleet.alert_webhook"),
    ],
)
def test_what_is_wrong_is_said_where(text: str, said: str) -> None:
    assert said in problems(text)


def test_a_secret_is_never_in_a_message() -> None:
    assert "secret" not in problems("groups: {g: {model: m, api_key: secret}}")


def test_replicas_are_live_and_whether_there_is_an_embedded_engine_is_not() -> None:
    assert needs_restart(load(ONE), load(ONE.replace("10.0.0.1", "10.0.0.2"))) == []
    assert needs_restart(load(""), load(ONE))
