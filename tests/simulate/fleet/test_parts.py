"""The pure parts: routing, scaling, prefix caches, and scenario files."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.config.problems import ConfigProblems
from headrace.errors import ConfigError
from headrace.kv.sources import SourceTimes
from headrace.simulate.fleet.prefix_cache import PrefixCache, Prompt
from headrace.simulate.fleet.routes import Asked, Seen, router
from headrace.simulate.fleet.scaling import ScalingState, decide_scale
from headrace.simulate.fleet.scenario import Scaling, Tier
from headrace.simulate.fleet.scenario_file import load_scenario, parse_scenario, shipped_scenarios, with_knob
from tests.simulate.rig import RowTimes

TIMES = SourceTimes(RowTimes(), 0.0, 512)
"""A token computed takes a millisecond."""


def blocks(name: str, count: int) -> Prompt:
    return Prompt(tuple([(name, number) for number in range(count)]))


def test_two_choices_take_the_emptier() -> None:
    """Of ten with one empty, that one is taken in a fifth of all cases: whenever it is one of the two."""
    source = random.Random(1)
    seen = [Seen(5, 0, 0.0)] * 9 + [Seen(0, 0, 0.0)]
    chosen = Counter(router("power-of-two")(seen, Asked(n, 1), source) for n in range(5000))
    assert chosen[9] / 5000 == pytest.approx(0.2, abs=0.03)  # five standard errors of a share of 0.2


def test_the_gateways_own_choice_is_the_cheapest_in_seconds() -> None:
    """100 tokens at 1,000/s: the replica without 900 waiting tokens; the one with them once its rate is twenty times as
    high; of two idle ones the one that has the prompt. Full replicas are chosen among all the same."""
    source = random.Random(1)
    choose = router("gateway")
    idle, busy = Seen(1, 0, 0.0, 0, 8, 1e3), Seen(3, 900, 0.0, 0, 8, 1e3)
    assert choose([busy, idle], Asked(0, 100), source) == 1
    assert choose([Seen(3, 900, 0.0, 0, 8, 2e4), idle], Asked(0, 100), source) == 0
    assert choose([Seen(0, 0, 0.0, 0, 8, 1e3), Seen(0, 0, 0.0, 90, 8, 1e3)], Asked(0, 100), source) == 1
    assert choose([Seen(17, 900, 0.0, 0, 8, 1e3), Seen(16, 0, 0.0, 0, 8, 1e3)], Asked(0, 100), source) == 1


def test_a_prefix_is_worth_a_queue_but_not_any() -> None:
    """The replica with the prefix is taken until it is much busier than the emptiest."""
    source = random.Random(1)
    for requests, taken in ((8, True), (9, False)):
        seen = [Seen(requests, 0, 0.0, cached_tokens=500), Seen(0, 0, 0.0)]
        assert (router("prefix")(seen, Asked(0, 600), source) == 0) == taken


def test_a_group_gets_what_its_load_asks_for() -> None:
    """Twice the wanted busy share: twice as many; fewer only after calm."""
    scaling = Scaling(least=1, most=8, target_busy=0.5, calm_s=100.0)
    up = decide_scale(scaling, ScalingState(), serving=2, coming=0, busy=1.0, now_s=10.0)
    assert up.replicas == 4
    calm = decide_scale(scaling, ScalingState(), serving=4, coming=0, busy=0.1, now_s=20.0)
    assert calm.replicas == 4
    assert decide_scale(scaling, calm.state, serving=4, coming=0, busy=0.1, now_s=119.0).replicas == 4
    assert decide_scale(scaling, calm.state, serving=4, coming=0, busy=0.1, now_s=120.0).replicas == 3
    assert decide_scale(scaling, ScalingState(), serving=8, coming=0, busy=1.0, now_s=0.0).replicas == 8


def test_blocks_go_down_the_tiers_and_come_back_where_that_is_quicker() -> None:
    """Room for 4 blocks here and 4 in a tier: of 6 the two oldest are in the tier. A fast tier gives them, one slower
    than computing does not."""
    for gb_per_s, fetched in ((1.0, 256), (1e-6, 0)):
        cache = PrefixCache(lambda: 512, [Tier(512, gb_per_s)], 1000)
        cache.store(blocks("a", 2))
        cache.store(blocks("b", 4))
        assert cache.tokens(0) == 512 and cache.tokens(1) == 256
        found = cache.find(blocks("a", 2), 300, TIMES)
        assert (found.here_tokens, found.fetched_tokens) == (0, fetched)
        assert cache.find(blocks("b", 4), 1000, TIMES).here_tokens == 512
        assert cache.check_integrity() is None


def test_the_last_token_is_always_computed() -> None:
    """A prompt of exactly two blocks that are both there uses one."""
    cache = PrefixCache(lambda: 10_000, [], 1000)
    cache.store(blocks("a", 2))
    assert cache.find(blocks("a", 2), 256, TIMES).here_tokens == 128
    assert cache.find(blocks("a", 2), 257, TIMES).here_tokens == 256


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(1, 9)), max_size=60), st.integers(0, 3000))
def test_accounts_of_tiers_agree(stored: list[tuple[str, int]], room: int) -> None:
    """Whatever is stored in whatever order: no block twice, no tier over its size."""
    cache = PrefixCache(lambda: room, [Tier(700, 1.0), Tier(400, 0.1)], 1000)
    for name, count in stored:
        cache.find(blocks(name, count), 128 * count + 1, TIMES)
        cache.store(blocks(name, count))
        assert cache.check_integrity() is None
        assert cache.tokens(0) <= room
        assert cache.cached_tokens(blocks(name, count)) <= 128 * count


def test_shipped_scenarios_are_read() -> None:
    """All that come with headrace."""
    assert {"one-engine", "a100-8b"} <= set(shipped_scenarios())
    for name in shipped_scenarios():
        assert load_scenario(name).scenario.groups


WRONG = {
    "groups: {}": "there must be at least one group",
    "groups: {main: {replicas: 0}}": "groups.main.replicas: 0 is out of range",
    "groups: {main: {engin: {}}}": "did you mean engine?",
    "groups: {main: {engine: {times: smollm-2-threads}}}": "did you mean smollm2-2-threads?",
    "groups: {main: {role: prefill}}": "one of the two roles is missing",
    "groups: {main: {}}\nfaults: [{kind: dies, replica: main/1, at_s: 1, for_s: 1}]": "did you mean main/0?",
    "groups: {main: {engine: {policy: vlm}}}": "policy",
}


@pytest.mark.parametrize(("text", "message"), WRONG.items())
def test_what_is_wrong_with_a_scenario_is_said_with_its_line(text: str, message: str) -> None:
    """File, line, place, and what to write instead."""
    with pytest.raises(ConfigProblems) as caught:
        parse_scenario(text, name="wrong.yaml")
    assert message in str(caught.value) and "wrong.yaml:" in str(caught.value)


def test_a_knob_changes_one_value_or_one_of_every_group() -> None:
    """And is refused where there is no such key or it takes no such value."""
    scenario = load_scenario("a100-8b").scenario
    assert with_knob(scenario, "groups.main.replicas", 3).groups["main"].replicas == 3
    assert with_knob(scenario, "groups.*.engine.policy", "vllm").groups["main"].engine.policy == "vllm"
    with pytest.raises(ConfigError, match="did you mean replicas"):
        with_knob(scenario, "groups.main.replica", 3)
    with pytest.raises(ConfigError):
        with_knob(scenario, "groups.main.replicas", "many")
    with pytest.raises(ConfigError, match="out of range"):
        with_knob(scenario, "groups.main.replicas", 0)
