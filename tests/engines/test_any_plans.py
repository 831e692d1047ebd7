"""Any plans at all: the accounts agree, and everybody has one end."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.engines.llama import interrupt
from headrace.scheduling.bands import Band
from headrace.scheduling.knobs import SchedulingKnobs
from headrace.scheduling.sequence import Slot
from tests.engines.harness import (
    Amended,
    CutAt,
    Model,
    Results,
    Wishes,
    engine_core,
    request,
)

DEEDS = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.integers(1, 200), st.integers(0, 40)),
        st.tuples(st.just("abort"), st.integers(0, 20)),
        st.tuples(st.just("step"), st.integers(1, 6)),
        st.tuples(st.just("park"), st.integers(0, 7)),
        st.tuples(st.just("move")),
        st.tuples(st.just("rest"), st.integers(0, 7)),
        st.tuples(st.just("cut"), st.integers(1, 400)),
    ),
    max_size=30,
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(DEEDS)
def test_after_any_plans_the_accounts_agree_and_everybody_has_one_end(
    tiny: Model, deeds: list[tuple[str, int]]
) -> None:
    """Random victims, moves, holes, cuts and aborts over two bands."""
    wishes = Wishes()
    bands = (Band(64, 4), Band(256, 3))
    limits = SchedulingKnobs(step_tokens=48, max_prefill_tokens=24, band_margin_tokens=8)
    with (
        engine_core(tiny, *bands, limits=limits, policy=Amended(wishes)) as core,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(interrupt, "ASK_INTERVAL_S", 0.0)
        submitted: list[str] = []
        results = Results()

        def step() -> None:
            results.take(core.step())
            assert core.check_integrity() is None

        for name, *values in deeds:
            match name, values:
                case "submit", [prompt, max_tokens]:
                    submitted.append(f"r{len(submitted)}")
                    core.submit(request(submitted[-1], [3] * prompt, max_tokens=max_tokens))
                case "abort", [number]:
                    core.abort(f"r{number}")
                case "step", [times]:
                    for _ in range(times):
                        step()
                case "cut", [number]:
                    core.cut = CutAt(number)
                case _:
                    wishes.wanted.append((name, values[0] if values else 0))
                    step()
        while core.has_work:
            step()
        assert Counter(n for n, r in results.items() if r.finish is not None) == Counter(submitted)
        load = core.load()
        assert (load.running, load.waiting, load.parked, load.kv_used_tokens) == (0, 0, 0, 0)
        assert core.residents.slots.owner(Slot(0, 0)) is None
