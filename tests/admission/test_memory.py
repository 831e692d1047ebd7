"""Long contexts are refused while KV memory is scarce; short ones are not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.admission.front import Front
from headrace.admission.memory import MemoryState, memory_state, refusal
from headrace.kv.watermarks import LEVELS, KvLevel
from headrace.scheduling.knobs import SchedulingKnobs
from tests.admission.test_front import OPEN, admit, request
from tests.admission.values import RATES

SCARCE = MemoryState("refuse", 12.5, 8192)


@pytest.mark.parametrize("level", LEVELS)
def test_only_from_the_refusing_level_on(level: KvLevel) -> None:
    refused = refusal(MemoryState(level, 12.5, 8192), (9000,), 100)
    assert (refused is not None) == (level in ("refuse", "move"))
    if refused is not None:
        assert (refused.action, refused.reason, refused.retry_after_s) == ("shed", "kv_memory", 12.5)


@given(st.lists(st.integers(1, 20000), min_size=1, max_size=4), st.integers(0, 20000))
def test_a_request_is_long_when_one_of_its_sequences_will_be(prompts: list[int], output: int) -> None:
    refused = refusal(SCARCE, prompts, output)
    blocks = -(-(max(prompts) + output) // 128)
    assert (refused is not None) == (blocks * 128 >= 8192)


def test_the_time_to_come_back_is_within_bounds() -> None:
    for drain_s, retry_s in ((0.0, 1.0), (1e9, 600.0)):
        refused = refusal(MemoryState("move", drain_s, 1), (100,), 1)
        assert refused is not None and refused.retry_after_s == retry_s


def test_nothing_is_refused_before_the_engine_reported() -> None:
    assert memory_state(None, SchedulingKnobs()) is None
    assert refusal(None, (10**6,), 1) is None


def test_at_the_front_an_idle_engine_takes_everything_and_a_busy_one_only_what_is_short() -> None:
    """Its last report is old when nothing has come since."""
    front = Front()
    assert front.judge(request(9000), OPEN, RATES, 0.0, SCARCE).name == "accept"
    admit(front, request(10))
    long, short = (front.judge(request(tokens, overload="queue"), OPEN, RATES, 0.0, SCARCE) for tokens in (9000, 100))
    assert (long.name, long.decision.reason, long.decision.retry_after_s) == ("shed", "kv_memory", 12.5)
    assert short.name == "accept"
    assert front.judge(request(9000, overload="queue"), OPEN, None, 0.0, SCARCE).name == "shed", "without rates too"
