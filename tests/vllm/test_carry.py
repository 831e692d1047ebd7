"""A plan becomes what vLLM must be shown, such that its own loop does just that. ``walk`` is that loop, in short."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.scheduling.sequence import SequenceState, Slot
from headrace.scheduling.step import Admission, PrefillChunk, StepPlan
from headrace.vllm.carry import PlanRefused, Shown, shown


def runs(name: str, *, known: int, computed: int) -> SequenceState:
    return SequenceState(name, known, known + 50, 0, 0.0, known_tokens=known, computed_tokens=computed, slot=Slot(0, 0))


def waits(name: str, tokens: int, cached: int = 0) -> SequenceState:
    return SequenceState(name, tokens, tokens + 50, 0, 0.0, cached_tokens=cached)


def walk(step: Shown, running: list[SequenceState], waiting: dict[str, SequenceState]) -> dict[str, int]:
    """What vLLM gives to whom: the running ones in order, then the offered ones, within budget and threshold."""
    by_id = {s.request_id: s for s in running}
    order = list(by_id) if step.order is None else [*step.order]
    if not step.hide_rest:
        order += [name for name in by_id if name not in order]
    left, given_tokens = step.budget, {}

    def give(name: str, pending: int) -> None:
        nonlocal left
        if step.threshold:
            pending = min(pending, step.threshold)
        tokens = min(pending, left)
        if tokens > 0:
            given_tokens[name] = tokens
            left -= tokens

    for name in order:
        give(name, by_id[name].pending_tokens)
    for name in step.offered:
        give(name, waiting[name].uncached_tokens)
    return given_tokens


def test_all_decode() -> None:
    """The common step: the list stays as it is, the budget is one token each."""
    running = [runs(f"r{i}", known=10, computed=9) for i in range(5)]
    step = shown(StepPlan(decode=tuple([s.request_id for s in running])), running, {}, most_tokens=512)
    assert (step.order, step.offered, step.budget, step.threshold) == (None, (), 5, 0)


def test_who_does_not_decode_comes_last_and_gets_nothing() -> None:
    """Without arrivals nobody is hidden: the budget ends before the rest."""
    running = [runs(name, known=10, computed=9) for name in "abc"]
    step = shown(StepPlan(decode=("a", "c")), running, {}, most_tokens=512)
    assert step.order == ("a", "c")
    assert not step.hide_rest
    assert walk(step, running, {}) == {"a": 1, "c": 1}


def test_a_cut_prefill_beside_an_arrival_is_given_just_so() -> None:
    """A long prompt gets 56 tokens, a short arrival all of its 40: the threshold sees to it."""
    running = [runs("long", known=3000, computed=500)]
    plan = StepPlan(admissions=(Admission("s", 0),), prefill=(PrefillChunk("s", 40), PrefillChunk("long", 56)))
    waiting = {"s": waits("s", 40)}
    step = shown(plan, running, waiting, most_tokens=512)
    assert walk(step, running, waiting) == {"long": 56, "s": 40}


def test_a_cut_prefill_that_cannot_be_given_beside_a_longer_arrival_waits() -> None:
    """No threshold cuts the one to 56 and leaves the other 200: the long prompt is left out for this step."""
    running = [runs("long", known=3000, computed=500), runs("d", known=9, computed=8)]
    plan = StepPlan(
        decode=("d",), admissions=(Admission("s", 0),), prefill=(PrefillChunk("s", 200), PrefillChunk("long", 56))
    )
    waiting = {"s": waits("s", 200)}
    step = shown(plan, running, waiting, most_tokens=512)
    assert step.hide_rest
    assert walk(step, running, waiting) == {"d": 1, "s": 200}


def test_a_cached_prefix_need_not_be_computed() -> None:
    """What the prefix cache holds is not in the budget."""
    waiting = {"s": waits("s", 200, cached=160)}
    plan = StepPlan(admissions=(Admission("s", 0),), prefill=(PrefillChunk("s", 40),))
    assert shown(plan, [], waiting, most_tokens=512).budget == 40


def test_only_the_allowed_enter() -> None:
    """Who finds no memory is not offered, and its tokens are not in the budget."""
    waiting = {"a": waits("a", 20), "b": waits("b", 30)}
    plan = StepPlan(
        admissions=(Admission("a", 0), Admission("b", 0)), prefill=(PrefillChunk("a", 20), PrefillChunk("b", 30))
    )
    step = shown(plan, [], waiting, most_tokens=512, allowed=["a"])
    assert (step.offered, step.budget) == (("a",), 20)


def test_speculative_tokens_are_in_the_budget() -> None:
    """A decode brings its drafts along."""
    running = [runs("a", known=10, computed=9)]
    assert shown(StepPlan(decode=("a",)), running, {}, most_tokens=512, drafts={"a": 3}).budget == 4


@pytest.mark.parametrize(
    "plan",
    [
        StepPlan(decode=("nobody",)),
        StepPlan(decode=("a", "a")),
        StepPlan(prefill=(PrefillChunk("nobody", 5),)),
        StepPlan(decode=("a",), prefill=(PrefillChunk("a", 1),)),
        StepPlan(prefill=(PrefillChunk("a", 2),)),
        StepPlan(admissions=(Admission("nobody", 0),)),
    ],
)
def test_a_plan_that_does_not_fit_is_refused(plan: StepPlan) -> None:
    """It names who is not there, or computes what is not pending."""
    with pytest.raises(PlanRefused):
        shown(plan, [runs("a", known=10, computed=9)], {}, most_tokens=512)


def test_more_than_a_step_holds_is_refused() -> None:
    """vLLM's batch has a fixed size."""
    plan = StepPlan(admissions=(Admission("s", 0),), prefill=(PrefillChunk("s", 40),))
    with pytest.raises(PlanRefused, match="at most 39"):
        shown(plan, [], {"s": waits("s", 40)}, most_tokens=39)


@given(st.data())
def test_vllm_gives_exactly_the_chunks_that_are_shown(data: st.DataObject) -> None:
    """Whatever the plan: everything that is kept of it comes out token for token, and nobody else gets any."""
    running, waiting, decode, chunks, admissions = [], {}, [], [], []
    for index in range(data.draw(st.integers(0, 8))):
        name, kind = f"r{index}", data.draw(st.sampled_from(["decode", "rest", "prefill", "idle"]))
        if kind == "prefill":
            pending = data.draw(st.integers(2, 300))
            running.append(runs(name, known=400, computed=400 - pending))
            if data.draw(st.booleans()):
                chunks.append(PrefillChunk(name, data.draw(st.integers(1, pending))))
        else:
            running.append(runs(name, known=10, computed=9))
            decode += [name] if kind == "decode" else []
    for index in range(data.draw(st.integers(0, 5))):
        name, tokens = f"w{index}", data.draw(st.integers(1, 300))
        waiting[name] = waits(name, tokens)
        admissions.append(Admission(name, 0))
        if data.draw(st.booleans()):
            chunks.append(PrefillChunk(name, data.draw(st.integers(1, tokens))))
    chunks = data.draw(st.permutations(chunks))
    plan = StepPlan(decode=tuple(decode), admissions=tuple(admissions), prefill=tuple(chunks))
    step = shown(plan, running, waiting, most_tokens=10_000)
    given_tokens = walk(step, running, waiting)
    assert given_tokens == {**dict.fromkeys(decode, 1), **dict(step.chunks)}
    assert sum(given_tokens.values()) == step.budget
    wanted = {c.request_id: c.tokens for c in chunks}
    wanted |= {name: waiting[name].uncached_tokens for name in waiting if name not in wanted}
    assert dict(step.chunks).items() <= wanted.items()
    assert step.chunks or not wanted, "a plan that prefills must not come to nothing"


def test_who_is_admitted_without_a_chunk_gets_what_is_left() -> None:
    """vLLM admits nobody without computing something: within the step's tokens, or not now."""
    waiting = {"a": waits("a", 20, cached=19), "b": waits("b", 30)}
    plan = StepPlan(decode=("d",), admissions=(Admission("a", 0), Admission("b", 0)))
    running = [runs("d", known=9, computed=8)]
    assert dict(shown(plan, running, waiting, most_tokens=12).chunks) == {"a": 1, "b": 10}
    assert dict(shown(plan, running, waiting, most_tokens=2).chunks) == {"a": 1}
    assert dict(shown(plan, running, waiting, most_tokens=1).chunks) == {}
