"""Classification: the stated order, tenant limits, precise refusals."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.config.schema import Config, Tenant
from headrace.config.validate import validate
from headrace.errors import PermissionDenied, RequestError
from headrace.lanes.classify import LaneDecision, RequestSignals, allowed_lanes, classify, match_path
from headrace.lanes.lane import Lane, LaneMatch

CONFIG = Config(
    lanes={
        "by-header": Lane(priority=1),
        "by-path": Lane(priority=2, match=LaneMatch(path_prefixes=("/p",))),
        "deeper": Lane(priority=3, match=LaneMatch(path_prefixes=("/p/deep",))),
        "by-tenant": Lane(priority=4),
        "by-alias": Lane(priority=5, match=LaneMatch(model_aliases=("fast",))),
        "long": Lane(priority=6, match=LaneMatch(prompt_tokens_over=100)),
        "longer": Lane(priority=7, match=LaneMatch(prompt_tokens_over=1000)),
        "small": Lane(priority=8, max_prompt_tokens=10),
        "other": Lane(priority=9),
    },
    default_lane="other",
    tenants={
        "homed": Tenant(default_lane="by-tenant"),
        "limited": Tenant(lanes=("long", "small", "by-tenant")),
        "narrow": Tenant(lanes=("by-alias", "by-path"), default_lane="by-path"),
    },
)
PLAIN = RequestSignals(header_lane=None, path="/v1/models", tenant=None, model="m", prompt_tokens=5)
EVERYTHING = RequestSignals(
    header_lane="by-header", path="/p/v1/chat/completions", tenant="homed", model="fast", prompt_tokens=500
)


def chosen(signals: RequestSignals) -> tuple[str, str]:
    decision = classify(CONFIG, signals)
    return decision.name, decision.rule


def test_the_configuration_used_here_is_a_valid_one() -> None:
    assert validate(CONFIG, {}) == []


def test_each_rule_yields_to_the_one_before_it() -> None:
    signals = EVERYTHING
    assert chosen(signals) == ("by-header", "header")
    signals = replace(signals, header_lane=None)
    assert chosen(signals) == ("by-path", "path")
    signals = replace(signals, path="/v1/chat/completions")
    assert chosen(signals) == ("by-tenant", "tenant")
    signals = replace(signals, tenant=None)
    assert chosen(signals) == ("by-alias", "alias")
    signals = replace(signals, model="m")
    assert chosen(signals) == ("long", "length")
    signals = replace(signals, prompt_tokens=5)
    assert chosen(signals) == ("other", "default")


def test_the_longest_path_prefix_wins_whole_segments_only() -> None:
    assert chosen(replace(PLAIN, path="/p/deep/v1/models")) == ("deeper", "path")
    assert chosen(replace(PLAIN, path="/p/deeper/v1/models")) == ("by-path", "path")
    assert chosen(replace(PLAIN, path="/px/v1/models")) == ("other", "default")
    assert chosen(replace(PLAIN, path="/p")) == ("by-path", "path")


def test_match_path_leaves_the_api_path() -> None:
    match = match_path(CONFIG.lanes, "/p/deep/v1/models")
    assert match is not None
    assert (match.lane, match.prefix, match.rest) == ("deeper", "/p/deep", "/v1/models")
    assert match_path(CONFIG.lanes, "/v1/models") is None


@pytest.mark.parametrize(("tokens", "lane"), [(100, "other"), (101, "long"), (1000, "long"), (1001, "longer")])
def test_the_largest_threshold_below_the_prompt_wins(tokens: int, lane: str) -> None:
    assert chosen(replace(PLAIN, prompt_tokens=tokens))[0] == lane


def test_an_unknown_lane_in_the_header_is_refused_with_the_nearest_and_all_names() -> None:
    with pytest.raises(RequestError) as caught:
        classify(CONFIG, replace(PLAIN, header_lane="Smal"))
    assert type(caught.value) is RequestError
    assert "did you mean 'small'" in str(caught.value)
    assert "by-header, by-path, deeper" in str(caught.value)
    assert (caught.value.param, caught.value.code) == ("x-headrace-lane", "unknown_lane")


def test_a_very_long_header_is_not_repeated_whole() -> None:
    with pytest.raises(RequestError) as caught:
        classify(CONFIG, replace(PLAIN, header_lane="x" * 100_000))
    assert len(str(caught.value)) < 400


def test_a_blank_header_is_no_header() -> None:
    assert chosen(replace(PLAIN, header_lane="  ")) == ("other", "default")
    assert chosen(replace(PLAIN, header_lane=" long ")) == ("long", "header")


@pytest.mark.parametrize(
    "signals",
    [
        replace(PLAIN, header_lane="other"),
        replace(PLAIN, path="/p/v1/models"),
        replace(PLAIN, model="fast"),
    ],
    ids=["header", "path", "alias"],
)
def test_an_explicit_choice_outside_the_tenants_lanes_is_forbidden(signals: RequestSignals) -> None:
    with pytest.raises(PermissionDenied) as caught:
        classify(CONFIG, replace(signals, tenant="limited"))
    assert "it may use by-tenant, long, small" in str(caught.value)


def test_an_implicit_choice_outside_the_tenants_lanes_falls_to_its_most_urgent_one() -> None:
    assert chosen(replace(PLAIN, tenant="limited")) == ("by-tenant", "default, limited")
    assert chosen(replace(PLAIN, tenant="limited", prompt_tokens=5000)) == ("by-tenant", "length, limited")
    assert chosen(replace(PLAIN, tenant="limited", prompt_tokens=500)) == ("long", "length")


def test_a_limited_tenants_default_lane_comes_before_the_prompts_length() -> None:
    assert chosen(replace(PLAIN, tenant="narrow", prompt_tokens=5000)) == ("by-path", "tenant")


def test_a_tenant_that_is_not_configured_is_no_tenant() -> None:
    assert classify(CONFIG, replace(PLAIN, tenant="nobody")) == classify(CONFIG, PLAIN)
    assert allowed_lanes(CONFIG, "nobody") == tuple(CONFIG.lanes)


def test_a_prompt_longer_than_the_lane_takes_is_refused_with_both_numbers() -> None:
    assert chosen(replace(PLAIN, header_lane="small", prompt_tokens=10)) == ("small", "header")
    with pytest.raises(RequestError, match=r"11 tokens; lane 'small' takes at most 10"):
        classify(CONFIG, replace(PLAIN, header_lane="small", prompt_tokens=11))


NAMES = ("a", "b", "c", "d")


@st.composite
def configs(draw: st.DrawFn) -> Config:
    names = draw(st.lists(st.sampled_from(NAMES), min_size=1, unique=True))
    thresholds = draw(st.lists(st.integers(0, 50), min_size=len(names), max_size=len(names), unique=True))
    lanes = {}
    for name, threshold in zip(names, thresholds, strict=True):
        prefixes = draw(st.sampled_from([(), (f"/{name}",), (f"/{name}", f"/x/{name}")]))
        aliases = draw(st.sampled_from([(), (f"model-{name}",)]))
        over = threshold if draw(st.booleans()) else None
        cap = draw(st.none() | st.integers(60, 90))
        lanes[name] = Lane(
            priority=draw(st.integers(-2, 2)),
            match=LaneMatch(path_prefixes=prefixes, model_aliases=aliases, prompt_tokens_over=over),
            max_prompt_tokens=cap,
        )
    tenants = {}
    for tenant in ("t", "u"):
        limit = tuple(draw(st.lists(st.sampled_from(names), unique=True)))
        home = draw(st.none() | st.sampled_from(limit or tuple(names)))
        tenants[tenant] = Tenant(lanes=limit, default_lane=home)
    return Config(lanes=lanes, default_lane=draw(st.sampled_from(names)), tenants=tenants)


SIGNALS = st.builds(
    RequestSignals,
    header_lane=st.none() | st.sampled_from([*NAMES, "zz", ""]) | st.text(max_size=8),
    path=st.sampled_from(["/v1/models", *(f"/{name}/v1/models" for name in NAMES), "/x/a/v1", "/x", ""]),
    tenant=st.sampled_from([None, "t", "u", "unknown"]),
    model=st.sampled_from(["m", *(f"model-{name}" for name in NAMES)]),
    prompt_tokens=st.integers(0, 100),
)


def outcome(config: Config, signals: RequestSignals) -> LaneDecision | tuple[type[RequestError], str]:
    try:
        return classify(config, signals)
    except RequestError as error:
        return type(error), str(error)


@settings(deadline=None)
@given(configs(), SIGNALS)
def test_any_request_gets_a_lane_or_a_refusal_and_always_the_same(config: Config, signals: RequestSignals) -> None:
    assert validate(config, {}) == []
    first = outcome(config, signals)
    assert first == outcome(config, signals)
    if isinstance(first, LaneDecision):
        assert first.lane is config.lanes[first.name]


@settings(deadline=None)
@given(configs(), SIGNALS)
def test_no_tenant_ever_gets_a_lane_outside_its_limit(config: Config, signals: RequestSignals) -> None:
    decision = outcome(config, signals)
    if isinstance(decision, LaneDecision):
        assert decision.name in allowed_lanes(config, signals.tenant)
        cap = decision.lane.max_prompt_tokens
        assert cap is None or signals.prompt_tokens <= cap


RULES = ("header", "path", "tenant", "alias", "length", "default")


@settings(deadline=None)
@given(configs(), SIGNALS)
def test_the_rule_reported_is_the_first_that_names_a_lane(config: Config, signals: RequestSignals) -> None:
    decision = outcome(config, signals)
    if not isinstance(decision, LaneDecision):
        return
    rule = decision.rule.removesuffix(", limited")
    blank = replace(signals, header_lane=None, path="", tenant=None, model="", prompt_tokens=0)
    fields = {
        "header": {"header_lane": signals.header_lane},
        "path": {"path": signals.path},
        "tenant": {"tenant": signals.tenant},
        "alias": {"model": signals.model},
        "length": {"prompt_tokens": signals.prompt_tokens},
    }
    for earlier in itertools.takewhile(lambda name: name != rule, RULES):
        # An earlier rule on its own names nothing: the request with only that signal goes elsewhere.
        alone = outcome(config, replace(blank, **fields[earlier]))  # type: ignore[arg-type]
        assert not isinstance(alone, LaneDecision) or alone.rule.removesuffix(", limited") != earlier
