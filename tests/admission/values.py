"""Values for tests of admission, and hypothesis strategies for them."""

from __future__ import annotations

from hypothesis import strategies as st

from headrace.admission.predict import Arrival, Backlog, LaneWork, Waiting
from headrace.admission.rates import EngineRates

RATES = EngineRates(prefill_tokens_per_s=1000.0, decode_step_s=0.02, batch=1, places=8, chunk_tokens=100)
"""1 ms a prompt token, 20 ms a decode of one sequence and 1 ms more for each further one."""


def arrival(
    *prompts: int,
    lane: str = "own",
    tenant: str | None = None,
    priority: int = 10,
    weight: float = 1.0,
    output_tokens: int = 11,
    lane_places: int | None = None,
) -> Arrival:
    return Arrival(lane, tenant, priority, weight, prompts or (100,), output_tokens, lane_places)


counts = st.integers(0, 200)
tokens = st.integers(0, 100_000)
waiting = st.builds(Waiting, counts, tokens, tokens)
work = st.builds(
    LaneWork,
    priority=st.integers(0, 20),
    weight=st.floats(0.01, 100),
    waiting=waiting,
    oldest_s=st.floats(0, 500),
    running=counts,
    running_output_tokens=tokens,
    arriving_prefill_tokens_per_s=st.floats(0, 1e5),
    arriving_output_tokens_per_s=st.floats(0, 1e5),
)
engine_rates = st.builds(
    EngineRates,
    prefill_tokens_per_s=st.floats(10, 1e5),
    decode_step_s=st.floats(1e-3, 1.0),
    batch=st.integers(1, 64),
    places=st.integers(1, 64),
    chunk_tokens=st.integers(1, 2048),
    step_s=st.floats(0, 1),
    ageing_s=st.floats(0.1, 100),
)
arrivals = st.builds(
    Arrival,
    lane=st.sampled_from("abc"),
    tenant=st.sampled_from([None, "x", "y"]),
    priority=st.integers(0, 20),
    weight=st.floats(0.01, 100),
    prompt_tokens=st.lists(st.integers(1, 20_000), min_size=1, max_size=4).map(tuple),
    output_tokens=st.integers(0, 2000),
    lane_places=st.none() | st.integers(1, 16),
)


@st.composite
def backlogs(draw: st.DrawFn) -> Backlog:
    """What may be ahead; lane ``a`` has tenants, which add up to what waits in it."""
    by_tenant = {tenant: draw(waiting) for tenant in (None, "x", "y") if draw(st.booleans())}
    lanes = {name: draw(work) for name in "abc" if draw(st.booleans())}
    return Backlog(lanes, by_tenant, draw(st.floats(0, 100)))
