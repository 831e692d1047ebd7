"""The tuner beside a gateway: simulated time, a world that answers to the knobs, and people who change them."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from headrace.api.live import BY_TUNER, LiveConfig
from headrace.config.schema import Config, ControlConfig, SchedulingConfig, TunerConfig
from headrace.control.loop import TunerLoop
from headrace.messages.engine import EngineLoad
from headrace.telemetry.metrics import Metrics
from tests.api.harness import config, serving

ON = TunerConfig(enabled=True, window_s=30.0, settle_s=5.0, max_steps=2)
LOAD = EngineLoad(4, 2, 1, 2, 1, 2, 1, 0.1, 1, 1, 1, step_error=0.1, batch_cap=8)

Violations = Callable[[Config], int]


def tuned(settings: TunerConfig, **scheduling: object) -> Config:
    """The default configuration with a tuner."""
    engine = msgspec.structs.replace(
        Config().engine, scheduling=msgspec.structs.replace(SchedulingConfig(), **scheduling)
    )
    return msgspec.structs.replace(Config(), control=ControlConfig(settings), engine=engine)


class World:
    """100 requests in every 30 s, of which as many miss their SLO as ``violations`` says of the configuration."""

    def __init__(self, settings: Config, violations: Violations = lambda _: 10) -> None:
        self.live = LiveConfig(settings)
        self.metrics = Metrics("1")
        self.violations = violations
        self.now_s = 0.0
        self.slept: list[float] = []
        self.at: dict[int, Callable[[], object]] = {}
        """What happens after so many sleeps."""
        self.loop = TunerLoop(
            self.live,
            self.metrics,
            lambda: LOAD,
            clock=lambda: self.now_s,
            sleep=self.sleep,
            randomness=random.Random(1),
        )

    async def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        self.slept.append(seconds)
        requests = round(100 * seconds / 30)
        missed = min(requests, round(self.violations(self.live.config) * requests / 100))
        self.metrics.goodput.arrived += requests
        for number in range(requests):
            self.metrics.goodput.ended("interactive", good=number >= missed, prompt_tokens=10)
        self.at.pop(len(self.slept), lambda: None)()

    async def ticks(self, count: int) -> None:
        for _ in range(count):
            await self.loop.tick()

    @property
    def set_by_tuner(self) -> dict[str, object]:
        return {name: value for name, value in self.live.changes.items() if self.live.touched_by[name] == BY_TUNER}

    def moves(self) -> dict[tuple[str, str], float]:
        """headrace_tuner_moves_total by knob and outcome."""
        return {
            (sample.labels["knob"], sample.labels["outcome"]): sample.value
            for family in self.metrics.registry.collect()
            for sample in family.samples
            if sample.name == "headrace_tuner_moves_total"
        }


def slow(configuration: Config) -> int:
    """The longer the urgent step, the more violations."""
    return round(120 * configuration.engine.scheduling.urgent_step_s)


async def test_it_is_off_by_default_and_then_touches_nothing() -> None:
    """It only looks, once per window, whether it was switched on."""
    assert not Config().control.tuner.enabled
    world = World(Config(), slow)
    await world.ticks(50)
    assert world.slept == [Config().control.tuner.window_s] * 50
    assert (world.live.changes, world.moves()) == ({}, {})


async def test_it_finds_a_better_setting_says_so_and_counts_it(caplog: pytest.LogCaptureFixture) -> None:
    world = World(tuned(ON), slow)
    with caplog.at_level(logging.INFO, "headrace.control.loop"):
        await world.ticks(400)
    value = world.live.config.engine.scheduling.urgent_step_s
    assert value < 0.25 and world.set_by_tuner["urgent_step_s"] == value
    assert world.moves()["urgent_step_s", "kept"] >= 1
    said = [record.getMessage() for record in caplog.records]
    assert any(text.startswith("tuner: kept urgent_step_s urgent_step_s=0.1786: better: +") for text in said)
    assert "headrace_tuner_reward 2." in world.metrics.exposition().decode()


async def test_after_a_change_nothing_is_counted_for_a_while() -> None:
    world = World(tuned(ON))
    while not world.live.changes:
        await world.ticks(1)
    before = len(world.slept)
    await world.ticks(1)
    assert world.slept[before:] == [5.0, *[5.0] * 6]  # settle_s, and a window in six looks


async def test_what_is_back_at_its_configured_value_is_not_set_any_more() -> None:
    """`headrace knobs get` says config again."""
    world = World(tuned(ON), lambda c: 5 if c.engine.scheduling == SchedulingConfig() else 60)
    seen = 0
    for _ in range(100):
        await world.ticks(1)
        seen += bool(world.set_by_tuner)
        assert len(world.live.changes) <= 1
    assert seen and world.live.changes == {}


async def test_a_persons_knob_is_left_alone_also_at_the_value_it_has() -> None:
    """Setting a knob to the value that it has is a change of hands: it says that it shall stay."""
    world = World(tuned(ON), slow)
    world.live.set_knobs({"urgent_step_s": 0.25}, by="somebody")
    await world.ticks(300)
    assert world.live.config.engine.scheduling.urgent_step_s == 0.25
    assert not any(knob == "urgent_step_s" for knob, _ in world.moves())
    assert any(outcome == "tried" for _, outcome in world.moves())


async def test_a_person_who_takes_a_knob_in_the_middle_of_a_trial_has_it() -> None:
    world = World(tuned(ON), slow)
    while not world.live.changes:
        await world.ticks(1)
    world.at[len(world.slept) + 3] = lambda: world.live.set_knobs({"urgent_step_s": 0.3}, by="somebody")
    await world.ticks(200)
    assert world.live.config.engine.scheduling.urgent_step_s == 0.3
    assert world.live.touched_by["urgent_step_s"] == "somebody"


async def test_a_person_who_resets_a_knob_has_it_too() -> None:
    world = World(tuned(ON), slow)
    while "urgent_step_s" not in world.live.changes:
        await world.ticks(1)
    world.live.reset_knobs(["urgent_step_s"], by="somebody")
    await world.ticks(200)
    assert world.live.config.engine.scheduling.urgent_step_s == 0.25


@pytest.mark.parametrize("sleeps", [1, 3])
async def test_another_change_undoes_the_trial_under_way(sleeps: int) -> None:
    """What was measured before and after it cannot be compared, be it made while nothing is counted."""
    world = World(tuned(ON))
    while not world.live.changes:
        await world.ticks(1)
    world.at[len(world.slept) + sleeps] = lambda: world.live.set_knobs({"linger_s": 7}, by="somebody")
    await world.ticks(1)
    assert list(world.live.changes) == ["linger_s"]


async def test_a_persons_value_goes_before_the_tuners() -> None:
    """A value that does not go with what the tuner set is not refused for that."""
    live = LiveConfig(Config())
    live.set_knobs({"min_prefill_tokens": 256}, by=BY_TUNER)
    live.set_knobs({"max_prefill_tokens": 100}, by="somebody")
    assert live.changes == {"max_prefill_tokens": 100}


async def test_switching_it_off_puts_everything_back() -> None:
    world = World(tuned(ON), slow)
    world.live.set_knobs({"linger_s": 7}, by="somebody")
    while "urgent_step_s" not in world.live.changes:
        await world.ticks(1)
    world.live.swap(tuned(TunerConfig()))
    await world.ticks(2)
    assert world.live.changes == {"linger_s": 7.0}
    assert world.live.config.engine.scheduling == msgspec.structs.replace(SchedulingConfig(), linger_s=7.0)


async def test_a_reload_begins_anew_from_the_new_configuration() -> None:
    """What the tuner set does not outlive the values that it was found beside, nor stand in a reload's way."""
    world = World(tuned(ON), slow)
    while "urgent_step_s" not in world.live.changes:
        await world.ticks(1)
    world.live.swap(tuned(ON, urgent_step_s=1.0, idle_step_s=1.0))
    assert world.live.config.engine.scheduling.urgent_step_s == 1.0
    await world.ticks(200)
    assert world.live.config.engine.scheduling.urgent_step_s in (1.0, 0.7143, 0.5102)


async def test_what_goes_wrong_in_it_ends_it_and_puts_its_knobs_back(caplog: pytest.LogCaptureFixture) -> None:
    def broken(_: Config) -> int:
        raise RuntimeError("broken")

    world = World(tuned(ON), slow)
    while not world.live.changes:
        await world.ticks(1)
    world.violations = broken
    with caplog.at_level(logging.CRITICAL):
        await world.loop.run()
    assert world.live.changes == {}


async def test_the_admin_api_says_what_the_tuner_set(tmp_path: Path) -> None:
    async with serving(tmp_path, config()) as served:
        served.deps.live.set_knobs({"urgent_step_s": 0.2}, by=BY_TUNER)
        await served.client.patch("/admin/knobs", json={"idle_step_s": 0.3})
        knobs = (await served.client.get("/admin/knobs")).json()["knobs"]
        answer = await served.chat(headers={"x-headrace-lane": "batch"})
        good = dict(served.deps.metrics.goodput.good)
    assert {name: knobs[name]["layer"] for name in ("urgent_step_s", "idle_step_s", "linger_s")} == {
        "urgent_step_s": "tuner",
        "idle_step_s": "live",
        "linger_s": "config",
    }
    assert (answer.status_code, good) == (200, {"batch": 1})
