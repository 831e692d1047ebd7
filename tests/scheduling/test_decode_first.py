"""The step policy under random load: no slot leaks, none is shared, every request ends exactly once."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headrace.scheduling.bands import Band
from headrace.scheduling.continuous import DecodeFirst
from headrace.scheduling.knobs import SchedulingKnobs
from headrace.scheduling.sequence import SequenceState, Slot
from headrace.scheduling.step import SchedulerState
from tests.scheduling.dry_engine import DryEngine

BANDS = st.lists(
    st.tuples(st.integers(4, 48), st.integers(1, 4)), min_size=1, max_size=4, unique_by=lambda band: band[0]
).map(lambda bands: tuple(Band(tokens, sequences) for tokens, sequences in sorted(bands)))

LIMITS = st.builds(
    SchedulingKnobs,
    step_tokens=st.integers(1, 24),
    max_prefill_tokens=st.integers(1, 16),
    band_margin_tokens=st.integers(0, 16),
    max_num_seqs=st.none() | st.integers(1, 6),
    band_caps=st.none() | st.lists(st.integers(1, 3), max_size=4).map(tuple),
)


class LoadMachine(RuleBasedStateMachine):
    """Arrivals, cancels, knob changes and steps in any order; ``DryEngine.step`` checks each plan."""

    engine: DryEngine

    @initialize(bands=BANDS, limits=LIMITS, kv_travels=st.booleans())
    def begin(self, bands: tuple[Band, ...], limits: SchedulingKnobs, kv_travels: bool) -> None:
        self.engine = DryEngine(bands, limits, kv_travels=kv_travels)
        self.submitted: list[str] = []

    @rule(
        prompt_share=st.floats(0, 1),
        output_tokens=st.integers(1, 60),
        max_tokens=st.none() | st.integers(0, 60),
        priority=st.integers(0, 2),
        chunk_limit_tokens=st.none() | st.integers(1, 4),
    )
    def arrive(
        self,
        prompt_share: float,
        output_tokens: int,
        max_tokens: int | None,
        priority: int,
        chunk_limit_tokens: int | None,
    ) -> None:
        request_id = f"r{len(self.submitted)}"
        self.submitted.append(request_id)
        self.engine.submit(
            request_id,
            1 + int(prompt_share * (self.engine.longest - 2)),
            output_tokens,
            max_tokens=max_tokens,
            priority=priority,
            arrived_s=float(self.engine.steps),
            chunk_limit_tokens=chunk_limit_tokens,
        )

    @precondition(lambda self: self.submitted)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.engine.abort(data.draw(st.sampled_from(self.submitted)))

    @rule(limits=LIMITS)
    def turn_knobs(self, limits: SchedulingKnobs) -> None:
        self.engine.limits = limits

    @rule(times=st.integers(1, 12))
    def run(self, times: int) -> None:
        for _ in range(times):
            self.engine.step()

    @invariant()
    def everyone_is_in_one_place(self) -> None:
        places = [*self.engine.waiting, *self.engine.running, *(name for name, _ in self.engine.ended)]
        assert Counter(places) == Counter(self.submitted)

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return  # the run ended before it began
        # Every step computes at least one token, so this many must do: nothing starves, nothing spins.
        for _ in range(self.engine.remaining_tokens()):
            if not self.engine.waiting and not self.engine.running:
                break
            self.engine.step()
        assert Counter(name for name, _ in self.engine.ended) == Counter(self.submitted)
        assert self.engine.slots.owners() == {}
        assert self.engine.step().empty


TestLoad = LoadMachine.TestCase
TestLoad.settings = settings(
    max_examples=120, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


@settings(max_examples=60, deadline=None)
@given(
    slots=st.integers(1, 3),
    step_tokens=st.integers(1, 8),
    earlier=st.integers(0, 4),
    prompt_tokens=st.integers(1, 20),
    output_tokens=st.integers(1, 20),
)
def test_an_endless_stream_of_later_arrivals_starves_nobody(
    slots: int, step_tokens: int, earlier: int, prompt_tokens: int, output_tokens: int
) -> None:
    """With equal priority a request needs at most the time of those before it, one after the other, and its
    own, with one rival's decode in between: whatever arrives later, however often."""
    engine = DryEngine([Band(64, slots)], SchedulingKnobs(step_tokens, max_prefill_tokens=4))
    for number in range(earlier):
        engine.submit(f"e{number}", 10, 10, arrived_s=0.0)
    engine.submit("me", prompt_tokens, output_tokens, arrived_s=1.0)
    bound = (earlier + 1 + slots) * (20 + 20)
    for number in range(bound):
        engine.submit(f"later{number}", 20, 20, arrived_s=2.0 + number)
        engine.step()
        if ("me", "stop") in engine.ended:
            return
    pytest.fail(f"not done after {bound} steps")


def test_a_decoding_sequence_gets_its_token_in_every_step() -> None:
    """A long prompt beside it does not hold a decoding sequence up, nor does a crowd of waiting ones."""
    engine = DryEngine([Band(4096, 3)], SchedulingKnobs(64, 32))
    engine.submit("chat", 4, 50)
    while "chat" in engine.waiting or not engine.running["chat"].state.decoding:
        engine.step()
    engine.submit("document", 3000, 5, arrived_s=1.0)
    for number in range(5):
        engine.submit(f"crowd{number}", 100, 5, arrived_s=2.0)
    while "chat" in engine.running:
        assert "chat" in engine.step().decode


def test_a_full_band_does_not_block_another() -> None:
    """A waiting sequence whose band is full leaves the streams of other bands to those behind it."""
    engine = DryEngine([Band(32, 1), Band(512, 1)], SchedulingKnobs(64, 32, band_margin_tokens=0))
    engine.submit("long1", 100, 50, priority=0)
    engine.submit("long2", 100, 50, priority=0, arrived_s=1.0)
    engine.submit("short", 10, 5, priority=9, arrived_s=2.0)
    plan = engine.step()
    assert {admission.request_id for admission in plan.admissions} == {"long1", "short"}


def test_urgent_arrivals_enter_before_earlier_ones() -> None:
    """Priority goes before arrival, arrival before id."""
    engine = DryEngine([Band(64, 2)], SchedulingKnobs(64, 32))
    engine.submit("b", 5, 5, priority=1, arrived_s=0.0)
    engine.submit("a", 5, 5, priority=1, arrived_s=0.0)
    engine.submit("urgent", 5, 5, priority=0, arrived_s=9.0)
    assert [admission.request_id for admission in engine.step().admissions] == ["urgent", "a"]


def test_decoders_beyond_the_budget_take_turns() -> None:
    """With more decoders than ``step_tokens`` (a knob was turned down) they advance side by side."""
    engine = DryEngine([Band(64, 4)], SchedulingKnobs(64, 32))
    for number in range(4):
        engine.submit(f"r{number}", 3, 20)
    engine.step()
    engine.limits = SchedulingKnobs(1, 1)
    for _ in range(40):
        engine.step()
        generated = [request.state.known_tokens for request in engine.running.values()]
        assert max(generated) - min(generated) <= 1


def test_promotion_moves_a_sequence_that_filled_its_band_and_it_goes_on_in_the_same_step() -> None:
    """A chat that outgrows the short band continues in the next one, without losing a step."""
    engine = DryEngine([Band(16, 2), Band(64, 1)], SchedulingKnobs(64, 32, band_margin_tokens=1))
    engine.submit("chat", 10, 30)
    plans = []
    while "chat" not in dict(engine.ended):
        plans.append(engine.step())
    promoting = [plan for plan in plans if plan.promotions]
    assert [(m.request_id, m.band) for plan in promoting for m in plan.promotions] == [("chat", 1)]
    assert promoting[0].decode == ("chat",)
    assert len(plans) == 30  # the prefill yields the first token, every further step one


def test_promotion_waits_for_room_above_and_goes_before_new_arrivals() -> None:
    """A sequence stalled at the end of its band gets the first stream above that becomes free, although a
    more urgent one waits for the same band."""
    engine = DryEngine([Band(16, 2), Band(64, 1)], SchedulingKnobs(64, 32, band_margin_tokens=1))
    engine.submit("chat", 10, 30)
    engine.submit("tenant", 20, 40)
    while engine.running.get("chat") is None or engine.running["chat"].state.computed_tokens < 16:
        engine.step()
    assert "chat" not in engine.step().decode
    engine.submit("urgent", 20, 5, priority=-1)
    while "tenant" in engine.running:
        assert "chat" not in engine.step().decode
    plan = engine.step()
    assert [move.request_id for move in plan.promotions] == ["chat"] and "chat" in plan.decode
    assert "urgent" in engine.waiting


def test_nothing_to_do_is_an_empty_plan() -> None:
    """No sequence: nothing admitted, moved or computed."""
    plan = DecodeFirst().plan(SchedulerState(0.0, (Band(64, 1),), (1,), [], [], SchedulingKnobs()))
    assert plan.empty and not plan.admissions and not plan.promotions


@pytest.mark.parametrize(("step_tokens", "chunk"), [(0, 1), (1, 0), (-1, 5)])
def test_limits_that_could_compute_nothing_are_refused(step_tokens: int, chunk: int) -> None:
    """Such limits would make every plan empty for ever."""
    with pytest.raises(ValueError, match="at least 1"):
        SchedulingKnobs(step_tokens, chunk)


def test_decoding_means_that_only_the_last_sampled_token_is_pending() -> None:
    """A prompt of one token is prefill, and so is a sequence whose KV has to be computed again."""
    prompt = SequenceState("a", prompt_tokens=1, limit_tokens=9, priority=0, arrived_s=0.0)
    assert prompt.pending_tokens == 1 and not prompt.decoding
    generated = SequenceState("b", 4, 9, 0, 0.0, known_tokens=6, computed_tokens=5, slot=Slot(0, 0))
    assert generated.decoding
    again = SequenceState("c", 4, 9, 0, 0.0, known_tokens=6, computed_tokens=0, slot=Slot(0, 0))
    assert again.pending_tokens == 6 and not again.decoding
