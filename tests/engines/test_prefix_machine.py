"""Prefix reuse under random deeds: accounts agree after every step, and texts are as without it."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.engines.llama import interrupt
from headrace.engines.llama.context import Context
from headrace.engines.llama.core import EngineCore
from headrace.errors import EngineError
from headrace.messages.engine import Submit
from headrace.scheduling.bands import Band
from headrace.scheduling.knobs import SchedulingKnobs
from tests.engines.harness import (
    Amended,
    CutAt,
    Model,
    Results,
    Wishes,
    engine_core,
    run_one,
)
from tests.engines.prefixes import (
    OFF,
    ask,
    assert_alike,
    steady,
    words,
)


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """Tokens that both begin with."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


FAMILIES, TENANTS = 3, (None, "acme")
SUBMIT = st.tuples(
    st.just("submit"),
    st.integers(0, FAMILIES - 1),
    st.integers(1, 150),
    st.integers(0, 20),
    st.integers(1, 40),
    st.integers(0, 1),
)
AGAIN = st.tuples(st.just("again"), st.integers(0, 20), st.integers(1, 30))
STEP = st.tuples(st.just("step"), st.integers(1, 12))
PARK = st.tuples(st.just("park"), st.integers(0, 7))
MOVE = st.tuples(st.just("move"))
OTHERS = (
    st.tuples(st.just("abort"), st.integers(0, 20)),
    st.tuples(st.just("rest"), st.integers(0, 7)),
    st.tuples(st.just("cut"), st.integers(1, 60)),
    st.tuples(st.just("fail")),
    st.tuples(st.just("refuse"), st.sampled_from(["load_stream", "take_back", "begins_at_0"])),
    st.tuples(st.just("carrying costs"), st.sampled_from([1e-5, 1e-2])),
)
DEEDS = st.lists(
    st.one_of(*[SUBMIT] * 5, *[AGAIN] * 3, *[STEP] * 4, *[PARK] * 2, *[MOVE] * 3, *OTHERS), min_size=12, max_size=50
)
"""Mostly arrivals and steps."""
RANDOM_BANDS = (Band(64, 3), Band(256, 4))
RANDOM_LIMITS = SchedulingKnobs(step_tokens=48, max_prefill_tokens=24, band_margin_tokens=8)


class _Machine:
    """A core, random deeds, and what must hold after each."""

    def __init__(self, model: Model, core: EngineCore, patch: pytest.MonkeyPatch) -> None:
        self.model = model
        self.core = steady(core)
        self.patch = patch
        self.submits: dict[str, Submit] = {}
        self.results = Results()
        self.wishes = Wishes()
        core.set_policy(Amended(self.wishes))

    def submit(self, prompt: Sequence[int], max_tokens: int, tenant: str | None) -> None:
        submit = ask(f"r{len(self.submits)}", prompt[:200], max_tokens, tenant)
        self.submits[submit.request_id] = submit
        self.core.submit(submit)
        self.check()

    def again(self, number: int, max_tokens: int) -> None:
        """The next turn of a dialogue."""
        before = list(self.submits.values())
        if before:
            old = before[number % len(before)]
            answer = self.results[old.request_id].tokens if old.request_id in self.results else []
            self.submit([*old.prompt_tokens, *answer, 7, 7], max_tokens, old.tenant)

    def step(self) -> None:
        self.results.take(self.core.step())
        self.check()

    def check(self) -> None:
        assert self.core.check_integrity() is None

    def fail_once(self) -> None:
        self._once("decode", EngineError("llama_decode returned -3"))

    def _once(self, name: str, outcome: EngineError | bool) -> None:
        original: Callable[..., bool] = getattr(Context, name)
        left = [1]

        def replaced(context: Context, *arguments: object) -> bool:
            if left:
                left.pop()
                if isinstance(outcome, EngineError):
                    raise outcome
                original(context, *arguments)
                return outcome
            return original(context, *arguments)

        self.patch.setattr(Context, name, replaced)

    def refuse_once(self, name: str) -> None:
        self._once(name, False)

    def finish(self) -> None:
        self.wishes.wanted.clear()
        while self.core.has_work:
            self.step()

    def common_at_most(self, name: str) -> int:
        """Tokens that its prompt has in common with anything of its tenant."""
        mine = self.submits[name]
        known = [
            [*other.prompt_tokens, *(self.results[other.request_id].tokens if other.request_id in self.results else [])]
            for other in self.submits.values()
            if other.request_id != name and other.tenant == mine.tenant
        ]
        return max([common(tokens, mine.prompt_tokens) for tokens in known], default=0)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(DEEDS)
def test_after_anything_accounts_agree_and_every_text_is_as_without_reuse(
    tiny: Model, deeds: list[tuple[str, int]]
) -> None:
    """Random dialogues of two tenants with common beginnings; victims, moves, promotions, holes, cuts, aborts, failing
    passes, and refusals of libllama. After every step all accounts agree. Every sequence has one end; those that were
    not cut off say what they say alone without reuse; and no prompt was given more than it has in common
    with its own tenant's."""
    with (
        engine_core(tiny, *RANDOM_BANDS, limits=RANDOM_LIMITS) as core,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(interrupt, "ASK_INTERVAL_S", 0.0)
        machine = _Machine(tiny, core, patch)
        families = [words(tiny, 150, start=1000 * family) for family in range(FAMILIES)]
        for name, *values in deeds:
            match name, values:
                case "submit", [family, shared, own, max_tokens, tenant]:
                    prompt = [*families[family][:shared], *[20 + own] * own]
                    machine.submit(prompt, max_tokens, TENANTS[tenant])
                case "again", [number, max_tokens]:
                    machine.again(number, max_tokens)
                case "abort", [number]:
                    core.abort(f"r{number}")
                    machine.check()
                case "step", [times]:
                    for _ in range(times):
                        machine.step()
                case "cut", [number]:
                    core.cut = CutAt(number)
                case "fail", []:
                    machine.fail_once()
                case "refuse", [method]:
                    machine.refuse_once(str(method))
                case "carrying costs", [s_per_token]:
                    core.residents.reuse.carry_time.s_per_token = s_per_token
                case _:
                    machine.wishes.wanted.append((name, values[0] if values else 0))
                    machine.step()
        machine.finish()
    results = machine.results
    assert Counter(n for n, r in results.items() if r.finish is not None) == Counter(list(machine.submits))
    for name, result in results.items():
        assert sum(output.cached_tokens for output in result.outputs) <= machine.common_at_most(name)
    whole = {name: result for name, result in results.items() if result.finish == "length"}
    with engine_core(tiny, RANDOM_BANDS[1], limits=RANDOM_LIMITS, prefix=OFF) as core:
        for name, result in whole.items():
            assert_alike(result, run_one(core, machine.submits[name]))
