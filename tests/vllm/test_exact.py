"""Inside vLLM's real scheduler every request gets exactly its tokens, whatever the policies do to it on the way.

The model of the harness samples a token that tells whose it is and where it stands, and refuses to compute a token
that is not there yet; lost, repeated and exchanged tokens all fail these tests.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.scheduling.hybrid import Hybrid
from headrace.scheduling.step import SchedulerState, StepPlan, StepPolicy
from headrace.vllm.adapter import Adapter
from headrace.vllm.settings import Settings
from headrace.vllm.steer import Steering
from headrace.vllm.versions import ADAPTERS
from tests.vllm.harness import Engine, expected, make_request, make_scheduler, needs_vllm, prompt_of, vllm_config

pytestmark = [needs_vllm, pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])]
ADAPTER: Adapter = ADAPTERS[-1]
PLAIN = Settings()


class Clock:
    """A virtual clock: a step takes 5 ms and 0.1 ms a token. It is vLLM's wall clock, too."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s

    def tick(self, tokens: int) -> None:
        self.now_s += 0.005 + tokens * 1e-4

    def pause(self, seconds: float) -> None:
        self.now_s += seconds


def engine_of(
    folder: Path, asynchronous: bool, *, decides: StepPolicy | None = None, plugin: Settings = PLAIN, **shape: Any
) -> tuple[Engine, Steering, Clock]:
    """vLLM's scheduler, steered on a virtual clock."""
    scheduler = make_scheduler(vllm_config(folder, asynchronous=asynchronous, **shape))
    clock = Clock()
    scheduler.waiting = scheduler.headrace.gate.stock
    steering = Steering(scheduler, ADAPTER, plugin, clock=clock, wall_s=clock, pause=clock.pause, policy=decides)
    scheduler.headrace = steering
    return Engine(scheduler, depth=2 if asynchronous else 1, tick=clock.tick), steering, clock


def lane(name: str, first_token_in_s: float | None = None, **more: Any) -> dict[str, Any]:
    fields = {"lane": name, "first_token_in_s": first_token_in_s, **more}
    return {f"headrace_{key}": value for key, value in fields.items() if value is not None}


def add(engine: Engine, clock: Clock, name: str, prompt: int, tokens: int, extra: dict[str, Any] | None = None) -> None:
    request = make_request(
        name, prompt_of(prompt, seed=hash(name) % 10**6), tokens, extra=extra, arrival_time=clock.now_s
    )
    engine.add(request)


def assert_exact(engine: Engine, requests: dict[str, tuple[int, int]], aborted: frozenset[str] = frozenset()) -> None:
    """Every request has all of its tokens, an aborted one the first of them."""
    for name, (prompt, tokens) in requests.items():
        want = expected(name, prompt, tokens)
        if name in aborted:
            assert engine.outputs[name] == want[: len(engine.outputs[name])]
        else:
            assert engine.outputs[name] == want
            assert engine.finished[name] == "length"


def test_mixed_lengths_and_lanes(tmp_path: Path, asynchronous: bool) -> None:
    """Shorts among longs: all exact, every step made as planned, the accounts agree, and everything is forgotten."""
    engine, steering, clock = engine_of(tmp_path, asynchronous)
    requests = {f"r{i}": (40 + 170 * (i % 7), 5 + i % 11) for i in range(50)}
    for index, (name, (prompt, tokens)) in enumerate(requests.items()):
        add(engine, clock, name, prompt, tokens, lane("chat", 1.0, tpot_s=0.1) if index % 2 else lane("docs"))
        engine.step()
    engine.run()
    assert_exact(engine, requests)
    assert steering.counts.failures == steering.counts.deviations == steering.counts.stock_steps == 0
    assert steering.check_integrity() is None
    assert len(steering.book) == 0


def test_a_victim_in_flight_resumes_with_identical_tokens(tmp_path: Path, asynchronous: bool) -> None:
    """All streams are held by decoding documents when an urgent request comes: one of them gives way, while its step
    is in flight, and goes on later without losing or repeating a token."""
    engine, steering, clock = engine_of(tmp_path, asynchronous, max_num_seqs=4)
    requests = {f"doc{i}": (200, 60) for i in range(4)}
    for name, (prompt, tokens) in requests.items():
        add(engine, clock, name, prompt, tokens, lane("docs", priority=90))
    for _ in range(30):
        engine.step()
    assert all(engine.outputs[name] for name in requests)
    requests["urgent"] = (50, 5)
    add(engine, clock, "urgent", 50, 5, lane("chat", 0.3))
    engine.run()
    assert_exact(engine, requests)
    assert steering.counts.victims >= 1
    assert engine.scheduler.headrace.check_integrity() is None
    assert any(step.preempted for step in engine.steps)


def test_hidden_prefills_lose_nothing(tmp_path: Path, asynchronous: bool) -> None:
    """While a long prompt is under way, urgent ones enter beside it: in those steps vLLM does not see the long one,
    and it still gets exactly its tokens."""
    engine, steering, clock = engine_of(tmp_path, asynchronous)
    requests = {"long": (3000, 8)}
    add(engine, clock, "long", 3000, 8, lane("docs", priority=90))
    for _ in range(3):
        engine.step()
    for index in range(6):
        requests[f"short{index}"] = (200, 4)
        add(engine, clock, f"short{index}", 200, 4, lane("chat", 0.05))
        engine.step()
    engine.run()
    assert_exact(engine, requests)
    entered = [step for step in engine.steps if any(name.startswith("short") for name in step.new)]
    assert any("long" not in step.scheduled for step in entered)
    assert steering.counts.deviations == 0


def test_aborts_anywhere(tmp_path: Path, asynchronous: bool) -> None:
    """Requests are aborted while they wait, in flight, preempted; the others are exact and the accounts agree."""
    engine, steering, clock = engine_of(tmp_path, asynchronous, max_num_seqs=4)
    requests = {f"r{i}": (100 + 37 * i, 12) for i in range(16)}
    for name, (prompt, tokens) in requests.items():
        add(engine, clock, name, prompt, tokens, lane("chat", 0.5) if name in ("r14", "r15") else lane("docs"))
    aborted = []
    for name in ("r0", "r9", "r3", "r15", "r1"):
        for _ in range(4):
            engine.step()
        if name not in engine.finished:
            engine.abort(name)
            aborted.append(name)
        assert steering.check_integrity() is None
    engine.run()
    assert len(aborted) >= 3
    assert_exact(engine, requests, frozenset(aborted))
    assert len(steering.book) == 0


def test_kv_memory_too_small_for_all(tmp_path: Path, asynchronous: bool) -> None:
    """With KV memory for a third of what is asked for, sequences make way and come back; all are exact."""
    engine, steering, clock = engine_of(tmp_path, asynchronous, blocks=80, max_model_len=1024, max_num_seqs=8)
    requests = {f"r{i}": (150 + 10 * i, 120) for i in range(10)}
    for name, (prompt, tokens) in requests.items():
        add(engine, clock, name, prompt, tokens, lane("docs"))
    engine.run()
    assert_exact(engine, requests)
    assert steering.counts.failures == 0
    assert steering.check_integrity() is None


def test_caps_hold(tmp_path: Path, asynchronous: bool) -> None:
    """Never more of a lane run than its cap, nor more in all than ``max_num_seqs``; both are live."""
    engine, steering, clock = engine_of(
        tmp_path, asynchronous, plugin=Settings(knobs={"lane_caps": {"docs": 2}, "max_num_seqs": 6})
    )
    requests = {f"r{i}": (60, 10) for i in range(24)}
    for index, (name, (prompt, tokens)) in enumerate(requests.items()):
        add(engine, clock, name, prompt, tokens, lane("docs" if index % 2 else "chat"))
    most = 6
    for number in range(4000):
        if not engine.step():
            break
        docs = [r for r in engine.scheduler.running if int(r.request_id[1:]) % 2]
        assert len(docs) <= 2
        if number == 12:
            steering.change({"max_num_seqs": 3})
            most = 6
        if number == 30:
            most = 3
        assert len(engine.scheduler.running) <= most
    assert_exact(engine, requests)


class Broken:
    """A policy that fails at its tenth step."""

    def __init__(self) -> None:
        self.steps = 0

    def plan(self, state: SchedulerState) -> StepPlan:
        self.steps += 1
        if self.steps == 10:
            raise ZeroDivisionError("a policy's mistake")
        return Hybrid().plan(state)


class Liar:
    """A policy that decodes what does not run."""

    def plan(self, state: SchedulerState) -> StepPlan:
        return StepPlan(decode=("nobody",))


@pytest.mark.parametrize("policy", [Broken, Liar])
def test_a_policy_that_fails_leaves_vllm_to_itself(
    tmp_path: Path, asynchronous: bool, policy: type[Broken | Liar], caplog: pytest.LogCaptureFixture
) -> None:
    """Serving goes on without it, the failure is counted, and it is said once."""
    engine, steering, clock = engine_of(tmp_path, asynchronous, decides=policy())
    requests = {f"r{i}": (100 + 40 * i, 10) for i in range(20)}
    for name, (prompt, tokens) in requests.items():
        add(engine, clock, name, prompt, tokens)
    engine.run()
    assert_exact(engine, requests)
    assert steering.counts.failures == 1
    assert steering.failed and not steering.active
    assert steering.counts.stock_steps > 0
    assert [r.message for r in caplog.records].count(caplog.records[-1].message) == 1
    assert "policy failed" in caplog.text


def test_enabled_is_live(tmp_path: Path, asynchronous: bool) -> None:
    """Off in the middle of everything, and on again: all exact, the accounts agree."""
    engine, steering, clock = engine_of(tmp_path, asynchronous, max_num_seqs=6)
    requests = {f"r{i}": (80 + 60 * (i % 9), 15) for i in range(30)}
    for index, (name, (prompt, tokens)) in enumerate(requests.items()):
        add(engine, clock, name, prompt, tokens, lane("chat", 1.0) if index % 2 else lane("docs"))
    for index in range(4000):
        if index % 10 == 5:
            steering.change({"enabled": not steering.enabled})
        if steering.active and index % 3 == 0:
            assert steering.check_integrity() is None
        if not engine.step():
            break
    assert_exact(engine, requests)
    assert steering.counts.steps > 10
    assert steering.counts.stock_steps > 10


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_disabled_is_stock(tmp_path: Path, asynchronous: bool, policy: str) -> None:
    """With ``enabled: false`` every step is the one that vLLM's own scheduler makes, token for token."""

    def steps_of(headrace: bool) -> list[Any]:
        config = vllm_config(
            tmp_path,
            asynchronous=asynchronous,
            policy=policy,
            blocks=90,
            max_model_len=1024,
            threshold=100,
            settings={"enabled": False},
        )
        engine = Engine(make_scheduler(config, headrace=headrace), depth=2 if asynchronous else 1)
        for index in range(30):
            request = make_request(
                f"r{index}",
                prompt_of(30 + 53 * (index % 8), seed=index),
                20 + index % 13,
                priority=index % 3,
                arrival_time=float(index),
            )
            engine.add(request)
            engine.step()
            if index % 7 == 6:
                engine.abort(f"r{index - 2}")
        engine.run()
        return [engine.steps, engine.outputs, engine.finished]

    assert steps_of(True) == steps_of(False)


@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_any_arrivals_in_any_lanes(tmp_path: Path, asynchronous: bool, data: st.DataObject) -> None:
    """Random shapes, arrivals, lanes, deadlines, aborts, knobs: tokens exact, accounts in agreement at any time."""
    engine, steering, clock = engine_of(
        tmp_path,
        asynchronous,
        max_num_seqs=data.draw(st.integers(2, 12)),
        blocks=data.draw(st.sampled_from([70, 150, 2048])),
        max_model_len=1024,
        max_num_batched_tokens=data.draw(st.sampled_from([32, 128, 512])),
        threshold=data.draw(st.sampled_from([0, 0, 48])),
        policy=data.draw(st.sampled_from(["fcfs", "priority"])),
        plugin=data.draw(
            st.sampled_from(
                [
                    Settings(),
                    Settings(bands=((256, 3), (1024, 4))),
                    Settings(knobs={"lane_caps": {"docs": 1}, "strategy": "continuous"}),
                    Settings(knobs={"strategy": "auto", "min_prefill_tokens": 16}),
                ]
            )
        ),
    )
    requests: dict[str, tuple[int, int]] = {}
    aborted: set[str] = set()
    for index in range(data.draw(st.integers(1, 24))):
        name = f"r{index}"
        prompt, tokens = data.draw(st.integers(1, 700)), data.draw(st.integers(1, 40))
        extra = data.draw(
            st.sampled_from(
                [None, lane("docs"), lane("chat", 0.2), lane("chat", 2.0, tpot_s=0.02), lane("batch", priority=90)]
            )
        )
        requests[name] = (prompt, tokens)
        add(engine, clock, name, prompt, tokens, extra)
        for _ in range(data.draw(st.integers(0, 6))):
            engine.step()
        action = data.draw(st.sampled_from(["", "", "", "abort", "off", "on", "cap"]))
        if action == "abort":
            victim = data.draw(st.sampled_from(sorted(requests)))
            if victim not in engine.finished:
                engine.abort(victim)
                aborted.add(victim)
        elif action in ("off", "on"):
            steering.change({"enabled": action == "on"})
        elif action == "cap":
            steering.change({"max_num_seqs": data.draw(st.integers(1, engine.scheduler.max_num_running_reqs))})
        if steering.active:
            assert steering.check_integrity() is None
    engine.run(20000)
    assert_exact(engine, requests, frozenset(aborted))
    assert steering.counts.failures == 0
    assert steering.counts.deviations <= steering.counts.steps // 10


def test_a_prefix_that_others_have_computed_meanwhile_is_seen(tmp_path: Path, asynchronous: bool) -> None:
    """Chats behind one long system prompt arrive together: once the first has computed it, the others are planned with
    what is left, and their tokens are exact."""
    engine, steering, clock = engine_of(tmp_path, asynchronous, max_num_batched_tokens=128)
    system = prompt_of(800, seed=1)
    requests = {f"chat{i}": (820, 6) for i in range(6)}
    for index, name in enumerate(requests):
        prompt = system + prompt_of(20, seed=100 + index)
        engine.add(make_request(name, prompt, 6, extra=lane("chat", 5.0), arrival_time=clock.now_s))
    engine.run()
    assert_exact(engine, requests)
    # All of the first, and of the others their own tokens, the last shared block and what was begun at once.
    assert engine.computed_tokens < 2 * 820 + 5 * 60
    # A chat that enters in the step that computes the last of the prefix may find more cached than was planned with.
    assert steering.counts.deviations <= 2
